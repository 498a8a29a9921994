"""The launcher target (tests/sim/targets/launcher.cpp): orders to it, one answered before the next is given."""

from __future__ import annotations

from pathlib import Path

from orders import Ordered
from product import Stepper


class Launcher(Ordered):
    """One running launcher. `sizes`: its allocations by their address."""

    def __init__(self, process: Stepper, orders: Path) -> None:
        super().__init__(process, orders)
        self.sizes: dict[int, int] = {}

    def alloc(self, size_bytes: int) -> int:
        address = int(self.order("alloc", size_bytes), 16)
        self.sizes[address] = size_bytes
        return address

    def free(self, address: int) -> None:
        self.order("free", f"{address:x}")
        del self.sizes[address]

    def write(self, address: int, size_bytes: int, seed: int) -> None:
        self.order("write", f"{address:x}", size_bytes, seed)

    def put(self, address: int, data: bytes) -> None:
        """In pieces: an order is a line."""
        for at in range(0, len(data), 4096):
            self.order("put", f"{address + at:x}", data[at : at + 4096].hex())

    def get(self, address: int, size_bytes: int) -> bytes:
        return bytes.fromhex(self.order("get", f"{address:x}", size_bytes))

    def load(self, path: Path, how: str = "module") -> int:
        return int(self.order("load", path, how))

    def launch(
        self,
        module: int,
        kernel: str,
        parameters: bytes,
        *,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (1, 1, 1),
        shared_bytes: int = 0,
        how: str = "params",
    ) -> None:
        self.order("launch", module, kernel, how, *grid, *block, shared_bytes, parameters.hex())
