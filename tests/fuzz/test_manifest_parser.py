"""Fuzzing the manifest parser: whatever comes in, it answers with a manifest or with BadImageError, and quickly.

Takes WOODFROG_FUZZ_SECONDS (default 12) in all, longer only where a machine is too slow for MIN_EXAMPLES in that time;
failures are minimised by hypothesis and kept in its database.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import small_images
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from woodfrog.errors import BadImageError
from woodfrog.image import codec
from woodfrog.image.manifest import Manifest

SECONDS = float(os.environ.get("WOODFROG_FUZZ_SECONDS", "12"))
MAX_DECODE_S = 5.0
MANIFEST = small_images.manifest(cpu=small_images.cpu_with_pages())
BODY = msgspec.msgpack.encode(MANIFEST)
FIELDS = msgspec.msgpack.decode(BODY)
FLAGS = int(MANIFEST.features)
TESTS = 4
# However slow the machine: fewer say nothing, and the last test could not see both outcomes.
MIN_EXAMPLES = 200

fuzz = settings(
    max_examples=1_000_000, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)


class Budget:
    """Each test's share of the time; once it is used up the remaining examples return at once."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.examples = 0
        self.accepted = 0

    def spent(self) -> bool:
        return time.monotonic() - self.begun > SECONDS / TESTS


class Enough(BaseException):
    """Ends a test whose time is used up. No Exception: hypothesis would take that for a failure and minimise it."""


def seal(body: bytes, mandatory: int = FLAGS) -> bytes:
    prefix = codec.PREFIX.pack(codec.MAGIC, 1, codec.HEADER_BYTES, mandatory, 0, len(body), 0)
    content = prefix + blake3(prefix).digest() + body
    return content + blake3(content).digest()


def decode(data: bytes) -> Manifest | None:
    """The manifest, or None for a refusal; anything else that is raised, or that takes long, fails the test."""
    begun = time.thread_time()  # not by the clock: the machine may be busy with something else
    try:
        manifest = codec.decode(data)
    except BadImageError:
        manifest = None
    assert time.thread_time() - begun < MAX_DECODE_S
    if manifest is not None:
        # What was accepted can be written again, and is then the same: nothing slipped through unchecked.
        assert codec.decode(codec.encode(manifest)) == manifest
    return manifest


def run(test: Any) -> Budget:
    """Let hypothesis loose on `test(budget)` until the budget is spent."""
    budget = Budget()
    with contextlib.suppress(Enough):
        test(budget)
    print(f"{budget.examples} examples, {budget.accepted} accepted")
    assert budget.examples >= MIN_EXAMPLES
    return budget


def count(budget: Budget) -> None:
    if budget.spent() and budget.examples >= MIN_EXAMPLES:
        raise Enough
    budget.examples += 1


def test_arbitrary_bytes_are_never_a_manifest_and_never_an_accident() -> None:
    def body(budget: Budget) -> None:
        @fuzz
        @given(st.binary(max_size=4096), st.booleans())
        def check(data: bytes, sealed: bool) -> None:
            count(budget)
            assert decode(seal(data) if sealed else data) is None

        check()

    run(body)


def test_a_manifest_with_bytes_changed_is_refused() -> None:
    whole = codec.encode(MANIFEST)

    def body(budget: Budget) -> None:
        edit = st.tuples(st.integers(0, len(whole) - 1), st.binary(max_size=8), st.integers(0, 8))

        @fuzz
        @given(st.lists(edit, min_size=1, max_size=4))
        def check(edits: list[tuple[int, bytes, int]]) -> None:
            count(budget)
            data = whole
            for position, replacement, removed in edits:
                data = data[:position] + replacement + data[position + removed :]
            assert (decode(data) is None) == (data != whole)

        check()

    run(body)


def test_a_sealed_body_with_bytes_changed_is_refused_or_a_manifest() -> None:
    def body(budget: Budget) -> None:
        edit = st.tuples(st.integers(0, len(BODY) - 1), st.binary(max_size=8), st.integers(0, 8))

        @fuzz
        @given(st.lists(edit, min_size=1, max_size=4))
        def check(edits: list[tuple[int, bytes, int]]) -> None:
            count(budget)
            data = BODY
            for position, replacement, removed in edits:
                data = data[:position] + replacement + data[position + removed :]
            budget.accepted += decode(seal(data)) is not None

        check()

    run(body)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.sampled_from([0, 1, (1 << 31), (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1])
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=80),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=4,
)


def near(value: Any, step: int) -> Any:
    """A value of the same type, a little off: what a faulty writer would write."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return abs(value + step)
    if isinstance(value, float):
        return value * step
    if isinstance(value, str):
        return value + "x" * abs(step)
    if isinstance(value, bytes):
        return value[:-step] if step > 0 else value + b"x" * -step
    if isinstance(value, list):
        return value[:-1] if step > 0 else value + value[:1]
    return value


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in the decoded body."""
    yield prefix
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*prefix, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from paths(value[index], (*prefix, index))


def replaced(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], change)
    return copy


def test_a_sealed_manifest_with_fields_changed_is_refused_or_a_manifest() -> None:
    places = list(paths(FIELDS))
    edit = st.tuples(st.sampled_from(places), st.just(near), st.integers(-9, 9)) | st.tuples(
        st.sampled_from(places), st.just(lambda old, new: new), VALUES
    )

    def body(budget: Budget) -> None:
        @fuzz
        @given(st.lists(edit, min_size=1, max_size=3), st.integers(0, 31))
        def check(edits: list[tuple[tuple[Any, ...], Any, Any]], flags: int) -> None:
            count(budget)
            fields = FIELDS
            for path, change, argument in edits:
                try:
                    fields = replaced(fields, path, lambda old, c=change, a=argument: c(old, a))
                except (KeyError, IndexError, TypeError):
                    continue  # an earlier edit took this place away
            # Most examples keep the right flags, so that the fields are what decides.
            mandatory = FLAGS if flags >= 8 else flags
            budget.accepted += decode(seal(msgspec.msgpack.encode(fields), mandatory)) is not None

        check()

    # Fields that say nothing about others (names, notes) can be anything: if nothing at all is accepted, the fuzzer
    # never gets past the first checks and tests nothing.
    budget = run(body)
    assert 0 < budget.accepted < budget.examples
