"""`woodfrog kernels`: what a file's GPU kernels are, and what they are known to read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption

app = typer.Typer(help="Look into GPU code: kernels, and what they read and write.", no_args_is_help=True)

_SOURCE = (
    "An executable, shared object, archive, fatbin, cubin or PTX text; a wheel; a folder of these (Triton's cache); or "
    "the pid of a process, for the files that it maps."
)
FileArgument = Annotated[str, typer.Argument(metavar="FILE|PID", help=_SOURCE)]


@app.command("list")
def list_kernels(file: FileArgument, as_json: JsonOption = False) -> None:
    """List a file's kernels with architecture, parameters and compression."""
    with output.reported(as_json):
        from woodfrog.kernels import report
        from woodfrog.kernels.reader.sources import read_source

        source = read_source(file)
        found = report.listed(source)
        if as_json:
            output.print_json([_listed(one) for one in found])
            return
        rows = []
        for one in found:
            sizes = "not known" if one.parameters is None else ", ".join(str(size) for _, size in one.parameters)
            rows.append((one.kernel, one.kind, one.architecture, one.compression, sizes))
        output.table(("kernel", "code", "architecture", "compression", "parameter bytes"), rows)
        _say_problems(source.problems)


def _say_problems(problems: list[str]) -> None:
    from woodfrog.image.inspect import printable

    for problem in problems:
        typer.echo(f"woodfrog: passed over: {printable(problem, 500)}", err=True)


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
        from woodfrog.kernels.reader.sources import read_source

        source = read_source(file)
        found, machine_code = report.judged_code(source)
        if as_json:
            kernels = [
                {
                    "kernel": one.template.kernel,
                    "architecture": one.architecture,
                    "origin": one.origin,
                    "reads": _name(one.reads),
                    "writes": _name(one.writes),
                    "reason": one.reason,
                }
                for one in found
            ]
            output.print_json({"kernels": kernels, "machine_code_only": machine_code, "passed_over": source.problems})
            return
        rows = [(o.template.kernel, o.architecture, _name(o.reads), _name(o.writes), o.reason) for o in found]
        output.table(("kernel", "architecture", "reads", "writes", "why not exact"), rows)
        good = sum(one.has_template for one in found)
        output.say("")
        output.say(f"{good} of {len(found)} kernels with PTX have a template for their writes.")
        if machine_code:
            output.say(f"{len(machine_code)} kernels come as machine code only and have no template.")
        _say_problems(source.problems)


def _name(quality: Any) -> str:
    return "none" if quality is None else str(quality.name).lower()


@app.command("explain")
def explain_kernel(
    file: FileArgument,
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="The kernel's name as `list` shows it.")],
    grid: Annotated[
        str, typer.Option("--grid", metavar="X[,Y[,Z]]", help="Blocks of a launch whose ranges are drawn.")
    ] = "",
    block: Annotated[str, typer.Option("--block", metavar="X[,Y[,Z]]", help="Threads of a block of it.")] = "",
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="VALUE",
            help="A parameter of it, in order: NAME:BYTES for a buffer (out:64K), a number, or hex:BYTES.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a kernel's template in readable form, and what a launch of it reads and writes."""
    with output.reported(as_json):
        from woodfrog.cli.picture import unicode_output
        from woodfrog.errors import UsageError
        from woodfrog.image.inspect import printable
        from woodfrog.kernels import report, sketch

        wants_launch = bool(grid or block or param)
        if wants_launch and not (grid and block):
            raise UsageError("a launch has a grid and a block", advice="Give both --grid and --block.")
        found = report.explained(file, kernel)
        documents: list[dict[str, Any]] = []
        for template in found:
            launch = sketch.sketched(template, grid, block, param or []) if wants_launch else None
            lines = report.lines(template)
            if as_json:
                document: dict[str, Any] = {"kernel": template.kernel, "lines": lines}
                documents.append(document | ({"launch": sketch.as_fields(launch)} if launch else {}))
                continue
            if launch:
                lines += ["", *sketch.drawn(launch, unicode=unicode_output())]
            for line in lines:
                output.say(printable(line, 2000))
        if as_json:
            output.print_json(documents)


@app.command("build")
def build_catalogues(
    files: Annotated[list[str], typer.Argument(metavar="FILE|PID…", help=_SOURCE)],
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="CATALOGUE", help="A folder for them (default: your cache)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build the catalogues of templates for all PTX in some files, ahead of the programs that use it."""
    with output.reported(as_json):
        from woodfrog.kernels import prebuilt
        from woodfrog.kernels.reader.sources import read_source

        rows: list[dict[str, Any]] = []
        problems: list[str] = []
        for file in files:
            source = read_source(file)
            problems += source.problems
            for code in source.code:
                if code.kind != "ptx":
                    continue
                built = prebuilt.build(code.data, folder=folder)
                rows.append(
                    {
                        "origin": code.origin,
                        "architecture": code.architecture,
                        "library": str(built.library),
                        "kernels": len(built.kernels),
                        "with_template": sum(one.writes in ("none", "exact", "bounded") for one in built.kernels),
                        "was_there": built.was_there,
                    }
                )
        if as_json:
            output.print_json({"catalogues": rows, "passed_over": problems})
            return
        texts = [
            (
                one["origin"],
                one["architecture"],
                str(one["kernels"]),
                str(one["with_template"]),
                "was there" if one["was_there"] else "built",
            )
            for one in rows
        ]
        output.table(("PTX", "architecture", "kernels", "with template", ""), texts)
        if not rows:
            output.say("There is no PTX in it: its kernels come as machine code only.")
        _say_problems(problems)


__all__ = ["app"]
