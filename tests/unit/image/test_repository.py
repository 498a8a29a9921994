"""A place with images: what is committed verifies, what is not cannot be seen, and damage is told, not hidden."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small_images

from woodfrog.errors import BadImageError, NotFoundError, RefusedError, UsageError, WoodfrogError
from woodfrog.image.repository import ImageRepository
from woodfrog.image.writer import parse_compression


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[], ImageRepository]]:
    """Opens the same store anew at each call."""
    opened: list[ImageRepository] = []

    def make() -> ImageRepository:
        opened.append(ImageRepository(tmp_path / "store"))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], ImageRepository]) -> ImageRepository:
    return open_store()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a store that is in use."""
    monkeypatch.setattr("woodfrog.store.store.Store.remove.__kwdefaults__", {"wait_s": 0.0})


def write(store: ImageRepository, name: str = "small") -> str:
    with small_images.write(store, name) as image:
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
            assert {file.path for file in image.cpu_files()} == set(small_images.CPU_FILES)


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
        writer.commit(small_images.manifest())
        with pytest.raises(UsageError):
            small_images.fill(writer)
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


def test_what_the_store_has_is_stored_once(store: ImageRepository) -> None:
    write(store)
    first = store.manifest("small@1").stats
    write(store)
    second = store.manifest("small@2").stats
    gpu_bytes, cpu_bytes = small_images.manifest().gpu_bytes, sum(map(len, small_images.CPU_FILES.values()))
    assert (first.gpu.raw, first.gpu.new, first.gpu.known) == (gpu_bytes, gpu_bytes, 0)
    assert (second.gpu.raw, second.gpu.new, second.gpu.known) == (gpu_bytes, 0, gpu_bytes)
    # The chunks of one of CRIU's files repeat within it.
    assert (first.cpu.raw, second.cpu.new, second.cpu.known) == (cpu_bytes, 0, cpu_bytes)
    assert first.gpu.stored > 0
    assert second.gpu.stored == second.cpu.stored == 0


def test_an_image_that_is_open_is_not_removed(store: ImageRepository, impatient: None) -> None:
    write(store)
    with store.open("small") as image:
        with pytest.raises(RefusedError):
            store.remove("small@1")
        assert image.verify() == []
    store.remove("small@1")
    with pytest.raises(NotFoundError):
        store.open("small@1")
    with pytest.raises(NotFoundError):
        store.remove("small@1")


@pytest.mark.parametrize("reference", ["", "..", "small@", "small@0", "small@01", "small@-1", "@1", "small@1@1", "a/b"])
def test_a_malformed_reference_is_refused(store: ImageRepository, reference: str) -> None:
    for action in (store.open, store.remove):
        with pytest.raises(UsageError):
            action(reference)


def test_a_manifest_that_does_not_fit_the_files_is_refused_and_leaves_nothing(store: ImageRepository) -> None:
    with store.begin("small") as writer:
        small_images.fill(writer)
        with pytest.raises(BadImageError, match="no CPU side"):
            writer.commit(small_images.manifest(cpu=None))
    with store.begin("small") as writer:
        small_images.fill(writer)
        with pytest.raises(BadImageError, match="contradicts"):
            writer.commit(small_images.manifest(gpu_pid=7))
    with store.begin("small") as writer:
        small_images.fill(writer)
        (writer.directory / "cpu" / "link").symlink_to("/etc/passwd")
        with pytest.raises(BadImageError, match="symbolic link"):
            writer.commit(small_images.manifest())
    assert references(store) == []


def test_a_damaged_image_is_listed_with_its_reason_and_does_not_hide_others(store: ImageRepository) -> None:
    write(store)
    write(store)
    assert store.path is not None
    manifest = store.path / "images" / "small" / "1"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    first, second = store.list()
    assert (first.reference, first.manifest) == ("small@1", None)
    assert first.error is not None
    assert second.error is None
    assert second.manifest is not None
    store.remove("small@1")
    assert references(store) == ["small@2"]


def test_a_link_in_place_of_a_manifest_is_not_followed_even_to_the_right_contents(
    store: ImageRepository, tmp_path: Path
) -> None:
    write(store)
    assert store.path is not None
    manifest = store.path / "images" / "small" / "1"
    manifest.rename(tmp_path / "elsewhere")
    manifest.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((BadImageError, NotFoundError)):
        store.open("small@1")
    for entry in store.list():
        assert entry.error is not None


