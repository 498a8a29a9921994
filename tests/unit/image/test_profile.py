"""The profile of an image: a hint that is kept beside it, and ignored when it is not what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import small_images

from woodfrog.errors import UsageError
from woodfrog.image.profile import MOST_HANDLES, read_profile, write_profile
from woodfrog.image.repository import ImageRepository
from woodfrog.store import keys

OPERATION = 77


@pytest.fixture
def images(tmp_path: Path) -> Iterator[ImageRepository]:
    with ImageRepository(tmp_path / "store") as images:
        small_images.write(images, "small").close()
        yield images


def raw(images: ImageRepository, data: bytes) -> None:
    images.store.tier.replace(keys.profile_of("small@1"), data)


def test_what_was_used_comes_first_and_what_is_known_stays(images: ImageRepository) -> None:
    store = images.store
    assert read_profile(store, "small@1", OPERATION) == []
    assert write_profile(store, "small@1", OPERATION, [5, 3, 5, 9])
    assert read_profile(store, "small@1", OPERATION) == [5, 3, 9]
    assert write_profile(store, "small", OPERATION, [9, 4])
    assert read_profile(store, "small@1", OPERATION) == [9, 4, 5, 3]
    assert images.verify() == []


def test_a_profile_is_bounded(images: ImageRepository) -> None:
    assert write_profile(images.store, "small@1", OPERATION, range(MOST_HANDLES + 10))
    assert read_profile(images.store, "small@1", OPERATION) == list(range(MOST_HANDLES))
    with pytest.raises(UsageError):
        images.store.write_profile("small@1", bytes(keys.PROFILE_MAX_BYTES + 1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"version":2,"operation":77,"handles":[1]}',
        b'{"version":1,"operation":78,"handles":[1]}',
        b'{"version":1,"operation":77,"handles":["one"]}',
        b'{"version":1,"operation":77,"handles":[1.5]}',
        bytes(keys.PROFILE_MAX_BYTES + 1),
    ],
    ids=["empty", "cut", "a list", "version", "another image's", "text", "float", "too large"],
)
def test_a_damaged_one_is_ignored_and_replaced(images: ImageRepository, data: bytes) -> None:
    raw(images, data)
    assert read_profile(images.store, "small@1", OPERATION) == []
    assert write_profile(images.store, "small@1", OPERATION, [1])
    assert read_profile(images.store, "small@1", OPERATION) == [1]


def test_it_goes_with_its_image_and_is_not_made_without_one(images: ImageRepository, tmp_path: Path) -> None:
    assert write_profile(images.store, "small@1", OPERATION, [1])
    assert (tmp_path / "store" / "profiles" / "small" / "1").stat().st_mode & 0o777 == 0o600
    images.remove("small@1", lambda directory: None)
    assert list((tmp_path / "store").glob("profiles/*/*")) == []
    assert not write_profile(images.store, "small@1", OPERATION, [1])
    assert list((tmp_path / "store").glob("profiles/*/*")) == []
