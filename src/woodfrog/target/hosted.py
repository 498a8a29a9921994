"""Device memory of a target that lies on host memory until it is promoted, as its agent tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from woodfrog.target import wire
from woodfrog.target.descriptors import Descriptors
from woodfrog.target.memory import MAX_HANDLES, Handle, handle_of


@dataclass
class Hosted:
    """`fds[k]` is the host memory behind `handles[k]`. Close it, or take the descriptors."""

    handles: list[Handle] = field(default_factory=list)
    fds: Descriptors = field(default_factory=Descriptors)

    @property
    def size_bytes(self) -> int:
        return sum(handle.size_bytes for handle in self.handles)

    def add(self, message: wire.Message) -> None:
        """Take a batch over, its descriptors included, or raise WireError and take nothing."""
        if message.type != "hosted_batch":
            raise wire.WireError(f"a {message.type} came in answer to hosted")
        handles = [handle_of(entry) for entry in message.entries]
        if len(handles) != len(message.fds):
            raise wire.WireError(f"{len(handles)} handles came with {len(message.fds)} descriptors")
        if len(self.handles) + len(handles) > MAX_HANDLES:
            raise wire.WireError(f"it has more than {MAX_HANDLES} handles")
        self.handles += handles
        self.fds.extend(message.fds)

    def check(self) -> None:
        """WireError unless the handles are distinct."""
        if len({handle.handle for handle in self.handles}) != len(self.handles):
            raise wire.WireError("it tells of a handle twice")

    def close(self) -> None:
        self.fds.close()

    def __enter__(self) -> Hosted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Named:
    """The handles of batches of one type, without descriptors: which were replaced, or which launches named."""

    type: str
    handles: list[int] = field(default_factory=list)

    def add(self, message: wire.Message) -> None:
        """The handles of one batch; WireError for anything else."""
        if message.type != self.type:
            raise wire.WireError(f"a {message.type} came where a {self.type} was expected")
        if message.fds:
            raise wire.WireError(f"a {message.type} came with descriptors")
        if len(self.handles) + len(message.entries) > MAX_HANDLES:
            raise wire.WireError(f"it names more than {MAX_HANDLES} handles")
        self.handles += [entry["handle"] for entry in message.entries]
