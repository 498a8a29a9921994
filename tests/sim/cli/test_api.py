"""The Python API on a target that checks itself: what the documentation shows, as it shows it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from product import DEADLINE_S, Product, Stepper

import woodfrog
from woodfrog.errors import NotFoundError, UsageError

pytestmark = pytest.mark.usefixtures("environment")


def run(product: Product, name: str | None = None) -> tuple[woodfrog.Target, Stepper]:
    target = woodfrog.run([str(product.build / "stepper"), "--ptx", str(product.build / "stepper.ptx")], name=name)
    stepper = Stepper(target.pid, Path(target.log))
    product._targets.append(stepper)
    stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
    return target, stepper


def test_a_target_goes_through_everything_and_ends_with_its_exit_code(product: Product) -> None:
    target, stepper = run(product)
    assert target.poll()
    assert (target.name, target.log) == ("stepper", str(product.runtime / "logs" / "stepper.log"))
    events: list[dict[str, Any]] = []
    result = woodfrog.checkpoint(target, on_event=events.append)
    assert result.image == "stepper@1"
    assert {event["phase"] for event in events if event["event"] == "end"} == set(result.phases)
    stepper.wait_steps(2)
    suspended = woodfrog.suspend(target)
    assert [one.state for one in woodfrog.ps()] == ["suspended"]
    assert woodfrog.resume("stepper").bytes == suspended.bytes
    stepper.wait_steps(2)
    stopped = woodfrog.checkpoint("stepper", leave_running=False)
    assert stopped.stopped
    assert target.wait(DEADLINE_S) == -signal.SIGKILL
    assert not target.poll()
    assert woodfrog.verify(stopped.image or "").image == "stepper@2"
    restored = woodfrog.restore("stepper", verify=True)
    assert restored.pid == target.pid
    assert restored.details is not None
    assert restored.details.verified
    assert restored.poll()
    Stepper(restored.pid, Path(restored.log)).wait_steps(2)
    with pytest.raises(TimeoutError):
        restored.wait(0.01)
    restored.kill(signal.SIGTERM)
    assert restored.wait(DEADLINE_S) == 0
    assert not restored.poll()
    assert stepper.lines()[-1].endswith("errors 0")
    assert [image.reference for image in woodfrog.images()] == ["stepper@1", "stepper@2"]
    assert woodfrog.inspect("stepper@2")["target_name"] == "stepper"
    assert woodfrog.rm("stepper@1") == "stepper@1"
    with pytest.raises(NotFoundError):
        woodfrog.inspect("stepper@1")


def test_two_targets_of_one_program_get_two_names(product: Product) -> None:
    first, second = run(product)[0], run(product)[0]
    assert (first.name, second.name) == ("stepper", "stepper-2")
    assert first.log != second.log


def test_what_makes_no_sense_is_refused_before_anything_is_started(product: Product) -> None:
    with pytest.raises(UsageError):
        woodfrog.run([])
    with pytest.raises(UsageError):
        woodfrog.run(["/bin/true"], name="../x")
    with pytest.raises(UsageError, match="mode"):
        woodfrog.restore("a@1", mode="sideways")
    with pytest.raises(UsageError):
        woodfrog.checkpoint(-1)


SELF = """
import sys, time, woodfrog
from cuda.bindings import driver
from cuda.core import Device

Device(0).set_current()
error, address = driver.cuMemAlloc(4 << 20)
assert driver.cuMemsetD32(address, 1, 1 << 20)[0] == 0
result = woodfrog.checkpoint_self(stop=sys.argv[1] == "stop")
assert driver.cuMemsetD32(address, 2 if result.restored else 3, 1)[0] == 0
found = bytearray(8)
assert driver.cuMemcpyDtoH(found, address, 8)[0] == 0
print("restored" if result.restored else f"wrote {result.image}", bytes(found).hex(), flush=True)
"""


def start_self(product: Product, tmp_path: Path, how: str) -> woodfrog.Target:
    script = tmp_path / "itself.py"
    script.write_text(SELF)
    target = woodfrog.run([sys.executable, str(script), how], name="itself", log=tmp_path / "itself.log")
    product._targets.append(Stepper(target.pid, Path(target.log)))
    return target


def test_a_process_checkpoints_itself_and_knows_itself_when_it_is_restored(product: Product, tmp_path: Path) -> None:
    target = start_self(product, tmp_path, "on")
    assert target.wait(DEADLINE_S) == 0, Path(target.log).read_text()
    assert Path(target.log).read_text() == "wrote itself@1 0300000001000000\n"
    for count in (1, 2):
        restored = woodfrog.restore("itself@1")
        assert restored.wait(DEADLINE_S) in (0, None)
        lines = Path(target.log).read_text().splitlines()
        assert lines[1:] == ["restored 0200000001000000"] * count


def test_a_process_can_end_with_its_own_checkpoint(product: Product, tmp_path: Path) -> None:
    target = start_self(product, tmp_path, "stop")
    assert target.wait(DEADLINE_S) == -signal.SIGKILL, Path(target.log).read_text()
    assert Path(target.log).read_text() == ""
    restored = woodfrog.restore("itself")
    assert restored.wait(DEADLINE_S) in (0, None)
    assert Path(target.log).read_text() == "restored 0200000001000000\n"
    assert list(product.runtime.glob("self-*")) == []


def test_a_failed_checkpoint_of_oneself_is_raised_in_oneself(product: Product, tmp_path: Path) -> None:
    lines = [
        "import woodfrog",
        "try: woodfrog.checkpoint_self()",
        "except woodfrog.WoodfrogError as error: print(error.exit_code.name)",
    ]
    program = "\n".join(lines)
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert finished.stdout.strip() == "REFUSED"
