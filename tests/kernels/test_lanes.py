"""Accesses that are evaluated as one (combine.py): the same bytes as one by one, and a mistake in it is caught.

WOODFROG_LANE_EXAMPLES: random kernels of the property test (default 60).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import triton_launches
from conftest import HERE
from hypothesis import given, settings
from hypothesis import strategies as st
from intervals import without
from recorder import Recorder
from test_differential import check, launch_of
from test_triton import only_template, runnable

from woodfrog.errors import UsageError
from woodfrog.kernels import WRITES, Access, Exactness, Launch, Template, templates
from woodfrog.kernels.atoms import Atoms
from woodfrog.kernels.catalogue import Catalogue
from woodfrog.kernels.rewrite import Rewriter
from woodfrog.kernels.values import Atom, Condition, Poly, const

EXAMPLES = int(os.environ.get("WOODFROG_LANE_EXAMPLES", "60"))
BASE = 0x7F0000000000
ALLOCATIONS = [(BASE, 1 << 20)]
KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 to, .param .u32 n, .param .u32 row){demands}
{{
    .reg .pred %p<3>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [n];
    ld.param.u32 %r2, [row];
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    {body}
    ret;
}}
"""
# A store at 4 * (every * (i + place) + rows * row) where i + mask < n, and i = block * size + thread.
STORE = """
    add.s32 %r7, %r6, {place}; mul.lo.s32 %r8, %r7, {every}; mul.lo.s32 %r9, %r2, {rows}; add.s32 %r10, %r8, %r9;
    mul.wide.s32 %rd2, %r10, 4; add.s64 %rd3, %rd1, %rd2;
    add.s32 %r11, %r6, {mask}; setp.lt.s32 %p1, %r11, %r1; @%p1 st.global.u32 [%rd3], %r1;
"""
Store = tuple[int, int, int]  # place, rows, mask


def kernel(stores: list[Store], every: int = 1, block: int = 0) -> Template:
    """`block`: of how many threads blocks must be."""
    body = "".join(STORE.format(place=p, every=every, rows=r, mask=m) for p, r, m in stores)
    (found,) = templates(KERNEL.format(body=body, demands=f" .reqntid {block}, 1, 1" if block else ""))
    return found


def launched(grid: int, block: int, n: int, row: int) -> Launch:
    return Launch((grid, 1, 1), (block, 1, 1), struct.pack("<QII", BASE, n, row), ALLOCATIONS)


def truth(stores: list[Store], every: int, launch: Launch) -> list[tuple[int, int]]:
    _, n, row = struct.unpack("<QII", launch.parameters)
    return [
        (BASE + 4 * (every * (i + place) + rows * row), 4)
        for i in range(launch.grid[0] * launch.block[0])
        for place, rows, mask in stores
        if i + mask < n
    ]


def progressions(starts: list[Store], count: int, step: Store) -> list[Store]:
    """`count` stores from each start on, `step` apart."""
    return [
        (start[0] + k * step[0], start[1] + k * step[1], start[2] + k * step[2])
        for start in starts
        for k in range(count)
    ]


TILES = st.builds(
    progressions,
    st.lists(st.tuples(*[st.integers(0, 20)] * 3), min_size=1, max_size=3),
    st.integers(1, 5),
    st.tuples(*[st.integers(0, 8)] * 3),
)


@settings(max_examples=EXAMPLES, deadline=None, derandomize="CI" in os.environ)
@given(
    tiles=TILES, every=st.integers(1, 3), grid=st.integers(1, 3), block=st.sampled_from([1, 4, 32]),
    n=st.integers(0, 120), row=st.sampled_from([0, 1, 7, 64, 1000]), demands=st.booleans(),
)  # fmt: skip
def test_stores_put_together_name_what_they_name_one_by_one(
    tiles: list[Store], every: int, grid: int, block: int, n: int, row: int, demands: bool
) -> None:
    found = kernel(tiles, every, block if demands else 0)
    launch = launched(grid, block, n, row)
    touched = truth(tiles, every, launch)
    named = found.ranges(launch, kinds=WRITES)
    assert not without(touched, [(one.address, one.size_bytes) for one in named])
    exact = [(one.address, one.size_bytes) for one in named if one.exactness is Exactness.EXACT]
    assert not without(exact, touched)
    alone = replace(found)
    alone.__dict__["combined"] = found.accesses
    if all(one.exactness is Exactness.EXACT for one in alone.ranges(launch, kinds=WRITES)):
        assert not without([(one.address, one.size_bytes) for one in named], touched), "they were exact one by one"


