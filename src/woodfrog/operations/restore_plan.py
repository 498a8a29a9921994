"""What a restore is asked for, and what its survey makes of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from woodfrog.operations.hook import DEFAULT_TIMEOUT_S
from woodfrog.operations.manifest import kind_name
from woodfrog.operations.notes import HandleNote
from woodfrog.operations.promote import EAGER

if TYPE_CHECKING:
    from woodfrog.image.manifest import Manifest


@dataclass(frozen=True)
class RestoreRequest:
    """What was asked for. `gpu_map`: UUIDs in the image → UUIDs here, 32 hex digits. `mode`: one of promote.MODES."""

    image: str
    store: str = ""
    gpu_map: dict[str, str] = field(default_factory=dict)
    verify: bool = False
    mode: str = EAGER
    new_pid_namespace: bool = False
    name: str = ""  # in a new PID namespace, one that no other target has
    ports: dict[int, int] = field(default_factory=dict)  # TCP, that the image listens on → instead; 0: any free one
    binds: tuple[tuple[str, str], ...] = ()  # in a new PID namespace, paths here → where the target finds them
    environment: dict[str, str] = field(default_factory=dict)  # told to programs that ask (operations.telling)
    hook: str = ""
    hook_timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class RestorePlan:
    """What the survey decided; can be printed."""

    image: str
    pid: int
    gpu_map: dict[str, str]
    gpu_bytes: int
    cpu_bytes: int
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "image": self.image,
            "pid": self.pid,
            "gpu_map": self.gpu_map,
            "gpu_bytes": self.gpu_bytes,
            "cpu_bytes": self.cpu_bytes,
            "warnings": self.warnings,
        }


def handle_notes(manifest: Manifest) -> list[HandleNote]:
    """The image's handles, those that share memory numbered alike."""
    ordinals = [device.ordinal for device in manifest.devices]
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(one.of for one in manifest.shared), 1)}
    owners = [
        HandleNote(one.id, one.size, ordinals[one.device], kind_name(one.kind), numbers.get(one.id, 0), one.host_node)
        for one in manifest.handles
    ]
    nodes = {one.id: one.host_node for one in manifest.handles}
    # Behind their owners: of handles of one size the first stands for the memory.
    return owners + [
        HandleNote(one.id, one.size, ordinals[one.device], kind_name(one.kind), numbers[one.of], nodes[one.of])
        for one in manifest.shared
    ]
