"""Every verb that needs the daemon, from the command line, on a target that checks itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from product import DEADLINE_S, Product, Stepper

from woodfrog.errors import ExitCode
from woodfrog.logtail import LogTail

Woodfrog = Callable[..., Any]


def command(product: Product, *arguments: str) -> list[str]:
    return [str(product.build / "stepper"), "--ptx", str(product.build / "stepper.ptx"), *arguments]


def started(product: Product, woodfrog: Woodfrog, name: str = "walker") -> Stepper:
    """A stepper started by `woodfrog run --detach`, after its first steps."""
    told = woodfrog("run", "--detach", "--json", "--name", name, "--", *command(product)).json
    stepper = Stepper(told["pid"], Path(told["log"]))
    product._targets.append(stepper)
    stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
    return stepper


def test_a_detached_target_is_listed_checkpointed_stopped_and_restored(product: Product, woodfrog: Woodfrog) -> None:
    stepper = started(product, woodfrog)
    (row,) = woodfrog("ps", "--json").json
    assert (row["name"], row["pid"], row["state"], row["managed"]) == ("walker", stepper.pid, "running", True)
    assert row["gpu_bytes"] > 0
    assert "walker" in woodfrog("ps").out

    running = woodfrog("checkpoint", "walker", "--json").json
    assert running["image"] == "walker@1"
    assert running["stopped"] is False
    assert running["stall_s"] > 0
    assert {"survey", "quiesce", "handover", "control", "cpu", "drain", "return", "commit"} <= set(running["phases"])
    stepper.wait_steps(2)

    shown = woodfrog("checkpoint", "walker", "--stop")
    assert shown.code == 0, shown.err
    assert "walker@2" in shown.out
    assert "commit" in shown.out
    assert not stepper.alive
    at = stepper.steps()
    assert [image["reference"] for image in woodfrog("images", "--json").json] == ["walker@1", "walker@2"]
    assert woodfrog("verify", "walker@2", "--json").json["verified"] is True
    inspected = woodfrog("inspect", "walker@2", "--json").json
    assert inspected["target_name"] == "walker"
    assert [finding for finding in inspected["compatibility"] if finding["severity"] == "refused"] == []

    back = woodfrog("restore", "walker", "--verify", "--json").json
    assert (back["pid"], back["image"], back["verified"]) == (stepper.pid, "walker@2", True)
    restored = Stepper(back["pid"], Path(back["log"]))
    assert restored.log == stepper.log
    restored.wait_steps(2)
    assert restored.steps() > at
    restored.finish()


def test_suspend_and_resume_from_the_command_line(product: Product, woodfrog: Woodfrog) -> None:
    stepper = started(product, woodfrog)
    asleep = woodfrog("suspend", "walker", "--json").json
    assert asleep["bytes"] > 0
    assert woodfrog("ps", "--json").json[0]["state"] == "suspended"
    again = woodfrog("suspend", "walker", "--json")
    assert again.code == ExitCode.REFUSED
    assert again.json["target_state"] == "suspended"
    refused = woodfrog("daemon", "stop")
    assert refused.code == ExitCode.REFUSED
    shown = woodfrog("resume", str(stepper.pid))
    assert shown.code == 0, shown.err
    assert "runs again" in shown.out
    stepper.check_runs_right()


def test_run_shows_the_output_and_ends_with_the_programs_code(product: Product, woodfrog: Woodfrog) -> None:
    shown = woodfrog("run", "--", "/bin/sh", "-c", "echo to stdout; echo to stderr >&2; exit 7")
    assert (shown.code, shown.out) == (7, "to stdout\nto stderr\n")
    told = woodfrog("run", "--json", "--name", "quiet", "--", "/bin/sh", "-c", "echo unseen; exit 3")
    assert told.code == 3
    assert (told.json["name"], told.json["exit_code"]) == ("quiet", 3)
    assert Path(told.json["log"]).read_text() == "unseen\n"
    again = woodfrog("run", "--name", "quiet", "--", "/bin/echo", "second")
    assert again.out == "second\n"


def test_run_leaves_the_programs_own_options_alone(product: Product, woodfrog: Woodfrog) -> None:
    assert woodfrog("run", "/bin/echo", "--json", "--name", "x", "-d").out == "--json --name x -d\n"
    assert woodfrog("run", "--", "/bin/echo", "--", "--detach").out == "-- --detach\n"


def test_run_passes_signals_on_and_ends_as_a_shell_would(product: Product, environment: dict[str, str]) -> None:
    following = subprocess.Popen(
        [sys.executable, "-m", "woodfrog", "run", "--name", "walker", "--", *command(product)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    try:
        while not following.stdout.readline().startswith("step "):
            assert following.poll() is None
        following.send_signal(signal.SIGTERM)  # the stepper then verifies everything and ends by itself
        out, err = following.communicate(timeout=DEADLINE_S)
        assert following.returncode == 0, err
        assert out.splitlines()[-1].startswith("done ")
        assert out.splitlines()[-1].endswith("errors 0")
    finally:
        following.kill()
        following.wait()


def test_run_says_which_image_its_program_was_stopped_into(
    product: Product, environment: dict[str, str], woodfrog: Woodfrog
) -> None:
    following = subprocess.Popen(
        [sys.executable, "-m", "woodfrog", "run", "--name", "walker", "--", *command(product)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    try:
        while not following.stdout.readline().startswith("step "):
            assert following.poll() is None
        assert woodfrog("checkpoint", "walker", "--stop", "--json").json["stopped"] is True
        _, err = following.communicate(timeout=DEADLINE_S)
        assert following.returncode == 128 + signal.SIGKILL
        assert "woodfrog restore walker@1" in err
    finally:
        following.kill()
        following.wait()


def test_a_target_that_is_not_there_is_told_by_code_and_reason(product: Product, woodfrog: Woodfrog) -> None:
    for verb in ("checkpoint", "suspend", "resume"):
        finished = woodfrog(verb, "nobody", "--json")
        assert finished.code == ExitCode.NOT_FOUND
        assert "nobody" in finished.json["reason"]
    missing = woodfrog("restore", "nobody@3")
    assert missing.code == ExitCode.NOT_FOUND
    assert "nobody@3" in missing.err
    absent = woodfrog("run", "--", str(product.root / "no-such-program"))
    assert absent.code == ExitCode.NOT_FOUND


def test_a_process_without_a_gpu_is_refused_and_left_alone(product: Product, woodfrog: Woodfrog) -> None:
    finished = woodfrog("checkpoint", str(os.getpid()), "--json")
    assert finished.code == ExitCode.REFUSED
    assert finished.json["target_state"] in ("untouched", "running")


def test_the_daemon_is_started_looked_at_and_stopped(product: Product, woodfrog: Woodfrog) -> None:
    begun = woodfrog("daemon", "start", "--arena", "64M", "--json").json
    assert woodfrog("daemon", "status", "--json").json["pid"] == begun["pid"]
    assert woodfrog("daemon", "start", "--json").json["pid"] == begun["pid"]
    assert woodfrog("daemon", "stop", "--json").json == {"stopped": True}
    assert woodfrog("daemon", "status").code == ExitCode.NO_DAEMON


def test_doctor_knows_the_simulated_gpu(product: Product, woodfrog: Woodfrog) -> None:
    finished = woodfrog("doctor", "--json")
    verdicts = {check["name"]: check for check in finished.json["checks"]}
    assert verdicts["driver"]["verdict"] == "ok"
    assert "simulated" in verdicts["driver"]["finding"]
    assert verdicts["woodfrog"]["verdict"] == "ok"
    assert verdicts["CRIU"]["verdict"] == "ok"
    assert verdicts["GPU 0"]["verdict"] == "ok"


def test_ctrl_c_takes_a_checkpoint_back_and_the_target_runs_on(
    product: Product, environment: dict[str, str], woodfrog: Woodfrog
) -> None:
    trace = product.root / "trace"
    trace.touch()
    environment["WOODFROG_FAULTS"] = "checkpoint.drain.before:hang"
    environment["WOODFROG_FAULTS_TRACE"] = str(trace)
    stepper = started(product, woodfrog)
    running = subprocess.Popen(
        [sys.executable, "-m", "woodfrog", "checkpoint", "walker", "--stop"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with LogTail(trace, 0, running.pid) as passed:
            assert "checkpoint.drain.before" in passed.lines(DEADLINE_S)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()
        running.wait()
    assert (running.returncode, out) == (130, "")
    assert "interrupted" in err
    assert product.images() == []
    stepper.check_runs_right()


def test_a_mapped_restore_is_told_of_and_waited_for(product: Product, woodfrog: Woodfrog) -> None:
    stepper = product.run("--idle-kib", "4096", name="walker")
    product.checkpoint(stepper, stop=True)
    shown = woodfrog("restore", "walker", "--mode", "mapped", "--wait")
    assert "moved to the GPU in" in shown.out, shown
    restored = product.restored({"root_pid": stepper.pid}, stepper.log)
    restored.wait_steps(2)
    assert woodfrog("resume", "walker").code == ExitCode.REFUSED
    told = woodfrog("checkpoint", "walker", "--stop", "--json").json
    details = woodfrog("restore", told["image"], "--mode", "ordered", "--json").json
    assert (details["mode"], details["promotion"]["state"]) in (("ordered", "running"), ("ordered", "complete"))
    assert woodfrog("restore", "walker", "--mode", "lazy").code == ExitCode.USAGE
    product.restored({"root_pid": stepper.pid}, stepper.log).check_runs_right()
