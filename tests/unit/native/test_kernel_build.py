"""The kernels' build step: what it compiles can be embedded, and a machine without a compiler builds woodfrog too."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TRANSFER = Path(__file__).resolve().parents[3] / "native" / "transfer"
EMBED = TRANSFER / "kernels" / "embed.py"
KERNEL = 'extern "C" __global__ void example(int *to) { *to = 7; }\n'


def compilers() -> list[str]:
    """Every nvcc that a build could find: the toolkit's, and the one of the wheels beside this Python."""
    found = [shutil.which("nvcc"), shutil.which("/usr/local/cuda/bin/nvcc")]
    spec = importlib.util.find_spec("nvidia")
    for package in spec.submodule_search_locations or [] if spec else []:
        found.append(shutil.which(f"{package}/cu13/bin/nvcc"))
    return sorted({str(Path(path).resolve()) for path in found if path})


def embed(folder: Path, *options: str, text: str = KERNEL) -> tuple[subprocess.CompletedProcess[str], Path]:
    source, output = folder / "kernel.cu", folder / "out" / "images.cpp"
    source.write_text(text)
    command = [sys.executable, str(EMBED), "--source", str(source), "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False), output


def rows(folder: Path, output: Path) -> list[tuple[int, int]]:
    """(capability, bytes) of each image in the compiled file's table."""
    main = folder / "main.cpp"
    main.write_text(
        '#include "kernels.hpp"\n#include <cstdio>\nint main() {\n'
        "    for (const auto &image : woodfrog::transfer::kernel_images())\n"
        '        std::printf("%d %td\\n", image.capability, image.end - image.data);\n}\n'
    )
    cuda = next(
        path
        for path in (*map(Path, importlib.util.find_spec("nvidia").submodule_search_locations), Path("/usr/local/cuda"))
        for path in (path / "cu13" / "include", path / "include")
        if (path / "cuda.h").exists()
    )
    program = folder / "main"
    subprocess.run(
        ["g++", "-std=c++20", "-fPIE", f"-I{TRANSFER}", f"-I{cuda}", str(main), str(output), "-o", str(program)],
        check=True,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    return [(int(line.split()[0]), int(line.split()[1])) for line in done.stdout.splitlines()]


def test_there_is_a_compiler_to_test_with() -> None:
    assert compilers(), "install the test dependencies (nvidia-cuda-nvcc), or put the toolkit on PATH"


@pytest.mark.parametrize("nvcc", compilers())
def test_kernels_are_embedded_as_code_and_as_text_that_older_drivers_read(tmp_path: Path, nvcc: str) -> None:
    done, output = embed(tmp_path, f"--nvcc={nvcc}", "--architectures", "80", "90", "--required")
    assert done.returncode == 0, done.stderr
    text = (output.parent / "kernels.ptx").read_text()
    (version,) = re.findall(r"^\.version (.*)$", text, re.MULTILINE)
    assert tuple(map(int, version.split("."))) <= (8, 7), "driver 570 reads PTX up to 8.7"
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    sizes = dict(rows(tmp_path, output))
    assert sizes.keys() == {0, 80, 90}
    assert sizes[0] == len(text)
    assert sizes[90] == (output.parent / "kernels.sm_90.cubin").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--nvcc="], KERNEL), (["--nvcc=/no/such/nvcc"], KERNEL), (["--nvcc=false"], KERNEL), ([], "this is no CUDA")],
)
def test_without_a_working_compiler_the_build_goes_on_and_says_what_is_left_out(
    tmp_path: Path, options: list[str], text: str
) -> None:
    options = options or [f"--nvcc={compilers()[0]}"]
    done, output = embed(tmp_path, *options, text=text)
    assert done.returncode == 0
    assert "GPU kernels are left out" in done.stderr
    assert rows(tmp_path, output) == []
    required, _ = embed(tmp_path, *options, "--required", text=text)
    assert required.returncode == 1


def test_text_that_is_not_of_the_older_version_is_not_embedded(tmp_path: Path) -> None:
    """The build asks the assembler; here a register type of PTX 8.3, in a text that is made to say 8.0."""
    text = (
        'extern "C" __global__ void example(unsigned long long *to) {\n'
        '    asm("{ .reg .b128 q; .reg .u64 a, b; mov.b128 q, {%1, %1}; mov.b128 {a, b}, q; st.global.u64 [%0], b; }"\n'
        '        :: "l"(to), "l"(1ull) : "memory");\n}\n'
    )
    done, output = embed(tmp_path, f"--nvcc={compilers()[0]}", "--architectures", "90", text=text)
    assert done.returncode == 0
    assert "left out" in done.stderr
    assert "requires PTX ISA .version 8.3" in done.stderr
    assert rows(tmp_path, output) == []
