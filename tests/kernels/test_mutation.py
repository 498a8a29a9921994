"""The differential test finds templates that are wrong: each kind of mistake, made on purpose, is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import launches
import pytest
from conftest import Compiled
from recorder import Recorder
from test_differential import check, launch_of

from woodfrog.kernels import Access, Template, templates
from woodfrog.kernels.template import LoopFact
from woodfrog.kernels.values import Compare, Condition, Poly, const

Mutation = Callable[[Access], Access]
SEEDS = range(12)


def moved(by: int) -> Mutation:
    return lambda a: replace(a, address=None if a.address is None else a.address + const(by))


def shorter(access: Access) -> Access:
    return replace(access, size=const(access.size.constant // 2)) if access.size and access.size.constant else access


def other_stride(access: Access) -> Access:
    if access.address is None:
        return access
    terms = {m: c // 2 if m and abs(c) > 1 else c for m, c in access.address.terms.items()}
    return replace(access, address=Poly(terms))


def tighter_condition(access: Access) -> Access:
    """`x < n` becomes `x + 1 < n`."""
    steps = []
    for step in access.steps:
        if isinstance(step, Condition) and step.op == "cmp":
            compare = step.args[0]
            assert isinstance(compare, Compare)
            side = "left" if compare.relation in ("lt", "le") else "right"
            step = Condition("cmp", (compare._replace(**{side: getattr(compare, side) + const(1)}),))
        steps.append(step)
    return replace(access, steps=tuple(steps))


def no_conditions(access: Access) -> Access:
    return replace(access, steps=tuple(step for step in access.steps if isinstance(step, LoopFact)))


CASES: list[tuple[str, str, Mutation]] = [
    ("saxpy", "elementwise", moved(4)),
    ("saxpy", "elementwise", moved(-4)),
    ("saxpy", "elementwise", shorter),
    ("saxpy", "elementwise", other_stride),
    ("saxpy", "elementwise", tighter_condition),
    ("saxpy", "elementwise", no_conditions),
    ("two_dimensions", "elementwise", other_stride),
    ("strided", "elementwise", tighter_condition),
    ("transpose", "blocks", moved(4)),
    ("matmul_tiled", "blocks", moved(64)),
    ("kv_cache_append", "irregular", moved(4)),
    ("nested_loops", "irregular", other_stride),
    ("fill_grid_stride", "elementwise", tighter_condition),
]


def changed(template: Template, mutation: Mutation) -> Template:
    accesses = tuple(mutation(access) for access in template.accesses)
    assert accesses != template.accesses, "the mutation changes nothing"
    return replace(template, accesses=accesses)


@pytest.mark.parametrize(("kernel", "file", "mutation"), CASES)
def test_a_wrong_template_is_caught_by_recorded_accesses(
    kernel: str, file: str, mutation: Mutation, compiled: Compiled, recorder_program: Path
) -> None:
    ptx = compiled(file, "sm_90", "O3")
    (template,) = [t for t in templates(ptx.read_text()) if t.kernel == kernel]
    wrong = changed(template, mutation)
    with Recorder(recorder_program, ptx) as recorder:
        caught = False
        for seed in SEEDS:
            made = launches.make(kernel, seed)
            recorded, launch = recorder.run(kernel, made), launch_of(made, recorder)
            check(template, launch, recorded, kernel)  # the right one passes
            try:
                check(wrong, launch, recorded, kernel)
            except AssertionError:
                caught = True
        assert caught
