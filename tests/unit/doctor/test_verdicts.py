"""What doctor says of drivers and CRIUs that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from woodfrog._native import transfer
from woodfrog.cpu import criu
from woodfrog.doctor import gpu, host, machine, tools
from woodfrog.doctor.checks import Check, Verdict
from woodfrog.driver import devices, features


def check_driver(monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int], nvml: tuple[int, ...] | None) -> Check:
    """The verdict on a driver of that CUDA version, where /proc shows nothing and NVML says `nvml`."""
    branch = features.branch_of_cuda(cuda) or 0
    symbols = frozenset(feature.symbol for feature in features.TABLE if feature.symbol and feature.branch <= branch)
    monkeypatch.setattr(devices, "cuda_version", lambda: cuda)
    monkeypatch.setattr(devices, "driver_branch", lambda: nvml)
    monkeypatch.setattr(machine, "driver_release", lambda: "")
    monkeypatch.setattr(machine, "is_simulated", lambda: False)
    monkeypatch.setattr(features, "exported_symbols", lambda: symbols)
    (check,) = gpu.check_driver()
    return check


def test_without_nvml_the_cuda_version_tells_the_drivers_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_driver(monkeypatch, (13, 0), None)
    assert check.verdict is Verdict.OK
    assert "branch 580 or newer" in check.finding
    # What no symbol tells is judged by that branch: 580 has it, 595 is needed for the other.
    remap, arm = (feature.description for feature in features.TABLE if feature.name in ("gpu_remap", "arm"))
    assert remap not in check.finding
    assert arm in check.finding


@pytest.mark.parametrize("cuda", [(12, 6), (12, 4), (11, 8)])
def test_a_driver_from_before_the_api_fails_by_its_cuda_version(
    monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int]
) -> None:
    check = check_driver(monkeypatch, cuda, None)
    assert check.verdict is Verdict.FAIL
    assert "too old" in check.finding
    assert check.fix


def test_nvmls_word_counts_where_proc_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_driver(monkeypatch, (13, 0), (580, 159, 4))
    assert check.verdict is Verdict.OK
    assert check.finding.startswith("580.159.4, CUDA 13.0")


@pytest.mark.parametrize(("version", "warned"), [((4, 1, 1), True), ((4, 2), False)])
def test_what_a_criu_cannot_do_on_this_kernel_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], warned: bool
) -> None:
    found = criu.Criu(Path("/criu"), version)
    monkeypatch.setattr(criu, "find", lambda: found)
    monkeypatch.setattr(criu.Criu, "check", lambda self: None)
    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"release": "6.18.0"}))
    first, *others = tools.check_criu()
    assert first.verdict is Verdict.OK
    assert [check.verdict for check in others] == ([Verdict.WARNING] if warned else [])
    assert all("network sockets" in check.finding and check.fix for check in others)


@pytest.mark.parametrize(
    ("way", "trouble", "verdict", "said"),
    [
        ("uring", None, Verdict.OK, "io_uring"),
        ("threads", None, Verdict.OK, "WOODFROG_FILE_IO"),
        ("threads", "io_uring is forbidden here", Verdict.WARNING, "forbidden"),
        ("uring", "io_uring is forbidden here", Verdict.WARNING, "forbidden"),
    ],
)
def test_how_the_disk_is_read_and_written_is_told(
    monkeypatch: pytest.MonkeyPatch, way: str, trouble: str | None, verdict: Verdict, said: str
) -> None:
    monkeypatch.setattr(transfer, "file_io", lambda: way)
    monkeypatch.setattr(transfer, "uring_trouble", lambda: trouble)
    (check,) = host.check_file_io()
    assert check.verdict is verdict
    assert said in check.finding
    assert bool(check.fix) == (verdict is Verdict.WARNING)


@pytest.mark.parametrize(
    ("mounts", "verdict", "said"),
    [
        ("tmpfs /dev/shm tmpfs rw,relatime,size=1k 0 0", Verdict.OK, "remount,huge=within_size"),
        ("tmpfs /dev/shm tmpfs rw,huge=within_size 0 0", Verdict.OK, "huge pages (huge=within_size)"),
        ("tmpfs /dev/shm tmpfs rw,huge=never 0 0", Verdict.OK, "small pages"),
        ("none /tmp tmpfs rw,huge=always 0 0", Verdict.NOT_APPLICABLE, "no tmpfs"),
    ],
)
def test_the_pages_of_stores_in_memory_are_told(
    monkeypatch: pytest.MonkeyPatch, mounts: str, verdict: Verdict, said: str
) -> None:
    monkeypatch.setattr(host, "read", lambda path: f"proc /proc proc rw 0 0\n{mounts}")
    (check,) = host.check_memory_stores()
    assert check.verdict is verdict
    assert said in check.finding
