"""Ending a whole tree of processes, once an image has taken its place or it must not live."""

from __future__ import annotations

import contextlib
import logging

from woodfrog.errors import NotFoundError
from woodfrog.operations.context import Context
from woodfrog.operations.instance import end_namespace
from woodfrog.target import pid_namespace
from woodfrog.target.process import ProcessTree

_log = logging.getLogger(__name__)

REAP_TIMEOUT_S = 5.0  # of what is our own child; the reaper's thread does it within milliseconds


def end_tree(context: Context, root_pid: int, alive: bool) -> None:
    """Kill the tree below `root_pid` and wait for its end; nothing happens when it has ended already."""
    if not alive:
        return
    init = pid_namespace.init_above(root_pid)
    with contextlib.suppress(NotFoundError), ProcessTree(root_pid) as tree:
        # What was restored, and what that has started, is left to us as all of it ends (in a namespace to process 1).
        ours = init is None and context.reaper.is_watched(tree.root.identity)
        adopted = context.reaper.adopt([process.pid for process in tree.processes]) if ours else []
        tree.kill()
        if not context.reaper.wait_reaped(adopted, REAP_TIMEOUT_S):
            _log.warning("not all processes of %d were reaped within %g s of their end", root_pid, REAP_TIMEOUT_S)
    if init is not None:
        end_namespace(context.reaper, init.identity)
