"""Catalogues built ahead: for each PTX text, by its hash, a shared object of templates and an index of its kernels.

A folder of them (the same cache that catalogue.py uses, or one of its own beside a program or wheel) holds
HASH.json, the index of one PTX text, and the shared objects that indexes name. The hash covers the text, the analysis
and the evaluator: what an older analysis made is never used. The folder must be its user's alone, as what is in it is
loaded as code.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from woodfrog.errors import RefusedError, TargetState
from woodfrog.kernels import catalogue
from woodfrog.kernels.analysis import templates
from woodfrog.kernels.error import KernelFileError
from woodfrog.kernels.template import Exactness, Kind, Launch, Range

_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel of a built catalogue. `symbols` are the module variables whose addresses a launch must bring."""

    kernel: str
    number: int
    parameters_bytes: int
    symbols: tuple[str, ...]
    reads: str  # "none" or the name of an Exactness, as `report` says it
    writes: str
    fallback: str


@dataclass(frozen=True)
class Built:
    """The catalogue of one PTX text."""

    library: Path
    kernels: tuple[BuiltKernel, ...]
    was_there: bool = False

    def open(self) -> Opened:
        """Load the shared object. Raises KernelFileError when it cannot be."""
        return Opened(self)


class Opened:
    """A built catalogue that is loaded: ranges without any analysis."""

    def __init__(self, built: Built) -> None:
        self.kernels = {one.kernel: one for one in built.kernels}
        self._library = catalogue.Library(built.library)

    def ranges(self, kernel: str, launch: Launch, *, kinds: Sequence[Kind] = tuple(Kind)) -> list[Range]:
        """What a launch touches: see Template.ranges. KeyError for a kernel that is not in it."""
        one = self.kernels[kernel]
        return self._library.ranges(one, one.number, launch, kinds)


@cache
def _identity() -> bytes:
    """Changes whenever the analysis or the evaluator does."""
    content = hashlib.sha256()
    package = Path(__file__).resolve().parent
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.hpp")]):
        content.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return content.digest()


def key_of(ptx: bytes) -> str:
    return hashlib.sha256(_identity() + ptx).hexdigest()[:32]


def find(ptx: bytes, *, folder: Path | None = None) -> Built | None:
    """The catalogue of a PTX text, if one has been built. Raises RefusedError for a folder others may write to."""
    place = folder or catalogue.default_cache()
    index = place / f"{key_of(ptx)}.json"
    if not index.is_file():
        return None
    catalogue.check_own(place)
    try:
        with open(index, encoding="utf-8") as file:
            fields = json.loads(file.read(_INDEX_BYTES))
        kernels = tuple(BuiltKernel(**{**one, "symbols": tuple(one["symbols"])}) for one in fields["kernels"])
        library = place / Path(fields["library"]).name
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise KernelFileError(f"{index} is damaged: {error}", advice="Remove it; it is built again.") from None
    return Built(library, kernels, was_there=True) if library.is_file() else None


def build(ptx: bytes, *, folder: Path | None = None, compiler: str | None = None) -> Built:
    """The catalogue of a PTX text, made if it is not there. Raises PtxError for text that is no PTX.

    RefusedError without a C++ compiler: there is nothing to keep for later then.
    """
    from woodfrog.kernels.report import worst_of

    found = find(ptx, folder=folder)
    if found is not None:
        return found
    place = folder or catalogue.default_cache()
    # What goes beside a program is the catalogue alone.
    made = catalogue.Catalogue(templates(ptx), cache=place, compiler=compiler, objects=catalogue.default_cache())
    if made.library is None:
        raise RefusedError(
            "there is no C++ compiler to build a catalogue with",
            advice="Install g++ or clang++, or name one in CXX. Without one, templates are interpreted.",
            target_state=TargetState.NONE,
        )
    kernels = []
    for number, one in enumerate(made.templates):
        reads, writes = (_name(worst_of(one, stores=stores)) for stores in (False, True))
        kernels.append(BuiltKernel(one.kernel, number, one.parameters_bytes, one.symbols, reads, writes, one.fallback))
    text = json.dumps({"library": made.library.name, "kernels": [asdict(one) for one in kernels]})
    with tempfile.NamedTemporaryFile("w", dir=place, suffix=".unfinished", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(place / f"{key_of(ptx)}.json")
    return Built(made.library, tuple(kernels))


def _name(quality: Exactness | None) -> str:
    return "none" if quality is None else quality.name.lower()
