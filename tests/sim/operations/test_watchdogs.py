"""Who suspends a job with a watchdog of its own is told how long that may last."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product


@pytest.fixture
def libnccl(tmp_path: Path) -> Path:
    """A library of that name; nothing is in it."""
    library = tmp_path / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", library], check=True)
    return library


def test_a_job_that_uses_nccl_is_suspended_with_a_warning(make_product: Callable[..., Product], libnccl: Path) -> None:
    product = make_product(environment={"LD_PRELOAD": str(libnccl)})
    job = product.collective(2)
    (warning,) = product.call("suspend", target=job.pid)["warnings"]
    assert "may end a job that is suspended for longer" in warning
    product.call("resume", target=job.pid)
    job.check_runs_right()


def test_a_single_process_and_other_jobs_have_none(make_product: Callable[..., Product], libnccl: Path) -> None:
    product = make_product()
    job = product.collective(2)
    assert product.call("suspend", target=job.pid)["warnings"] == []
    product.call("resume", target=job.pid)
    job.check_runs_right()
    alone = make_product(environment={"LD_PRELOAD": str(libnccl)})
    target = alone.run()
    assert alone.call("suspend", target=target.pid)["warnings"] == []
    alone.call("resume", target=target.pid)
    target.check_runs_right()
