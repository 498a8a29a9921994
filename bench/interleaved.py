"""Throughput with and without something (the interposer, following of launches), of targets that take turns.

Two runs one after the other differ by whatever else the machine does meanwhile, which can be far more than what is
looked for. Here some processes with and as many without it exist at the same time, and take turns of some
steps each (their --hold file lets one go on and keeps the others at rest): a drift of the machine falls on all alike
within seconds, and what one process has by chance, as where its memory lies, shows as a difference of equal ones.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import target_process
from target_process import TargetRun

WARM_STEPS = 10
DRAWS = 2000


@dataclass
class Player:
    """One process of the comparison and its `--hold` file."""

    run: TargetRun
    hold: Path
    with_it: bool
    medians_s: list[float] = field(default_factory=list)  # of its steps, one for each turn

    def turn(self, steps: int) -> float:
        """Lets it make ``steps`` steps; the median time of one. The first is left out: the target was asleep."""
        begin = self.run.log.last_step
        self.hold_at(begin + steps)
        self.run.wait_step(begin + steps)
        # The lines of this turn: of the first one the time before is that of the rest.
        return harness.median(self.run.log.step_times_s(skip=begin))

    def hold_at(self, step: int) -> None:
        new = self.hold.with_suffix(".new")
        new.write_text(str(step))
        new.replace(self.hold)


def play(
    results: harness.Results, budget: harness.Budget, case: str, target: str, options: Sequence[str], work: Path,
    *, each: int, turns: int, steps: int,
) -> dict[str, float]:  # fmt: skip
    """Measures and returns the members of the summary; every process computes the same, or TargetError.

    `summary_of` says what they are."""
    total = WARM_STEPS + turns * steps
    arguments = [*options, "--steps", str(total)]
    with contextlib.ExitStack() as stack:
        players: list[Player] = []
        for number in range(2 * each):
            with_it = number % 2 == 1
            label = f"interleaved-{case}-{number}"
            hold = work / f"{label}.hold"
            work.mkdir(parents=True, exist_ok=True)
            hold.write_text(str(WARM_STEPS))
            start = target_process.interposed if with_it else target_process.plain
            run = stack.enter_context(start(target, [*arguments, "--hold", str(hold)], work, label))
            players.append(Player(run, hold, with_it))
        for player in players:
            player.run.wait_start()
        for player in players:
            player.run.wait_step(WARM_STEPS)
        launches = [launches_of(player) for player in players if player.with_it]
        played = take_turns(results, budget, case, players, turns=turns, steps=steps)
        per_step = [
            (launches_of(player) - before) / (played * steps)
            for player, before in zip([p for p in players if p.with_it], launches, strict=True)
        ]
        if played == turns:
            for player in players:
                player.hold.unlink()  # at rest after its last step, it may end now
            for player in players:
                player.run.wait_done()
            digests = {str(player.run.log.done["digest"]) for player in players if player.run.log.done}
        else:
            digests = {player.run.log.values[WARM_STEPS + played * steps] for player in players}
        if len(digests) != 1:
            raise target_process.TargetError(f"{target}: the processes with and without did not compute the same")
    return summary_of(case, players, per_step)


def take_turns(
    results: harness.Results, budget: harness.Budget, case: str, players: Sequence[Player], *, turns: int, steps: int
) -> int:
    """Each player at rest makes ``steps`` steps in its turn, until there were ``turns`` or time is up; how many there
    were."""
    played = 0
    for turn in range(turns):
        before_s = budget.left_s
        # Every other round backwards, so that no process always follows the same one.
        for player in players if turn % 2 == 0 else players[::-1]:
            player.medians_s.append(player.turn(steps))
        results.add(
            case=case, kind="turn", turn=turn,
            with_s=[p.medians_s[-1] for p in players if p.with_it],
            without_s=[p.medians_s[-1] for p in players if not p.with_it],
        )  # fmt: skip
        played += 1
        if not budget.allows(2 * (before_s - budget.left_s)):
            break
    return played


def launches_of(player: Player) -> int:
    """Kernel and graph launches of a process with the interposer, as its agent counts them."""
    import woodfrog

    return next(row.launches for row in woodfrog.ps() if row.pid == player.run.pid)


def summary_of(case: str, players: Sequence[Player], per_step: Sequence[float]) -> dict[str, Any]:
    """``case``: time of a step without ÷ with, each the mean over the processes of the median over their turns;
    ``case``_low and _high hold it in 95 of 100 draws of as many turns (bootstrap over turns, percentiles). How far the
    slowest and fastest of equal processes are apart stands beside it, and launches per step and the time of a step,
    which bound what launching can cost."""
    with_it = [player.medians_s for player in players if player.with_it]
    without = [player.medians_s for player in players if not player.with_it]

    def ratio(turns: Sequence[int]) -> float:
        def time_s(group: Sequence[Sequence[float]]) -> float:
            return statistics.fmean(harness.median(times[turn] for turn in turns) for times in group)

        return time_s(without) / time_s(with_it)

    turns = range(len(without[0]))
    draw = random.Random(1)
    drawn = sorted(ratio(draw.choices(turns, k=len(turns))) for _ in range(DRAWS))
    found: dict[str, Any] = {
        case: ratio(turns),
        f"{case}_low": drawn[DRAWS * 25 // 1000],
        f"{case}_high": drawn[DRAWS * 975 // 1000],
        f"{case}_turns": len(turns),
        f"{case}_launches_per_step": harness.median(per_step),
        f"{case}_step_s": statistics.fmean(map(harness.median, without)),
    }
    for name, group in (("without", without), ("with", with_it)):
        own = [harness.median(times) for times in group]
        found[f"{case}_spread_{name}"] = max(own) / min(own) - 1
    return found
