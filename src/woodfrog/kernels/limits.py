"""Every cap that keeps hostile or merely huge input within bounded time and memory.

Caps are checked before anything is allocated or parsed. A cap that is hit gives an error or a coarser answer, never a
smaller one.
"""

from __future__ import annotations

# Files and containers. The largest libraries of the field (cuBLAS, PyTorch) stay below 2 GiB.
FILE_BYTES = 8 << 30
CONTAINERS = 100_000  # fatbin containers in one file
ENTRIES = 200_000  # entries of all containers of one file
CODE_BYTES = 256 << 20  # one cubin or PTX text, unpacked; compilers stay far below
UNPACKED_BYTES = 4 << 30  # everything unpacked from one file while listing it
ARCHIVE_MEMBERS = 100_000
KERNELS = 200_000  # of one cubin
PARAMETERS = 4096  # of one kernel: 4 KiB (32 KiB from sm_70 on with CUDA 12.1) of at least one byte, in practice < 100

# PTX text.
PTX_BYTES = 64 << 20
NESTING = 200  # depth of { } in a function body
PARAMETER_BYTES = 1 << 16

# Analysis of one kernel; beyond these the kernel is reported as touching everything.
INSTRUCTIONS = 60_000  # after inlining
INLINE_DEPTH = 16
BLOCKS = 8_000
POLYNOMIAL_TERMS = 48
EXPRESSION_DEPTH = 60
ALTERNATIVES = 24  # values that one join, select or indexed parameter can stand for
GATED_ALTERNATIVES = 6  # of these, how many may each have a condition of their own
ENVIRONMENT_ENTRIES = 3_000_000  # values kept over all blocks of a kernel

# Evaluation of one access.
CASES = 64  # combinations of alternatives
RANGES = 4096  # ranges that one access is split into before neighbours are joined
