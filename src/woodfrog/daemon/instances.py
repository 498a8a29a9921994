"""Parameters of `restore` and `standby` that say in what an instance differs from its image; checked here, once."""

from __future__ import annotations

import re
from typing import Any

from woodfrog.daemon.server import optional
from woodfrog.errors import UsageError
from woodfrog.operations.hook import DEFAULT_TIMEOUT_S
from woodfrog.operations.telling import MAX_BYTES
from woodfrog.store.names import check_name

INSTANCE_PARAMETERS = (
    "new_pid_namespace",
    "target_name",
    "ports",
    "binds",
    "environment",
    "hook",
    "hook_timeout_s",
)
MAX_HOOK_TIMEOUT_S = 3600.0
MAX_COMMAND_BYTES = 1 << 16  # the kernel's bound on one argument is twice that


def instance_of(params: dict[str, Any]) -> dict[str, Any]:
    """Fields of a RestoreRequest. UsageError."""
    namespace = optional(params, "new_pid_namespace", bool, False)
    name = optional(params, "target_name", str, "")
    if name:
        check_name(name)
        if not namespace:
            raise UsageError(
                "only a target in a PID namespace of its own can get another name: it has the old one in its memory",
                advice="add --new-pid-namespace",
            )
    binds = tuple(_bind(one) for one in optional(params, "binds", list, []))
    if binds and not namespace:
        raise UsageError("paths are bound in a mount namespace of the target's", advice="add --new-pid-namespace")
    command = optional(params, "hook", str, "")
    if len(command.encode(errors="surrogateescape")) > MAX_COMMAND_BYTES or "\0" in command:
        raise UsageError("the hook is no command that can be run", advice="put it into a script")
    timeout_s = optional(params, "hook_timeout_s", float, DEFAULT_TIMEOUT_S)
    if not 0 < timeout_s <= MAX_HOOK_TIMEOUT_S:
        raise UsageError(f"a hook cannot have {timeout_s:g} s", advice=f"0 < seconds <= {MAX_HOOK_TIMEOUT_S:g}")
    return {
        "new_pid_namespace": namespace,
        "name": name,
        "ports": _ports(optional(params, "ports", dict, {})),
        "binds": binds,
        "environment": _environment(optional(params, "environment", dict, {})),
        "hook": command,
        "hook_timeout_s": timeout_s,
    }


def _ports(given: dict[Any, Any]) -> dict[int, int]:
    """Port of the image → port here, 0 for any free one."""
    ports: dict[int, int] = {}
    for old, new in given.items():
        for value in (old, new):
            if not str(value).isdigit() or not 0 <= int(value) <= 65535:
                raise UsageError(f"{value!r} is no TCP port")
        if int(old) == 0:
            raise UsageError("0 is no port that an image listens on")
        ports[int(old)] = int(new)
    fixed = [new for new in ports.values() if new]
    if len(set(fixed)) < len(fixed):
        raise UsageError("two ports cannot become one")
    return ports


def _bind(given: Any) -> tuple[str, str]:
    if not (isinstance(given, (list, tuple)) and len(given) == 2 and all(isinstance(one, str) for one in given)):
        raise UsageError("a path to bind is a pair: here, there")
    return given[0], given[1]


def _environment(given: dict[Any, Any]) -> dict[str, str]:
    for name, value in given.items():
        if not (isinstance(name, str) and isinstance(value, str) and re.fullmatch(r"[^=\0]+", name)):
            raise UsageError(f"{name!r} cannot be a variable of an environment")
    if sum(len(name) + len(value) for name, value in given.items()) > MAX_BYTES // 2:
        raise UsageError("that is more environment than a restored process is told of", advice="put it into a file")
    return given
