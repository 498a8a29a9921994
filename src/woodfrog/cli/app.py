"""The command line's verbs, put together. Importing a verb's module must stay cheap."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import (
    bench,
    checkpoint,
    cp,
    daemon,
    demo,
    diff,
    doctor,
    images,
    inspect,
    kernels,
    migrate,
    prune,
    ps,
    pull,
    push,
    repair,
    restore,
    resume,
    rm,
    run,
    standby,
    suspend,
    switch,
    trace,
    verify,
)

app = typer.Typer(
    name="woodfrog",
    help="Freeze a running CUDA process, whole, and thaw it later, on this GPU or another.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from woodfrog import __version__

        typer.echo(f"woodfrog {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# `run` takes the rest of the line as the program's own arguments, options included.
app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run.run)
app.command("ps")(ps.ps)
app.command("checkpoint")(checkpoint.checkpoint)
app.command("restore")(restore.restore)
app.command("standby")(standby.standby)
app.command("suspend")(suspend.suspend)
app.command("switch")(switch.switch)
app.command("resume")(resume.resume)
app.command("migrate")(migrate.migrate)
app.command("images")(images.images)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("diff")(diff.diff)
app.command("rm")(rm.rm)
app.command("prune")(prune.prune)
app.command("repair")(repair.repair)
app.command("push")(push.push)
app.command("pull")(pull.pull)
app.command("cp")(cp.cp)
app.command("doctor")(doctor.doctor)
app.command("trace")(trace.trace)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.add_typer(kernels.app, name="kernels")
app.add_typer(daemon.app, name="daemon")


def main() -> None:
    """Run the command line and exit with a code of errors.ExitCode."""
    app(prog_name="woodfrog")
