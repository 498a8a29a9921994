"""The benchmarks' harness follows targets by their logs, notices when they fail, and ends only what it started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import psutil
import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module under test, with targets that are small scripts of the tests'."""
    monkeypatch.syspath_prepend(str(BENCH))
    import target_process

    monkeypatch.setattr(target_process, "TARGETS", tmp_path)
    return target_process


def write_target(folder: Path, name: str, body: str) -> None:
    """A target that follows the protocol with the real protocol module, and does what ``body`` says."""
    (folder / f"{name}.py").write_text(
        f"import sys, time\nsys.path.insert(0, {str(BENCH / 'targets')!r})\nimport protocol\n"
        "arguments = protocol.parser('test', steps=5).parse_args()\n"
        f"log = protocol.Log(arguments.log, arguments.pace_ms)\n{body}\n"
    )


COUNT = "log.start('count', 0)\nfor i in range(arguments.steps):\n    log.step(f'{i:x}')\nlog.done('end')"


def test_a_target_that_ends_is_seen_with_all_its_steps(processes: ModuleType, tmp_path: Path) -> None:
    write_target(tmp_path, "count", COUNT)
    with processes.plain("count", ["--steps", "7"], tmp_path, "run") as run:
        run.wait_start()
        run.wait_step(3)
        run.wait_done()
    assert run.log.values == {i + 1: f"{i:x}" for i in range(7)}
    assert run.log.last_step == 7
    assert not run.alive()


def test_a_target_that_fails_is_reported_with_its_output(processes: ModuleType, tmp_path: Path) -> None:
    write_target(tmp_path, "broken", "log.start('broken', 0)\nlog.step('1')\nraise SystemExit('out of luck')")
    with (
        processes.plain("broken", [], tmp_path, "run") as run,
        pytest.raises(processes.TargetError, match=r"(?s)has ended and has not reached step 2.*out of luck"),
    ):
        run.wait_step(2)


def test_leaving_the_block_ends_the_target_and_its_children(processes: ModuleType, tmp_path: Path) -> None:
    body = (
        "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "log.start('parent', 0, child=child.pid)\ntime.sleep(600)"
    )
    write_target(tmp_path, "parent", body)
    with processes.plain("parent", [], tmp_path, "run") as run:
        run.wait_start()
        child = psutil.Process(run.log.start["child"])
    assert not run.alive()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert psutil.pid_exists(os.getpid())


def test_equal_runs_do_not_differ_and_different_ones_do(processes: ModuleType, tmp_path: Path) -> None:
    write_target(tmp_path, "count", COUNT)
    write_target(tmp_path, "other", COUNT.replace("{i:x}", "{i * (i != 3):x}"))
    logs = []
    for name in ("count", "count", "other"):
        with processes.plain(name, [], tmp_path, f"run{len(logs)}") as run:
            run.wait_done()
        logs.append(run.log)
    assert processes.steps_differ(logs[0], logs[1], 1, 5) is None
    assert processes.ends_differ(logs[0], logs[1]) is None
    assert processes.steps_differ(logs[0], logs[2], 1, 5) == "step 4 is 0 instead of 3"
    assert "the final digest is" in processes.ends_differ(logs[0], logs[2])
    assert processes.steps_differ(logs[0], logs[1], 1, 6) == "step 6 is missing"


def test_a_step_that_is_repeated_with_another_value_is_a_difference(processes: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"step": 1, "time_s": 1.0, "value": "a"}, {"step": 1, "time_s": 2.0, "value": "b"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = processes.Log(path)
    log.read()
    assert processes.steps_differ(log, log, 1, 1) == "step 1 was a and then b"


def test_a_line_that_is_half_written_is_read_when_it_is_whole(processes: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    text = json.dumps({"step": 1, "time_s": 1.0, "value": "a"}) + "\n"
    log = processes.Log(path)
    for size in range(len(text)):
        path.write_text(text[:size])
        log.read()
        assert log.values == {}
    path.write_text(text)
    log.read()
    assert log.values == {1: "a"}


def test_the_longest_gap_is_the_one_around_the_operation(processes: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    times = [0.0, 1.0, 2.0, 9.0, 10.0, 30.0]
    path.write_text("".join(json.dumps({"step": i, "time_s": t, "value": ""}) + "\n" for i, t in enumerate(times)))
    log = processes.Log(path)
    log.read()
    assert max(log.gaps_s(2.5, 8.5)) == 7.0
    assert sorted(log.step_times_s(0)) == [1.0, 1.0, 1.0, 7.0, 20.0]


def test_a_target_that_is_not_built_is_named(processes: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(processes.TargetError, match=r"no-such-target does not exist.*build\.sh"):
        processes.command("no-such-target")


def test_what_an_operation_costs_is_the_time_that_usual_steps_would_not_have_taken(processes: ModuleType) -> None:
    log = processes.Log(Path("none"))
    times = [*(0.1 * step for step in range(20)), 2.9, 3.1, 3.2]  # stands still for a second, then one slow step
    log.lines = [{"step": step, "time_s": 100.0 + time_s} for step, time_s in enumerate(times, 1)]
    assert log.usual_step_s(101.85) == pytest.approx(0.1)
    assert log.lost_s(101.95, 103.05, 0.1) == pytest.approx(1.0)
    assert log.lost_s(100.55, 100.75, 0.1) == pytest.approx(0.0, abs=1e-9)


def test_ranks_whose_launcher_has_died_are_ended_too(processes: ModuleType, tmp_path: Path) -> None:
    write_target(
        tmp_path,
        "rank",
        "import os\nlog = protocol.Log(os.environ['RANK_LOG'] + '.' + os.environ['RANK'])\n"
        "os.setsid()\nlog.start('rank', 0)\ntime.sleep(600)",
    )
    with processes.plain("rank", [], tmp_path, "run", ranks=processes.Ranks(2)) as run:
        run.wait_start()
        ranks = [psutil.Process(log.start["pid"]) for log in run.log.parts]
        psutil.Process(run.pid).kill()
        run.wait_ended()
        assert [rank.status() == psutil.STATUS_ZOMBIE for rank in ranks] == [False, False]
    for rank in ranks:  # whoever is process 1 here may not have waited for them
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


def test_torchrun_is_asked_for_by_its_own_options(processes: ModuleType, tmp_path: Path) -> None:
    write_target(tmp_path, "rank", "")
    start = processes._prepare("rank", ["--steps", "3"], tmp_path, "run", None, processes.Ranks(2, "torchrun"))
    script = str(tmp_path / "rank.py")
    assert start.argv[:3] == [processes.TORCH_PYTHON, "-m", "torch.distributed.run"]
    assert start.argv[3:6] == ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    assert start.argv[6:] == [script, "--steps", "3"]
    assert "MASTER_PORT" not in start.environment, "torchrun chooses one"
