"""`woodfrog kernels`: each answer for people and as JSON, and the exit code of each refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton_launches
from conftest import HERE, Compiled, nvcc, run
from typer.testing import CliRunner

from woodfrog.cli.app import app
from woodfrog.errors import ExitCode, RefusedError
from woodfrog.kernels import WRITES, KernelFileError, Launch, prebuilt, templates

RUNNER = CliRunner()
PARAMETERS_WITH_A_BUFFER = ["--param", "n:4", "--param", "1", "--param", "1", "--param", "1"]


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


def test_explain_draws_what_a_launch_reads_and_writes(ptx: str) -> None:
    launch = ["--grid", "1", "--block", "64"]
    for word in ("100", "index:400", "in:1K", "out:512"):
        launch += ["--param", word]
    done = RUNNER.invoke(app, ["kernels", "explain", ptx, "gather", *launch])
    assert done.exit_code == ExitCode.OK, done.stdout
    lines = {line.split()[0] + " " + line.split()[1]: line for line in done.stdout.splitlines() if " bytes" in line}
    assert lines["out write"].endswith("256 of 512 bytes, exact")
    assert lines["index read"].endswith("256 of 400 bytes, exact")
    assert lines["in read"].endswith("1024 of 1024 bytes, whole")
    fields = json.loads(RUNNER.invoke(app, ["kernels", "explain", ptx, "gather", *launch, "--json"]).stdout)
    assert {"kind": "write", "buffer": "out", "offset_bytes": 0, "size_bytes": 256, "exactness": "exact"} in fields[0][
        "launch"
    ]["ranges"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--grid", "1"], "a grid and a block"),
        (["--grid", "1", "--block", "64", "--param", "1"], "takes 4 parameters"),
        (["--grid", "0", "--block", "64"], "takes 4 parameters"),
        (
            ["--grid", "1", "--block", "64", *(["--param", "n:4", "--param", "1", "--param", "1", "--param", "1"])],
            "cannot be a buffer",
        ),
        (["--grid", "1,2,3,4", "--block", "64", *("--param 1 " * 4).split()], "no size of a grid"),
        (["--grid", "1", "--block", "64", *("--param zebra " * 4).split()], "is nothing that 4 bytes can be"),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused_in_a_sentence(ptx: str, words: list[str], reason: str) -> None:
    done = RUNNER.invoke(app, ["kernels", "explain", ptx, "gather", *words, "--json"])
    assert done.exit_code == ExitCode.USAGE
    assert reason in json.loads(done.stdout)["reason"]


def test_explain_shows_the_line_of_source_that_an_access_comes_from(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text('extern "C" __global__ void fill(float *out) {\n    out[threadIdx.x] = 1;  // here\n}\n')
    ptx = tmp_path / "kernel.ptx"
    run(nvcc(), "-ptx", "-lineinfo", "-arch=sm_90", source, "-o", ptx)
    shown = RUNNER.invoke(app, ["kernels", "explain", str(ptx), "fill"]).stdout
    assert "kernel.cu:2" in shown
    assert "| out[threadIdx.x] = 1;  // here" in shown


def test_build_makes_catalogues_once_and_they_answer_without_analysis(tmp_path: Path) -> None:
    file, folder = HERE / "triton" / "kv_cache_write-sm_90.ptx", tmp_path / "catalogue"
    arguments = ["kernels", "build", str(file), "-o", str(folder), "--json"]
    (first,) = json.loads(RUNNER.invoke(app, arguments).stdout)["catalogues"]
    (second,) = json.loads(RUNNER.invoke(app, arguments).stdout)["catalogues"]
    assert (first["was_there"], second["was_there"]) == (False, True)
    assert first["library"] == second["library"]
    assert (first["kernels"], first["with_template"]) == (1, 1)
    built = prebuilt.find(file.read_bytes(), folder=folder)
    assert built is not None
    (template,) = templates(file.read_bytes())
    made = triton_launches.make("kv_cache_write", 3)
    launch = Launch(made.grid, made.block, made.parameters, made.allocations)
    assert built.open().ranges("kv_cache_write", launch, kinds=WRITES) == template.ranges(launch, kinds=WRITES)


def test_an_index_that_is_damaged_is_an_error_and_not_believed(ptx: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    data = Path(ptx).read_bytes()
    (tmp_path / f"{prebuilt.key_of(data)}.json").write_text('{"library": "x.so", "kernels": [{"no": 1}]}')
    with pytest.raises(KernelFileError, match="is damaged"):
        prebuilt.find(data, folder=tmp_path)


def test_a_folder_others_may_write_to_is_not_loaded_from(ptx: str, tmp_path: Path) -> None:
    data = Path(ptx).read_bytes()
    (tmp_path / f"{prebuilt.key_of(data)}.json").write_text("{}")
    tmp_path.chmod(0o777)
    with pytest.raises(RefusedError, match="others may write"):
        prebuilt.find(data, folder=tmp_path)
