"""The real driver's answers to allocation calls are the same with the interposer as without it."""

from __future__ import annotations

import os
import subprocess

import pytest

import target_process


def answers(seed: int, *, interposed: bool) -> list[str]:
    """What allocation_calls prints; its exit status must be 0."""
    from woodfrog._native import paths

    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    if interposed:
        environment["LD_PRELOAD"] = str(paths.interposer())
    finished = subprocess.run(
        target_process.command("allocation_calls", "--seed", str(seed)),
        env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr + finished.stdout[-2000:]
    return finished.stdout.splitlines()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_application_sees_the_same_allocations_with_and_without_the_interposer(seed: int) -> None:
    without = answers(seed, interposed=False)
    assert len(without) > 100
    assert answers(seed, interposed=True) == without
