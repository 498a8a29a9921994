"""What arrived in GPU memory is compared with the image chunk by chunk."""

from __future__ import annotations

import os

import pytest

from woodfrog.errors import BadImageError
from woodfrog.operations.data import require_digests


def test_equal_digests_pass() -> None:
    digests = os.urandom(32 * 5)
    require_digests(digests, bytes(bytearray(digests)))


@pytest.mark.parametrize("wrong", [0, 3, 4])
def test_the_first_wrong_chunk_is_named(wrong: int) -> None:
    digests = bytes(range(32 * 5))
    found = bytearray(digests)
    found[32 * wrong + 31] ^= 1
    with pytest.raises(BadImageError, match=rf"1 of 5 chunks .* the first is chunk {wrong}"):
        require_digests(digests, bytes(found))
