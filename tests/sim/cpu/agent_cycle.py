"""Run by test_driver_and_criu.py: the whole way of a target with the interposer, done by hand without the daemon.

Quiesce, export, release, detach, driver lock and checkpoint, dump, kill; then CRIU restore, driver restore, unlock,
wake, return, resume. The memory lives meanwhile in the descriptors that this process holds. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from driver_cycle import TARGET, last_number, wait_for_more

from woodfrog._native import paths
from woodfrog.cpu import criu
from woodfrog.driver.process import DriverProcess, is_cuda_process
from woodfrog.target import discovery
from woodfrog.target.channel import listen
from woodfrog.target.identity import Identity
from woodfrog.target.link import AgentLink
from woodfrog.target.preconditions import refuse, survey
from woodfrog.target.process import ProcessTree
from woodfrog.target.reaper import Reaper, become_subreaper

ROUNDS = 3


def accept(listener: socket.socket) -> AgentLink:
    connection, _ = listener.accept()
    return AgentLink(connection)


def main(directory: Path) -> None:
    become_subreaper()
    runtime = directory / "runtime"
    runtime.mkdir(mode=0o700)
    listener = listen(str(runtime / "agent.sock"))
    listener.settimeout(60)
    log = directory / "log"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(paths.interposer()),
        "WOODFROG_RUNTIME_DIR": str(runtime),
        "WOODFROG_NAME": "counter",
    }
    with open(log, "ab") as output:
        target = subprocess.Popen(
            [sys.executable, "-c", TARGET],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )
    program = criu.find()
    identity: Identity | None = None
    released_states, handles = [], 0
    with Reaper() as reaper:
        link = accept(listener)
        name = link.hello.name
        for number in range(ROUNDS):
            wait_for_more(log, last_number(log) + 10)
            found = link.survey()
            with ProcessTree(target.pid) as tree:
                assert tree.root.agent_tid == link.hello.agent_tid
                refuse(survey(tree, agent_survey=found, is_cuda_process=is_cuda_process), image=True)
                link.quiesce(operation=number, timeout_s=30)
                exported = link.export_memory()
                handles = len(exported.handles)
                link.release_memory()
                link.detach()
                driver = DriverProcess(target.pid)
                driver.lock(timeout_s=30)
                driver.checkpoint()
                dumped = program.dump(target.pid, directory / f"image{number}", leave_running=False)
                tree.kill()
            if identity is None:
                target.wait()
            else:
                assert reaper.wait(identity, timeout_s=30) is not None
            (identity,) = reaper.adopt([program.restore(dumped.directory).pid])
            driver.restore()
            driver.unlock()
            agent = discovery.agent_of(target.pid)
            assert agent is not None
            discovery.wake(agent)
            link = accept(listener)
            released_states.append(link.hello.state)
            with exported:
                link.return_memory(exported.handles, list(exported.fds))
            link.resume()
        wait_for_more(log, last_number(log) + 10)
        with ProcessTree(target.pid) as tree:
            tree.kill()
        assert identity is not None
        assert reaper.wait(identity, timeout_s=30) is not None
        link.close()
    listener.close()
    numbers = [int(line) for line in log.read_text().split()]
    print(
        json.dumps(
            {
                "name": name,
                "states": released_states,
                "handles": handles,
                "gapless": numbers == list(range(1, len(numbers) + 1)),
                "count": len(numbers),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
