"""Ending a whole tree of processes, once an image has taken its place or it must not live."""

from __future__ import annotations

import contextlib
import os

from woodfrog.errors import NotFoundError
from woodfrog.operations.context import Context
from woodfrog.operations.instance import end_namespace
from woodfrog.target import pid_namespace
from woodfrog.target.process import ProcessTree

REAP_TIMEOUT_S = 5.0  # of what is our own child; the reaper's thread does it within milliseconds


def end_tree(context: Context, root_pid: int, alive: bool) -> None:
    """Kill the tree below `root_pid` and wait for its end; nothing happens when it has ended already."""
    if not alive:
        return
    init = pid_namespace.init_above(root_pid)
    with contextlib.suppress(NotFoundError), ProcessTree(root_pid) as tree:
        ours = [process.identity for process in tree.processes if process.parent_pid == os.getpid()]
        tree.kill()
        for identity in ours:
            context.reaper.wait(identity, REAP_TIMEOUT_S)
    if init is not None:
        end_namespace(context.reaper, init.identity)
