"""What a target whose launches are followed may have written since an image: the answer to wire.h's `dirty`.

Built only from messages that wire.unpack accepted. It says what may have been written; whether an image is there to
compare with is for the reader to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from woodfrog.target import wire

# The interposer tells at most 2^15 ranges, and as many more as there are handles that others can write.
MAX_RANGES = 1 << 21


@dataclass(frozen=True)
class KernelUse:
    """A kernel's launches since the report before. `covered`: it has a template."""

    name: str
    launches: int
    covered: bool


@dataclass
class Tracked:
    """`ranges`: by handle, (offset, size) that may have been written since the image of operation `baseline` (0: none).
    With `everything` there are none, and `why` names what could not be followed."""

    baseline: int = 0
    everything: bool = True
    why: str = ""
    launches: int = 0
    covered: int = 0
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    kernels: list[KernelUse] = field(default_factory=list)
    told: bool = False  # the target follows its launches
    _count: int = 0

    def add(self, message: wire.Message) -> None:
        """Take one batch over, or raise WireError."""
        if message.fds:
            raise wire.WireError(f"a {message.type} came with descriptors")
        if message.type == "kernel_batch":
            self.kernels += [
                KernelUse(wire.text(entry["name"]), entry["launches"], bool(entry["covered"]))
                for entry in message.entries
            ]
            return
        if message.type != "dirty_batch":
            raise wire.WireError(f"a {message.type} came in answer to dirty")
        self._count += len(message.entries)
        if self._count > MAX_RANGES:
            raise wire.WireError(f"it reports more than {MAX_RANGES} ranges")
        body = message.body
        self.told = True
        self.baseline, self.everything = body["baseline"], bool(body["everything"])
        self.why = wire.text(body["why"])
        self.launches, self.covered = body["launches"], body["covered"]
        for entry in message.entries:
            self.ranges.setdefault(entry["handle"], []).append((entry["offset"], entry["size"]))
