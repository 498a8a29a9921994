"""The reader finds all GPU code in what compilers and linkers make, and refuses everything else in one sentence."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BUILD, HERE, nvcc, run

from woodfrog.kernels import KernelFileError, read_bytes, read_file
from woodfrog.kernels.reader import elf

FUZZ_SECONDS = 6.0  # of each fuzz test: bounded, so that CI is
SOURCE = HERE / "corpus" / "elementwise.cu"
TWO_TARGETS = ("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=[sm_90,compute_90]")


@pytest.fixture(scope="module")
def outputs() -> dict[str, Path]:
    """The same source as cubin, fatbins packed in all ways, object, archive and shared object."""
    folder = BUILD / "outputs"
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: folder / f"elementwise.{name}" for name in ("cubin", "zstd", "lz4", "raw", "o", "a", "so")}
    if not all(path.exists() and path.stat().st_mtime > SOURCE.stat().st_mtime for path in made.values()):
        compiler = nvcc()
        common = (compiler, "-std=c++17", SOURCE)
        run(*common, "-arch=sm_90", "-cubin", "-o", made["cubin"])
        run(*common, *TWO_TARGETS, "-fatbin", "-o", made["zstd"])
        run(*common, *TWO_TARGETS, "-fatbin", "--compress-mode=speed", "-o", made["lz4"])
        run(*common, *TWO_TARGETS, "-fatbin", "--no-compress", "-o", made["raw"])
        run(*common, *TWO_TARGETS, "-Xcompiler", "-fPIC", "-c", "-o", made["o"])
        run("ar", "rcs", made["a"], made["o"])
        # A shared object as linkers make it, without the CUDA runtime that nvcc would link.
        run("cc", "-shared", "-Wl,--unresolved-symbols=ignore-all", made["o"], "-o", made["so"])
    return made


def names(path: Path, kind: str) -> set[str]:
    found: set[str] = set()
    for code in read_file(path):
        if code.kind == kind == "cubin":
            found |= {kernel.name for kernel in elf.kernels(code.data, code.origin)}
        elif code.kind == kind:
            from woodfrog.kernels.ptx import parse

            found |= {kernel.name for kernel in parse(code.data).kernels}
    return found


@pytest.mark.parametrize("name", ["zstd", "lz4", "raw", "o", "a", "so"])
def test_all_kernels_are_found_as_machine_code_and_as_ptx(name: str, outputs: dict[str, Path]) -> None:
    expected = {"saxpy", "fill_grid_stride", "three_dimensions", "backwards"}
    assert expected <= names(outputs[name], "ptx")
    assert names(outputs[name], "ptx") == names(outputs[name], "cubin")
    assert {code.architecture for code in read_file(outputs[name])} == {"sm_80", "sm_90"}


@pytest.mark.parametrize(("name", "packed"), [("zstd", "zstd"), ("lz4", "lz4"), ("raw", "none")])
def test_the_packing_of_a_fatbin_is_told_and_its_text_is_the_same(
    name: str, packed: str, outputs: dict[str, Path]
) -> None:
    (ptx,) = [code for code in read_file(outputs[name]) if code.kind == "ptx"]
    (raw,) = [code for code in read_file(outputs["raw"]) if code.kind == "ptx"]
    assert ptx.compression == packed
    assert ptx.data == raw.data


def test_parameters_of_a_cubin_are_those_of_its_ptx(outputs: dict[str, Path]) -> None:
    from woodfrog.kernels.ptx import parse

    (cubin,) = read_file(outputs["cubin"])
    (text,) = [code for code in read_file(outputs["raw"]) if code.kind == "ptx"]
    from_ptx = {k.name: [(p.offset_bytes, p.size_bytes) for p in k.parameters] for k in parse(text.data).kernels}
    from_cubin = {
        k.name: [(p.offset_bytes, p.size_bytes) for p in k.parameters or ()]
        for k in elf.kernels(cubin.data, cubin.origin)
    }
    assert from_cubin == from_ptx
    assert cubin.architecture == "sm_90"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"#!/bin/sh\nexit 0\n",
        b"\x7fELF",
        b"!<arch>\n" + b"x" * 60,
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 60),
        struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0),
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 70) + b"\1" * 70,
    ],
)
def test_what_is_no_gpu_code_is_refused_with_one_sentence(data: bytes) -> None:
    with pytest.raises(KernelFileError) as caught:
        read_bytes(data)
    assert caught.value.reason
    assert "\n" not in caught.value.reason


def test_a_host_program_without_gpu_code_is_refused() -> None:
    program = shutil.which("true")
    assert program is not None
    with pytest.raises(KernelFileError, match="no section with a fatbin"):
        read_file(program)


@pytest.mark.parametrize("path", ["/nonexistent", "/", "/dev/null"])
def test_paths_that_are_no_files_are_refused(path: str) -> None:
    with pytest.raises(KernelFileError):
        read_file(path)


def test_a_small_entry_cannot_claim_memory_it_does_not_hold(outputs: dict[str, Path]) -> None:
    """An entry that announces gigabytes is refused before anything is allocated."""
    data = bytearray(outputs["zstd"].read_bytes())
    position = 16
    while struct.unpack_from("<H", data, position)[0] != 1:
        position += struct.unpack_from("<I", data, position + 4)[0] + struct.unpack_from("<Q", data, position + 8)[0]
    struct.pack_into("<Q", data, position + 56, 1 << 50)
    with pytest.raises(KernelFileError, match="more than"):
        read_bytes(bytes(data))


def refusal_of(data: bytes) -> KernelFileError | None:
    try:
        for code in read_bytes(data):
            if code.kind == "cubin":
                elf.kernels(code.data, code.origin)
    except KernelFileError as error:
        return error
    return None


@pytest.mark.parametrize("name", ["cubin", "zstd", "lz4", "o", "a"])
def test_damaged_files_give_code_or_one_sentence_in_bounded_time(name: str, outputs: dict[str, Path]) -> None:
    """Random bytes flipped, cut or grown: no other exception, no endless work."""
    original = outputs[name].read_bytes()
    rng = random.Random(name)
    end = time.monotonic() + FUZZ_SECONDS / 4
    tried = refused = 0
    while time.monotonic() < end:
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 8, 40))):
            at = rng.randrange(min(len(data), rng.choice((128, 4096, len(data)))))
            data[at] = rng.choice((0, 0xFF, 0x7F, data[at] ^ (1 << rng.randrange(8)), rng.randrange(256)))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        begun = time.monotonic()
        refusal = refusal_of(bytes(data))
        if refusal is not None:
            refused += 1
            assert "\n" not in refusal.reason
        tried += 1
        assert time.monotonic() - begun < 5, "one damaged file took far too long"
    assert tried > 5
    assert refused > 0


def test_reading_does_not_need_any_tool() -> None:
    """The reader works where there is no CUDA and no compiler on PATH."""
    code = """import os
os.environ["PATH"] = ""
from woodfrog.kernels import read_bytes
print(read_bytes(b".version 9.0\\n.target sm_90\\n")[0].architecture)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "sm_90", done.stderr
