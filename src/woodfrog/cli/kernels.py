"""`woodfrog kernels`: what a file's GPU kernels are, and what they are known to read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption

app = typer.Typer(help="Look into GPU code: kernels, and what they read and write.", no_args_is_help=True)

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="An executable, shared object, archive, fatbin, cubin or PTX text.")
]


@app.command("list")
def list_kernels(file: FileArgument, as_json: JsonOption = False) -> None:
    """List a file's kernels with architecture, parameters and compression."""
    with output.reported(as_json):
        from woodfrog.kernels import report

        found = report.listed(file)
        if as_json:
            output.print_json([_listed(one) for one in found])
            return
        rows = []
        for one in found:
            sizes = "not known" if one.parameters is None else ", ".join(str(size) for _, size in one.parameters)
            rows.append((one.kernel, one.kind, one.architecture, one.compression, sizes))
        output.table(("kernel", "code", "architecture", "compression", "parameter bytes"), rows)


def _listed(one: Any) -> dict[str, Any]:
    parameters = None
    if one.parameters is not None:
        parameters = [{"offset_bytes": offset, "size_bytes": size} for offset, size in one.parameters]
    return {
        "kernel": one.kernel,
        "kind": one.kind,
        "architecture": one.architecture,
        "compression": one.compression,
        "parameters": parameters,
        "origin": one.origin,
    }


@app.command("report")
def report_kernels(file: FileArgument, as_json: JsonOption = False) -> None:
    """Say for each kernel how well its reads and writes are known, and what stands in the way."""
    with output.reported(as_json):
        from woodfrog.kernels import report

        found, machine_code = report.judged(file)
        if as_json:
            kernels = [
                {
                    "kernel": one.template.kernel,
                    "architecture": one.architecture,
                    "reads": _name(one.reads),
                    "writes": _name(one.writes),
                    "reason": one.reason,
                }
                for one in found
            ]
            output.print_json({"kernels": kernels, "machine_code_only": machine_code})
            return
        rows = [(o.template.kernel, o.architecture, _name(o.reads), _name(o.writes), o.reason) for o in found]
        output.table(("kernel", "architecture", "reads", "writes", "why not exact"), rows)
        good = sum(one.has_template for one in found)
        output.say("")
        output.say(f"{good} of {len(found)} kernels with PTX have a template for their writes.")
        if machine_code:
            output.say(f"{len(machine_code)} kernels come as machine code only and have no template.")


def _name(quality: Any) -> str:
    return "none" if quality is None else str(quality.name).lower()


@app.command("explain")
def explain_kernel(
    file: FileArgument,
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="The kernel's name as `list` shows it.")],
    as_json: JsonOption = False,
) -> None:
    """Show a kernel's template in readable form."""
    with output.reported(as_json):
        from woodfrog.image.inspect import printable
        from woodfrog.kernels import report

        found = report.explained(file, kernel)
        if as_json:
            output.print_json([{"kernel": one.kernel, "lines": report.lines(one)} for one in found])
            return
        for template in found:
            for line in report.lines(template):
                output.say(printable(line, 2000))
