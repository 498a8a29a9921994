"""The kernels that Triton makes of a transformer block: their templates, against the truth where they can be run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import triton_launches
from conftest import HERE
from recorder import Recorder
from test_differential import check, launch_of

from woodfrog.kernels import Exactness, Launch, Template, templates
from woodfrog.kernels.report import judged

FILES = sorted((HERE / "triton").glob("*.ptx"))
LAUNCHES = int(os.environ.get("WOODFROG_KERNEL_LAUNCHES", "10"))


_LDMATRIX = re.compile(r"ldmatrix[.\w]+\s*\{([^}]*)\},\s*\[[^\]]*\];")


def runnable(text: str) -> str:
    """The text without ldmatrix, which the simulated GPU lacks: it loads data from shared memory, never an address."""
    return _LDMATRIX.sub(lambda m: " ".join(f"mov.b32 {name.strip()}, 0;" for name in m[1].split(",")), text)


def only_template(file: Path) -> Template:
    (template,) = templates(file.read_text())
    return template


def test_the_kernels_are_there_for_two_architectures() -> None:
    assert len(FILES) >= 26


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_writes_of_every_triton_kernel_have_a_template(file: Path) -> None:
    ((one,), machine_code) = judged(file)
    assert machine_code == []
    assert one.template.fallback == ""
    assert one.writes is not None
    assert one.writes <= Exactness.BOUNDED


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.stem.split("-")[0] in triton_launches.RUNNABLE], ids=lambda f: f.stem
)
def test_every_access_of_a_triton_kernel_lies_in_a_named_range(
    file: Path, recorder_program: Path, tmp_path: Path
) -> None:
    template = only_template(file)
    ptx = tmp_path / file.name
    ptx.write_text(runnable(file.read_text()))
    with Recorder(recorder_program, ptx) as recorder:
        for seed in range(LAUNCHES):
            made = triton_launches.make(template.kernel, seed)
            recorded = recorder.run(template.kernel, made)
            what = f"{file.stem}, launch {seed}"
            assert not recorded.fault, f"{what}: {recorded.fault}"
            launch = launch_of(made, recorder)
            assert isinstance(launch, Launch)
            check(template, launch, recorded, what)
