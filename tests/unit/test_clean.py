"""What is called clean: only what the target vouches for, against exactly the image that it means."""

from __future__ import annotations

import random

import pytest

from woodfrog.image.chunks import Cut
from woodfrog.operations.clean import Clean, CleanChangedError
from woodfrog.operations.data import plan_parts
from woodfrog.operations.history import Baseline
from woodfrog.operations.notes import HandleNote
from woodfrog.target.tracking import KernelUse, Tracked

CHUNK = 64 << 10
HANDLES = [
    HandleNote(1, 4 * CHUNK, 0, "allocation"),
    HandleNote(2, 3 * CHUNK + 100, 1, "slab"),
    HandleNote(3, 2 * CHUNK, 0, "virtual_handle"),
]
PARTS = plan_parts(HANDLES, [0, 1])
CUTS = [Cut(part.sizes, CHUNK) for part in PARTS]
IN_ORDER = tuple(HANDLES[index] for part in PARTS for index in part.indices)
OLD = [random.Random(part.number).randbytes(32 * len(CUTS[part.number])) for part in PARTS]
BASELINE = Baseline(77, CHUNK, IN_ORDER, b"".join(OLD))


def tracked(ranges: dict[int, list[tuple[int, int]]], **more: object) -> Tracked:
    made = Tracked(77, False, "", 5, 5, ranges, [KernelUse("axpy", 5, True)], True)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def clean(report: Tracked, baseline: Baseline | None = BASELINE, **options: object) -> Clean:
    return Clean(HANDLES, PARTS, CUTS, CHUNK, report, baseline, **options)  # type: ignore[arg-type]


def runs(found: Clean) -> list[tuple[int, int, int]]:
    return [(HANDLES[run.index].handle, run.first, run.end) for part in found.parts for run in part.runs]


def test_nothing_written_is_nothing_hashed() -> None:
    found = clean(tracked({}))
    assert (found.reason, runs(found), found.clean_bytes) == ("", [], sum(handle.size for handle in HANDLES))
    assert [part.fill(b"") for part in found.parts] == OLD


def test_ranges_are_widened_to_chunks_joined_and_cut_at_the_end() -> None:
    found = clean(
        tracked({1: [(CHUNK + 1, 1), (0, 5), (3 * CHUNK - 1, 2)], 2: [(3 * CHUNK + 50, 1 << 40)], 9: [(0, 1)]})
    )
    assert runs(found) == [(1, 0, 4), (2, 3, 4)]
    assert found.clean_bytes == 3 * CHUNK + 2 * CHUNK
    assert [run.size_bytes for part in found.parts for run in part.runs] == [4 * CHUNK, 100]
    new = [b"\1" * 32 * 4, b"\2" * 32]
    first, second = (part.fill(hashed) for part, hashed in zip(found.parts, new, strict=True))
    assert first == new[0] + OLD[0][4 * 32 :]
    assert second == OLD[1][: 3 * 32] + new[1]


@pytest.mark.parametrize(
    ("report", "baseline", "reason"),
    [
        (tracked({}), None, "no earlier image"),
        (tracked({}, baseline=76), BASELINE, "since another image"),
        (tracked({}, baseline=0), BASELINE, "since another image"),
        (tracked({}, everything=True, why="a kernel"), BASELINE, "a kernel"),
        (tracked({}), Baseline(77, 2 * CHUNK, IN_ORDER, b""), "another size"),
    ],
)
def test_what_does_not_fit_is_hashed(report: Tracked, baseline: Baseline | None, reason: str) -> None:
    found = clean(report, baseline)
    assert reason in found.reason
    assert (runs(found), found.clean_bytes) == ([(1, 0, 4), (3, 0, 2), (2, 0, 4)], 0)


def test_a_full_checkpoint_hashes_all() -> None:
    assert clean(tracked({}), full=True).clean_bytes == 0


@pytest.mark.parametrize("other", [{"handle": 11}, {"size": 8 * CHUNK}, {"device": 1}, {"kind": "slab"}])
def test_a_handle_that_is_not_the_same_is_hashed(other: dict[str, object]) -> None:
    fields = {"handle": 1, "size": 4 * CHUNK, "device": 0, "kind": "allocation", **other}
    changed = Baseline(77, CHUNK, (HandleNote(**fields), *IN_ORDER[1:]), b"".join(OLD) + bytes(32 * 8))  # type: ignore[arg-type]
    assert (1, 0, 4) in runs(clean(tracked({}), changed))


def test_a_difference_in_what_is_clean_is_an_error_that_names_the_kernels() -> None:
    found = clean(tracked({1: [(0, 1)]}))
    written = bytearray(OLD[0])
    written[:32] = bytes(32)
    found.check([bytes(written), OLD[1]])
    written[5 * 32] ^= 1
    with pytest.raises(CleanChangedError, match=r"1 chunks .* axpy"):
        found.check([bytes(written), OLD[1]])
