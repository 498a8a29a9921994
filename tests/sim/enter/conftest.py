"""Programs whose thread maps, or copies, as the driver does, on demand; woodfrog-enter stands beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from copier import Copier
from mapper import Mapper

FOLDER = Path(__file__).resolve().parent


def build(source: str, program: Path, *options: str) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "no C++ compiler"
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-o", str(program), str(FOLDER / source), *options]
    subprocess.run(command, check=True, timeout=120)
    return program


@pytest.fixture(scope="session")
def mapper_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("mapper.cpp", tmp_path_factory.mktemp("enter") / "mapper", "-pthread")


@pytest.fixture(scope="session")
def copier_programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The program; its driver with a reference that is resolved when it is first used; with one that is read-only."""
    folder = tmp_path_factory.mktemp("copier")
    drivers = []
    for name, options in (("lazy", "-Wl,-z,lazy"), ("fixed", "-Wl,-z,now,-z,relro")):
        (folder / name).mkdir()
        library = folder / name / "libcuda.so.1"
        drivers.append(build("fake_driver.cpp", library, "-shared", "-fPIC", "-fno-builtin", options))
    return build("copier.cpp", folder / "copier", "-pthread"), *drivers


@pytest.fixture
def mapper(mapper_program: Path) -> Iterator[Callable[..., Mapper]]:
    made: list[Mapper] = []

    def make(mebibytes: int = 96, **options: Any) -> Mapper:
        made.append(Mapper(mapper_program, mebibytes, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def copier(copier_programs: tuple[Path, Path, Path]) -> Iterator[Callable[..., Copier]]:
    made: list[Copier] = []
    program, lazy, fixed = copier_programs

    def make(*, read_only: bool = False, fresh: bool = False) -> Copier:
        made.append(Copier(program, fixed if read_only else lazy, fresh=fresh))
        return made[-1]

    yield make
    for one in made:
        one.close()
