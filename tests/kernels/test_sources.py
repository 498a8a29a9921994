"""Where GPU code may come from besides one file: folders, wheels and running processes, and what each may do wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import HERE, Compiled, nvcc, run
from typer.testing import CliRunner

from woodfrog.cli.app import app
from woodfrog.errors import ExitCode, NotFoundError, RefusedError
from woodfrog.kernels import KernelFileError
from woodfrog.kernels.reader.sources import read_source

TRITON = HERE / "triton"
SOURCE = 'extern "C" __global__ void fill(float *out) { out[threadIdx.x] = 1; }\n'


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared object with a kernel in it."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "fill.cu").write_text(SOURCE)
    run(
        nvcc(),
        "-shared",
        "-Xcompiler",
        "-fPIC",
        "-cudart=none",
        "-arch=sm_90",
        folder / "fill.cu",
        "-o",
        folder / "libfill.so",
    )
    return folder / "libfill.so"


def test_tritons_cache_is_taken_up_as_a_folder(tmp_path: Path) -> None:
    """Triton keeps each kernel in a folder of its own: NAME.ptx, NAME.cubin, NAME.json and more."""
    for name in ("softmax_rows", "rotary"):
        entry = tmp_path / f"hash_of_{name}"
        entry.mkdir()
        shutil.copy(TRITON / f"{name}-sm_90.ptx", entry / f"{name}.ptx")
        (entry / f"{name}.json").write_text("{}")
        (entry / f"{name}.ttir").write_text("module {}\n")
    found = read_source(tmp_path)
    assert [code.kind for code in found.code] == ["ptx", "ptx"]
    assert found.problems == []
    assert found.code[0].origin.startswith("hash_of_rotary/rotary.ptx")
    done = CliRunner().invoke(app, ["kernels", "report", str(tmp_path), "--json"])
    assert {one["kernel"] for one in json.loads(done.stdout)["kernels"]} == {"softmax_rows", "rotary"}


def test_a_damaged_file_in_a_folder_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    shutil.copy(TRITON / "rotary-sm_90.ptx", tmp_path / "good.ptx")
    (tmp_path / "bad.cubin").write_bytes(b"\x7fELF" + bytes(60))
    found = read_source(tmp_path)
    assert len(found.code) == 1
    assert len(found.problems) == 1
    assert "bad.cubin" in found.problems[0]


def test_a_folder_without_gpu_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.ptx").write_text("nothing\n")
    with pytest.raises(KernelFileError, match="has no file with GPU code"):
        read_source(tmp_path)


def test_the_libraries_of_a_wheel_are_read(library: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "fill-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(library, "fill/libfill.so")
        archive.writestr("fill/__init__.py", "")
    found = read_source(wheel)
    assert "ptx" in {code.kind for code in found.code}
    assert found.code[0].origin.startswith("fill/libfill.so")


@pytest.mark.parametrize("damage", ["cut", "swapped"])
def test_a_damaged_wheel_is_refused_in_a_sentence(damage: str, library: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "fill-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(library, "fill/libfill.so")
    data = bytearray(wheel.read_bytes())
    data = data[: len(data) // 2] if damage == "cut" else data[:200] + bytes(200) + data[400:]
    wheel.write_bytes(data)
    with pytest.raises(KernelFileError):
        read_source(wheel)


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trap.ptx")
    with pytest.raises(KernelFileError, match="not a regular file"):
        read_source(tmp_path / "trap.ptx")


def test_what_a_running_process_has_mapped_is_read(library: Path) -> None:
    code = f"f = open({str(library)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(1)"
    command = [sys.executable, "-uc", f"import mmap, sys; {code}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"1\n"
        found = read_source(str(process.pid))
        process.stdin.close()
    assert any(library.name in code.origin for code in found.code)


def test_a_process_that_is_not_there_is_not_found() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(NotFoundError, match=f"no process {process.pid}"):
        read_source(str(process.pid))


def test_a_process_without_gpu_code_says_so() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        done = CliRunner().invoke(app, ["kernels", "list", str(process.pid), "--json"])
        process.kill()
    assert done.exit_code == ExitCode.FAILED
    assert "maps no file with GPU code" in json.loads(done.stdout)["reason"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user to be refused")
def test_a_process_of_another_user_is_refused_in_a_sentence() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            os.setgid(65534)
            os.setuid(65534)
            read_source("1")
        except RefusedError as error:
            os.write(write, error.reason.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        reason = pipe.read()
    os.waitpid(child, 0)
    assert "belongs to another user" in reason


def test_nvrtc_output_is_ptx_like_any_other(compiled: Compiled) -> None:
    """NVRTC gives PTX text that ends with a zero byte when its reported size is written out."""
    text = compiled("elementwise", "sm_90", "O3").read_bytes()
    from woodfrog.kernels import read_bytes

    (code,) = read_bytes(text + b"\0")
    assert code.kind == "ptx"
    assert code.architecture == "sm_90"
