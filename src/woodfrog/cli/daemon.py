"""`woodfrog daemon start|stop|status`: the node daemon, which otherwise starts by itself when it is needed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption

app = typer.Typer(
    help="The node daemon: start it ahead, look at it, stop it.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("start")
def start(
    arena: Annotated[
        str | None,
        typer.Option("--arena", metavar="SIZE", help="Host memory for GPU data, e.g. 64G (default: half of it)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start the node daemon if there is none."""
    with output.reported(as_json):
        from woodfrog.daemon.client import ensure_daemon

        with ensure_daemon(arguments=["--arena", arena] if arena else []) as client:
            _show(client.call("ping"), as_json)


@app.command("status")
def status(as_json: JsonOption = False) -> None:
    """Show the node daemon. Exit code 8 if there is none."""
    with output.reported(as_json):
        from woodfrog.daemon.client import Client

        with Client.connect() as client:
            _show(client.call("ping"), as_json)


@app.command("stop")
def stop(as_json: JsonOption = False) -> None:
    """Stop the node daemon and its keeper. Refused while targets are frozen or suspended."""
    with output.reported(as_json):
        from woodfrog.daemon.client import Client

        with Client.connect() as client:
            client.call("stop")
        if as_json:
            output.print_json({"stopped": True})
        else:
            output.say("the node daemon has stopped")


def _show(found: Any, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
        return
    for name, value in dict(found or {}).items():
        output.say(f"{name:>16}  {value}")
