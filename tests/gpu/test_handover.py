"""GPU memory goes to the daemon and comes back on a real GPU: same bytes, same addresses, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import target_process
import woodfrog

OPTIONS = ("--state-gib", "1", "--buffers", "16", "--pace-ms", "2")


def test_memory_survives_five_suspends_in_a_row(work: Path) -> None:
    with target_process.interposed("fill_state", OPTIONS, work, "suspend") as target:
        target.wait_start()
        for _ in range(5):
            target.wait_more_steps(3)
            woodfrog.suspend(target.handle)
            woodfrog.resume(target.handle)
            target.wait_more_steps(3)
            assert target.verify() == 0
        assert target.log.conflict is None


def test_a_suspended_target_makes_no_step_and_holds_no_memory_on_the_gpu(work: Path) -> None:
    from cuda.bindings import driver

    def free_bytes() -> int:
        (error,) = driver.cuInit(0)
        assert error == driver.CUresult.CUDA_SUCCESS
        error, context = driver.cuDevicePrimaryCtxRetain(0)
        assert error == driver.CUresult.CUDA_SUCCESS
        driver.cuCtxPushCurrent(context)
        try:
            error, free, _ = driver.cuMemGetInfo()
            assert error == driver.CUresult.CUDA_SUCCESS
            return int(free)
        finally:
            driver.cuCtxPopCurrent()
            driver.cuDevicePrimaryCtxRelease(0)

    with target_process.interposed("fill_state", OPTIONS, work, "frozen") as target:
        target.wait_start()
        target.wait_more_steps(3)
        running = free_bytes()
        woodfrog.suspend(target.handle)
        assert free_bytes() - running >= 2**30
        target.log.read()
        steps = len(target.log.lines)
        woodfrog.resume(target.handle)
        target.wait_more_steps(3)
        assert target.verify() == 0
        # The steps go on with the next number: none was made while the target had no memory, none is lost.
        numbers = [line["step"] for line in target.log.lines]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) > steps


def test_a_gpu_only_image_is_taken_while_the_target_runs_on(work: Path, tmp_path: Path) -> None:
    with target_process.interposed("fill_state", OPTIONS, work, "image") as target:
        target.wait_start()
        target.wait_more_steps(3)
        result = woodfrog.checkpoint(target.handle, stop=False, cpu=False, store=tmp_path / "store")
        target.wait_more_steps(3)
        assert target.verify() == 0
        assert result.image is not None
        assert result.bytes >= 2**30
        assert woodfrog.verify(result.image, store=tmp_path / "store").bytes >= 2**30


def test_a_target_restored_in_a_new_process_goes_on_where_it_was(work: Path, tmp_path: Path) -> None:
    with target_process.interposed("fill_state", OPTIONS, work, "restore") as target:
        target.wait_start()
        target.wait_more_steps(3)
        result = woodfrog.checkpoint(target.handle, stop=True, store=tmp_path / "store")
        target.wait_ended()
        assert not target.alive()
        target.log.read()
        steps = target.log.last_step
        assert result.image is not None
        target.adopt(woodfrog.restore(result.image, store=tmp_path / "store"))
        target.wait_more_steps(3)
        assert target.verify() == 0
        assert target.log.lines[-1]["step"] > steps
        assert target.log.conflict is None
