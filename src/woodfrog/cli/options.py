"""Options and arguments that several verbs share, declared once so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import completion

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="Where images are kept: a directory, ram:NAME or s3://BUCKET/PREFIX "
        "(default: $WOODFROG_STORE, else your data directory).",
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
        help="NAME@NUMBER, NAME for the newest, or STORE/NAME@NUMBER.",
        autocompletion=completion.images,
    ),
]
CompressOption = Annotated[
    str, typer.Option("--compress", metavar="METHOD", help="auto, none, lz4, zstd or zstd:LEVEL.")
]
GpuOption = Annotated[
    list[str] | None,
    typer.Option("--gpu", metavar="[THERE=]HERE", help="GPU to go to: ordinal or UUID; repeat for several."),
]


def gpu_mapping(options: list[str]) -> dict[str, str]:
    """--gpu as a map: `THERE=HERE`, or `HERE` for the GPUs of the image or target in order of their ordinals there."""
    from woodfrog.errors import UsageError

    mapping: dict[str, str] = {}
    for index, option in enumerate(options):
        there, equals, here = option.rpartition("=")
        there = there if equals else str(index)
        if not there or not here or there in mapping:
            raise UsageError(f"--gpu {option!r} is not HERE or THERE=HERE, or names a GPU twice")
        mapping[there] = here
    return mapping
