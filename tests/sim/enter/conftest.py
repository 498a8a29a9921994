"""A program whose thread maps as the driver does, on demand; woodfrog-enter stands beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from mapper import Mapper

SOURCE = Path(__file__).resolve().parent / "mapper.cpp"


@pytest.fixture(scope="session")
def mapper_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("enter") / "mapper"
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None, "no C++ compiler"
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Wextra", "-o", str(program), str(SOURCE), "-pthread"]
    subprocess.run(command, check=True, timeout=120)
    return program


@pytest.fixture
def mapper(mapper_program: Path) -> Iterator[Callable[..., Mapper]]:
    made: list[Mapper] = []

    def make(mebibytes: int = 96, **options: Any) -> Mapper:
        made.append(Mapper(mapper_program, mebibytes, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
