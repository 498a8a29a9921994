"""The Triton kernels that torch.compile makes of a transformer block and its training step, against the truth.

inductor/make_ptx.py says how they were made. Every one of them runs on the simulated GPU. Their sizes are in their
text, so launches differ in their grids and in how much memory lies behind each pointer.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from conftest import HERE
from making import Maker
from recorder import Recorder
from test_differential import check, launch_of
from test_triton import only_template, runnable

from woodfrog.kernels import WRITES, Exactness
from woodfrog.kernels.report import judged

FILES = sorted((HERE / "inductor").glob("*.ptx"))
RUN = FILES if "WOODFROG_KERNEL_LAUNCHES" in os.environ else [f for f in FILES if f.stem.endswith("sm_90")]
LAUNCHES = int(os.environ.get("WOODFROG_KERNEL_LAUNCHES", "1"))
ARRAY_BYTES = 2 << 20  # more than the largest tensor of the program has
# The gradient of the loss stores through pointers that it exchanged through shared memory.
THROUGH_SHARED_MEMORY = ("11_red",)


def test_nearly_all_of_them_have_a_template_for_their_writes() -> None:
    assert len(FILES) >= 60
    without = [file.stem for file in FILES if not judged(file)[0][0].has_template]
    assert {name.split("-")[0] for name in without} == set(THROUGH_SHARED_MEMORY)
    assert len(without) <= 0.05 * len(FILES)


@pytest.mark.parametrize("file", RUN, ids=lambda file: file.stem)
def test_every_access_of_a_torch_compiled_kernel_lies_in_a_named_range(
    file: Path, recorder_program: Path, tmp_path: Path
) -> None:
    text = file.read_text()
    template = only_template(file)
    ptx = tmp_path / file.name
    ptx.write_text(runnable(text))
    found = re.search(r"\.reqntid (\d+)", text)
    assert found is not None
    with Recorder(recorder_program, ptx) as recorder:
        for seed in range(LAUNCHES):
            r = random.Random(f"{file.stem} {seed}")
            m = Maker(r)
            numbers = [("i", r.randrange(1, 200)), ("Q", 0)]
            parameters = [
                ("Q", m.array(ARRAY_BYTES)) if one.size_bytes == 8 else numbers[0] for one in template.parameters[:-2]
            ]
            grid = (r.randrange(1, 5), r.randrange(1, 3), 1)
            made = m.made(grid, int(found[1]), *parameters, numbers[1], numbers[1], shared_bytes=64 << 10)
            recorded = recorder.run(template.kernel, made)
            what = f"{file.stem}, launch {seed}"
            assert not recorded.fault, f"{what}: {recorded.fault}"
            launch = launch_of(made, recorder)
            check(template, launch, recorded, what)
            if not file.stem.startswith(THROUGH_SHARED_MEMORY):
                assert all(one.exactness <= Exactness.BOUNDED for one in template.ranges(launch, kinds=WRITES)), what
