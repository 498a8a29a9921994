"""Run by test_driver_and_criu.py with the simulated driver on its library path: one target, several whole cycles.

Prints one JSON object. A target writes a counter into GPU memory and reads it back; each round it is locked,
checkpointed by the driver, dumped, killed, restored by CRIU, restored by the driver and unlocked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from woodfrog.cpu import criu
from woodfrog.driver import devices
from woodfrog.driver.process import DriverProcess, ProcessState, is_cuda_process
from woodfrog.target.identity import Identity
from woodfrog.target.preconditions import refuse, survey
from woodfrog.target.process import ProcessTree
from woodfrog.target.reaper import Reaper, become_subreaper

ROUNDS = 4

TARGET = """
import time
from cuda.bindings import driver
def check(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:]
check(driver.cuInit(0))
context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
check(driver.cuCtxSetCurrent(context))
memory = int(check(driver.cuMemAlloc(1 << 20)))
check(driver.cuMemsetD8(memory, 0, 1 << 20))
seen, n = bytearray(1), 0
while True:
    check(driver.cuMemcpyDtoH(seen, memory + (1 << 20) - 1, 1))
    assert seen[0] == n % 256, (seen[0], n)
    n += 1
    check(driver.cuMemsetD8(memory, n % 256, 1 << 20))
    print(n, flush=True)
    time.sleep(0.002)
"""


def last_number(log: Path) -> int:
    text = log.read_text()
    lines = text[: text.rfind("\n") + 1].split()
    return int(lines[-1]) if lines else 0


def wait_for_more(log: Path, than: int) -> None:
    deadline = time.monotonic() + 60
    while last_number(log) <= than:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{log} stays at {last_number(log)}")
        time.sleep(0.005)


def main(directory: Path) -> None:
    become_subreaper()
    log = directory / "log"
    with open(log, "ab") as output:
        target = subprocess.Popen(
            [sys.executable, "-c", TARGET],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    program = criu.find()
    states: list[ProcessState] = []
    with Reaper() as reaper:
        wait_for_more(log, 0)
        simulated = False
        identity: Identity | None = None  # of the process that the round before restored
        for number in range(ROUNDS):
            driver = DriverProcess(target.pid)
            with ProcessTree(target.pid) as tree:
                simulated = tree.root.is_simulated
                refuse(survey(tree, is_cuda_process=is_cuda_process), image=True)
                driver.lock(timeout_s=30)
                states.append(driver.state())
                driver.checkpoint()
                states.append(driver.state())
                dumped = program.dump(target.pid, directory / f"image{number}", leave_running=False)
                tree.kill()
            if identity is None:
                target.wait()
            else:
                assert reaper.wait(identity, timeout_s=30) is not None
            restored = program.restore(dumped.directory, log_directory=directory / "logs")
            (identity,) = reaper.adopt([restored.pid])
            states.append(driver.state())
            driver.restore()
            states.append(driver.state())
            at = last_number(log)
            driver.unlock()
            wait_for_more(log, at + 10)
        with ProcessTree(target.pid) as tree:
            tree.kill()
        assert identity is not None
        assert reaper.wait(identity, timeout_s=30) is not None
    cycle = [ProcessState.LOCKED, ProcessState.CHECKPOINTED, ProcessState.CHECKPOINTED, ProcessState.LOCKED]
    numbers = [int(line) for line in log.read_text().split()]
    print(
        json.dumps(
            {
                "gpus": len(devices.list_gpus()),
                "simulated": simulated,
                "states_right": states == cycle * ROUNDS,
                "gapless": numbers == list(range(1, len(numbers) + 1)),
                "count": len(numbers),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
