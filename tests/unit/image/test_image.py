"""A complete image: any damage to any byte of it is found, and its files come out as they went in."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_images
from damage import damage_chunk

from woodfrog.errors import BadImageError, NotFoundError, RefusedError, WoodfrogError
from woodfrog.image import chunks
from woodfrog.image.diff import diff
from woodfrog.image.repository import ImageRepository


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with the image small@1 in it, and nobody who has it open."""
    with ImageRepository(tmp_path / "store") as store:
        small_images.write(store).close()
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[ImageRepository]:
    with ImageRepository(path) as opened:
        yield opened


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 0x10]))


def test_an_untouched_image_has_no_problem_and_tells_its_progress(store: ImageRepository) -> None:
    seen: list[tuple[int, int]] = []
    with store.open("small") as image:
        assert image.verify(lambda done, total: seen.append((done, total))) == []
        assert image.reference == "small@1"
        assert image.path == f"{store.url}/images/small/1"
        assert seen[-1] == (image.size_bytes, image.size_bytes)
    assert seen == sorted(seen)


def test_a_flipped_byte_in_any_chunk_is_found_with_its_handle_or_file(path: Path) -> None:
    """Every 4099th byte of every pack: each chunk is hit several times, headers now and then."""
    packs = small_images.packs(path)
    assert packs
    hit: set[str] = set()
    for pack in packs:
        for position in range(0, pack.stat().st_size, 4099):
            flip(pack, position)
            with ImageRepository(path) as store:
                with store.open("small") as image:
                    problems = image.verify()
                hit |= {problem.path for problem in problems}
                # What is no chunk's byte is a header's, which only the whole store's verification reads.
                assert problems or store.verify(), (pack, position)
            flip(pack, position)
    assert hit >= {"handle 0x1000", "handle 0x1001", "handle 0x1002", "cpu/pages-1.img"}
    with ImageRepository(path) as store, store.open("small") as image:
        assert image.verify() == []


