"""The PTX parser reads what compilers emit, carries what it does not know, and names the place of what is broken."""

from __future__ import annotations

import random
import time

import pytest
from conftest import VARIANTS, Compiled

from woodfrog.kernels import Kind, PtxError, Template, templates
from woodfrog.kernels.error import KernelFileError
from woodfrog.kernels.ptx import parse
from woodfrog.kernels.ptx.syntax import Instruction, Memory, Vector

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
FUZZ_SECONDS = 5.0


def kernel(body: str, parameters: str = ".param .u64 k_param_0, .param .u32 k_param_1") -> str:
    registers = ".reg .pred %p<9>;\n.reg .b32 %r<99>;\n.reg .b64 %rd<99>;"
    return f"{HEAD}.visible .entry k({parameters})\n{{\n{registers}\n{body}\nret;\n}}\n"


def template(body: str, parameters: str = ".param .u64 k_param_0, .param .u32 k_param_1") -> Template:
    (found,) = templates(kernel(body, parameters))
    return found


@pytest.mark.parametrize("file", ["elementwise", "blocks", "irregular", "tensor"])
@pytest.mark.parametrize(("architecture", "level"), VARIANTS)
def test_everything_nvcc_emits_is_read(file: str, architecture: str, level: str, compiled: Compiled) -> None:
    text = compiled(file, architecture, level).read_text()
    module = parse(text)
    assert module.target == architecture
    assert len(module.kernels) == text.count(".entry ")
    assert all(function.body for function in module.kernels)


def test_parameter_offsets_follow_sizes_and_alignments() -> None:
    parameters = ".param .u8 a, .param .u64 .ptr .global .align 1 b, .param .align 4 .b8 c[5], .param .f64 d"
    module = parse(f"{HEAD}.entry k({parameters}) {{ ret; }}")
    (function,) = module.kernels
    assert [(p.offset_bytes, p.size_bytes) for p in function.parameters] == [(0, 1), (8, 8), (16, 5), (24, 8)]
    assert function.parameters[1].is_pointer


def test_unknown_instructions_are_carried_with_their_operands() -> None:
    text = kernel("@!%p1 frobnicate.async.v9.zz32 {%r1, %r2}, [%rd1+-8, {%r3, 4}], 0f3F800000, tab;")
    (function,) = parse(text).kernels
    (instruction,) = [s for s in function.body or () if isinstance(s, Instruction) and s.opcode == "frobnicate"]
    assert instruction.modifiers == ("async", "v9", "zz32")
    assert instruction.predicate == "%p1"
    assert instruction.negated
    assert instruction.operands[0] == Vector(("%r1", "%r2"))
    assert instruction.operands[1] == Memory("%rd1", -8, (Vector(("%r3", 4)),))


def test_an_unknown_instruction_with_an_address_is_taken_to_touch_everything() -> None:
    found = template("ld.param.u64 %rd1, [k_param_0]; frobnicate.b32 [%rd1], %r1;")
    assert {a.kind for a in found.accesses if a.address is None} == {Kind.LOAD, Kind.ATOMIC}


def test_names_of_inner_blocks_do_not_reach_outer_ones() -> None:
    """Inline assembly declares registers and labels of its own; those outside keep their values."""
    body = """
    ld.param.u64 %rd1, [k_param_0];
    mov.u32 %r1, 16;
    { .reg .b32 %r1; mov.u32 %r1, 99999; again: @%p1 bra again; }
    { .reg .b32 t<3>; mov.u32 t1, 5; again: @%p1 bra again; }
    cvt.u64.u32 %rd2, %r1;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], 0;
    """
    (store,) = [a for a in template(body).accesses if a.kind is Kind.STORE]
    assert str(store.address) == "param[0] + 16"


@pytest.mark.parametrize(
    ("broken", "line", "column"),
    [
        ("add.s32 %r1 %r2, 3;", 9, 13),
        ("ld.global.u32 %r1, [%rd1;", 9, 25),
        ("ld.global.u32 %r1, [;", 9, 21),
        ("\n\n  mov.u32 %r1, `;", 11, 16),
        (".reg .b32 %r<x>;", 9, 14),
    ],
)
def test_an_error_names_line_and_column(broken: str, line: int, column: int) -> None:
    with pytest.raises(PtxError) as caught:
        parse(kernel(broken))
    assert (caught.value.line, caught.value.column) == (line, column)
    assert f"line {line}, column {column}" in caught.value.reason


@pytest.mark.parametrize("text", ["", "hello", ".version", HEAD + ".entry k(", HEAD + ".entry k() {", HEAD + "}"])
def test_text_that_ends_too_early_is_an_error_with_its_place(text: str) -> None:
    with pytest.raises(PtxError) as caught:
        parse(text)
    assert caught.value.line >= 1


def test_a_megabyte_of_ptx_is_read_in_seconds(compiled: Compiled) -> None:
    text = compiled("blocks", "sm_90", "O3").read_text()
    start = text.index(".address_size 64") + len(".address_size 64")
    copies = [text[start:].replace(".entry ", f".entry copy{i}_") for i in range(1_000_000 // len(text) + 1)]
    big = text[:start] + "".join(copies)
    begun = time.process_time()
    assert len(parse(big).kernels) >= 100
    assert time.process_time() - begun < 10  # about one second on an idle machine of 2024


def test_deep_nesting_is_refused_not_a_crash() -> None:
    with pytest.raises(PtxError, match="nested"):
        parse(kernel("{" * 5000 + "}" * 5000))


def refusal_of(text: str) -> KernelFileError | None:
    try:
        templates(text)
    except KernelFileError as error:
        return error
    return None


def test_damaged_ptx_gives_templates_or_a_placed_error_in_bounded_time(compiled: Compiled) -> None:
    texts = [
        compiled(file, "sm_90", level).read_text() for file in ("elementwise", "irregular") for level in ("O0", "O3")
    ]
    rng = random.Random(5)
    end = time.monotonic() + FUZZ_SECONDS
    tried = errors = 0
    while time.monotonic() < end:
        text = rng.choice(texts)
        start = text.rindex("// .globl", 0, rng.randrange(len(text) // 2, len(text)))
        text = HEAD + text[start : start + 6000].rpartition("\n}\n")[0] + "\n}\n"
        characters = list(text)
        for _ in range(rng.choice((1, 2, 10))):
            at = rng.randrange(len(characters))
            characters[at : at + rng.randrange(3)] = rng.choice(
                (";", "}", "{", "%r1", "[", ",", "@", "0", "", "\0", "é", "bra ")
            )
        refusal = refusal_of("".join(characters))
        if isinstance(refusal, PtxError):
            errors += 1
            assert refusal.line >= 1
        assert refusal is None or "\n" not in refusal.reason
        tried += 1
    assert tried > 5
    assert errors > 0
