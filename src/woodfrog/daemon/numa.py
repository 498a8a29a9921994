"""Which NUMA node a GPU hangs on, and how the arena is divided among nodes."""

from __future__ import annotations

from pathlib import Path

from woodfrog.driver import library
from woodfrog.errors import WoodfrogError
from woodfrog.target import procfs

UNBOUND = -1


def node_of(ordinal: int) -> int:
    """The NUMA node of the daemon's GPU number `ordinal`; UNBOUND with only one node, or when it is not known."""
    if len(online_nodes()) < 2:
        return UNBOUND
    try:
        device = library.call("cuDeviceGet", ordinal)
        raw = library.call("cuDeviceGetPCIBusId", 32, device)
    except WoodfrogError:
        return UNBOUND
    text = (raw if isinstance(raw, bytes) else str(raw).encode()).split(b"\0", 1)[0].decode(errors="replace")
    try:
        node = int((Path("/sys/bus/pci/devices") / text.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return UNBOUND
    return node if node in online_nodes() else UNBOUND


def online_nodes() -> list[int]:
    """NUMA nodes of this machine."""
    return procfs.listed("/sys/devices/system/node/online")


def divide(size_bytes: int, nodes: list[int]) -> dict[int, int]:
    """`size_bytes` of arena, in proportion to the number of GPUs on each node; one unbound arena without any."""
    if not nodes:
        return {UNBOUND: size_bytes}
    return {node: size_bytes * nodes.count(node) // len(nodes) for node in sorted(set(nodes))}
