"""Templates evaluated with the contents of memory: closer, never too close, and only where contents cannot change."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import launches
import pytest
from conftest import Compiled
from intervals import size_bytes
from recorder import Recorder
from test_differential import FILES, launch_of, missed
from test_templates import ALLOCATIONS, BASE, template

from woodfrog.kernels import READS, WRITES, Exactness, Launch, Range, Template, templates
from woodfrog.kernels.catalogue import Catalogue

LAUNCHES = int(os.environ.get("WOODFROG_KERNEL_LAUNCHES", "4"))
INDIRECT = ("scatter", "embedding_backward", "pointer_table", "kv_cache_write")  # their writes depend on loads


def with_contents(launch: Launch, made: launches.Made) -> Launch:
    return Launch(
        launch.grid, launch.block, launch.parameters, launch.allocations, launch.symbols, contents=made.contents
    )


@pytest.mark.parametrize("file", FILES)
def test_no_access_is_missed_with_contents_and_both_evaluators_agree(
    file: str, compiled: Compiled, recorder_program: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    ptx = compiled(file, "sm_80", "O3")
    found = templates(ptx.read_text())
    catalogue = Catalogue(found, cache=tmp_path, compiler=None if file == "irregular" else "")
    with Recorder(recorder_program, ptx) as recorder:
        for number, one in enumerate(found):
            for seed in range(LAUNCHES):
                made = launches.make(one.kernel, seed)
                recorded = recorder.run(one.kernel, made)
                launch = with_contents(launch_of(made, recorder), made)
                for kinds, touched in (
                    (READS, recorded.loads + recorded.atomics),
                    (WRITES, recorded.stores + recorded.atomics),
                ):
                    named = one.ranges(launch, kinds=kinds)
                    assert not missed(named, touched), f"{one.kernel}, launch {seed}"
                    assert catalogue.ranges(number, launch, kinds=kinds) == named, f"{one.kernel}, launch {seed}"


@pytest.mark.parametrize("kernel", INDIRECT)
def test_writes_through_loaded_indices_and_pointers_have_bounds(
    kernel: str, compiled: Compiled, recorder_program: Path
) -> None:
    ptx = compiled("irregular", "sm_90", "O3")
    (one,) = [t for t in templates(ptx.read_text()) if t.kernel == kernel]
    named_bytes = touched_bytes = 0
    with Recorder(recorder_program, ptx) as recorder:
        for seed in range(20):
            made = launches.make(kernel, seed)
            recorded = recorder.run(kernel, made)
            named = one.ranges(with_contents(launch_of(made, recorder), made), kinds=WRITES)
            assert all(place.exactness is Exactness.BOUNDED for place in named)
            named_bytes += size_bytes((place.address, place.size_bytes) for place in named)
            touched_bytes += size_bytes(recorded.stores + recorded.atomics)
    assert named_bytes <= 1.05 * touched_bytes


def ranges_of(body: str, contents: dict[int, int]) -> list[Range]:
    """The writes of one thread, with 32-bit words of memory at some addresses and zeros elsewhere."""

    def read(address: int, size: int) -> bytes:
        return b"".join(struct.pack("<I", contents.get(at, 0)) for at in range(address, address + size, 4))

    one: Template = template(body)
    return one.ranges(
        Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE, 0), ALLOCATIONS, contents=read), kinds=WRITES
    )


INDEXED = """
    ld.param.u64 %rd1, [k_param_0]; {load} %r1, [%rd1];
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], 7;
"""


def test_a_loaded_index_names_the_bytes_it_leads_to() -> None:
    assert ranges_of(INDEXED.format(load="ld.global.u32"), {BASE: 5}) == [Range(BASE + 20, 4, Exactness.BOUNDED)]


def test_an_index_that_the_kernel_itself_overwrites_is_not_believed() -> None:
    """With index 0 the store hits the index: another thread, or the next iteration, would load something else."""
    (whole,) = ranges_of(INDEXED.format(load="ld.global.u32"), {BASE: 0})
    assert whole.exactness is Exactness.WHOLE


@pytest.mark.parametrize("load", ["ld.volatile.global.u32", "ld.relaxed.gpu.global.u32", "ld.acquire.gpu.global.u32"])
def test_an_index_that_others_may_change_meanwhile_is_not_believed(load: str) -> None:
    (whole,) = ranges_of(INDEXED.format(load=load), {BASE: 5})
    assert whole.exactness is Exactness.WHOLE


def test_memory_that_cannot_be_read_gives_the_whole_allocation() -> None:
    one = template(INDEXED.format(load="ld.global.u32"))
    launch = Launch((1, 1, 1), (1, 1, 1), struct.pack("<QI", BASE, 0), ALLOCATIONS, contents=lambda _a, _s: None)
    (whole,) = one.ranges(launch, kinds=WRITES)
    assert whole.exactness is Exactness.WHOLE


def test_an_index_of_an_index_is_followed_through_both_tables() -> None:
    body = """
    ld.param.u64 %rd1, [k_param_0]; ld.global.u32 %r1, [%rd1];
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; ld.global.u32 %r2, [%rd3];
    mul.wide.u32 %rd4, %r2, 4; add.s64 %rd5, %rd1, %rd4; st.global.u32 [%rd5], 7;
    """
    assert ranges_of(body, {BASE: 2, BASE + 8: 9}) == [Range(BASE + 36, 4, Exactness.BOUNDED)]


def test_more_values_than_are_told_apart_become_bounds() -> None:
    body = """
    ld.param.u64 %rd1, [k_param_0]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 1024, %r1;
    mul.wide.u32 %rd2, %r3, 4; add.s64 %rd3, %rd1, %rd2; ld.global.u32 %r4, [%rd3];
    mul.wide.u32 %rd4, %r4, 4; add.s64 %rd5, %rd1, %rd4; st.global.u32 [%rd5], 7;
    """
    one = template(body)
    memory = [(BASE, 1 << 22)]

    def read(address: int, size: int) -> bytes:
        first = (address - BASE) // 4
        return struct.pack(f"<{size // 4}I", *(100_000 + 2 * i for i in range(first, first + size // 4)))

    launch = Launch((2, 1, 1), (1024, 1, 1), struct.pack("<QI", BASE, 0), memory, contents=read)
    (bounds,) = one.ranges(launch, kinds=WRITES)
    assert bounds == Range(BASE + 400_000, 4 * (2 * 2047 + 1), Exactness.BOUNDED)
