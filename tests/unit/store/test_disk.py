"""What only a store of directories promises: nobody else's files are read, followed or removed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from woodfrog.errors import BadImageError, NoSpaceError, RefusedError
from woodfrog.store import files, space
from woodfrog.store.disk import DiskStore, default_path


def write(store: DiskStore, name: str = "small") -> Path:
    """A published directory with a file in a subdirectory; its path."""
    with store.begin(name, ["sub"]) as writer:
        (writer.directory / "sub" / "file").write_bytes(b"contents")
        os.write(writer.create_file("data"), b"data")
        writer.publish(lambda: b"manifest")
        return store.path / writer.reference


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_in_a_store_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = DiskStore(tmp_path / "deep" / "store")
        path = write(store)
    finally:
        os.umask(before)
    assert mode(store.path) == 0o700
    for entry in [path, *path.rglob("*")]:
        assert mode(entry) == (0o700 if entry.is_dir() else 0o600), entry


def test_a_store_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    DiskStore(tmp_path / "store").close()
    assert mode(tmp_path / "store") == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_store_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    os.chown(tmp_path / "store", 12345, 12345)
    with pytest.raises(RefusedError, match="12345"):
        DiskStore(tmp_path / "store")


def test_a_store_that_is_a_file_or_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RefusedError):
        DiskStore(tmp_path / "file")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(BadImageError, match="symbolic link"):
        DiskStore(tmp_path / "link")


def test_a_link_with_a_published_name_is_neither_opened_nor_removed_through(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    other = DiskStore(tmp_path / "other")
    write(other)
    (store.path / "small@1").symlink_to(other.path / "small@1")
    with pytest.raises(BadImageError):
        store.open("small@1")
    with pytest.raises(BadImageError):
        store.remove("small@1")
    assert (other.path / "small@1" / "sub" / "file").read_bytes() == b"contents"


def test_cleaning_removes_abandoned_parts_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "store"
    DiskStore(path).close()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    abandoned = path / ".tmp" / "small@1-0badcafe"
    (abandoned / "cpu" / "deep").mkdir(parents=True)
    (abandoned / "cpu" / "link").symlink_to(outside)
    (path / ".tmp" / "notes").mkdir()
    (path / ".tmp" / "small@2-0badcafe").symlink_to(outside)
    DiskStore(path).close()
    assert not abandoned.exists()
    assert (outside / "precious").read_text() == "x"
    assert (path / ".tmp" / "notes").is_dir()


def test_a_mark_that_is_no_number_stops_the_store_from_using_a_number_twice(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    write(store)
    store.remove("small@1")
    (store.path / ".marks" / "small").write_text("seven")
    with pytest.raises(BadImageError, match=r"[.]marks/small"):
        store.begin("small")


def test_a_name_that_appeared_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    with store.begin("small") as writer:
        (store.path / "small@1").mkdir()
        with pytest.raises(RefusedError, match="already"):
            writer.publish(lambda: b"manifest")
    assert list((store.path / "small@1").iterdir()) == []
    assert list((store.path / ".tmp").iterdir()) == []


def test_rename_no_replace_replaces_nothing(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        with pytest.raises(FileExistsError):
            files.rename_no_replace("a", descriptor, "b", descriptor)
        files.rename_no_replace("a", descriptor, "c", descriptor)
        with pytest.raises(FileNotFoundError):
            files.rename_no_replace("a", descriptor, "d", descriptor)
    finally:
        os.close(descriptor)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["b", "c"]


def test_room_is_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    free = space.free_bytes(tmp_path / "not" / "there" / "yet")
    assert free > 0
    space.require(tmp_path, 1, "the image")
    with pytest.raises(NoSpaceError, match="the image needs") as raised:
        space.require(tmp_path, free * 2, "the image")
    assert raised.value.details["needed_bytes"] == free * 2


def test_the_environment_chooses_the_default_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WOODFROG_STORE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"
    monkeypatch.delenv("WOODFROG_STORE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".local" / "share" / "woodfrog" / "images"


def test_everything_is_durable_before_the_name_and_the_name_before_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "store")
    order: list[str] = []
    fsync, rename = os.fsync, files.rename_no_replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        order.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def noted_rename(source: str, source_dir: int, target: str, target_dir: int) -> None:
        rename(source, source_dir, target, target_dir)
        order.append("RENAMED")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(files, "rename_no_replace", noted_rename)
    with store.begin("small", ["sub"]) as writer:
        temporary = writer.directory
        (temporary / "sub" / "deep").mkdir()
        (temporary / "sub" / "deep" / "file").write_bytes(b"x")
        writer.create_file("data")
        writer.publish(lambda: b"manifest")
    path = store.path / "small@1"
    written = {entry.relative_to(path) for entry in path.rglob("*")}
    named = order.index("RENAMED")
    assert set(order[:named]) >= {str(temporary), *(str(temporary / entry) for entry in written - {Path("manifest")})}
    # A directory after what is in it; the manifest under its temporary name last of all files; then what names it.
    assert order.index(str(temporary / "sub/deep/file")) < order.index(str(temporary / "sub/deep"))
    assert order.index(str(temporary / "sub/deep")) < order.index(str(temporary / "sub"))
    assert order[named - 2 : named] == [str(temporary / "manifest.tmp"), str(temporary)]
    assert str(store.path) in order[named + 1 :]
    store.close()
