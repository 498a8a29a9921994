"""The catalogue of code that a running program has passed to its driver, for the interposer (shadow execution).

    python -m woodfrog.kernels.image_catalogue FOLDER KEY        FOLDER/KEY.image → KEY.so, then KEY.kernels

native/interpose/shadow_catalogue.cpp describes KEY.kernels. A kernel is only listed where the driver is known to run
what was analysed: PTX goes with the virtual architecture that the driver reports for a loaded function, and PTX beside
machine code that was made for a feature set of its own (sm_90a) with none. Machine code alone has a template when
a cache of Triton's has the very same bytes beside their PTX; KEY.origin, the path of the file that the code was loaded
from, may be in one. Always writes the list, an empty one where there is nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from woodfrog.errors import WoodfrogError
from woodfrog.kernels.analysis import templates
from woodfrog.kernels.catalogue import Catalogue
from woodfrog.kernels.error import KernelFileError
from woodfrog.kernels.reader import CodeObject, read_bytes
from woodfrog.kernels.template import Template
from woodfrog.kernels.triton_cache import folders, ptx_of

HEADER = "woodfrog-kernels 1"
ANY_VERSION = 0  # the image holds one code only: there is nothing to be mistaken for
# The library is loaded into programs of all kinds and unloaded again: it must bring its C++ runtime, and export nothing
# of it.
FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
_TARGET = re.compile(rb"^\s*\.target\s+sm_(\d+)([a-z]?)", re.MULTILINE)
_MADE_FOR = re.compile(rb"sm_(\d+)([af])(?![0-9A-Za-z])")


def build(folder: Path, key: str) -> int:
    """Make the files of the image `key` in `folder`; the number of kernels that they list."""
    image = folder / f"{key}.image"
    try:
        found = _numbered(
            read_bytes(image.read_bytes(), key), [*_cache_of(folder / f"{key}.origin"), *folders(os.environ)]
        )
        library = Catalogue([template for template, _ in found], flags=FLAGS).library if found else None
    except WoodfrogError as error:
        print(f"{key}: {error}", file=sys.stderr)
        found, library = [], None
    if library is None:
        found = []
    else:
        _place(folder / f"{key}.so", lambda path: shutil.copyfile(library, path), 0o700)
    text = listing(found)
    _place(folder / f"{key}.kernels", lambda path: path.write_text(text), 0o600)
    image.unlink(missing_ok=True)
    (folder / f"{key}.origin").unlink(missing_ok=True)
    return len(found)


def _cache_of(origin: Path) -> list[Path]:
    """The cache that a file of machine code is in, if it is in one."""
    try:
        path = Path(os.fsdecode(origin.read_bytes()))
    except FileNotFoundError:
        return []
    return [path.parent.parent] if path.is_absolute() else []


def listing(found: Sequence[tuple[Template, int]]) -> str:
    """KEY.kernels of these templates, each with its PTX version."""
    lines = [HEADER]
    for number, (template, version) in enumerate(found):
        lines.append(
            f"kernel {number} {version} {int(is_bounded(template))} {template.parameters_bytes} {template.kernel}"
        )
        lines += [f"parameter {one.offset_bytes} {one.size_bytes}" for one in template.parameters]
        lines += [f"symbol {name}" for name in template.symbols]
    return "\n".join([*lines, "end", ""])


def is_bounded(template: Template) -> bool:
    """Whether what it writes may be less than everything."""
    return not template.fallback and all(
        access.address is not None and access.size is not None for access in template.accesses if access.kind.stores
    )


def _numbered(codes: Sequence[CodeObject], caches: Sequence[Path]) -> list[tuple[Template, int]]:
    texts = list(_usable(codes, caches))
    found = []
    for data, version in texts:
        try:
            found += [(template, version) for template in templates(data)]
        except KernelFileError as error:  # of one text; the others are as good as before
            print(f"PTX for {version}: {error}", file=sys.stderr)
    return found


def _usable(codes: Sequence[CodeObject], caches: Sequence[Path] = ()) -> Iterator[tuple[bytes, int]]:
    """PTX texts and the PTX version that a function has which the driver took from them."""
    if len(codes) == 1:
        (code,) = codes
        text = code.data if code.kind == "ptx" else ptx_of(code.data, caches)
        if text is not None:
            yield text, ANY_VERSION
        return
    for code in codes:
        target = _TARGET.search(code.data) if code.kind == "ptx" else None
        if target is None:
            continue
        number, suffix = target.groups()
        same = [other for other in codes if other is not code and _is_for(other, number)]
        if any(_suffixes(other, number) != {suffix} for other in same):
            continue  # two codes that the driver reports alike
        yield code.data, int(number)


def _is_for(code: CodeObject, number: bytes) -> bool:
    if code.kind == "ptx":
        target = _TARGET.search(code.data)
        return target is None or target[1] == number
    return code.architecture.removeprefix("sm_").rstrip("af") == number.decode()


def _suffixes(code: CodeObject, number: bytes) -> set[bytes]:
    """The feature sets that a code may be made for; ptxas writes its own command line into machine code."""
    if code.kind == "ptx":
        target = _TARGET.search(code.data)
        return {target[2]} if target else {b"?"}
    named = {match[2] for match in _MADE_FOR.finditer(code.data) if match[1] == number}
    return named or {b""}


def _place(path: Path, make: Callable[[Path], object], mode: int) -> None:
    """`path` whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        make(temporary)
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2])
