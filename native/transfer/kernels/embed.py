"""Compiles the kernels and writes the C++ file through which they become part of the extension module.

Run by CMake. PTX that every GPU from compute capability 8.0 on can be served with, and a cubin for each architecture
that is named, which spares the driver compiling it there. Without a compiler, or when it fails, the file
has an empty table (and says so): the build goes on, and woodfrog hashes on the CPU; ``--required`` makes that an error.
It must never write anywhere but into the output's folder.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

# PTX names the version of the language it is written in, and a driver refuses one that is newer than itself even where
# nothing new is used: nvcc 13.0 writes 9.0, driver 570 reads up to 8.7. The kernels use nothing newer than 7.4
# (cp.async and L2::128B, CUDA 11.4). 8.0 is CUDA 12.0; ptxas is asked whether the text really is of that version.
PTX_VERSION = "8.0"
PTX_ARCHITECTURE = "80"


class CompileError(Exception):
    """The compiler cannot be run or refuses; the text is what it said."""


def run(*command: str | Path) -> None:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise CompileError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


def compile_all(
    nvcc: str, host_compiler: str, source: Path, folder: Path, architectures: list[str]
) -> list[tuple[str, Path]]:
    """(architecture, file) of each image; "ptx" for the text."""
    ptx = folder / "kernels.ptx"
    run(
        nvcc,
        "-std=c++20",
        "-O3",
        "-ptx",
        *(("-ccbin", host_compiler) if host_compiler else ()),
        f"-arch=compute_{PTX_ARCHITECTURE}",
        "-o",
        ptx,
        source,
    )
    text, count = re.subn(
        r"^\.version [0-9.]+$", f".version {PTX_VERSION}", ptx.read_text(), count=1, flags=re.MULTILINE
    )
    if count != 1:
        raise CompileError(f"{ptx} does not name its version")
    ptx.write_text(re.sub(r"^\s*//.*\n", "", text, flags=re.MULTILINE))
    images = [("ptx", ptx)]
    for architecture in architectures:
        cubin = folder / f"kernels.sm_{architecture}.cubin"
        run(nvcc, "-cubin", f"-arch=sm_{architecture}", "-o", cubin, ptx)  # of the text, and so a test of it
        images.append((architecture, cubin))
    return images


def write(output: Path, images: list[tuple[str, Path]]) -> None:
    """The file with the table `images` of kernels.hpp, filled by the assembler's .incbin."""
    lines = [
        "// Written by embed.py.",
        '#include "kernels.hpp"',
        "namespace {",
    ]
    rows = []
    for architecture, path in images:
        name = f"woodfrog_kernels_{architecture}"
        # A text ends with a zero for the driver.
        lines += [
            f'asm(".pushsection .rodata\\n.balign 64\\n{name}:\\n.incbin \\"{path}\\"\\n'
            f'{name}_end:\\n.byte 0\\n.popsection\\n");',
            f'extern "C" __attribute__((visibility("hidden"))) const unsigned char {name}[], {name}_end[];',
        ]
        rows.append(f"    {{{0 if architecture == 'ptx' else architecture}, {name}, {name}_end}},")
    lines += [
        "} // namespace",
        "namespace woodfrog::transfer {",
        "const std::vector<KernelImage> &kernel_images() {",
        "    static const std::vector<KernelImage> images{",
        *rows,
        "    };",
        "    return images;",
        "}",
        "} // namespace woodfrog::transfer",
    ]
    output.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default="", help="the compiler; none: an empty table")
    parser.add_argument("--host-compiler", default="", help="that nvcc uses; none: its own choice")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the C++ file; images are written beside it")
    parser.add_argument("--architectures", nargs="*", default=[], help="of the cubins, such as 90")
    parser.add_argument("--required", action="store_true", help="fail when the kernels cannot be compiled")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    images: list[tuple[str, Path]] = []
    try:
        if not arguments.nvcc:
            raise CompileError("there is no nvcc (put the CUDA toolkit on PATH, or install the nvidia-cuda-nvcc wheel)")
        images = compile_all(
            arguments.nvcc,
            arguments.host_compiler,
            arguments.source.resolve(),
            arguments.output.parent.resolve(),
            arguments.architectures,
        )
    except CompileError as error:
        print(f"woodfrog: GPU kernels are left out, hashing will be slow on a GPU: {error}", file=sys.stderr)
        if arguments.required:
            return 1
    write(arguments.output, images)
    return 0


if __name__ == "__main__":
    sys.exit(main())
