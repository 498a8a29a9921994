"""`woodfrog bench`: the scripts under bench/ in a checkout; without one, a small measurement of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption, StoreOption


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="[BENCH]", help="Which to run; without it they are listed.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]…", help="Passed to it.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List or run the benchmarks of a checkout. `builtin` measures hashing and the store here."""
    with output.reported(as_json):
        from woodfrog.doctor import measure
        from woodfrog.errors import NotFoundError

        scripts = measure.scripts()
        if name == "builtin" or (name is None and not scripts):
            measured = measure.builtin(store)
            if as_json:
                output.print_json(measured)
            else:
                output.say("a small measurement of this machine (no GPU needed):")
                for what, value in measured["summary"].items():
                    output.say(f"{what:>24}  {value:,.2f}")
            return
        if name is None:
            if as_json:
                output.print_json({"benches": sorted([*scripts, "builtin"])})
            else:
                for script in sorted(scripts):
                    output.say(f"{script:>16}  {measure.first_sentence(scripts[script])}")
                output.say(f"{'builtin':>16}  hashing and store speed of this machine, no GPU needed")
            return
        if name not in scripts:
            raise NotFoundError(f"there is no benchmark {name}", advice=", ".join(sorted([*scripts, "builtin"])))
        raise typer.Exit(measure.run_script(scripts[name], arguments or []))
