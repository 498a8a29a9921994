"""Opens files that hold GPU code: executables, shared objects, objects, archives, fatbins, cubins and PTX text.

Needs no tool of a vendor. Input is hostile until parsed: sizes are capped first, and whatever is wrong with a file
comes out as one KernelFileError.
"""

from __future__ import annotations

from woodfrog.kernels.reader.code import CodeObject, KernelInfo, Parameter
from woodfrog.kernels.reader.open import read_bytes, read_file

__all__ = ["CodeObject", "KernelInfo", "Parameter", "read_bytes", "read_file"]
