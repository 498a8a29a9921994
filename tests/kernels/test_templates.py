"""What templates promise beyond the differential test: overflow is seen, unknowns widen, launches are checked."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from conftest import Compiled
from test_ptx import HEAD, kernel, template

from woodfrog import kernels
from woodfrog.errors import UsageError
from woodfrog.kernels import READS, WRITES, Exactness, Kind, Launch, Range, Template, templates
from woodfrog.kernels.footprint import merged, pieces
from woodfrog.kernels.space import InfeasibleError, Space

BASE = 0x7F0000000000
OTHER = 0x7F0100000000
ALLOCATIONS = [(BASE, 1 << 20), (OTHER, 1 << 20)]
INDEX = """
    ld.param.u64 %rd1, [k_param_0];
    ld.param.u32 %r1, [k_param_1];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
"""


def launched(found: Template, value: int, *, grid: int = 4, block: int = 64) -> list[Range]:
    parameters = struct.pack("<QI", BASE, value & 0xFFFFFFFF)
    return found.ranges(Launch((grid, 1, 1), (block, 1, 1), parameters, ALLOCATIONS))


def test_an_index_that_may_wrap_around_is_never_called_exact() -> None:
    """i * n in 32 bits: small n is exact, a product beyond 2**31 may land anywhere."""
    found = template(
        INDEX
        + "mul.lo.s32 %r6, %r5, %r1; mul.wide.s32 %rd2, %r6, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], 0;"
    )
    assert launched(found, 1) == [Range(BASE, 4 * 256, Exactness.EXACT)]
    wrapped = launched(found, 1 << 24)
    assert all(one.exactness >= Exactness.BOUNDED for one in wrapped)
    # Thread 128 writes to index -2**31, which wraps from +2**31: below the base.
    assert any(one.address <= BASE and one.address + one.size_bytes >= BASE + 4 for one in wrapped)


def test_an_unsigned_index_that_wraps_below_zero_is_followed() -> None:
    found = template(
        INDEX + "sub.u32 %r6, %r5, %r1; mul.wide.u32 %rd2, %r6, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], 0;"
    )
    assert launched(found, 0)[0] == Range(BASE, 4 * 256, Exactness.EXACT)
    # Threads below the parameter write near BASE + 2**34: no range may leave them out.
    ranges = launched(found, 2)
    assert all(one.exactness is not Exactness.EXACT for one in ranges)


def test_a_loop_whose_counter_may_wrap_is_not_bounded_by_its_condition() -> None:
    """for (i = 0; i != n; i += 3) ends only by luck when 3 does not divide n."""
    body = """
    ld.param.u64 %rd1, [k_param_0]; ld.param.u32 %r1, [k_param_1]; mov.u32 %r2, 0;
    again:
    mul.wide.s32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2; st.global.u8 [%rd3], 0;
    add.s32 %r2, %r2, 3; setp.ne.s32 %p1, %r2, %r1; @%p1 bra again;
    """
    found = template(body)
    assert launched(found, 9) == [Range(BASE + 12 * i, 1, Exactness.EXACT) for i in range(3)]
    assert launched(found, 10) == [Range(BASE, 1 << 20, Exactness.WHOLE)]


def test_what_depends_on_memory_is_the_whole_allocation() -> None:
    found = template(
        INDEX
        + "ld.global.u32 %r6, [%rd1]; mul.wide.u32 %rd2, %r6, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], 0;"
    )
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE + 64, 0), ALLOCATIONS)
    (written,) = found.ranges(launch, kinds=WRITES)
    assert written.exactness >= Exactness.BOUNDED
    assert written.address + written.size_bytes == BASE + (1 << 20)
    assert found.ranges(launch, kinds=READS) == [Range(BASE + 64, 4, Exactness.EXACT)]


def test_a_pointer_out_of_memory_is_everything() -> None:
    found = template("ld.param.u64 %rd1, [k_param_0]; ld.global.u64 %rd2, [%rd1]; st.global.u32 [%rd2], 0;")
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE, 0), ALLOCATIONS)
    assert found.ranges(launch, kinds=WRITES) == [Range(a, s, Exactness.EVERYTHING) for a, s in ALLOCATIONS]
    alone = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE, 0))
    assert alone.allocations == ()
    assert found.ranges(alone, kinds=WRITES) == [Range(0, 1 << 64, Exactness.EVERYTHING)]


def test_a_pointer_one_past_its_allocation_still_names_it() -> None:
    found = template(
        INDEX
        + "ld.global.u32 %r6, [%rd1+-4]; mul.wide.s32 %rd2, %r6, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], 0;"
    )
    neighbours = [(BASE, 4096), (BASE + 4096, 4096)]
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE + 4096, 0), neighbours)
    touched = found.ranges(launch, kinds=WRITES)
    assert min(one.address for one in touched) <= BASE
    assert max(one.address + one.size_bytes for one in touched) >= BASE + 8192


def test_a_value_that_changes_irregularly_in_a_loop_keeps_its_base() -> None:
    """A pointer advanced by what memory says stays in its allocation, and never looks like a fixed stride."""
    body = """
    ld.param.u64 %rd1, [k_param_0]; ld.param.u32 %r1, [k_param_1]; mov.u64 %rd2, %rd1; mov.u32 %r2, 0;
    again:
    ld.global.u32 %r3, [%rd2]; cvt.u64.u32 %rd3, %r3; add.s64 %rd2, %rd2, %rd3; st.global.u32 [%rd2], 0;
    add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, %r1; @%p1 bra again;
    """
    (written,) = template(body).ranges(
        Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE, 5), ALLOCATIONS), kinds=WRITES
    )
    assert (written.address, written.size_bytes) == (BASE, 1 << 20)
    assert written.exactness >= Exactness.WHOLE


def test_a_call_that_cannot_be_followed_is_everything() -> None:
    text = (
        HEAD
        + ".extern .func other (.param .b64 a);\n"
        + kernel(
            "{ .param .b64 p0; ld.param.u64 %rd1, [k_param_0]; st.param.b64 [p0], %rd1; call.uni other, (p0); }"
        ).removeprefix(HEAD)
    )
    (found,) = templates(text)
    assert any(access.address is None and access.kind is Kind.ATOMIC for access in found.accesses)
    assert any("other" in access.reason for access in found.accesses)


def test_irreducible_control_flow_falls_back_with_a_reason() -> None:
    found = template("@%p1 bra b; a: add.s32 %r1, %r1, 1; b: add.s32 %r1, %r1, 2; @%p2 bra a;")
    assert "loop" in found.fallback
    assert {access.kind for access in found.accesses} == {Kind.LOAD, Kind.ATOMIC}


def test_a_launch_that_does_not_fit_the_kernel_is_refused() -> None:
    found = template(INDEX)
    with pytest.raises(UsageError, match="12 bytes"):
        found.ranges(Launch((1, 1, 1), (1, 1, 1), b"\0" * 4))
    with pytest.raises(UsageError, match="at least 1"):
        found.ranges(Launch((0, 1, 1), (1, 1, 1), b"\0" * 12))


@pytest.mark.parametrize(
    ("kernel_name", "expected"),
    [("mma_tiles", Exactness.EXACT), ("ldmatrix_copy", Exactness.EXACT), ("bulk_copy", Exactness.BOUNDED)],
)
def test_tensor_core_and_bulk_copy_kernels_have_templates(
    kernel_name: str, expected: Exactness, compiled: Compiled
) -> None:
    found = {t.kernel: t for t in templates(compiled("tensor", "sm_90", "O3").read_text())}[kernel_name]
    sizes = {"mma_tiles": (32, 24, 40), "ldmatrix_copy": (), "bulk_copy": (256,)}[kernel_name]
    pointers = 3 if kernel_name == "mma_tiles" else 2
    addresses = [BASE, OTHER, OTHER + (1 << 19)][:pointers]
    parameters = struct.pack(f"<{pointers}Q", *addresses)
    if kernel_name == "mma_tiles":
        parameters += struct.pack("<2i", 16, 24)
    elif sizes:
        parameters += struct.pack("<i", sizes[0])
    grid = (2, 3, 1)
    written = found.ranges(Launch(grid, (32, 1, 1), parameters, ALLOCATIONS), kinds=WRITES)
    assert written
    assert max(one.exactness for one in written) <= expected
    if kernel_name == "mma_tiles":
        assert written == [Range(addresses[2], 4 * 48 * 16, Exactness.EXACT)]
    if kernel_name == "bulk_copy":
        assert [(one.address, one.size_bytes) for one in written] == [(OTHER + 4096 * i, 256) for i in range(2)]


def test_a_kernel_with_wgmma_has_an_exact_template(compiled: Compiled) -> None:
    found = {t.kernel: t for t in templates(compiled("tensor", "sm_90a", "O3").read_text())}["wgmma_tile"]
    address = OTHER + (1 << 19)
    launch = Launch((2, 3, 1), (128, 1, 1), struct.pack("<3Qi", BASE, OTHER, address, 16), ALLOCATIONS)
    assert found.ranges(launch, kinds=WRITES) == [Range(address, 4 * 16 * 192, Exactness.EXACT)]
    assert found.ranges(launch, kinds=READS) == [
        Range(BASE, 16 * 128 * 3, Exactness.EXACT),
        Range(OTHER, 16 * 16 * 2, Exactness.EXACT),
    ]


def test_a_copy_through_a_tensor_map_reads_anything_and_writes_nothing(compiled: Compiled) -> None:
    found = {t.kernel: t for t in templates(compiled("tensor", "sm_90", "O3").read_text())}["tensor_map_copy"]
    assert [a.kind for a in found.accesses if a.address is None] == [Kind.LOAD]


NOTHING, EVERYTHING = (), ("everything",)
HALF = ((64, 64),)


@pytest.mark.parametrize(
    ("instruction", "reads", "writes"),
    [
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;", NOTHING, NOTHING),
        ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};", NOTHING, NOTHING),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd1, %rd2, %r3, %p1;", NOTHING, NOTHING),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [%r2];", NOTHING, EVERYTHING),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 64;", NOTHING, HALF),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], %r1;", NOTHING, HALF),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r2], 64;", HALF, HALF),
        ("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 64, [%r3];", HALF, NOTHING),
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r2], %r1, [%r3];", NOTHING, NOTHING),
        ("st.async.mmio.release.sys.global.b32 [%rd1], %r1;", NOTHING, ((64, 4),)),
        ("tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;", ((64, 128),), ((64, 128),)),
        ("st.global.v8.b32 [%rd1], {%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1};", NOTHING, ((64, 32),)),
        ("ld.global.v4.b64 {%rd3, %rd4, %rd5, %rd6}, [%rd1];", ((64, 32),), NOTHING),
        ("red.global.add.noftz.v4.f32 [%rd1], {%r1, %r1, %r1, %r1};", ((64, 16),), ((64, 16),)),
        ("atom.global.exch.b128 %rd3, [%rd1], %rd2;", ((64, 16),), ((64, 16),)),
        ("multimem.red.relaxed.sys.global.add.u32 [%rd1], %r1;", EVERYTHING, EVERYTHING),
        ("discard.global.L2 [%rd1], 128;", NOTHING, ((64, 128),)),
    ],
)
def test_what_instructions_up_to_sm_100_touch(instruction: str, reads: object, writes: object) -> None:
    body = "ld.param.u64 %rd1, [k_param_0]; ld.param.u32 %r1, [k_param_1]; mov.u32 %r2, 0; mov.u32 %r3, 64;"
    found = template(body + instruction)
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE + 64, 64), ALLOCATIONS)
    for kinds, expected in ((READS, reads), (WRITES, writes)):
        named = found.ranges(launch, kinds=kinds)
        if expected == EVERYTHING:
            assert all(one.exactness is Exactness.EVERYTHING for one in named)
            assert [(one.address, one.size_bytes) for one in named] == ALLOCATIONS
        else:
            assert [(one.address - BASE, one.size_bytes) for one in named] == list(expected)  # type: ignore[call-overload]


def test_dense_strides_join_into_one_run_and_sparse_ones_do_not() -> None:
    space = Space()
    x, y = space.variable(0, 9), space.variable(0, 2)
    form = x.scaled(4).plus(y.scaled(40)).shifted(100)
    assert pieces(form, space, 4, exact=True) == ([(100, 120)], True)
    form = x.scaled(4).plus(y.scaled(64)).shifted(100)
    assert pieces(form, space, 4, exact=True) == ([(100, 40), (164, 40), (228, 40)], True)


def test_too_many_runs_become_fewer_and_larger_never_smaller() -> None:
    space = Space()
    form = space.variable(0, 10**6).scaled(64).plus(space.variable(0, 2).scaled(1 << 40))
    found, exact = pieces(form, space, 4, exact=True)
    assert not exact
    assert len(found) <= 4096
    assert sum(size for _, size in found) >= 3 * (64 * 10**6 + 4)


def test_constraints_without_a_point_are_infeasible() -> None:
    space = Space()
    x = space.variable(0, 9)
    with pytest.raises(InfeasibleError):
        space.require_nonpositive(x.scaled(-1).shifted(20))


def test_joined_ranges_are_as_exact_as_their_least_exact_part() -> None:
    found = merged([Range(0, 10, Exactness.EXACT), Range(5, 10, Exactness.BOUNDED), Range(15, 5, Exactness.EXACT)])
    assert found == [Range(0, 15, Exactness.BOUNDED), Range(15, 5, Exactness.EXACT)]


def test_the_kernels_package_imports_nothing_of_woodfrog_but_errors() -> None:
    import ast

    package = Path(kernels.__file__).parent
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.split(".")[0] == "woodfrog":
                    assert name.startswith(("woodfrog.kernels", "woodfrog.errors")), f"{file.name} imports {name}"


def test_a_pointer_that_may_be_local_or_global_names_the_global_side() -> None:
    body = """
    .local .align 8 .b8 depot[16];
    mov.u64 %rd5, depot; cvta.local.u64 %rd6, %rd5;
    ld.param.u64 %rd1, [k_param_0]; ld.param.u32 %r1, [k_param_1];
    setp.eq.s32 %p1, %r1, 0; selp.b64 %rd2, %rd6, %rd1, %p1;
    st.u32 [%rd2], 7;
    """
    found = template(body)
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE, 1), ALLOCATIONS)
    assert any(one.address <= BASE < one.address + one.size_bytes for one in found.ranges(launch, kinds=WRITES))


def test_a_negative_value_that_is_halved_in_a_loop_is_not_taken_to_shrink() -> None:
    """for (i = -n; i != 0; i /= 2) touches below the base, nearer and nearer to it."""
    body = """
    ld.param.u64 %rd1, [k_param_0]; ld.param.u32 %r1, [k_param_1]; neg.s32 %r2, %r1;
    again:
    mul.wide.s32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2; st.global.u8 [%rd3], 0;
    shr.s32 %r2, %r2, 1; setp.ne.s32 %p1, %r2, -1; @%p1 bra again;
    """
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE + 4096, 8), ALLOCATIONS)
    named = template(body).ranges(launch, kinds=WRITES)
    for offset in (-32, -16, -8):
        assert any(one.address <= BASE + 4096 + offset < one.address + one.size_bytes for one in named)


def test_stores_side_by_side_are_one_run_and_others_stay_apart() -> None:
    body = """
    ld.param.u64 %rd1, [k_param_0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 16; add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3+8], 0; st.global.u32 [%rd3], 0; st.global.u32 [%rd3+4], 0;
    """
    found = template(body)
    assert len(found.accesses) == 3
    assert [access.size and access.size.constant for access in found.combined] == [12]
    launch = Launch((1, 1, 1), (2, 1, 1), struct.pack("<QI", BASE, 0), ALLOCATIONS)
    named = found.ranges(launch, kinds=WRITES)
    assert named == [Range(BASE, 12, Exactness.EXACT), Range(BASE + 16, 12, Exactness.EXACT)]


DOUBLING = """
    ld.param.u64 %rd1, [k_param_0]; ld.param.u32 %r1, [k_param_1]; mov.u32 %r2, 1;
    again:
    mul.wide.u32 %rd2, %r2, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], 0;
    shl.b32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, %r1; @%p1 bra again;
