"""Errors become text in one place: reason, state of the target, way out; the code is the error's own."""

from __future__ import annotations

import json

import pytest
import typer

from woodfrog import errors
from woodfrog.cli import output
from woodfrog.cli.options import gpu_mapping
from woodfrog.errors import ExitCode, TargetState


@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.WoodfrogError)]
)
def test_each_error_ends_with_its_own_exit_code(
    kind: type[errors.WoodfrogError], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as raised, output.reported(as_json=True):
        raise kind("it broke", advice="mend it", phase="drain", pid=7, target_state=TargetState.RUNNING)
    assert raised.value.exit_code == kind.exit_code
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == kind.exit_code
    assert (told["reason"], told["advice"], told["phase"], told["pid"]) == ("it broke", "mend it", "drain", 7)


def test_the_text_says_reason_phase_state_and_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    output.report(
        errors.NoSpaceError("the disk is full", advice="free some", phase="write", target_state=TargetState.RUNNING),
        False,
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "woodfrog: the disk is full (in phase write)\n  The target runs on as before.\n  What to do: free some\n"
    )


def test_every_state_of_a_target_has_a_sentence() -> None:
    states = {value for name, value in vars(TargetState).items() if not name.startswith("_")}
    assert states == set(output._STATES)


def test_an_interruption_is_told_with_the_shells_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised, output.reported(as_json=False):
        raise KeyboardInterrupt
    assert raised.value.exit_code == 130
    assert "interrupted" in capsys.readouterr().err


def test_escape_sequences_of_a_daemons_error_are_shown_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    output.report(errors.WoodfrogError("bad \x1b[31m thing"), False)
    assert "\x1b" not in capsys.readouterr().err


def test_gpus_are_mapped_by_pair_or_in_order() -> None:
    assert gpu_mapping(["1"]) == {"0": "1"}
    assert gpu_mapping(["3", "2"]) == {"0": "3", "1": "2"}
    assert gpu_mapping(["GPU-aa=1"]) == {"GPU-aa": "1"}
    for bad in (["=1"], ["0="], ["0=1", "0=2"], [""]):
        with pytest.raises(errors.UsageError):
            gpu_mapping(bad)


def test_exit_codes_are_those_that_are_documented() -> None:
    from pathlib import Path

    text = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()
    for code in ExitCode:
        assert f"| {int(code)} | {code.name} |" in text
