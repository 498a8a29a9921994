"""The benchmarks' results files are whole at every moment, say whether they are complete, and invent no numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module under test; its results go to a folder of the test's."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("WOODFROG_COMMIT", "0123456789ab")
    import harness

    return harness


def test_results_are_on_disk_after_every_row_and_say_that_they_are_not_complete(harness: ModuleType) -> None:
    results = harness.Results("example")
    results.summary["speed"] = 2.5
    results.add(kind="first", size_bytes=4)
    written = json.loads(results.path.read_text())
    assert written["rows"] == [{"kind": "first", "size_bytes": 4}]
    assert written["summary"] == {"speed": 2.5, "complete": 0}
    results.finish()
    written = json.loads(results.path.read_text())
    assert written["summary"] == {"speed": 2.5, "complete": 1}
    assert set(written) == {"bench", "date", "gpu", "driver", "commit", "command", "summary", "rows"}
    assert written["commit"] == "0123456789ab"
    assert [path.name for path in results.path.parent.iterdir()] == ["example.json"]


def test_a_median_of_nothing_is_an_error(harness: ModuleType) -> None:
    with pytest.raises(ValueError, match="no measurement"):
        harness.Spread.of([])
    spread = harness.Spread.of([3.0, 1.0, 10.0])
    assert (spread.minimum, spread.median, spread.maximum, spread.count) == (1.0, 3.0, 10.0, 3)


def test_a_budget_that_is_used_up_allows_nothing_more(harness: ModuleType) -> None:
    assert harness.Budget(1000.0).allows(999.0)
    assert not harness.Budget(1000.0).allows(1001.0)
    spent = harness.Budget(0.0)
    assert spent.left_s == 0.0
    assert not spent.allows()


def test_a_table_has_a_line_for_every_row(harness: ModuleType) -> None:
    text = harness.table("title", ("name", "value"), [("a", 1.23456), ("long name", None)])
    assert text.splitlines() == ["title", "name       value", "---------  -----", "a          1.235", "long name"]