"""


def test_an_index_that_doubles_in_a_loop_stays_below_what_ends_the_loop() -> None:
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE, 100), ALLOCATIONS)
    (named,) = template(DOUBLING).ranges(launch, kinds=WRITES)
    assert named.exactness is Exactness.BOUNDED
    assert named.address <= BASE + 4
    assert BASE + 4 * 64 + 4 <= named.address + named.size_bytes <= BASE + 4 * 128 + 4


def test_an_index_that_may_wrap_around_before_its_loop_ends_has_no_such_bound() -> None:
    """2**30 doubled is negative, below the limit, and the loop goes on."""
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE, (1 << 30) + 1), ALLOCATIONS)
    (named,) = template(DOUBLING).ranges(launch, kinds=WRITES)
    assert named.exactness is Exactness.WHOLE


@pytest.mark.parametrize("lanes", [4, 3])
def test_stores_side_by_side_that_each_have_a_mask_are_one_access_and_stay_exact(lanes: int) -> None:
    """What Triton makes of `tl.store(p + x, v, mask=x < n)`: four elements a thread, each under its own condition.

    With three of four there are gaps between the values that are compared, and the parts are looked at.
    """
    body = """
    ld.param.u64 %rd1, [k_param_0]; ld.param.u32 %r1, [k_param_1];
    mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; shl.b32 %r4, %r2, 2; and.b32 %r5, %r4, 508; shl.b32 %r6, %r3, 9;
    or.b32 %r7, %r5, %r6; mul.wide.s32 %rd2, %r7, 4; add.s64 %rd3, %rd1, %rd2;
    """
    for lane in range(lanes):
        body += f"or.b32 %r8, %r7, {lane}; setp.lt.s32 %p1, %r8, %r1; @%p1 st.global.u32 [%rd3+{4 * lane}], 0;\n"
    found = template(body)
    assert (len(found.accesses), len(found.combined), len(found.combined[0].parts)) == (lanes, 1, lanes)
    for n in (0, 1, 2, 3, 5, 511, 600, 1023, 1024, 2000):
        launch = Launch((2, 1, 1), (128, 1, 1), struct.pack("<QI", BASE, n), ALLOCATIONS)
        named = found.ranges(launch, kinds=WRITES)
        assert all(one.exactness is Exactness.EXACT for one in named)
        words = {at // 4 for one in named for at in range(one.address - BASE, one.address - BASE + one.size_bytes)}
        assert words == {x for x in range(min(n, 1024)) if x % 4 < lanes}
