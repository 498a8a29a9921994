"""Parameters of `restore` and `standby` that say in what an instance differs from its image; checked here, once."""

from __future__ import annotations

from typing import Any

from woodfrog.daemon.server import optional
from woodfrog.errors import UsageError
from woodfrog.store.names import check_name

INSTANCE_PARAMETERS = ("new_pid_namespace", "target_name")


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
    return {"new_pid_namespace": namespace, "name": name}
