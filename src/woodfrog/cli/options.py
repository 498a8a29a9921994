"""Options and arguments that several verbs share, declared once so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from woodfrog.cli import completion

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", help="Where images are kept (default: $WOODFROG_STORE, else your data directory)."
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long GPU work in flight may take to finish.")
]
TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="Name or pid, as `woodfrog ps` shows.", autocompletion=completion.targets),
]
ImageArgument = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE",
        help="NAME@NUMBER, NAME for the newest, or an image's directory.",
        autocompletion=completion.images,
    ),
]
