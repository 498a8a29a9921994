"""Threads of the interposer help the driver to copy its control state; what it copies is as without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from product import Product, Stepper

MIB = 1 << 20
STATE_BYTES = 48 * MIB + 4096 * 3  # its last copy is no whole piece
HELPERS = 3


def helped(target: Stepper) -> list[str]:
    """What the interposer said of each operation's copies."""
    return [line for line in target.lines() if "of the driver's copies" in line]


def helping_threads(target: Stepper) -> int:
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{target.pid}/task").iterdir()]
    return names.count("woodfrog-copy")


@pytest.fixture
def product(make_product: Callable[..., Product], request: pytest.FixtureRequest) -> Product:
    settings = {
        "WOODFROG_SIMGPU_CONTROL_STATE": str(STATE_BYTES),
        "WOODFROG_CONTROL_COPIES": str(getattr(request, "param", HELPERS)),
        "WOODFROG_DEBUG": "1",
    }
    return make_product(environment=settings)


def test_both_directions_are_helped_and_the_threads_end(product: Product) -> None:
    target = product.run("--idle-kib", "3000")
    product.checkpoint(target, cpu=False)  # shows how large the control state is
    for count in (1, 2):
        product.checkpoint(target, cpu=False)
        target.wait_for(lambda _, count=count: len(helped(target)) == count, "that the help has ended")
    whole = 2 * (STATE_BYTES // (2 * MIB)) * 2 * MIB  # the last piece of a state, 12 KiB, is too small to be shared
    for line in helped(target):
        assert f"{HELPERS} threads helped with {whole} bytes" in line or "until they had no processor" in line
    target.wait_for(lambda _: helping_threads(target) == 0, "that the threads have ended")
    target.check_runs_right()


def test_a_new_process_is_helped_by_the_threads_that_were_in_the_image(product: Product) -> None:
    target = product.run("--threads", "2", "--idle-kib", "3000")
    product.checkpoint(target, cpu=False)
    for _ in range(2):
        result = product.checkpoint(target, stop=True)
        target = product.restore(result["image"], target.log)
        target.wait_steps(1)
    target.wait_for(lambda _: helping_threads(target) == 0, "that the threads have ended")
    # The new processes' logs are the old one's: each restore ended the help that its checkpoint had begun.
    target.wait_for(lambda _: len(helped(target)) >= 2, "what the new processes say")
    target.check_runs_right()


def test_a_suspended_target_keeps_them_for_its_resume(product: Product) -> None:
    target = product.run("--idle-kib", "3000")
    product.checkpoint(target, cpu=False)
    for count in (1, 2):
        product.call("suspend", target=target.pid)
        assert helping_threads(target) == HELPERS
        product.call("resume", target=target.pid)
        target.wait_for(lambda _, count=count: len(helped(target)) == count, "that the help has ended")
    target.check_runs_right()


@pytest.mark.parametrize("product", [0], indirect=True)
def test_it_can_be_declined(product: Product) -> None:
    target = product.run("--idle-kib", "3000")
    for _ in range(3):
        product.checkpoint(target, cpu=False)
    assert not helped(target)
    target.check_runs_right()
