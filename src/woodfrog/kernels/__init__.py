"""Access templates: what a GPU kernel will read and write, told from its PTX and its launch arguments.

Stands alone: nothing here needs a GPU, a driver or the rest of woodfrog (its error types apart).

    for code in read_file("libexample.so"):          # executables, shared objects, archives, fatbins, cubins, PTX
        if code.kind == "ptx":
            for template in templates(code.data):
                launch = Launch(grid=(4, 1, 1), block=(256, 1, 1), parameters=block, allocations=[(address, size)])
                template.ranges(launch, kinds=WRITES)   # [Range(address, size_bytes, exactness), ...]

The ranges are a superset of what the launch touches, always; `exactness` says how close. Two things are taken for
granted, as the CUDA C++ language does: an access made from a pointer stays inside the allocation that the pointer
points into, and an index into an array stays inside that array.
"""

from __future__ import annotations

from woodfrog.kernels.analysis import template_of, templates
from woodfrog.kernels.error import KernelFileError, PtxError
from woodfrog.kernels.reader import CodeObject, KernelInfo, Parameter, read_bytes, read_file
from woodfrog.kernels.template import Access, Exactness, Kind, Launch, ParameterLayout, Range, Template

READS = (Kind.LOAD, Kind.ATOMIC)
WRITES = (Kind.STORE, Kind.ATOMIC)

__all__ = [
    "READS",
    "WRITES",
    "Access",
    "CodeObject",
    "Exactness",
    "KernelFileError",
    "KernelInfo",
    "Kind",
    "Launch",
    "Parameter",
    "ParameterLayout",
    "PtxError",
    "Range",
    "Template",
    "read_bytes",
    "read_file",
    "template_of",
    "templates",
]
