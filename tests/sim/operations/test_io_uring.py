"""Programs that would like an io_uring, which CRIU cannot save: refused, or started so that the kernel has none."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from product import Product

from woodfrog._native import paths
from woodfrog.errors import RefusedError


def filters_of(pid: int) -> tuple[str, str]:
    """The process's seccomp mode and whether it can gain privileges, as the kernel has them."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return lines["Seccomp"].strip(), lines["NoNewPrivs"].strip()


def test_an_io_uring_is_refused_with_the_way_out(product: Product) -> None:
    target = product.sharer(1, io_uring=True)
    assert target.order(0, "io_uring", "-") == "ok"
    with pytest.raises(RefusedError, match="io_uring") as raised:
        product.checkpoint(target.process)
    assert "run --no-io-uring" in raised.value.advice
    product.call("suspend", target=target.process.pid)
    product.call("resume", target=target.process.pid)
    target.end()


def test_who_is_not_root_gives_up_gaining_privileges_for_it() -> None:
    with tempfile.TemporaryDirectory() as folder:  # whoever is not root may not reach where woodfrog is
        Path(folder).chmod(0o755)
        program = shutil.copy(paths.no_io_uring(), folder)
        command = [program, "grep", "-E", "Seccomp:|NoNewPrivs:", "/proc/self/status"]
        found = subprocess.run(command, user=65534, capture_output=True, text=True, check=True, cwd="/").stdout
    assert found.split() == ["NoNewPrivs:", "1", "Seccomp:", "2"]


def test_the_default_takes_no_privileges_from_who_is_not_root() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = shutil.copy(paths.no_io_uring(), folder)
        command = [program, "--where-free", "grep", "-E", "Seccomp:|NoNewPrivs:", "/proc/self/status"]
        found = subprocess.run(command, user=65534, capture_output=True, text=True, check=True, cwd="/").stdout
    plain = subprocess.run(command[2:], capture_output=True, text=True, check=True).stdout  # what this machine has
    assert found.split() == plain.split()


@pytest.mark.parametrize("asked", [None, False])
def test_a_target_without_io_uring_comes_back_without_it(product: Product, asked: bool | None) -> None:
    target = product.sharer(2, io_uring=asked)
    refused = "none: Function not implemented"
    assert [target.order(worker, "io_uring", "-") for worker in (0, 1)] == [refused, refused]
    target.order(0, "make", "a", 2)
    target.order(0, "map", "a", 2)
    target.order(0, "write", "a", 5)
    before = [filters_of(pid) for pid in (target.process.pid, *target.pids)]
    assert before == [("2", "0")] * 3, "a filter, and as root nothing else"
    product.checkpoint(target.process)
    assert target.order(0, "check", "a", 5) == "ok"
    image = product.checkpoint(target.process, stop=True)["image"]
    target.process = product.restore(image, target.process.log, verify=True)
    assert target.order(0, "check", "a", 5) == "ok"
    assert [target.order(worker, "io_uring", "-") for worker in (0, 1)] == [refused, refused]
    assert [filters_of(pid) for pid in (target.process.pid, *target.pids)] == before
    target.end()
