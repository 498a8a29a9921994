"""Several processes of one image from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from instances import nothing_is_left
from product import Product, Stepper

from woodfrog.errors import ExitCode

Woodfrog = Callable[..., Any]


def test_processes_of_one_image_are_named_listed_and_reached_by_name(product: Product, woodfrog: Woodfrog) -> None:
    command = [str(product.build / "stepper"), "--ptx", str(product.build / "stepper.ptx")]
    told = woodfrog("run", "--detach", "--json", "--name", "walker", "--", *command).json
    stepper = Stepper(told["pid"], Path(told["log"]))
    product._targets.append(stepper)
    stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
    woodfrog("checkpoint", "walker", "--stop", "--json")

    made = woodfrog("standby", "walker", "--count", "2", "--json").json
    assert [one["name"] for one in made] == ["walker", "walker-2"]
    taken = [
        woodfrog("restore", "walker", "--new-pid-namespace", "--json").json,
        woodfrog("restore", "walker", "--new-pid-namespace", "--name", "runner", "--json").json,
    ]
    assert [(one["name"], one["standby"]) for one in taken] == [("walker", "host"), ("runner", "")]
    shown = woodfrog("ps").out
    assert all(name in shown for name in ("walker", "walker-2", "runner"))
    assert woodfrog("suspend", "runner", "--json").json["name"] == "runner"
    woodfrog("resume", "runner")
    assert "walker-2" in woodfrog("standby", "walker", "--count", "1").out
    for wrong in (
        ["--port", "http=1"],
        ["--port", "8000"],
        ["--env", "NOTHING"],
        ["--bind", "/a"],
        ["--name", "alone"],
        ["--hook", "true", "--hook-timeout", "0"],
    ):
        assert woodfrog("restore", "walker", *wrong).code == ExitCode.USAGE, wrong
    assert woodfrog("restore", "walker", "--new-pid-namespace", "--name", "runner").code == ExitCode.USAGE
    failed = woodfrog("restore", "walker", "--new-pid-namespace", "--no-standby", "--hook", "echo ice; false")
    assert failed.code == ExitCode.FAILED
    assert "ice" in failed.err
    woodfrog("standby", "--end")
    for one in taken:
        product.restored(one, Path(one["log"])).check_runs_right()
    nothing_is_left(product)
