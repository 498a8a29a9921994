"""Our BLAKE3 is BLAKE3: equal to the blake3 library, in every implementation that this processor can run."""

from __future__ import annotations

import random

import blake3
import pytest

from woodfrog._native import transfer

IMPLEMENTATIONS = transfer.blake3_implementations()
DATA = random.Random(3).randbytes((1 << 20) * 9 + 12345)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_length_up_to_5000_has_the_librarys_digest(implementation: str) -> None:
    for size in range(5001):
        assert transfer.blake3(DATA[:size], implementation) == blake3.blake3(DATA[:size]).digest(), size


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_lengths_and_those_around_every_border_have_the_librarys_digest(implementation: str) -> None:
    generator = random.Random(4)
    sizes = {(1 << bits) + more for bits in range(12, 24) for more in (-1025, -1024, -1, 0, 1, 63, 64, 1023, 1024)}
    sizes |= {pieces * (1 << 20) + more for pieces in range(1, 9) for more in (-1, 0, 1, 1024, 1025)}
    sizes |= {generator.randrange(len(DATA)) for _ in range(200)}
    for size in sizes:
        view = memoryview(DATA)[: min(size, len(DATA))]
        assert transfer.blake3(bytes(view), implementation) == blake3.blake3(view).digest(), size


def test_the_published_test_vector_of_nothing_holds() -> None:
    # https://github.com/BLAKE3-team/BLAKE3, test_vectors.json, input_len 0
    expected = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert transfer.blake3(b"").hex() == expected


def test_an_implementation_that_this_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot run"):
        transfer.blake3(b"", "abacus")
    assert "portable" in IMPLEMENTATIONS
