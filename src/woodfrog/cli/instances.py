"""Options of `restore` and `standby` that say in what a process differs from others of its image."""

from __future__ import annotations

from typing import Annotated

import typer

NamespaceOption = Annotated[
    bool,
    typer.Option("--new-pid-namespace", help="With its pids in a PID namespace of its own: any number can run."),
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the target (with --new-pid-namespace).")]
PortOption = Annotated[
    list[str] | None,
    typer.Option(
        "--port", metavar="OLD=NEW", help="Listen on TCP port NEW (auto: any free one) where the image does on OLD."
    ),
]
BindOption = Annotated[
    list[str] | None,
    typer.Option("--bind", metavar="HERE:THERE", help="The target finds HERE at THERE (with --new-pid-namespace)."),
]
EnvironmentOption = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="Told to programs that use woodfrog.on_restore, and to the hook."),
]
HookOption = Annotated[
    str | None, typer.Option("--hook", metavar="COMMAND", help="Run it before the target goes on; it must succeed.")
]
HookTimeoutOption = Annotated[float | None, typer.Option("--hook-timeout", help="Seconds that the hook may take.")]


def pairs(option: str, given: list[str] | None, separator: str) -> dict[str, str]:
    """`LEFT=RIGHT` of a repeated option as a dict. UsageError."""
    from woodfrog.errors import UsageError

    found: dict[str, str] = {}
    for one in given or []:
        left, there, right = one.partition(separator)
        if not there or not left or left in found:
            raise UsageError(f"{option} {one!r} is not LEFT{separator}RIGHT, or says something twice")
        found[left] = right
    return found


def ports(given: list[str] | None) -> dict[int, int]:
    """--port as numbers; `auto` is 0."""
    from woodfrog.errors import UsageError

    result = {}
    for old, new in pairs("--port", given, "=").items():
        if not old.isdigit() or not (new.isdigit() or new == "auto"):
            raise UsageError(f"--port {old}={new}: a port is a number", advice="--port 8000=8001, or --port 8000=auto")
        result[int(old)] = int(new) if new != "auto" else 0
    return result