def test_everything_in_a_store_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with ImageRepository(tmp_path / "store") as store:
            write(store)
    finally:
        os.umask(before)
    for entry in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        mode = stat.S_IMODE(entry.stat().st_mode)
        assert mode == (0o700 if entry.is_dir() else 0o600), entry


def test_who_removes_an_image_sees_its_cpu_side_once_its_name_is_gone(store: ImageRepository) -> None:
    write(store)
    seen: list[dict[str, bytes]] = []

    def look(cpu_directory: Path) -> None:
        assert references(store) == []
        assert stat.S_IMODE(cpu_directory.stat().st_mode) == 0o700
        seen.append({entry.name: entry.read_bytes() for entry in cpu_directory.iterdir()})

    assert store.remove("small", look, files=["core-100.img", "remap-fpath.img"]) == "small@1"
    assert seen == [{"core-100.img": small_images.CPU_FILES["core-100.img"]}]


def test_an_image_whose_target_ran_on_has_no_links_to_look_for(store: ImageRepository) -> None:
    small_images.write(store, leave_running=True).close()
    touched: list[Path] = []
    store.remove("small", touched.append, files=["core-100.img"])
    assert touched == []


def test_an_image_in_use_is_not_touched_by_its_removal(store: ImageRepository, impatient: None) -> None:
    write(store)
    touched: list[Path] = []
    with store.open("small"), pytest.raises(RefusedError):
        store.remove("small", touched.append)
    assert touched == []
    assert references(store) == ["small@1"]


def test_removing_a_damaged_image_tells_that_its_links_are_not_known(store: ImageRepository) -> None:
    write(store)
    assert store.path is not None
    for pack in small_images.packs(store.path):
        pack.unlink()
    touched: list[Path] = []
    with pytest.raises(WoodfrogError):
        store.remove("small", touched.append, files=["core-100.img"])
    assert touched == []
    assert references(store) == []


def test_prune_removes_what_no_image_names_and_nothing_else(store: ImageRepository) -> None:
    write(store)
    with store.begin("other") as writer:
        small_images.fill(writer, seed=100)
        writer.commit(small_images.manifest(digests=_digests(seed=100)))
    store.remove("small@1")
    assert store.path is not None
    before = sum(pack.stat().st_size for pack in small_images.packs(store.path))
    store.prune(dry_run=True, grace_s=0)
    assert sum(pack.stat().st_size for pack in small_images.packs(store.path)) == before
    store.prune(grace_s=0)
    assert sum(pack.stat().st_size for pack in small_images.packs(store.path)) < before
    with store.open("other@1") as image:
        assert image.verify() == []
    assert store.verify() == []


def test_a_copy_in_another_store_is_whole_and_moves_only_what_is_absent(store: ImageRepository, tmp_path: Path) -> None:
    write(store)
    with ImageRepository(tmp_path / "there") as there:
        store.copy("small@1", there)
        with there.open("small@1") as image:
            assert image.verify() == []
        write(store)
        size = sum(pack.stat().st_size for pack in small_images.packs(tmp_path / "there"))
        store.copy("small@2", there, name="renamed")
        with there.open("renamed@1") as image:
            assert (image.manifest.name, image.manifest.number) == ("renamed", 1)
            assert image.verify() == []
        assert sum(pack.stat().st_size for pack in small_images.packs(tmp_path / "there")) == size


def test_retention_keeps_the_newest_of_each_name(store: ImageRepository) -> None:
    for _ in range(3):
        write(store)
    write(store, "other")
    plan = store.plan_retention(keep_last=1)
    assert references(store) == ["other@1", "small@1", "small@2", "small@3"]
    assert sorted(store.apply_retention(plan)) == ["small@1", "small@2"]
    assert references(store) == ["other@1", "small@3"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("auto", ("auto", 0)), ("none", ("none", 0)), ("lz4", ("lz4", 0)), ("zstd", ("zstd", 0)), ("zstd:9", ("zstd", 9))],
)
def test_a_compression_is_a_method_and_a_level(text: str, meant: tuple[str, int]) -> None:
    assert parse_compression(text) == meant


@pytest.mark.parametrize("text", ["", "zip", "auto:1", "zstd:", "zstd:0", "zstd:99", "zstd:-1", "zstd:1:2", "lz4:1"])
def test_a_compression_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_compression(text)


def _digests(seed: int) -> bytes:
    contents = (small_images.pattern(size, index + seed) for index, (_, size) in enumerate(small_images.HANDLES))
    return b"".join(map(small_images.digests, contents))