def test_a_pack_that_is_gone_or_cut_is_told(path: Path) -> None:
    for pack in small_images.packs(path):
        content = pack.read_bytes()
        for damaged in (None, b"", content[: len(content) // 2], content[:-1]):
            if damaged is None:
                pack.unlink()
            else:
                pack.write_bytes(damaged)
            with ImageRepository(path) as store, store.open("small") as image:
                assert _told(image.verify)
            pack.write_bytes(content)
            pack.chmod(0o600)
    with ImageRepository(path) as store, store.open("small") as image:
        assert image.verify() == []


def _told(verify: object) -> bool:
    """Whether a problem is returned, or raised as one."""
    try:
        return bool(verify())  # type: ignore[operator]
    except WoodfrogError:
        return True


def test_a_chunk_that_the_store_does_not_have_is_refused_with_the_number_missing(path: Path) -> None:
    for index in (path / "index").iterdir():
        index.unlink()
    with ImageRepository(path) as store, store.open("small") as image:
        with pytest.raises(BadImageError, match=r"small@1.*7 of 7") as raised:
            image.locate_gpu()
        assert raised.value.details["image"] == "small@1"
        assert len(image.verify()) > 7


def test_criu_gets_its_files_back_as_they_were(store: ImageRepository, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir(0o700)
    with store.open("small") as image:
        image.extract_cpu(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == small_images.CPU_FILES
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_only_the_files_that_are_asked_for_come_out(store: ImageRepository, tmp_path: Path) -> None:
    with store.open("small") as image:
        image.extract_cpu(tmp_path, only=["pages-1.img", "not-there.img"])
    assert (tmp_path / "pages-1.img").read_bytes() == small_images.CPU_FILES["pages-1.img"]
    assert not (tmp_path / "core-100.img").exists()


def test_a_file_that_is_in_the_way_is_not_overwritten(store: ImageRepository, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "core-100.img").symlink_to(tmp_path / "precious")
    with store.open("small") as image, pytest.raises(FileExistsError):
        image.extract_cpu(tmp_path / "out")
    assert (tmp_path / "precious").read_bytes() == b"x"


def test_a_manifest_that_was_cut_or_has_grown_is_refused_at_open(path: Path) -> None:
    manifest = path / "images" / "small" / "1"
    content = manifest.read_bytes()
    for changed in (b"", content[:1], content[: len(content) // 2], content[:-1], content + b"\0"):
        manifest.write_bytes(changed)
        with ImageRepository(path) as store, pytest.raises(BadImageError):
            store.open("small@1")


def test_a_fifo_in_place_of_a_manifest_is_refused_without_waiting(path: Path) -> None:
    manifest = path / "images" / "small" / "1"
    manifest.unlink()
    os.mkfifo(manifest)
    with ImageRepository(path) as store, pytest.raises((BadImageError, NotFoundError)):
        store.open("small@1")


def test_a_store_that_others_may_write_is_refused(path: Path) -> None:
    path.chmod(0o770)
    with pytest.raises(RefusedError):
        ImageRepository(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_store_of_another_user_is_refused(path: Path) -> None:
    os.chown(path, 12345, 12345)
    with pytest.raises(RefusedError, match="12345"):
        ImageRepository(path)


def test_looking_for_an_image_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ImageRepository(tmp_path / "nothing", create=False)
    assert not (tmp_path / "nothing").exists()


def test_an_image_without_a_cpu_side_says_what_it_cannot_do(tmp_path: Path) -> None:
    with ImageRepository(tmp_path / "store") as store:
        with store.begin("gpu-only") as writer:
            small_images.fill(writer)
            for file in (writer.directory / "cpu").iterdir():
                file.unlink()
            writer.commit(small_images.manifest(cpu=None))
        with store.open("gpu-only") as image:
            assert image.verify() == []
            with pytest.raises(BadImageError, match="no CPU side"):
                image.extract_cpu(tmp_path)


def test_an_image_with_chunks_of_another_size_than_its_store_is_refused(path: Path, tmp_path: Path) -> None:
    with ImageRepository(tmp_path / "other", chunk_bytes=128 << 10) as other:
        place = tmp_path / "other" / "images" / "small"
        place.mkdir(0o700, parents=True)
        (place / "1").write_bytes((path / "images" / "small" / "1").read_bytes())
        (place / "1").chmod(0o600)
        with pytest.raises(BadImageError, match="chunks of"):
            other.open("small@1")


def test_a_file_with_chunks_of_its_own_sizes_comes_back_and_shares_what_did_not_change(tmp_path: Path) -> None:
    page = 4096
    pages = [small_images.pattern(page, seed) for seed in range(10)]
    before, after = b"".join(pages), b"".join([small_images.pattern(page, 99), *pages])
    cuts = [[4 * page, 4 * page, 2 * page], [page, 4 * page, 4 * page, 2 * page]]
    with ImageRepository(tmp_path / "store") as store:
        for data, sizes in zip((before, after), cuts, strict=True):
            with store.begin("small") as writer:
                small_images.fill(writer)
                (writer.directory / "cpu" / "pages-1.img").write_bytes(data)
                packed = {"pages-1.img": (chunks.packed(sizes), 101)}
                committed = writer.commit(small_images.manifest(), cuts=packed)
        assert committed.manifest.stats.cpu.new == page  # the one that came, though all others have moved
        with store.open("small@2") as image:
            assert image.verify() == []
            image.extract_cpu(tmp_path)
            assert (tmp_path / "pages-1.img").read_bytes() == after
            record = next(record for record in image.cpu_files() if record.path == "pages-1.img")
            assert (list(chunks.positions_of(record.sizes)), record.pid) == (cuts[1], 101)
            damage_chunk(store, record.digests[-32:])
        with store.open("small@2") as image:
            (problem,) = image.verify()
            assert (problem.path, problem.chunk) == ("cpu/pages-1.img", 3)
            assert f"at byte {9 * page}" in problem.what
        changed = diff(store.manifest("small@1"), store.manifest("small@2"))
        mine = {one.pid: one for one in changed.processes}[101]
        assert (mine.state, mine.changed_bytes, mine.new_bytes) == ("changed", page, page)
