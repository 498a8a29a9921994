"""A place with images: what is committed verifies, what is not cannot be seen, and damage is told, not hidden."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small_images

from woodfrog.errors import BadImageError, NotFoundError, RefusedError, UsageError
from woodfrog.image.repository import ImageRepository


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[[], ImageRepository]:
    """Opens the same store anew at each call."""
    return lambda: ImageRepository(tmp_path / "store")


@pytest.fixture
def store(open_store: Callable[[], ImageRepository]) -> Iterator[ImageRepository]:
    opened = open_store()
    yield opened
    opened.close()


def write(store: ImageRepository, name: str = "small") -> str:
    with store.begin(name) as writer:
        small_images.fill(writer)
        with writer.commit(small_images.manifest()) as image:
            return image.reference


def references(store: ImageRepository) -> list[str]:
    return [entry.reference for entry in store.list()]


def test_a_committed_image_is_there_for_everybody_and_verifies(
    store: ImageRepository, open_store: Callable[[], ImageRepository]
) -> None:
    assert write(store) == "small@1"
    for other in (store, open_store()):
        with other.open("small@1") as image:
            assert image.verify() == []
            assert (image.manifest.name, image.manifest.number) == ("small", 1)
            assert {file.path for file in image.manifest.cpu.files} == set(small_images.CPU_FILES)


def test_an_image_cannot_be_seen_before_its_commit(store: ImageRepository) -> None:
    with store.begin("small") as writer:
        small_images.fill(writer)
        assert references(store) == []
        with pytest.raises(NotFoundError):
            store.open("small")


def test_an_aborted_image_leaves_nothing(store: ImageRepository) -> None:
    with store.begin("small") as writer:
        small_images.fill(writer)
        directory = writer.directory
    assert not directory.exists()
    assert references(store) == []
    writer.abort()


def test_a_writer_that_has_ended_writes_no_more(store: ImageRepository) -> None:
    with store.begin("small") as writer:
        small_images.fill(writer)
        writer.commit(small_images.manifest()).close()
        with pytest.raises(UsageError):
            writer.open_data("gpu-3.data")
        with pytest.raises(UsageError):
            writer.commit(small_images.manifest())
        writer.abort()
    assert references(store) == ["small@1"]


def test_numbers_rise_and_a_bare_name_is_the_newest(store: ImageRepository) -> None:
    assert [write(store) for _ in range(3)] == ["small@1", "small@2", "small@3"]
    assert write(store, "other") == "other@1"
    with store.open("small") as image:
        assert image.reference == "small@3"
    assert store.next_number("small") == 4
    assert references(store) == ["other@1", "small@1", "small@2", "small@3"]
    assert [entry.reference for entry in store.list("other")] == ["other@1"]


def test_an_image_that_is_open_is_not_removed(store: ImageRepository) -> None:
    write(store)
    with store.open("small") as image:
        with pytest.raises(RefusedError, match="in use"):
            store.remove("small@1")
        assert image.verify() == []
    store.remove("small@1")
    with pytest.raises(NotFoundError):
        store.open("small@1")
    with pytest.raises(NotFoundError):
        store.remove("small@1")


@pytest.mark.parametrize("reference", ["", "..", "small@", "small@0", "small@01", "small@-1", "@1", "small@1@1"])
def test_a_malformed_reference_is_refused(store: ImageRepository, reference: str) -> None:
    for action in (store.open, store.remove):
        with pytest.raises(UsageError):
            action(reference)


def test_a_manifest_that_does_not_fit_the_files_is_refused_and_leaves_nothing(store: ImageRepository) -> None:
    with store.begin("small") as writer:
        small_images.fill(writer)
        os.ftruncate(writer.open_data("gpu-7.data"), 5)
        with pytest.raises(BadImageError, match=r"gpu-7[.]data"):
            writer.commit(small_images.manifest())
    with store.begin("small") as writer, pytest.raises(BadImageError, match=r"gpu-0[.]data"):
        writer.commit(small_images.manifest())
    with store.begin("small") as writer:
        small_images.fill(writer)
        with pytest.raises(BadImageError, match="contradicts"):
            writer.commit(small_images.manifest(gpu_pid=7))
    assert references(store) == []


@pytest.mark.parametrize("filename", ["manifest", "../x", "gpu-.data", "gpu-0.data/x", "gpu-00000.data", ""])
def test_only_data_files_can_be_opened_for_writing(store: ImageRepository, filename: str) -> None:
    with store.begin("small") as writer, pytest.raises(UsageError):
        writer.open_data(filename)


def test_a_damaged_image_is_listed_with_its_reason_and_does_not_hide_others(store: ImageRepository) -> None:
    write(store)
    write(store)
    with store.open("small@1") as image:
        manifest = image.path / "manifest"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    first, second = store.list()
    assert (first.reference, first.manifest) == ("small@1", None)
    assert first.error is not None
    assert second.error is None
    assert second.manifest is not None
    store.remove("small@1")
    assert references(store) == ["small@2"]


def test_a_link_with_an_images_name_is_listed_as_damaged(store: ImageRepository, tmp_path: Path) -> None:
    other = ImageRepository(tmp_path / "other")
    write(other)
    other.close()
    (store.path / "small@1").symlink_to(other.path / "small@1")
    (entry,) = store.list()
    assert entry.error is not None
    assert "symbolic link" in entry.error.reason


def test_an_image_outside_of_the_store_opens_by_its_path(store: ImageRepository, tmp_path: Path) -> None:
    write(store)
    moved = (store.path / "small@1").rename(tmp_path / "moved")
    with store.open(str(moved)) as image:
        assert image.verify() == []
    with pytest.raises(NotFoundError):
        store.open(f"{tmp_path}/nothing")


def test_everything_in_an_image_is_its_owners_alone_whatever_the_umask(store: ImageRepository) -> None:
    before = os.umask(0)
    try:
        write(store)
    finally:
        os.umask(before)
    path = store.path / "small@1"
    for entry in [path, *path.rglob("*")]:
        mode = stat.S_IMODE(entry.stat().st_mode)
        assert mode == (0o700 if entry.is_dir() else 0o600), entry


def test_who_removes_an_image_sees_its_cpu_side_once_its_name_is_gone(store: ImageRepository) -> None:
    write(store)
    seen: list[list[str]] = []

    def look(cpu_directory: Path) -> None:
        assert references(store) == []
        seen.append(sorted(entry.name for entry in cpu_directory.iterdir()))

    assert store.remove("small", look) == "small@1"
    assert seen == [sorted(small_images.CPU_FILES)]
    assert list((store.path / ".tmp").iterdir()) == []


def test_an_image_in_use_is_not_touched_by_its_removal(store: ImageRepository) -> None:
    write(store)
    touched: list[Path] = []
    with store.open("small"), pytest.raises(RefusedError, match="in use"):
        store.remove("small", touched.append)
    assert touched == []
