"""A suspended job's watchdogs: PyTorch's clock stands still for them, and who suspends a job with NCCL is warned."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product, Stepper

SOURCE = Path(__file__).parent.parent / "targets" / "torch_watchdog.cpp"
LIMIT_S = 2.0
SUSPENDED_S = 2 * LIMIT_S  # what is tested is that this time does not count
LOOKS_PER_S = 20
READER = """
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
__attribute__((constructor)) void begin(void) {
    int file = open(getenv("READ_FILE"), O_RDONLY);
    if (mmap(0, 1 << 16, PROT_READ, MAP_PRIVATE, file, 0) == MAP_FAILED)
        abort();
}
"""


@pytest.fixture
def libnccl(tmp_path: Path) -> Path:
    """A library of that name; nothing is in it."""
    library = tmp_path / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", library], check=True)
    return library


def watchdog(directory: Path, *flags: str) -> Path:
    """The library with the watchdogs, by PyTorch's name."""
    library = directory / "libtorch_cuda.so"
    command = ["c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", *flags]
    subprocess.run([*command, SOURCE, "-o", library, "-ldl"], check=True)
    return library


def told(log: Path, what: str) -> list[float]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [float(line.split()[1]) for line in lines if line.startswith(f"{what} ")]


def wait_for_looks(log: Path, more: int) -> float:
    """Until the second watchdog has looked so often; the seconds that this took."""
    since, begin = len(told(log, "looks")), time.monotonic()
    while len(told(log, "looks")) < since + more:
        assert time.monotonic() - begin < 60, "the watchdogs do not run"
        time.sleep(0.02)
    return time.monotonic() - begin


def suspend_for_long(product: Product, target: Stepper) -> None:
    product.call("suspend", target=target.pid)
    time.sleep(SUSPENDED_S)
    product.call("resume", target=target.pid)


@pytest.fixture
def watched(make_product: Callable[..., Product], tmp_path: Path) -> Callable[..., tuple[Product, Stepper, Path]]:
    """A product with a target that is watched, and the watchdogs' log."""

    def make(*flags: str) -> tuple[Product, Stepper, Path]:
        log = tmp_path / "watchdog.log"
        library = watchdog(tmp_path, *flags)
        product = make_product(
            environment={
                "LD_PRELOAD": str(library),
                "TORCH_WATCHDOG_LOG": str(log),
                "TORCH_WATCHDOG_LIMIT_S": str(LIMIT_S),
            }
        )
        target = product.run("--idle-kib", "3000")
        wait_for_looks(log, 2)
        assert told(log, "late") == []
        return product, target, log

    return make


@pytest.mark.parametrize("flags", [("-Wl,-z,lazy",), ("-Wl,-z,lazy", "-DOLD_WAITS")], ids=["clockwait", "old_waits"])
def test_the_clock_stands_still_for_them(
    watched: Callable[..., tuple[Product, Stepper, Path]], flags: tuple[str, ...]
) -> None:
    product, target, log = watched(*flags)
    for _ in range(2):
        suspend_for_long(product, target)
        target.wait_steps(2)
        looks = told(log, "looks")[-1]
        took_s = wait_for_looks(log, 4)  # they still wait as long as they are to
        assert told(log, "looks")[-1] - looks < 1.5 * LOOKS_PER_S * (took_s + 1)
    assert told(log, "late") == []
    target.check_runs_right()


def test_without_it_they_find_it_late(watched: Callable[..., tuple[Product, Stepper, Path]]) -> None:
    """So the test above can fail; and where the loader has made the references read-only nothing is done to them."""
    product, target, log = watched("-Wl,-z,now,-z,relro")
    suspend_for_long(product, target)
    target.wait_steps(2)
    wait_for_looks(log, 2)
    assert told(log, "late")
    target.check_runs_right()


def test_a_file_of_that_name_that_is_only_read_is_left_alone(
    make_product: Callable[..., Product], tmp_path: Path
) -> None:
    reader = tmp_path / "reader.c"
    reader.write_text(READER)
    directory = tmp_path / "read"
    directory.mkdir()
    library = watchdog(directory, "-Wl,-z,lazy")
    subprocess.run(["cc", "-shared", "-fPIC", reader, "-o", tmp_path / "libreader.so"], check=True)
    product = make_product(environment={"LD_PRELOAD": str(tmp_path / "libreader.so"), "READ_FILE": str(library)})
    target = product.run("--idle-kib", "3000")
    assert str(library) in Path(f"/proc/{target.pid}/maps").read_text()
    product.call("suspend", target=target.pid)
    product.call("resume", target=target.pid)
    target.check_runs_right()


def test_a_job_that_uses_nccl_is_suspended_with_a_warning(make_product: Callable[..., Product], libnccl: Path) -> None:
    product = make_product(environment={"LD_PRELOAD": str(libnccl)})
    job = product.collective(2)
    (warning,) = product.call("suspend", target=job.pid)["warnings"]
    assert "may end a job that is suspended for longer" in warning
    product.call("resume", target=job.pid)
    job.check_runs_right()


def test_the_warning_says_so_where_the_clock_stands_still(
    make_product: Callable[..., Product], libnccl: Path, tmp_path: Path
) -> None:
    library = watchdog(tmp_path, "-Wl,-z,lazy")  # it watches nothing, without a log
    product = make_product(environment={"LD_PRELOAD": f"{libnccl}:{library}"})
    job = product.collective(2)
    (warning,) = product.call("suspend", target=job.pid)["warnings"]
    assert "stands still while it is suspended" in warning
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
