"""CRIU's image files are read without trusting them, and patched without changing anything else."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from criu_files import FILES, PSTREE, REMAP, blob, image, number, regular, varint, write

from woodfrog.cpu import files, images, protobuf
from woodfrog.cpu.rewrite import Changes, rewritten
from woodfrog.errors import BadImageError


def test_the_process_tree_is_read_with_threads_packed_or_not(tmp_path: Path) -> None:
    root = number(1, 10) + number(2, 0) + number(3, 10) + number(4, 10) + number(5, 10) + number(5, 300)
    child = number(1, 11) + number(2, 10) + number(3, 10) + number(4, 10) + blob(5, varint(11) + varint(301))
    write(tmp_path, "pstree.img", image(PSTREE, root, child))
    assert images.tasks(tmp_path) == [
        images.Task(10, 0, 10, 10, (10, 300)),
        images.Task(11, 10, 10, 10, (11, 301)),
    ]


def test_open_files_are_those_that_criu_opens_by_path(tmp_path: Path) -> None:
    records = (
        regular(1, b"/data/in", os.O_RDONLY, 5),
        regular(2, b"/data/log", os.O_WRONLY | os.O_APPEND, None, position=7),
        regular(3, b"/data/deleted", os.O_RDWR, 9),
        regular(4, b"/dev/null", os.O_RDWR, None, mode=0o020666),
        number(1, 6) + number(2, 5),  # an eventfd
    )
    write(tmp_path, "files.img", image(FILES, *records))
    write(tmp_path, "remap-fpath.img", image(REMAP, number(1, 3) + number(2, 77) + number(3, 1)))
    found = images.open_files(tmp_path)
    assert [(file.path, file.size_bytes) for file in found] == [("/data/in", 5), ("/data/log", None)]
    assert found[1].position == 7


def test_links_of_deleted_files_are_named(tmp_path: Path) -> None:
    records = (regular(3, b"/data/deleted", os.O_RDWR, 9), regular(77, b"/data/link_remap.77", 0, None))
    write(tmp_path, "files.img", image(FILES, *records))
    write(tmp_path, "remap-fpath.img", image(REMAP, number(1, 3) + number(2, 77) + number(3, 0)))
    assert images.linked_remaps(tmp_path) == ["/data/link_remap.77"]


def test_only_the_wanted_sizes_change(tmp_path: Path) -> None:
    records = [regular(n, b"/data/%d" % n, os.O_RDWR, 100 + n) for n in range(1, 5)]
    original = image(FILES, *records)
    patched = rewritten(original, Changes(), {2: 1 << 40, 4: 0})
    write(tmp_path, "files.img", patched)
    after = {file.file_id: file for file in images.open_files(tmp_path)}
    assert {n: file.size_bytes for n, file in after.items()} == {1: 101, 2: 1 << 40, 3: 103, 4: 0}
    assert {file.mode for file in after.values()} == {0o100644}
    assert rewritten(original, Changes(), {}) == original


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_cut_file_is_refused_with_its_name(tmp_path: Path, cut: int) -> None:
    whole = image(PSTREE, number(1, 10) + number(2, 0) + number(3, 10) + number(4, 10) + number(5, 300) * 20)
    write(tmp_path, "pstree.img", whole[:-cut])
    with pytest.raises(BadImageError, match=r"pstree\.img"):
        images.tasks(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        image(FILES),
        image(PSTREE) + struct.pack("<I", 0xFFFFFFFF),
        image(PSTREE, b"\xff" * 12),
        image(PSTREE, b"\x0f"),
        image(PSTREE, blob(1, b"text where a number belongs")),
        image(PSTREE, varint(1 << 3 | 2) + varint(1 << 60)),
    ],
)
def test_what_is_not_an_image_is_refused(tmp_path: Path, data: bytes) -> None:
    write(tmp_path, "pstree.img", data)
    with pytest.raises(BadImageError):
        images.tasks(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadImageError, match="missing"):
        images.tasks(tmp_path)


def test_a_relative_path_in_an_image_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "files.img", image(FILES, regular(1, b"../etc/passwd", os.O_RDONLY, 5)))
    with pytest.raises(BadImageError, match="absolute"):
        images.open_files(tmp_path)


def test_an_oversized_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "pstree.img", "wb") as sparse:
        sparse.truncate(protobuf.MAX_FILE_BYTES + 1)
    with pytest.raises(BadImageError, match="larger"):
        images.tasks(tmp_path)


def unix(file_id: int, name: bytes, uid: int | None = None) -> bytes:
    socket = number(1, file_id) + number(2, 7) + blob(11, name)
    if uid is not None:
        socket += blob(13, number(1, 0o140755) + number(2, uid) + number(3, uid))
    return number(1, 5) + number(2, file_id) + blob(16, socket)


def test_sockets_in_the_filesystem_are_found_with_their_owner_and_abstract_ones_are_not(tmp_path: Path) -> None:
    records = (unix(1, b"/tmp/x/listener\0", 1000), unix(2, b"\0abstract"), unix(3, b"/run/one"), unix(4, b""))
    write(tmp_path, "files.img", image(FILES, *records))
    assert images.socket_files(tmp_path) == [
        images.SocketFile("/tmp/x/listener", 1000, 1000),
        images.SocketFile("/run/one", 0, 0),
    ]


def test_the_folder_of_a_socket_that_is_gone_is_made_again_for_its_owner_only(tmp_path: Path) -> None:
    dump, scratch = tmp_path / "dump", tmp_path / "scratch"
    dump.mkdir()
    scratch.mkdir()
    gone = tmp_path / "program" / "temporary"
    write(dump, "files.img", image(FILES, unix(1, str(gone / "listener").encode() + b"\0", os.getuid())))
    files.prepare(dump, scratch)
    assert gone.is_dir()
    assert gone.stat().st_mode & 0o777 == 0o700
    assert gone.stat().st_uid == os.getuid()


def _with_link(directory: Path, link: Path) -> None:
    """CRIU's files of a tree that had a deleted file open, of which `link` is the last name."""
    records = (regular(3, b"/data/deleted", os.O_RDWR, 9), regular(77, os.fsencode(link), 0, None))
    write(directory, "files.img", image(FILES, *records))
    write(directory, "remap-fpath.img", image(REMAP, number(1, 3) + number(2, 77) + number(3, 0)))


def test_the_links_of_a_removed_image_go_with_it(tmp_path: Path) -> None:
    link = tmp_path / "link_remap.77"
    link.write_bytes(b"deleted")
    kept = tmp_path / "link_remap.77.woodfrog"
    kept.hardlink_to(link)
    _with_link(tmp_path, link)
    files.remove_links(tmp_path)
    assert not link.exists()
    assert not kept.exists()
    files.remove_links(tmp_path)


def test_an_image_cannot_have_a_file_removed_that_is_no_link_of_criu(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    _with_link(tmp_path, precious)
    with pytest.raises(BadImageError, match="precious"):
        files.remove_links(tmp_path)
    assert precious.exists()
