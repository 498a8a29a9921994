"""Times and fractions as a person writes them."""

from __future__ import annotations

import pytest

from woodfrog.cli.units import duration_s, fraction
from woodfrog.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("24h", 86400),
        ("7d", 604800),
        ("2w", 1209600),
        ("0", 0),
        (" 5 min ", 300),
    ],
)
def test_times(text: str, expected_s: float) -> None:
    assert duration_s(text, "--every") == expected_s


@pytest.mark.parametrize("text", ["", "m", "-1s", "1e9", "5 years", "1h30m", "nan", "\u0661s"])
def test_what_is_no_time_names_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--every"):
        duration_s(text, "--every")


@pytest.mark.parametrize(("text", "expected"), [("5%", 0.05), ("5", 0.05), ("0.5%", 0.005), ("100%", 1), ("0%", 0)])
def test_fractions(text: str, expected: float) -> None:
    assert fraction(text, "--sample") == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "%", "101%", "-1%", "half"])
def test_what_is_no_fraction_names_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--sample"):
        fraction(text, "--sample")
