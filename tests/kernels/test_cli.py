"""`woodfrog kernels`: each answer for people and as JSON, and the exit code of each refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Compiled
from typer.testing import CliRunner

from woodfrog.cli.app import app
from woodfrog.errors import ExitCode

RUNNER = CliRunner()


@pytest.fixture
def ptx(compiled: Compiled) -> str:
    return str(compiled("irregular", "sm_90", "O3"))


def test_list_shows_each_kernel_with_its_parameters(ptx: str) -> None:
    done = RUNNER.invoke(app, ["kernels", "list", ptx, "--json"])
    assert done.exit_code == ExitCode.OK
    kernels = {one["kernel"]: one for one in json.loads(done.stdout)}
    assert kernels["gather"]["parameters"] == [
        {"offset_bytes": offset, "size_bytes": size} for offset, size in ((0, 4), (8, 8), (16, 8), (24, 8))
    ]
    assert kernels["gather"]["architecture"] == "sm_90"
    assert "gather" in RUNNER.invoke(app, ["kernels", "list", ptx]).stdout


def test_report_says_why_a_kernel_is_not_exact(ptx: str) -> None:
    done = RUNNER.invoke(app, ["kernels", "report", ptx, "--json"])
    kernels = {one["kernel"]: one for one in json.loads(done.stdout)["kernels"]}
    assert kernels["kv_cache_append"]["writes"] == "exact"
    assert kernels["scatter"]["writes"] == "whole"
    assert "loaded value" in kernels["scatter"]["reason"]
    assert kernels["pointer_table"]["writes"] == "everything"
    assert kernels["histogram_bytes"]["writes"] == "bounded"
    assert "kernels with PTX have a template" in RUNNER.invoke(app, ["kernels", "report", ptx]).stdout


def test_explain_shows_addresses_conditions_and_loops(ptx: str) -> None:
    done = RUNNER.invoke(app, ["kernels", "explain", ptx, "kv_cache_append"])
    assert done.exit_code == ExitCode.OK
    assert "store 4 bytes at [param[24]" in done.stdout
    assert "loop 0: k0 = 0, then while" in done.stdout


def test_a_kernel_that_is_not_there_is_not_found_and_others_are_named(ptx: str) -> None:
    done = RUNNER.invoke(app, ["kernels", "explain", ptx, "absent", "--json"])
    assert done.exit_code == ExitCode.NOT_FOUND
    assert "gather" in json.loads(done.stdout)["advice"]


@pytest.mark.parametrize("verb", ["list", "report"])
def test_a_file_without_gpu_code_is_refused_with_its_name(verb: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("nothing to run here\n")
    done = RUNNER.invoke(app, ["kernels", verb, str(file), "--json"])
    assert done.exit_code == ExitCode.FAILED
    assert "notes.txt holds no GPU code" in json.loads(done.stdout)["reason"]