def test_rows_that_are_so_far_apart_as_the_launch_says_are_one_access() -> None:
    stores = [(0, rows, 0) for rows in range(8)]
    found = kernel(stores, block=32)
    assert (len(found.accesses), len(found.combined)) == (8, 1)
    launch = launched(1, 32, 20, 1000)
    named = found.ranges(launch, kinds=WRITES)
    assert [(one.address, one.size_bytes) for one in named] == [(BASE + 4000 * row, 80) for row in range(8)]
    assert all(one.exactness is Exactness.EXACT for one in named)


def test_tiles_of_tiles_are_one_access() -> None:
    stores = [(a + 64 * b, 0, a + 64 * b) for a in (0, 1, 2, 3) for b in (0, 1, 2)]
    found = kernel(stores, every=4)
    assert len(found.combined) == 1
    assert [len(found.combined[0].parts), len(found.combined[0].parts[0].parts)] == [3, 4]


def test_a_block_that_the_kernel_does_not_allow_is_no_launch(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    found = kernel([(0, 0, 0)], block=32)
    with pytest.raises(UsageError, match="demands blocks of"):
        found.ranges(launched(1, 64, 100, 1))
    catalogue = Catalogue([found], cache=tmp_path)
    assert catalogue.ranges(0, launched(1, 32, 100, 1), kinds=WRITES) == found.ranges(
        launched(1, 32, 100, 1), kinds=WRITES
    )
    with pytest.raises(UsageError, match="does not fit"):
        catalogue.ranges(0, launched(1, 64, 100, 1), kinds=WRITES)


def with_lanes(access: Access, change: Callable[[Atom], Poly]) -> Access:
    """An access with its lanes changed, and without its parts."""
    rewriter = Rewriter(Atoms(), lambda atom: change(atom) if atom.kind == "lane" else None)
    steps = tuple(rewriter.condition(step) if isinstance(step, Condition) else step for step in access.steps)
    return replace(access, address=rewriter.poly(cast(Poly, access.address)), steps=steps, parts=())


def forgetting_lanes(access: Access) -> Access:
    """What it would be if only the first of the accesses it stands for were there."""
    return with_lanes(access, lambda atom: const(0))


def shorter_lanes(access: Access) -> Access:
    """One access too few."""

    def fewer(atom: Atom) -> Poly:
        args = (cast(int, atom.args[0]) - 1, atom.args[1])
        return Poly({(Atom(atom.number, "lane", args, frozenset(), 1),): 1})

    return with_lanes(access, fewer)


@pytest.mark.parametrize("mutation", [forgetting_lanes, shorter_lanes])
@pytest.mark.parametrize("name", ["pointwise_gelu", "softmax_rows", "transpose_heads", "residual_add"])
def test_accesses_put_together_wrongly_are_caught(
    name: str, mutation: Callable[[Access], Access], recorder_program: Path, tmp_path: Path
) -> None:
    file = HERE / "triton" / f"{name}-sm_90.ptx"
    template = only_template(file)
    wrong = replace(template)
    wrong.__dict__["combined"] = tuple(mutation(one) for one in template.combined)
    assert wrong.combined != template.combined
    ptx = tmp_path / file.name
    ptx.write_text(runnable(file.read_text()))
    caught = False
    with Recorder(recorder_program, ptx) as recorder:
        for seed in range(12):
            made = triton_launches.make(template.kernel, seed)
            recorded, launch = recorder.run(template.kernel, made), launch_of(made, recorder)
            check(template, launch, recorded, name)
            try:
                check(wrong, launch, recorded, name)
            except AssertionError:
                caught = True
    assert caught
