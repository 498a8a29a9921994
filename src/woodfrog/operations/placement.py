"""Which GPU a target's GPU becomes: what was asked for, judged, and as the driver wants to be told.

The driver's restore takes pairs of UUIDs, and once there are any they must name every GPU of the machine that it was
checkpointed on: it records all of them, whatever the process's CUDA_VISIBLE_DEVICES says (docs/driver.md). So the pairs
are a permutation of the machine's GPUs, the same for all processes of a target; what a process sees under an ordinal
moves with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from woodfrog.driver import devices as driver_devices
from woodfrog.driver import features
from woodfrog.driver.process import GpuPair
from woodfrog.errors import NotFoundError, RefusedError, UsageError
from woodfrog.operations.context import Context, Devices
from woodfrog.operations.notes import MemberNote, Notes

if TYPE_CHECKING:
    from woodfrog.image.manifest import Manifest

Pairs = list[tuple[str, str]]  # UUIDs, 32 hex digits: the old one and the new one


def machine_gpus(context: Context) -> list[str]:
    """All GPUs here: those that this daemon uses, then the others that the driver knows of."""
    return list(dict.fromkeys([*context.devices.all(), *(uuid.hex() for uuid in driver_devices.physical_uuids())]))


def pairs_of_image(context: Context, manifest: Manifest, used: Pairs) -> Pairs:
    """For a restore that puts the image's GPUs where `used` says."""
    if all(old == new for old, new in used):
        return []  # as all_pairs says, without asking NVML
    there = [uuid for uuid in manifest.notes.get("visible_gpus", "").split(",") if uuid]
    return all_pairs(used, there, machine_gpus(context))


def all_pairs(used: Pairs, there: Sequence[str], here: Sequence[str]) -> Pairs:
    """Pairs for every GPU `there` (of the machine that the target was on), once a single one moves.

    The GPUs that it used go where `used` says; the others stay where they are if that is free, else they take what is
    left, so that it is a permutation. Empty when nothing moves.
    """
    if all(old == new for old, new in used):
        return []
    chosen = dict(used)
    free = [uuid for uuid in here if uuid not in chosen.values()]
    others = [uuid for uuid in there if uuid not in chosen]
    for uuid in [uuid for uuid in others if uuid in free]:
        chosen[uuid] = uuid
        free.remove(uuid)
    for uuid in [uuid for uuid in others if uuid not in chosen]:
        if free:
            chosen[uuid] = free.pop(0)
    return list(chosen.items())


def driver_pairs(notes: Notes, member: MemberNote) -> list[GpuPair]:
    """What the driver is to be told for one process: empty when it goes where it was checkpointed."""
    goal = dict(notes.gpu_pairs)
    pairs = [(now, goal.get(home, home)) for home, now in member.moved] if member.moved else notes.gpu_pairs
    if all(old == new for old, new in pairs):
        return []
    return [GpuPair(bytes.fromhex(old), bytes.fromhex(new)) for old, new in pairs]


def resolve(devices: Devices, given: Mapping[Any, Any], there: Sequence[str]) -> dict[str, str]:
    """A map of GPUs as people write it (ordinals or UUIDs on both sides) as UUIDs. `there`: those that ordinals on the
    left count. NotFoundError, UsageError."""
    result: dict[str, str] = {}
    for left, right in given.items():
        old = there[int(left)] if _is_ordinal(left, len(there)) else _uuid(left)
        result[old] = devices.by_ordinal(int(right)) if _is_number(right) else _uuid(right)
    return result


class Placement:
    """Where a living target goes: `devices` (its ordinals → UUIDs) as they will be, and the driver's pairs."""

    def __init__(self, context: Context, devices: Mapping[int, str], given: Mapping[Any, Any]) -> None:
        """`devices` as they are; `given`: what goes where, the others stay. NotFoundError, UsageError, RefusedError."""
        there = [uuid for _, uuid in sorted(devices.items())]
        self.gpu_map = resolve(context.devices, given, there)
        _judge(context, there, self.gpu_map)
        self.devices = {ordinal: self.gpu_map.get(uuid, uuid) for ordinal, uuid in devices.items()}
        used = [(uuid, self.gpu_map.get(uuid, uuid)) for uuid in there]
        machine = machine_gpus(context)
        self.pairs = all_pairs(used, machine, machine)
        if self.pairs:
            features.require("gpu_remap", "moving a target to another GPU")


def _judge(context: Context, there: Sequence[str], gpu_map: Mapping[str, str]) -> None:
    if not there:
        raise RefusedError(
            "which GPUs the target uses is not known, because its driver keeps all of its memory",
            advice="start the program with `woodfrog run`",
        )
    for old, new in gpu_map.items():
        if old not in there:
            raise UsageError(f"the target does not use GPU {old}", advice=f"it uses {', '.join(there)}")
        context.devices.by_uuid(new)
    goals = [gpu_map.get(uuid, uuid) for uuid in there]
    if len(set(goals)) != len(goals):
        twice = next(uuid for uuid in goals if goals.count(uuid) > 1)
        raise UsageError(
            f"two GPUs of the target would become GPU {twice}", advice="say where each of them goes: --gpu THERE=HERE"
        )
    kinds = {gpu.uuid.hex(): (gpu.name, gpu.compute_capability) for gpu in driver_devices.list_gpus()}
    for old, new in gpu_map.items():
        if kinds.get(old) != kinds.get(new):
            raise RefusedError(
                f"GPU {new} is a {kinds[new][0]}, and GPU {old}, which the target is on, is not",
                advice="the driver restores onto GPUs of the same chip only",
            )


def _is_number(value: Any) -> bool:
    return str(value).isdigit() and len(str(value)) < 4


def _is_ordinal(value: Any, count: int) -> bool:
    if not _is_number(value):
        return False
    if int(value) >= count:
        raise NotFoundError(f"there is no GPU number {value} in it; it has {count}")
    return True


def _uuid(value: Any) -> str:
    digits = str(value).removeprefix("GPU-").replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{32}", digits):
        raise UsageError(f"{value!r} is neither a GPU's number nor its UUID")
    return digits
