"""Physical GPU memory: it lives as long as anybody refers to it, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from woodfrog._native import transfer

from .conftest import MIB, View, noise

Filled = Callable[..., list[transfer.Memory]]


def test_a_device_says_what_it_is(device: transfer.Device) -> None:
    assert transfer.driver_version() >= 12080
    assert len(device.uuid) == 16
    assert device.uuid != bytes(16)
    assert device.name
    assert 0 < device.free_bytes() <= device.total_bytes
    assert device.granularity_bytes == 2 * MIB
    assert transfer.Device(1).uuid != device.uuid


def test_a_device_that_is_not_there_is_an_error_of_the_driver() -> None:
    with pytest.raises(transfer.TransferError, match="cuDeviceGet") as caught:
        transfer.Device(99).free_bytes()
    assert caught.value.code > 0


def test_memory_outlives_its_maker_in_a_descriptor(view: View, device: transfer.Device, filled: Filled) -> None:
    data = noise(4 * MIB, 3)
    (memory,) = filled([data])
    fd = memory.export_fd()
    free = device.free_bytes()
    memory.release()
    assert device.free_bytes() == free, "the descriptor alone must keep the memory"
    again = device.import_memory(fd, 4 * MIB)
    os.close(fd)
    transfer.drain([(again, 0, 0, 4 * MIB)], view.arena)
    assert view.get(0, 4 * MIB) == data
    again.release()
    assert device.free_bytes() == free + 4 * MIB


def test_releasing_one_mapping_leaves_the_other_with_its_contents(
    view: View, device: transfer.Device, filled: Filled
) -> None:
    data = noise(4 * MIB, 4)
    (memory,) = filled([data])
    fd = memory.export_fd()
    other = device.import_memory(fd, 4 * MIB)
    os.close(fd)
    memory.release()
    memory.release()  # a second call does nothing
    with pytest.raises(transfer.TransferError, match="closed"):
        transfer.drain([(memory, 0, 0, 4 * MIB)], view.arena)
    transfer.drain([(other, 0, 0, 4 * MIB)], view.arena)
    assert view.get(0, 4 * MIB) == data
    other.release()


EXPORTER = """
import os, socket, sys
from woodfrog._native import transfer
link = socket.socket(fileno=int(sys.argv[1]))
device = transfer.Device(0)
arena = transfer.Arena(64 << 20)
os.pwrite(arena.fd, bytes(range(256)) * (4 << 12), 0)
memories = device.create_memories([2 << 20] * 5)
transfer.refill([(m, 0, i * 7, 2 << 20) for i, m in enumerate(memories[:1])], arena)
for m in memories[1:]:
    transfer.refill([(m, 0, 0, 2 << 20)], arena)
