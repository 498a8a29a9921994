"""What a child that was forked after cuInit keeps of the GPU's device files: nothing that CRIU could not save."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import interposer_support as support
import pytest


@pytest.fixture
def device_file() -> Iterator[Path]:
    """A file that has the name of one of the driver's; CRIU and the interposer know them by their names."""
    path = Path(f"/dev/nvidia-woodfrog-test-{os.getpid()}")
    path.write_bytes(bytes(8192))
    yield path
    path.unlink()


def test_a_forked_child_has_no_file_and_no_mapping_of_the_gpu_and_the_parent_keeps_both(
    programs: Path, device_file: Path
) -> None:
    program = support.compile_program("forked.cpp", programs)
    done = subprocess.run(
        [program, device_file], env=support.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "descriptor /dev/null", "byte 0", "mapped 0", "other /dev/zero",
        f"descriptor {device_file}", "byte 7", "mapped 1", "other /dev/zero",
    ]  # fmt: skip
