"""Kinds of blocks, where they are read, what is new in a process's maps, and that every form of a trace can be made."""

from __future__ import annotations

import json
import os
import random
from html.parser import HTMLParser
from pathlib import Path

from woodfrog.driver.calls import Kind, SystemCall, by_kind
from woodfrog.trace import contents, memory, page, text
from woodfrog.trace.record import DriverFile, Holdings, LongCall, Sample, SavedState, Step, Trace

BLOCK = contents.BLOCK_BYTES
# Of a cubin for sm_90: MOV R1, c[0x0][0x28]; S2R; EXIT; BRA; NOP, as nvdisasm prints their words.
INSTRUCTIONS = [
    0x000FE40000000F00_00000A0000017A02,
    0x000E220000002500_0000000000007919,
    0x000FEA0003800000_000000000000794D,
    0x000FC0000383FFFF_FFFFFFF000007947,
    0x000FC00000000000_0000000000007918,
]


def code_block() -> bytes:
    words = b"".join(word.to_bytes(16, "little") for word in INSTRUCTIONS)
    return (words * (BLOCK // len(words) + 1))[:BLOCK]


def test_each_kind_of_block_is_told(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(4 * BLOCK)
    (tmp_path / "weights").write_bytes(b"header" * 86 + data[:-4] + b"tail")
    known = contents.Known([tmp_path / "weights"])
    # The file holds the data at an offset of 516 bytes: a block of it starts at no multiple of 512.
    assert contents.kind_of(data[:BLOCK], known) == contents.OTHER
    (tmp_path / "weights").write_bytes(b"\0" * 512 + data)
    known = contents.Known([tmp_path / "weights"])
    assert contents.kind_of(data[BLOCK : 2 * BLOCK], known) == contents.KNOWN
    assert contents.kind_of(bytes(BLOCK), known) == contents.ZERO
    assert contents.kind_of(b"\x5e\xed\0\0\0\0\0\0" * (BLOCK // 8)) == contents.FILL
    assert contents.kind_of(code_block()) == contents.CODE
    assert contents.kind_of(random.Random(2).randbytes(BLOCK)) == contents.OTHER


def test_numbers_are_not_taken_for_code() -> None:
    import struct

    generator = random.Random(3)
    floats = struct.pack(f"<{BLOCK // 4}f", *(generator.gauss(0, 0.02) for _ in range(BLOCK // 4)))
    longs = struct.pack(f"<{BLOCK // 8}Q", *range(BLOCK // 8))
    assert [contents.kind_of(block) for block in (floats, longs)] == [contents.OTHER] * 2


def test_blocks_are_read_over_the_whole_mapping() -> None:
    assert list(contents.offsets(5 * BLOCK + 17)) == [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK]
    found = contents.offsets(16 << 30, 8)
    assert len(found) == 8
    assert found[0] == 0
    assert found[-1] == (14 << 30)
    assert all(offset % BLOCK == 0 for offset in found)


def test_own_memory_is_surveyed() -> None:
    import ctypes
    import mmap

    size = 64 * BLOCK
    before = memory.ranges(os.getpid())
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.write(b"\1" * (size // 2))
    view = ctypes.c_char.from_buffer(area)
    begin = ctypes.addressof(view)
    try:
        count, kinds = contents.survey(os.getpid(), begin, begin + size)
        assert (count, kinds[contents.ZERO], kinds[contents.FILL]) == (64, 0.5, 0.5)
        assert any(
            found_begin <= begin and found_end >= begin + size
            for found_begin, found_end in memory.new_writable(before, memory.ranges(os.getpid()))
        )
    finally:
        del view
        area.close()


def test_a_mapping_that_the_kernel_joined_to_another_counts_with_what_is_new() -> None:
    old = [memory.Range(0x1000, 0x5000, "rw-p", ""), memory.Range(0x9000, 0xA000, "rw-p", "/a file")]
    new = [memory.Range(0x1000, 0x9000, "rw-p", ""), memory.Range(0x10000, 0x11000, "r--p", "")]
    assert memory.new_writable(old, new) == [(0x5000, 0x9000)]


def test_calls_are_summed_by_what_they_do() -> None:
    nvidia = "/dev/nvidiactl"
    calls = [
        SystemCall(0.0, 0.2, 1, "ioctl", (7, 0xC020462A, 0, 0, 0, 0), 0, nvidia),
        SystemCall(0.3, 0.1, 1, "ioctl", (7, 0xC020462A, 0, 0, 0, 0), 0, nvidia),
        SystemCall(0.4, 0.5, 1, "mmap", (0, 1 << 30, 3, 0x8022, 2**64 - 1, 0), 4096, ""),
        SystemCall(0.9, 9.0, 2, "read", (5, 0, 8, 0, 0, 0), 8, "anon_inode:[eventfd]"),
    ]
    found = by_kind(calls)
    assert [(one.kind, one.count, one.waits) for one in found] == [
        ("read", 1, True),
        ("mmap populated", 1, False),
        (f"ioctl {nvidia} 0x462a", 2, False),
    ]


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def a_trace() -> Trace:
    return Trace(
        pid=7,
        command="python <script>alert(1)</script>",
        started_by_us=False,
        steps=[Step("lock", 0.0, 0.001, "locked"), Step("checkpoint", 0.01, 0.4, "locked", "it failed & was refused")],
        samples=[Sample(0.0, 1 << 20, 2 << 20, 0, None), Sample(0.4, 500 << 20, 2 << 20, 0, 1 << 30)],
        holdings=[Holdings("lock", [DriverFile("/dev/nvidia0", 9, 3, 1 << 20)])],
        saved=SavedState(0x7F0000000000, 1 << 30, 1 << 30, 0, 8192, {"zero": 0.9, "code": 0.1}, 1e9, 0.0),
        calls={"lock": [Kind("ioctl /dev/nvidiactl 0x462a", 3, 0.01, False)], "checkpoint": []},
        long_calls=[LongCall("lock", 0.0, 0.001, 8, "ioctl /dev/nvidiactl 0x462a")],
        threads={8: "cuda-EvtHandlr"},
        unseen=["the <rest>"],
    )


def test_a_page_is_whole_and_takes_nothing_of_a_process_for_markup() -> None:
    shown = page.page(a_trace())
    parser = Balanced()
    parser.feed(shown)
    assert parser.open == []
    assert "<script" not in shown
    assert "http" not in shown
    assert "it failed &amp; was refused" in shown


def test_text_and_json_tell_the_same() -> None:
    shown = "\n".join(text.lines(a_trace()))
    for expected in ("FAILED: it failed", "1024 MiB at 0x7f0000000000", "zero 90.0%", "the <rest>", "0x462a"):
        assert expected in shown, expected
    assert json.loads(json.dumps(a_trace().to_dict()))["steps"][1]["error"] == "it failed & was refused"


def test_an_empty_trace_can_be_shown() -> None:
    empty = Trace(pid=1, command="", started_by_us=True)
    assert list(text.lines(empty))
    assert page.page(empty)
