"""Each benchmark target, suspended and resumed once on a real GPU, computes what an uninterrupted run computes."""

from __future__ import annotations

from pathlib import Path

import pytest

import target_process
import woodfrog

STEPS = 30
COMPILED = {
    "driver_api": ("--state-gib", "0.1"),
    "heat": ("--state-gib", "0.05"),
    "md": ("--cells-per-side", "24"),
}
PYTORCH = {
    "decode_graphs": ("--state-gib", "0.5"),
    "train_gpt2": ("--state-gib", "1", "--batch", "2", "--sequence", "64"),
    "resnet50": ("--batch", "8"),
}


def suspended_once_equals_uninterrupted(name: str, options: tuple[str, ...], work: Path) -> None:
    """Runs the target twice, once with a suspend and resume in the middle, and compares every step and the end."""
    options = (*options, "--steps", str(STEPS))
    with target_process.plain(name, options, work, "uninterrupted") as reference:
        reference.wait_done()
    with target_process.interposed(name, (*options, "--pace-ms", "50"), work, "suspended") as target:
        target.wait_step(STEPS // 3)
        woodfrog.suspend(target.handle)
        target.log.read()
        assert target.log.last_step < STEPS, "the target had ended before it was suspended: nothing was tested"
        woodfrog.resume(target.handle)
        target.wait_done()
    assert target_process.steps_differ(reference.log, target.log, 1, STEPS) is None
    assert target_process.ends_differ(reference.log, target.log) is None


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_target_computes_the_same_after_suspend_and_resume(name: str, work: Path) -> None:
    suspended_once_equals_uninterrupted(name, COMPILED[name], work)


@pytest.mark.parametrize("name", PYTORCH)
def test_a_pytorch_target_computes_the_same_after_suspend_and_resume(name: str, work: Path) -> None:
    pytest.importorskip("torch", reason="not run: PyTorch is not installed")
    suspended_once_equals_uninterrupted(name, PYTORCH[name], work)
