"""What people and programs are told of an image."""

from __future__ import annotations

import json

import pytest
import small_images

from woodfrog.image import inspect


def test_the_summary_is_json_and_says_what_matters() -> None:
    told = json.loads(json.dumps(inspect.summary(small_images.manifest(name="small", number=3))))
    assert told["reference"] == "small@3"
    assert told["gpu_bytes"] == sum(size for _, size in small_images.HANDLES)
    assert told["chunks"] == 7
    assert told["phases"] == {"quiesce": 0.001, "drain": 0.5}
    assert [device["data_bytes"] for device in told["devices"]] == [
        sum(size for device, size in small_images.HANDLES if device == wanted) for wanted in (0, 1)
    ]


def test_the_lines_name_every_gpu_and_process() -> None:
    whats = [what for what, _ in inspect.lines(small_images.manifest())]
    assert {"GPU 0", "GPU 1", "process 100", "process 101"} <= set(whats)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_600, "1 MB"),
        (123_456_789, "123 MB"),
        (16 << 30, "17.2 GB"),
        (5 << 40, "5498 GB"),
    ],
)
def test_sizes_are_told_in_decimal_units_with_three_digits(size: int, text: str) -> None:
    assert inspect.human_bytes(size) == text


def test_control_characters_are_shown_and_long_text_is_cut() -> None:
    assert inspect.printable("a\x1b[2J\n\x07é") == "a\\x1b[2J\\n\\x07é"
    assert inspect.printable("x" * 500, limit=10) == "x" * 9 + "…"


def test_a_time_that_no_clock_shows_is_unknown() -> None:
    assert inspect.iso_time(1e300) == "unknown"
    assert inspect.iso_time(float("nan")) == "unknown"
    assert inspect.iso_time(0).startswith(("1970", "1969"))
