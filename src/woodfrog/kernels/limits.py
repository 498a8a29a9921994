"""Every cap that keeps hostile or merely huge input within bounded time and memory.

Caps are checked before anything is allocated or parsed. A cap that is hit gives an error or a coarser answer, never a
smaller one.
"""

from __future__ import annotations

# Files and containers. The largest libraries of the field (cuBLAS, PyTorch) stay below 2 GiB.
FILE_BYTES = 8 << 30
CONTAINERS = 100_000  # fatbin containers in one file
FOLDER_FILES = 20_000  # looked at in one folder, at any depth; Triton's cache has a folder for each kernel
MAPPED_FILES = 4_000  # of one process
MAPS_BYTES = 64 << 20  # of /proc/PID/maps
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
SOURCE_BYTES = 16 << 20  # of a source file that PTX names, for showing a line of it

# Analysis of one kernel; beyond these the kernel is reported as touching everything.
INSTRUCTIONS = 60_000  # after inlining
INLINE_DEPTH = 16
BLOCKS = 8_000
BLOCK_THREADS = 1024  # of one block: a limit of the GPUs themselves
POLYNOMIAL_TERMS = 48
EXPRESSION_DEPTH = 60
ALTERNATIVES = 24  # values that one join, select or indexed parameter can stand for
JOINED_ALTERNATIVES = 64  # that an address is looked through for, whether they lie around one place
GATED_ALTERNATIVES = 6  # of these, how many may each have a condition of their own
ENVIRONMENT_ENTRIES = 3_000_000  # values kept over all blocks of a kernel

# Accesses that are put together.
LANE_AMOUNTS = 64  # parts of one value that may differ between them
LANE_LEVELS = 6  # accesses of accesses of … that are put together

# Evaluation of one access.
LOADED_BYTES = 1 << 20  # of memory that is looked at for one load
LOADED_VALUES = 1024  # combinations of loaded values that are told apart
NEARLY = 20  # accesses put together may name a byte in so many more than the sharpest answer would, to save time
CASES = 64  # combinations of alternatives
RANGES = 4096  # ranges that all accesses of a kernel are split into before neighbours are joined
BOUNDED_RANGES = 128  # ranges that one access is split into where they are bounds only, or accesses are many
