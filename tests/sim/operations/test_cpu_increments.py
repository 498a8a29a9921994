"""What a second checkpoint costs on the CPU side: pages that changed, not those that CRIU's packing has moved."""

from __future__ import annotations

import os
import signal

from product import Product, Stepper

from woodfrog.image.diff import diff
from woodfrog.image.manifest import Manifest
from woodfrog.image.repository import ImageRepository

MEMORY_BYTES = 32 << 20
# Private memory with a different word in each page; page 0 and every 64th are not there. SIGUSR1: page 0 comes, and
# in CRIU's file of pages all others move by one. SIGUSR2: look whether all of it is still right.
HOLDER = f"""
import mmap, os, signal
memory = mmap.mmap(-1, {MEMORY_BYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
here = [page for page in range({MEMORY_BYTES} // 4096) if page % 64]
def say(line):
    os.write(1, line.encode() + bytes([10]))  # one write: the log has another writer
def word(page):
    return (page * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little") * 64
def touch(*_):
    memory[0:512] = word(1 << 20)
    say("holder touched")
def check(*_):
    wrong = [page for page in here if memory[page * 4096 : page * 4096 + 512] != word(page)]
    say("holder right" if not wrong and memory[0:512] == word(1 << 20) else "holder WRONG")
for page in here:
    memory[page * 4096 : page * 4096 + 512] = word(page)
signal.signal(signal.SIGUSR1, touch)
signal.signal(signal.SIGUSR2, check)
say("holder " + str(os.getpid()))
while True:
    signal.pause()
"""


def holder(target: Stepper) -> int:
    return next(int(line.split()[1]) for line in target.lines() if line.startswith("holder "))


def test_a_second_checkpoint_stores_the_pages_that_changed_not_those_that_moved(product: Product) -> None:
    target = product.run_script(f"python3 -c '{HOLDER}' & \"$@\" & wait")
    target.wait_for(lambda lines: any(line.startswith("holder ") for line in lines), "holder's memory")
    first = product.checkpoint(target)
    assert first["cpu_new_bytes"] > MEMORY_BYTES * 0.9
    pid = holder(target)
    os.kill(pid, signal.SIGUSR1)
    target.wait_for(lambda lines: "holder touched" in lines, "page that comes")
    second = product.checkpoint(target, stop=True)
    assert 0 < second["cpu_new_bytes"] < second["cpu_bytes"] * 0.05
    with ImageRepository(product.store_path) as images:
        before, after = images.manifest(first["image"]), images.manifest(second["image"])
    rows = {row.pid: row for row in diff(before, after).processes}
    assert 0 < rows[pid].changed_bytes < MEMORY_BYTES * 0.05
    assert pages_of(after) >= {process.pid for process in after.processes}
    restored = product.restore(second["image"], target.log, verify=True)
    os.kill(pid, signal.SIGUSR2)
    restored.wait_for(lambda lines: any(line.startswith("holder right") for line in lines), "holder's memory, right")
    assert "holder WRONG" not in restored.lines()
    assert sorted(product.images()) == sorted([first["image"], second["image"]])


def pages_of(manifest: Manifest) -> set[int]:
    """Whose pages files the image knows, of those that are cut by address."""
    assert manifest.cpu is not None
    return {record.pid for record in manifest.cpu.files if record.sizes}
