"""Templates against the truth: every access that the simulated GPU records lies in a range that the template names.

The number of launches of each kernel is WOODFROG_KERNEL_LAUNCHES (see DEFAULT_LAUNCHES for `make test`).
"""

from __future__ import annotations

import os
from pathlib import Path

import launches
import pytest
from conftest import VARIANTS, Compiled
from intervals import without
from recorder import Recorded, Recorder

from woodfrog.kernels import READS, WRITES, Exactness, Launch, Range, Template, templates

DEFAULT_LAUNCHES = 40  # of each kernel and variant: more than 10,000 in all
LAUNCHES = int(os.environ.get("WOODFROG_KERNEL_LAUNCHES", DEFAULT_LAUNCHES))
FILES = ("elementwise", "blocks", "irregular")


def launch_of(made: launches.Made, recorder: Recorder) -> Launch:
    allocations = sorted([*made.allocations, *recorder.symbols.values()])
    return Launch(made.grid, made.block, made.parameters, allocations, recorder.symbols)


def missed(named: list[Range], touched: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Touched bytes outside all ranges."""
    return without(touched, [(one.address, one.size_bytes) for one in named])


def untouched(named: list[Range], touched: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Bytes in ranges called exact that were not touched."""
    return without([(o.address, o.size_bytes) for o in named if o.exactness is Exactness.EXACT], touched)


def check(template: Template, launch: Launch, recorded: Recorded, what: str) -> None:
    for kinds, touched in (
        (READS, recorded.loads + recorded.atomics),
        (WRITES, recorded.stores + recorded.atomics),
    ):
        named = template.ranges(launch, kinds=kinds)
        assert not missed(named, touched), f"{what}: {missed(named, touched)[:3]} touched, not in {named[:5]}"
        assert not untouched(named, touched), f"{what}: {untouched(named, touched)[:3]} called exact, not touched"


@pytest.mark.parametrize(("architecture", "level"), VARIANTS)
@pytest.mark.parametrize("file", FILES)
def test_every_access_of_the_corpus_lies_in_a_named_range(
    file: str, architecture: str, level: str, compiled: Compiled, recorder_program: Path
) -> None:
    ptx = compiled(file, architecture, level)
    found = templates(ptx.read_text())
    assert {template.kernel for template in found} <= launches.GENERATORS.keys()
    with Recorder(recorder_program, ptx) as recorder:
        for template in found:
            for seed in range(LAUNCHES):
                made = launches.make(template.kernel, seed)
                recorded = recorder.run(template.kernel, made)
                what = f"{template.kernel}, {architecture}, {level}, launch {seed}"
                assert not recorded.fault, f"{what}: {recorded.fault}"
                check(template, launch_of(made, recorder), recorded, what)


def test_the_corpus_has_at_least_sixty_kernels_and_a_launch_for_each(compiled: Compiled) -> None:
    names = {t.kernel for file in FILES for t in templates(compiled(file, "sm_90", "O3").read_text())}
    assert names == launches.GENERATORS.keys()
    assert len(names) >= 60
