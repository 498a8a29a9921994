"""The recorder program as a Python object: runs launches on the simulated GPU and says which bytes they touched."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from launches import Made

Ranges = list[tuple[int, int]]


class Recorded(NamedTuple):
    """Disjoint (address, size_bytes) of each kind, in order; `fault` is empty when the kernel ran to its end."""

    fault: str
    loads: Ranges
    stores: Ranges
    atomics: Ranges


class Recorder:
    """A running recorder with one PTX file. `symbols` are the addresses and sizes of its variables."""

    def __init__(self, program: Path, ptx: Path) -> None:
        self._process = subprocess.Popen([program, ptx], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.symbols: dict[str, tuple[int, int]] = {}
        for _ in range(self._number()):
            name = self._read(self._number()).decode()
            self.symbols[name] = struct.unpack("<QQ", self._read(16))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, kernel: str, made: Made) -> Recorded:
        pieces = b"".join(struct.pack("<QQ", a, len(content)) + content for a, content in made.memory)
        name = kernel.encode()
        request = b"M" + struct.pack("<I", len(made.memory)) + pieces
        request += b"L" + struct.pack("<I", len(name)) + name
        request += struct.pack("<7I", *made.grid, *made.block, made.shared_bytes)
        request += struct.pack("<I", len(made.parameters)) + made.parameters
        assert self._process.stdin is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()
        status = self._number()
        text = self._read(self._number()).decode()
        loads, stores, atomics = (self._ranges() for _ in range(3))
        return Recorded(text or "stopped" if status else "", loads, stores, atomics)

    def _ranges(self) -> Ranges:
        count = self._number()
        flat = struct.unpack(f"<{2 * count}Q", self._read(16 * count))
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _number(self) -> int:
        return int(struct.unpack("<I", self._read(4))[0])

    def _read(self, size_bytes: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size_bytes)
        if len(data) != size_bytes:
            raise RuntimeError(f"the recorder ended (exit code {self._process.wait(timeout=20)})")
        return data