fds = [m.export_fd() for m in memories]
socket.send_fds(link, [b"x"], fds)
link.recv(1)
os.kill(os.getpid(), 9)
"""


def test_memory_of_a_process_that_is_killed_lives_on_in_its_descriptors(view: View, device: transfer.Device) -> None:
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = subprocess.Popen([sys.executable, "-c", EXPORTER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 1, 16)
    ours.send(b"x")
    assert child.wait() == -9
    memories = device.import_memories(fds, [2 * MIB] * 5)
    for fd in fds:
        os.close(fd)
    transfer.drain([(m, 0, i * 2 * MIB, 2 * MIB) for i, m in enumerate(memories)], view.arena)
    assert view.get(0, 10 * MIB) == bytes(range(256)) * (10 * MIB // 256)
    for memory in memories:
        memory.release()


def test_many_are_made_or_none(device: transfer.Device) -> None:
    free = device.free_bytes()
    with pytest.raises(transfer.TransferError, match="cuMemCreate") as caught:
        device.create_memories([2 * MIB] * 4 + [device.total_bytes])
    assert caught.value.code == 2
    assert device.free_bytes() == free
    good = device.create_memory(2 * MIB)
    fd = good.export_fd()
    with Path("/dev/null").open() as null, pytest.raises(transfer.TransferError, match="cuMemImport"):
        device.import_memories([fd, fd, null.fileno()], [2 * MIB] * 3)
    os.close(fd)
    good.release()
    assert device.free_bytes() == free


@pytest.mark.parametrize("size", [0, 1, 2 * MIB - 1, 2 * MIB + 4096])
def test_a_size_that_is_no_multiple_of_the_granularity_is_refused(device: transfer.Device, size: int) -> None:
    with pytest.raises(transfer.TransferError, match="multiple") as caught:
        device.create_memory(size)
    assert caught.value.code == -22


def test_a_wrong_size_at_import_is_refused(device: transfer.Device, filled: Filled) -> None:
    (memory,) = filled([noise(2 * MIB)])
    fd = memory.export_fd()
    free = device.free_bytes()
    with pytest.raises(transfer.TransferError):
        device.import_memory(fd, 4 * MIB)
    with pytest.raises(transfer.TransferError, match="descriptors"):
        device.import_memories([fd], [2 * MIB, 2 * MIB])
    os.close(fd)
    assert device.free_bytes() == free


def test_imported_memory_is_not_exported_again(device: transfer.Device, filled: Filled) -> None:
    (memory,) = filled([noise(2 * MIB)])
    fd = memory.export_fd()
    imported = device.import_memory(fd, 2 * MIB)
    os.close(fd)
    with pytest.raises(transfer.TransferError, match="own descriptor"):
        imported.export_fd()
    imported.release()


def test_memory_that_python_forgets_is_given_back(device: transfer.Device) -> None:
    free = device.free_bytes()
    memories = device.create_memories([2 * MIB] * 3)
    assert device.free_bytes() == free - 6 * MIB
    del memories
    assert device.free_bytes() == free


def test_no_thread_of_ours_lives_between_two_operations(view: View, filled: Filled, file: int) -> None:
    (memory,) = filled([noise(8 * MIB)])
    transfer.drain([(memory, 0, 0, 8 * MIB)], view.arena)
    before = len(list(Path("/proc/self/task").iterdir()))
    view.arena.populate(0, view.arena.size_bytes)
    transfer.drain_to_file([(memory, 0, 8 * MIB)], file, 0, view.arena, 0, 8 * MIB, chunk_bytes=MIB, threads=8)
    assert len(list(Path("/proc/self/task").iterdir())) <= before


def test_python_runs_on_while_bytes_move(view: View, filled: Filled) -> None:
    """With the GIL held, the other thread could never cancel a copy that has begun; one attempt may be too quick."""
    (memory,) = filled([noise(32 * MIB)])
    for _ in range(50):
        progress = transfer.Progress()
        ended = threading.Event()

        def cancel_once_begun(progress: transfer.Progress = progress, ended: threading.Event = ended) -> None:
            while progress.bytes_done == 0 and not ended.is_set():
                pass
            progress.cancel()

        other = threading.Thread(target=cancel_once_begun)
        other.start()
        try:
            transfer.drain([(memory, 0, 0, 32 * MIB)], view.arena, chunk_bytes=4096, progress=progress)
        except transfer.CancelledError:
            assert 0 < progress.bytes_done < 32 * MIB
            return
        finally:
            ended.set()
            other.join()
    pytest.fail("no copy was ever cancelled from another Python thread")


def test_an_arena_is_registered_piece_by_piece_as_it_is_populated() -> None:
    arena = transfer.Arena(256 * MIB)
    arena.register()
    assert arena.registered_bytes == 0
    arena.populate(0, 64 * MIB)
    assert arena.registered_bytes == 0, "a piece that is not whole must not be registered"
    arena.populate(64 * MIB, 192 * MIB)
    assert arena.registered_bytes == arena.populated_bytes == 256 * MIB
    adopted = transfer.Arena(256 * MIB, fd=arena.fd)
    arena.close()
    assert adopted.registered_bytes == 0
    adopted.register()
    assert adopted.registered_bytes == 256 * MIB, "what was populated before is registered at once"
    adopted.unregister()
    assert adopted.registered_bytes == 0
    adopted.close()
