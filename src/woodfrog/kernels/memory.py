"""What PTX memory instructions touch, and what they load.

Global, constant and generic accesses are recorded; local and parameter memory is followed slot by slot; shared memory
is never recorded, and what is loaded from any memory but these slots is unknown.
"""

from __future__ import annotations

from collections.abc import Callable

from woodfrog.kernels.execution import Execution, FoundAccess, Slot, under_guard
from woodfrog.kernels.opcodes import HARMLESS_CALLS, SHARED_SPACES, access_bytes, destinations
from woodfrog.kernels.operands import value_of
from woodfrog.kernels.ptx.syntax import Instruction, Memory, Operand, Vector
from woodfrog.kernels.template import Kind
from woodfrog.kernels.values import Condition, Poly, Value, const

Handler = Callable[[Execution, Instruction, Condition], None]
_MAY_CHANGE = frozenset(("volatile", "relaxed", "acquire", "mmio"))  # loads of what others write meanwhile
_PREFETCHES = frozenset(("prefetch",))
_DISCARD_BYTES = 128  # PTX ISA: discard works on 128 aligned bytes, the only size there is
_TENSORMAP_BYTES = 128


def record(
    execution: Execution,
    instruction: Instruction,
    kind: Kind,
    address: Poly | None,
    size: Poly | None,
    guard: Condition,
    reason: str = "",
) -> None:
    if guard.op != "false":
        execution.found.append(
            FoundAccess(execution.block, kind, address, size, guard, instruction.position, reason)
        )  # fmt: skip


def anywhere(execution: Execution, instruction: Instruction, guard: Condition, reason: str, *kinds: Kind) -> None:
    """The instruction may touch all memory."""
    for kind in kinds:
        record(execution, instruction, kind, None, None, guard, reason)


def address_of(execution: Execution, operand: Operand) -> Poly | None:
    """The address in `[base+offset]`; None when there is no such operand."""
    if not isinstance(operand, Memory):
        return None
    if not operand.base:
        return const(operand.offset)
    return value_of(execution, operand.base, 64) + const(operand.offset)


def _place(execution: Execution, address: Poly) -> tuple[str, int | None] | None:
    """The variable of local or parameter memory that an address lies in, and its offset there if that is known."""
    names = {str(a.args[0]) for m in address.terms for a in m if a.kind == "window"}
    names = {n for n in names if n in execution.parameters or execution.variables.get(n) in ("local", "param")}
    # Where only one of several alternatives is local memory, the access may be one of global memory.
    execution.slots.lost |= execution.windows(address) - names
    if not names:
        return None
    if len(names) > 1:
        execution.slots.lost |= names
        return next(iter(names)), None
    name = next(iter(names))
    window = execution.atoms.atom("window", name)
    offset = (address - window).constant
    return name, offset


def _is_shared(execution: Execution, address: Poly) -> bool:
    return any(
        atom.kind == "window" and execution.variables.get(str(atom.args[0])) == "shared"
        for monomial in address.terms
        for atom in monomial
    )


def _results(instruction: Instruction) -> list[str]:
    first = instruction.operands[0]
    elements = first.elements if isinstance(first, Vector) else (first,)
    return [name for name in elements if isinstance(name, str)]


def _set(execution: Execution, name: str, value: Value, guard: Condition) -> None:
    execution.environment[name] = under_guard(execution, guard, value, execution.environment.get(name))


