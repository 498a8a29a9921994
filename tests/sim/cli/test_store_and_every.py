"""Stores, comparisons and periodic checkpoints from the command line, on one running target that checks itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from product import DEADLINE_S, Product, Stepper, new_root
from typer.testing import CliRunner

from woodfrog.cli.app import app
from woodfrog.errors import ExitCode
from woodfrog.periodic.loop import Made, checkpoint_every

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def shared(targets: Path) -> Iterator[Product]:
    """One daemon for all tests here."""
    made = Product(new_root(), targets)
    yield made
    made.close()


@pytest.fixture(scope="module")
def walker(shared: Product) -> Stepper:
    """One running target for all tests here but the last, which ends it."""
    return shared.run("--idle-kib", "4096", name="walker")


@pytest.fixture
def woodfrog(shared: Product, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name, value in shared.environment.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, arguments, prog_name="woodfrog")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, (arguments, result.stdout, result.stderr)
        return json.loads(result.stdout) if "--json" in arguments else result.stdout

    return run


def every(product: Product, *arguments: str, target: str = "walker") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "woodfrog", "checkpoint", target, "--every", "1s", "--json", *arguments],
        env={**os.environ, **product.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def document(process: subprocess.Popen[str]) -> Any:
    """The next line of its output."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    return json.loads(line)


def test_two_images_of_a_running_target_share_what_did_not_change(
    shared: Product, walker: Stepper, woodfrog: Run
) -> None:
    first = woodfrog("checkpoint", "walker", "--compress", "lz4", "--json")
    walker.wait_steps(2)
    second = woodfrog("checkpoint", "walker", "--compress", "zstd:3", "--json")
    assert second["parent"] == first["image"]
    assert 0 < second["gpu_new_bytes"] < first["gpu_new_bytes"]
    found = woodfrog("diff", first["image"], second["image"], "--json")
    assert found["same"] is False
    assert found["gpu_new_bytes"] == second["gpu_new_bytes"]
    assert 0 < found["gpu_changed_bytes"] <= found["gpu_new_bytes"] < found["gpu_bytes"]
    assert found["allocation_counts"]["same"] > 0
    assert [process["pid"] for process in found["processes"] if process["pid"] is not None] == [walker.pid]
    assert "changed" in woodfrog("diff", first["image"], second["image"])
    drawn = woodfrog("inspect", second["image"], "--json")["picture"]
    assert drawn["gpu"]["shared_bytes"] > 0
    assert drawn["gpu"]["new_bytes"] > 0
    assert woodfrog("verify", "--json")["problems"] == []


def test_an_image_that_was_pushed_and_pulled_restores(shared: Product, walker: Stepper, woodfrog: Run) -> None:
    there, third = shared.root / "there", shared.root / "third"
    image = woodfrog("checkpoint", "walker", "--json")["image"]
    pushed = woodfrog("push", image, str(there), "--json")
    assert pushed["copied_chunks"] > 0
    assert woodfrog("cp", f"{there}/{image}", str(third), "--json")["copied_chunks"] == pushed["copied_chunks"]
    assert woodfrog("verify", f"{third}/{image}", "--json")["verified"] is True
    other = shared.run(name="mover")
    moving = woodfrog("checkpoint", "mover", "--stop", "--json")["image"]
    assert other.process is not None
    other.process.wait(DEADLINE_S)  # its number is free once its parent, which we are, has taken its end
    woodfrog("push", moving, str(there))
    woodfrog("pull", moving, str(there), "--store", str(third))
    back = woodfrog("restore", moving, "--store", str(third), "--verify", "--json")
    assert back["pid"] == other.pid
    Stepper(back["pid"], Path(back["log"])).check_runs_right()


def test_every_goes_on_keeps_so_many_images_and_ends_cleanly_by_ctrl_c(
    shared: Product, walker: Stepper, woodfrog: Run
) -> None:
    running = every(shared, "--keep-last", "2", "--max-overhead", "100%", "--name", "often")
    try:
        made = [document(running) for _ in range(4)]
        assert [one["checkpoint"]["image"] for one in made] == [f"often@{number}" for number in (1, 2, 3, 4)]
        assert [one["removed"] for one in made] == [[], [], ["often@1"], ["often@2"]]
        assert all(one["interval_s"] >= max(1, 2 * one["total_s"]) for one in made)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
        running.wait()
    last = json.loads(out.splitlines()[-1])
    # Between two checkpoints it ends well; one that had begun is taken back, and told by 130.
    assert running.returncode in (0, 130), err
    assert running.returncode == 130 or last["summary"]["ended"] is False
    images = [image["reference"] for image in woodfrog("images", "often", "--json")]
    assert images[-1] in ("often@4", "often@5")
    assert len(images) <= 3
    walker.wait_steps(2)


def test_ctrl_c_within_a_periodic_checkpoint_takes_it_back(shared: Product, walker: Stepper, woodfrog: Run) -> None:
    rounds: list[Made] = []

    def interrupt(event: dict[str, Any]) -> None:
        if rounds and (event["event"], event["phase"]) == ("begin", "drain"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint_every(
            "walker", 1, max_overhead=None, name="cut", on_event=interrupt, on_round=rounds.append, timeout=30.0
        )
    assert [made.result.image for made in rounds if made.result] == ["cut@1"]
    assert [image["reference"] for image in woodfrog("images", "cut", "--json")] == ["cut@1"]
    walker.wait_steps(2)


def test_a_periodic_checkpoint_of_nothing_fails_at_once(shared: Product, woodfrog: Run) -> None:
    for arguments, code in (
        (("nobody", "--every", "5m"), ExitCode.NOT_FOUND),
        ((str(os.getpid()), "--every", "5m"), ExitCode.REFUSED),
        (("walker", "--every", "0.1s"), ExitCode.USAGE),
        (("walker", "--every", "5m", "--stop"), ExitCode.USAGE),
        (("walker", "--every", "5m", "--max-overhead", "0%"), ExitCode.USAGE),
        (("walker", "--keep-last", "2"), ExitCode.USAGE),
    ):
        result = CliRunner().invoke(app, ["checkpoint", *arguments], prog_name="woodfrog")
        assert result.exit_code == code, (arguments, result.stdout, result.stderr)


def test_every_ends_by_itself_when_the_target_does(shared: Product, walker: Stepper, woodfrog: Run) -> None:
    running = every(shared, "--max-overhead", "100%", "--name", "last")
    try:
        assert document(running)["checkpoint"]["image"] == "last@1"
        walker.finish()
        out, err = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
        running.wait()
    # A target that ends while a checkpoint has it may be told as a failed round before the end is seen.
    assert running.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["summary"]["ended"] is True
