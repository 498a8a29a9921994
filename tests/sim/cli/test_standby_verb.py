"""`woodfrog standby` and what `restore` says of it, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from product import Product, Stepper

from woodfrog.errors import ExitCode

Woodfrog = Callable[..., Any]


def test_a_process_is_kept_waiting_listed_taken_and_ended(product: Product, woodfrog: Woodfrog) -> None:
    command = [str(product.build / "stepper"), "--ptx", str(product.build / "stepper.ptx")]
    told = woodfrog("run", "--detach", "--json", "--name", "walker", "--", *command).json
    stepper = Stepper(told["pid"], Path(told["log"]))
    product._targets.append(stepper)
    stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
    image = woodfrog("checkpoint", "walker", "--stop", "--json").json["image"]

    [made] = woodfrog("standby", "walker", "--hold", "device", "--json").json
    assert (made["image"], made["pid"], made["state"], made["new"]) == (image, stepper.pid, "standby", True)
    assert "waits already" in woodfrog("standby", image).out
    [row] = woodfrog("standby", "--list", "--json").json
    assert (row["image"], row["hold"]) == (image, "device")
    assert image in woodfrog("standby", "--list").out
    assert "standby" in woodfrog("ps").out
    assert woodfrog("standby", image, "--count", "0").code == ExitCode.USAGE

    shown = woodfrog("restore", "walker")
    assert "taken from standby (device)" in shown.out, shown
    stepper.wait_steps(2)
    assert woodfrog("standby", "--list", "--json").json == []

    image = woodfrog("checkpoint", "walker", "--stop", "--json").json["image"]
    woodfrog("standby", image)
    assert str(stepper.pid) in woodfrog("standby", "--end", image).out
    assert not stepper.alive
    assert woodfrog("standby", "--end", image).code == ExitCode.NOT_FOUND
    assert woodfrog("standby").code == ExitCode.USAGE
    assert woodfrog("standby", "--list", "--end").code == ExitCode.USAGE
    assert woodfrog("restore", "walker", "--json").json["standby"] == ""
    stepper.check_runs_right()
