"""Compiled templates give the ranges that interpreted ones give, and the cache of compiled code is kept safe."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

import launches
import pytest
import triton_launches
from conftest import HERE, Compiled

from woodfrog.errors import RefusedError, UsageError
from woodfrog.kernels import READS, WRITES, Exactness, Launch, Range, Template, codegen, templates
from woodfrog.kernels.catalogue import Catalogue, PreparedLaunch, new_ranges
from woodfrog.kernels.error import KernelFileError

LAUNCHES = int(os.environ.get("WOODFROG_KERNEL_LAUNCHES", "12"))
SAXPY = Launch((4, 1, 1), (64, 1, 1), struct.pack("<ifQQ", 200, 1.0, 1 << 32, 1 << 33))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalogue")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def corpus(compiled: Compiled) -> list[Template]:
    files = ("elementwise", "blocks", "irregular")
    return [template for file in files for template in templates(compiled(file, "sm_90", "O3").read_text())]


def test_compiled_templates_name_the_same_ranges_as_interpreted_ones(corpus: list[Template], cache: Path) -> None:
    catalogue = Catalogue(corpus, cache=cache)
    assert catalogue.library is not None, "there is no C++ compiler"
    for number, template in enumerate(corpus):
        for seed in range(LAUNCHES):
            made = launches.make(template.kernel, seed)
            launch = Launch(made.grid, made.block, made.parameters, made.allocations)
            for kinds in (READS, WRITES):
                interpreted = template.ranges(launch, kinds=kinds)
                assert catalogue.ranges(number, launch, kinds=kinds) == interpreted, f"{template.kernel}, launch {seed}"


def test_compiled_and_interpreted_templates_of_triton_kernels_name_the_same_ranges(cache: Path) -> None:
    """Their accesses stand for others, which are looked at in some of these launches."""
    texts = [path.read_text() for name in ("triton", "inductor") for path in sorted((HERE / name).glob("*.ptx"))]
    found = [templates(text)[0] for text in texts]
    catalogue = Catalogue(found, cache=cache)
    for number, (template, text) in enumerate(zip(found, texts, strict=True)):
        for seed in range(LAUNCHES):
            launch = triton_launches.unlike_any_other(template, text, seed)
            for kinds in (READS, WRITES):
                interpreted = template.ranges(launch, kinds=kinds)
                assert catalogue.ranges(number, launch, kinds=kinds) == interpreted, f"{template.kernel}, launch {seed}"


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2, malloc(3)."""

    _fields_ = (
        *((f"other{number}", ctypes.c_size_t) for number in range(4)),
        ("hblkhd", ctypes.c_size_t),  # in mappings of their own
        *((f"more{number}", ctypes.c_size_t) for number in range(2)),
        ("uordblks", ctypes.c_size_t),  # in use
        *((f"rest{number}", ctypes.c_size_t) for number in range(2)),
    )


def test_an_evaluation_keeps_no_memory(corpus: list[Template], cache: Path) -> None:
    """A thousand launches may take 1 MB: what is kept is the caller's ranges and nothing else."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Heap
    catalogue = Catalogue(corpus, cache=cache)
    out = new_ranges(8192)
    calls = []
    for number, template in enumerate(corpus):
        for seed in range(15):
            made = launches.make(template.kernel, seed)
            launch = Launch(made.grid, made.block, made.parameters, made.allocations)
            calls.append(catalogue.bound(number, PreparedLaunch(template, launch), WRITES, out))
    assert len(calls) > 1000
    before: list[int] = []
    for _ in range(2):  # Python has made what it needs after the first time
        for call in calls:
            assert call() >= 0
        heap = mallinfo()
        before.append(heap.uordblks + heap.hblkhd)
    assert before[1] - before[0] < 4096


def test_generated_code_compiles_without_a_warning(compiled: Compiled, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{codegen.HEADERS}"]
    tables = codegen.source(templates(compiled("irregular", "sm_90", "O3").read_text()))
    for text in (tables, codegen.evaluator_source()):
        file = tmp_path / "templates.cpp"
        file.write_text(text)
        done = subprocess.run([compiler, *flags, str(file)], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[:2000]


def test_the_evaluator_is_compiled_once_for_all_catalogues(corpus: list[Template], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "objects")]
    made = [Catalogue([corpus[n]], cache=folders[n], objects=folders[2]).library for n in (0, 1)]
    assert [path for folder in folders[:2] for path in folder.iterdir()] == made
    (evaluator,) = folders[2].iterdir()
    before = evaluator.stat().st_mtime_ns
    Catalogue(corpus[2:3], cache=folders[0], objects=folders[2])
    assert [path.stat().st_mtime_ns for path in folders[2].iterdir()] == [before]


def test_without_a_compiler_templates_are_interpreted(compiled: Compiled, cache: Path) -> None:
    found = templates(compiled("elementwise", "sm_90", "O3").read_text())
    catalogue = Catalogue(found[:1], cache=cache, compiler="")
    assert catalogue.library is None
    assert catalogue.ranges(0, SAXPY, kinds=WRITES) == [Range(1 << 33, 800, Exactness.EXACT)]


def test_the_same_templates_are_compiled_once_for_their_owner_alone(corpus: list[Template], cache: Path) -> None:
    first, second = Catalogue(corpus, cache=cache), Catalogue(corpus, cache=cache)
    assert first.library is not None
    assert first.library == second.library
    assert first.library.stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError):
        second.ranges(0, Launch((1, 1, 1), (1, 1, 1), b""))


def test_a_cache_that_others_may_write_to_is_refused(compiled: Compiled, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = templates(compiled("elementwise", "sm_90", "O3").read_text())
    with pytest.raises(RefusedError, match="others may write"):
        Catalogue(found[:1], cache=tmp_path)


def test_a_compiler_that_fails_leaves_nothing_behind(compiled: Compiled, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    found = templates(compiled("elementwise", "sm_90", "O3").read_text())
    false = shutil.which("false")
    with pytest.raises(KernelFileError, match="could not be compiled"):
        Catalogue(found[:1], cache=tmp_path, compiler=false)
    assert list(tmp_path.iterdir()) == []
