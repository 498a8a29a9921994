"""`woodfrog doctor`: every precondition, with the fix for each that fails."""

from __future__ import annotations

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption, StoreOption


def doctor(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Check every precondition on this machine and say how to fix what is missing. Exit code 4 if a check fails."""
    with output.reported(as_json):
        from woodfrog.doctor import checks
        from woodfrog.errors import ExitCode

        found = checks.run_all(store)
        failed = any(check.verdict is checks.Verdict.FAIL for check in found)
        if as_json:
            output.print_json({"ok": not failed, "checks": [check.to_dict() for check in found]})
        else:
            rows = [(check.verdict.value, check.name, check.finding, check.fix) for check in found]
            output.table(("verdict", "check", "finding", "what to do"), rows)
        if failed:
            raise typer.Exit(int(ExitCode.REFUSED))
