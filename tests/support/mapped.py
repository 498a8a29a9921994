"""A scribbler that is checkpointed, ended and restored, and what is known of its promotion."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from held import Holds
from instances import wait_until_ended
from product import Product
from scribbler import Scribbler

MIB = 1 << 20
MADE, AT_REST, COPIED, REPLACED = (f"promote.batch.{point}" for point in ("made", "at_rest", "copied", "replaced"))
POINTS = (MADE, AT_REST, COPIED, REPLACED)


class Mapped:
    """Pauses are of 4 MiB at most (`environment`)."""

    def __init__(self, product: Product, holds: Holds) -> None:
        self.product = product
        self.holds = holds
        self.target: Scribbler = product.scribbler()
        self.image = ""

    @staticmethod
    def environment(holds: Holds, **more: str) -> dict[str, str]:
        """Of the product."""
        return {**holds.environment, "WOODFROG_PAUSE_BYTES": str(4 * MIB), "WOODFROG_LOG_LEVEL": "DEBUG", **more}

    def filled(self, sizes: list[int]) -> list[int]:
        """New allocations, with contents of their own."""
        addresses = [self.target.alloc(size) for size in sizes]
        for number, address in enumerate(addresses):
            self.target.write(address, 0, sizes[number], seed=number + 1)
        return addresses

    def stop(self) -> None:
        self.image = self.product.checkpoint(self.target.process, stop=True)["image"]

    def stop_here(self) -> None:
        """The same of one that was restored."""
        pid = self.target.process.pid
        self.stop()
        wait_until_ended(pid)

    def restore(self, mode: str = "mapped", **params: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.product.call(
            "restore", image=self.image, store=str(self.product.store_path), mode=mode, **params
        )
        self.target.process = self.product.restored(result, self.target.process.log)
        return result

    def restored_at(self, point: str, meanwhile: Callable[[], None], mode: str = "mapped", **params: Any) -> Any:
        """Restore; `meanwhile` runs while the promotion stands at that point for the first time. The result."""
        with self.holds.at(point, lambda: self.restore(mode, wait=True, **params)) as restored:
            meanwhile()
        return restored.result()

    def ended(self) -> dict[str, Any]:
        """The promotion, once it has ended."""
        told: dict[str, Any] = self.product.call("promotion", target=self.target.process.pid, wait=True)["promotion"]
        return told

    def row(self) -> dict[str, Any]:
        [row] = self.product.call("ps")
        return dict(row)

    def moved(self) -> list[list[int]]:
        """The handles of each batch so far, by the daemon's log."""
        found = re.findall(r"batch \d+ of \S+: \[([\d, ]*)\]", self.product.daemon_log())
        return [[int(one) for one in text.split(",")] for text in found]

    def check(self) -> None:
        """The GPU holds what the target wrote."""
        memory = {address: bytes(content) for address, content in self.target.memory.items()}
        assert self.target.shown(self.product.root) == memory