def _load(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    shape = access_bytes(instruction.modifiers)
    results = _results(instruction)
    address = address_of(execution, instruction.operands[1]) if len(instruction.operands) > 1 else None
    if shape is None or address is None:
        for name in destinations(instruction):
            execution.environment[name] = None
        anywhere(execution, instruction, guard, "a load whose form is not known", Kind.LOAD)
        return
    size, elements, signed = shape
    is_integer = any(m[0] in "usb" and m[1:].isdigit() for m in instruction.modifiers[-1:])
    spaces = set(instruction.modifiers)
    place = None if spaces & {"global", "const"} | spaces & SHARED_SPACES else _place(execution, address)
    for index in range(elements):
        value: Value = None
        if place is not None:
            value = _load_slot(execution, place[0], place[1], index * size, size, signed, address)
        elif is_integer and size <= 8 and not spaces & (SHARED_SPACES | _MAY_CHANGE):
            value = execution.atoms.load(address + const(index * size), size, signed, execution.block_loops)
        elif is_integer and size <= 8:
            value = _loaded(execution, size, signed)
        if index < len(results):
            _set(execution, results[index], value, guard)
    own_spaces = SHARED_SPACES | {"local", "param", "param::entry", "param::func"}
    if place is None and not spaces & own_spaces and not _is_shared(execution, address):
        record(execution, instruction, Kind.LOAD, address, const(size * elements), guard)


def _loaded(execution: Execution, size: int, signed: bool) -> Poly:
    bits = 8 * size
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return execution.unknown(bits, "a loaded value", low, high)


def _load_slot(
    execution: Execution, name: str, offset: int | None, element: int, size: int, signed: bool, address: Poly
) -> Value:
    """What a load from local or parameter memory gives."""
    parameter = execution.parameters.get(name)
    if parameter is not None:
        start = address - execution.atoms.atom("window", name) + const(parameter[0] + element)
        number = start.constant
        if number is not None:
            value = execution.atoms.atom("param", number, size)
        else:
            value = execution.atoms.atom("paramat", execution.atoms.ext(start, 64, True), size)
        return execution.atoms.ext(value, 8 * size, True) if signed and size < 4 else value
    if execution.is_first_pass:
        if offset is not None:
            execution.slots.touched.setdefault(name, set()).add((offset + element, size))
        return _loaded(execution, size, signed) if size <= 8 else None
    if offset is None:
        return _load_indexed(execution, name, element, size, signed, address)
    slot = (name, offset + element, size)
    if slot in execution.good_slots:
        return execution.environment.get(slot)
    return _loaded(execution, size, signed) if size <= 8 else None


def _load_indexed(execution: Execution, name: str, element: int, size: int, signed: bool, address: Poly) -> Value:
    """A load at a computed index: one of the values that the variable's slots of this size hold now.

    The index stays inside its array, as the language demands, and arrays begin at the constant part of the address.
    """
    if name in execution.slots.lost:
        return _loaded(execution, size, signed) if size <= 8 else None
    first = (address - execution.atoms.atom("window", name)).terms.get((), 0) + element
    values: list[Poly] = []
    for offset, slot_size in sorted(execution.slots.touched.get(name, ())):
        if offset + slot_size <= first:
            continue
        value = execution.environment.get((name, offset, slot_size))
        if slot_size != size or (name, offset, slot_size) not in execution.good_slots or not isinstance(value, Poly):
            return _loaded(execution, size, signed) if size <= 8 else None
        values.append(value)
    return (
        execution.atoms.either(values, execution.block_loops)
        if values
        else _loaded(execution, size, signed)
        if size <= 8
        else None
    )


def _store(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    shape = access_bytes(instruction.modifiers)
    operands = instruction.operands
    address = address_of(execution, operands[0]) if operands else None
    if shape is None or address is None or len(operands) < 2:
        anywhere(execution, instruction, guard, "a store whose form is not known", Kind.STORE)
        return
    size, elements, _ = shape
    spaces = set(instruction.modifiers)
    stored = operands[1].elements if isinstance(operands[1], Vector) else (operands[1],)
    place = None if spaces & {"global"} or spaces & SHARED_SPACES else _place(execution, address)
    if place is not None:
        for index, operand in enumerate(stored):
            _store_slot(execution, place[0], place[1], index * size, size, operand, guard)
        return
    for operand in stored:
        if isinstance(operand, str):
            execution.lose(execution.environment.get(operand))
    if spaces & SHARED_SPACES or _is_shared(execution, address):
        return
    if "local" in spaces:
        _lose_all_local(execution)  # an address of local memory that is not followed
        return
    # A generic address that is not followed could be that of a local variable only if one had been lost before.
    record(execution, instruction, Kind.STORE, address, const(size * elements), guard)


def _lose_all_local(execution: Execution) -> None:
    execution.slots.lost.update(name for name, space in execution.variables.items() if space == "local")


def _store_slot(
    execution: Execution, name: str, offset: int | None, element: int, size: int, operand: Operand, guard: Condition
) -> None:
    value: Value = None
    if isinstance(operand, int):
        value = const(operand)
    elif isinstance(operand, str):
        value = execution.environment.get(operand)
        if value is None and operand not in execution.environment:
            value = value_of(execution, operand, 64)  # a special register or the address of a variable
    if offset is None:
        execution.slots.lost.add(name)
        execution.lose(value)
        return
    slot: Slot = (name, offset + element, size)
    if execution.is_first_pass:
        execution.slots.touched.setdefault(name, set()).add(slot[1:])
        execution.slots.stored.setdefault(execution.block, set()).add(slot)
        return
    if slot not in execution.good_slots:
        execution.lose(value)
        return
    if isinstance(value, Condition):
        value = None
    if isinstance(value, Poly) and size < 4:
        value = execution.atoms.ext(value, 8 * size, False)
    old = execution.environment.get(slot)
    new = under_guard(execution, guard, value, old)
    if new is None:
        execution.environment.pop(slot, None)
    else:
        execution.environment[slot] = new


def _atomic(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    shape = access_bytes(instruction.modifiers)
    position = 0 if instruction.opcode == "red" else 1
    address = address_of(execution, instruction.operands[position]) if len(instruction.operands) > position else None
    for name in destinations(instruction):
        execution.environment[name] = None
    for operand in instruction.operands[position + 1 :]:
        if isinstance(operand, str):
            execution.lose(execution.environment.get(operand))
    if instruction.opcode == "red" and "async" in instruction.modifiers:
        return  # red.async works on shared memory of a cluster
    if shape is None or address is None:
        anywhere(execution, instruction, guard, "an atomic whose form is not known", Kind.ATOMIC)
        return
    place = _place(execution, address)
    if place is not None:
        execution.slots.lost.add(place[0])
        return
    if not set(instruction.modifiers) & SHARED_SPACES and not _is_shared(execution, address):
        record(execution, instruction, Kind.ATOMIC, address, const(shape[0] * shape[1]), guard)


def _copy(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    """cp.async, cp.async.bulk, cp.reduce.async.bulk and what belongs to them."""
    words, operands = instruction.modifiers, instruction.operands
    if {"commit_group", "wait_group", "wait_all", "mbarrier", "prefetch"} & set(words) and not operands[1:]:
        return
    if "prefetch" in words or "commit_group" in words or "wait_group" in words or "arrive" in words:
        return
    spaces = [w for w in words if w == "global" or w in SHARED_SPACES]
    into_global = bool(spaces) and spaces[0] == "global"
    from_global = "global" in spaces[1:]
    kind = (Kind.ATOMIC if "reduce" in words else Kind.STORE) if into_global else Kind.LOAD
    if not into_global and not from_global and spaces:
        return  # shared memory to shared memory
    if "tensor" in words or not spaces or "mask" in words or len(operands) < 2:
        kinds = (kind,) if spaces else (Kind.LOAD, Kind.ATOMIC)
        anywhere(execution, instruction, guard, "a copy through a tensor map or of an unknown form", *kinds)
        return
    address = address_of(execution, operands[0 if into_global else 1])
    size: Poly | None = const(16)
    if len(operands) > 2:
        size = execution.atoms.ext(value_of(execution, operands[2], 32), 32, False)
        if len(operands) > 3 and "bulk" not in words and isinstance(operands[3], (int, str)):
            given = value_of(execution, operands[3], 32)  # a shorter source, or a predicate or cache policy
            size = execution.atoms.ext(given, 32, False) if given.constant is not None else size
    record(execution, instruction, kind, address, size, guard)


def _discard(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    address = address_of(execution, instruction.operands[0]) if instruction.operands else None
    record(execution, instruction, Kind.STORE, address, const(_DISCARD_BYTES), guard)


def _tensormap(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    address = address_of(execution, instruction.operands[0]) if instruction.operands else None
    if "replace" in instruction.modifiers and SHARED_SPACES & set(instruction.modifiers):
        return
    record(execution, instruction, Kind.ATOMIC, address, const(_TENSORMAP_BYTES), guard)


def _call(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    """A call that was not put in place of itself."""
    for operand in instruction.operands:
        names = operand.elements if isinstance(operand, Vector) else (operand,)
        for name in names:
            if isinstance(name, str):
                if execution.variables.get(name) == "param":
                    for key in [k for k in execution.environment if isinstance(k, tuple) and k[0] == name]:
                        execution.lose(execution.environment[key])
                        del execution.environment[key]
                else:
                    execution.lose(execution.environment.get(name))
                    if name in execution.environment:
                        execution.environment[name] = None
    callee = next((o for o in instruction.operands if isinstance(o, str)), "")
    if callee not in HARMLESS_CALLS:
        _lose_all_local(execution)
        reason = f"a call of {callee}, which is not in the module" if callee else "a call that is not known"
        anywhere(execution, instruction, guard, reason, Kind.LOAD, Kind.ATOMIC)


def _texture(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    for name in destinations(instruction):
        execution.environment[name] = None
    kind = {"sust": Kind.STORE, "sured": Kind.ATOMIC}.get(instruction.opcode, Kind.LOAD)
    anywhere(execution, instruction, guard, "an access through a texture or surface", kind)


def other_memory(execution: Execution, instruction: Instruction, guard: Condition) -> None:
    """An instruction that is not known and has an address."""
    words = set(instruction.modifiers)
    if words & SHARED_SPACES and "global" not in words:
        return
    anywhere(execution, instruction, guard, f"{instruction.name} is not known", Kind.LOAD, Kind.ATOMIC)


MEMORY_HANDLERS: dict[str, Handler] = {
    "ld": _load, "ldu": _load, "st": _store, "atom": _atomic, "red": _atomic, "cp": _copy, "discard": _discard,
    "tensormap": _tensormap, "call": _call, "tex": _texture, "tld4": _texture, "suld": _texture, "sust": _texture,
    "sured": _texture,
}  # fmt: skip
