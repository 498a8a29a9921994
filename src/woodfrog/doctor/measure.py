"""The benchmarks of a checkout, and the small measurement for where there is none.

The measurement uses no GPU: it tells what hashing and the store's disk can do. It must remove what it writes.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from woodfrog.errors import UsageError
from woodfrog.store import space
from woodfrog.store.open import default_place

_FILE_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20


def scripts() -> dict[str, Path]:
    """Benchmarks by name: the scripts of this checkout that run by themselves; empty when installed."""
    directory = Path(__file__).resolve().parents[3] / "bench"
    found = {}
    for path in sorted(directory.glob("*.py")):
        if "__main__" in path.read_text(encoding="utf-8"):
            found[path.stem] = path
    return found


def first_sentence(script: Path) -> str:
    """What the script's first paragraph says it is."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ")


def run_script(script: Path, arguments: Sequence[str]) -> int:
    """Run it with our interpreter; its exit code."""
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode


def builtin(store: str | os.PathLike[str] | None) -> dict[str, Any]:
    """BLAKE3 of memory, and a file of 256 MiB written, made durable and hashed in the store's file system."""
    name = os.fspath(store) if store is not None else default_place()
    if name.startswith(("ram:", "s3://")):
        raise UsageError(f"{name} is no directory, and this measures a file system", advice="give one with --store")
    place = Path(name)
    while not place.is_dir():
        place = place.parent
    space.require(place, _FILE_BYTES, "the measurement")
    from woodfrog._native import transfer

    block = os.urandom(16 << 20)
    begun = time.perf_counter()
    blake3(block * 16, max_threads=blake3.AUTO).digest()
    hash_s = time.perf_counter() - begun
    with tempfile.TemporaryFile(dir=place) as file:
        begun = time.perf_counter()
        for _ in range(_FILE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - begun
        begun = time.perf_counter()
        transfer.hash_pieces([(file.fileno(), 0, _FILE_BYTES)], chunk_bytes=_CHUNK_BYTES)
        file_s = time.perf_counter() - begun
    gigabytes = _FILE_BYTES / 1e9
    return {
        "bench": "builtin",
        "store": str(place),
        "summary": {
            "blake3_gb_per_s": gigabytes / hash_s,
            "write_durable_gb_per_s": gigabytes / write_s,
            "hash_file_gb_per_s": gigabytes / file_s,
        },
    }
