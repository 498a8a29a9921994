"""A target with more allocations than the daemon may have files open is refused before it is touched."""

from __future__ import annotations

import resource

import pytest

from woodfrog.errors import RefusedError
from woodfrog.target.limits import raise_open_file_limit, require_open_files


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        limit = raise_open_file_limit()
        assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert limit > 256 or hard <= 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_allocations_are_refused_with_the_numbers() -> None:
    limit = raise_open_file_limit()
    require_open_files(1)
    with pytest.raises(RefusedError, match=f"{limit} allocations, and the daemon may have only {limit}") as caught:
        require_open_files(limit)
    assert "LimitNOFILE" in caught.value.advice
