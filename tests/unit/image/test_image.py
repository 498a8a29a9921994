"""A complete image on disk: any damage to any of its files is found, and nothing outside of it is ever read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_images

from woodfrog.errors import BadImageError, NotFoundError, RefusedError
from woodfrog.image.image import Image
from woodfrog.image.repository import ImageRepository


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    store = ImageRepository(tmp_path / "store")
    with small_images.write(store) as image:
        written = image.path
    yield written
    store.close()


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 0x10]))


FILES = ("gpu-0.data", "gpu-1.data", "cpu/core-100.img", "cpu/pages-1.img")


def test_an_untouched_image_has_no_problem_and_tells_its_progress(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Image.open(path) as image:
        assert image.verify(lambda done, total: seen.append((done, total))) == []
        assert image.reference == "small@1"
        assert image.cpu_directory == path / "cpu"
        assert seen[-1] == (image.size_bytes, image.size_bytes)
    assert seen == sorted(seen)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_in_a_file_is_found_with_its_chunk(path: Path, name: str) -> None:
    size = (path / name).stat().st_size
    edges = {0, size - 1, size // 2}
    edges |= {p + d for p in range(0, size, small_images.CHUNK_BYTES) for d in (-1, 0, 1) if 0 <= p + d < size}
    # Where the second handle begins chunks restart; both sides of that edge belong to the sample.
    first = small_images.HANDLES[0][1]
    edges |= {p for p in (first - 1, first) if p < size}
    for position in sorted(edges):
        flip(path / name, position)
        with Image.open(path) as image:
            problems = image.verify()
        assert [problem.path for problem in problems] == [name]
        assert problems[0].chunk is not None
        flip(path / name, position)
    with Image.open(path) as image:
        assert image.verify() == []


@pytest.mark.parametrize("name", [*FILES, "manifest"])
def test_a_file_that_was_cut_or_has_grown_is_refused_at_open(path: Path, name: str) -> None:
    content = (path / name).read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        (path / name).write_bytes(content[:length])
        with pytest.raises(BadImageError):
            Image.open(path)
    (path / name).write_bytes(content + b"\0")
    with pytest.raises(BadImageError):
        Image.open(path)


@pytest.mark.parametrize("name", [*FILES, "manifest", "cpu"])
def test_a_missing_part_is_refused(path: Path, name: str) -> None:
    if (path / name).is_dir():
        shutil.rmtree(path / name)
    else:
        (path / name).unlink()
    with pytest.raises(BadImageError, match="missing"):
        Image.open(path)


@pytest.mark.parametrize("name", [*FILES, "manifest", "cpu"])
def test_a_symbolic_link_is_not_followed_even_to_the_right_contents(path: Path, tmp_path: Path, name: str) -> None:
    shutil.move(path / name, tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadImageError, match="symbolic link"):
        Image.open(path)


def test_a_link_to_an_image_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(BadImageError, match="symbolic link"):
        Image.open(tmp_path / "link")


def test_a_fifo_in_place_of_a_file_is_refused_without_waiting(path: Path) -> None:
    (path / "gpu-0.data").unlink()
    os.mkfifo(path / "gpu-0.data")
    with pytest.raises(BadImageError, match="regular"):
        Image.open(path)


@pytest.mark.parametrize("name", ["extra", "cpu/extra", "cpu/sub/extra", "manifest.tmp"])
def test_a_file_that_the_manifest_does_not_list_is_reported(path: Path, name: str) -> None:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"x")
    with Image.open(path) as image:
        assert [problem.path for problem in image.verify()] == [name]


def test_an_image_that_others_may_write_is_refused(path: Path) -> None:
    path.chmod(0o770)
    with pytest.raises(RefusedError, match="others"):
        Image.open(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_an_image_of_another_user_is_refused(path: Path) -> None:
    os.chown(path, 12345, 12345)
    with pytest.raises(RefusedError, match="12345"):
        Image.open(path)


def test_no_image_at_all_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        Image.open(tmp_path / "nothing")
    (tmp_path / "empty").mkdir(0o700)
    with pytest.raises(BadImageError):
        Image.open(tmp_path / "empty")


def test_an_image_without_a_cpu_side_has_no_directory_for_it(tmp_path: Path) -> None:
    store = ImageRepository(tmp_path / "store")
    with store.begin("gpu-only") as writer:
        small_images.fill(writer)
        for file in (writer.directory / "cpu").iterdir():
            file.unlink()
        with writer.commit(small_images.manifest(cpu=None)) as image:
            assert image.verify() == []
            assert not (image.path / "cpu").exists()
            with pytest.raises(BadImageError, match="no CPU side"):
                _ = image.cpu_directory
    store.close()


def test_open_data_opens_only_data_files(path: Path) -> None:
    with Image.open(path) as image:
        descriptor = image.open_data("gpu-0.data")
        assert os.fstat(descriptor).st_size == image.manifest.data_files[0].size_bytes
        os.close(descriptor)
        for name in ("manifest", "../small@1/gpu-0.data", "gpu-9.data", ""):
            with pytest.raises(BadImageError):
                image.open_data(name)


def test_an_open_image_stays_the_same_when_its_directory_is_replaced(path: Path) -> None:
    with Image.open(path) as image:
        path.rename(path.with_name("aside"))
        path.mkdir()
        assert image.verify() == []
