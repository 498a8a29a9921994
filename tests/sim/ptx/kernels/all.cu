// All kernels in one module: one run of the compiler for each variant.
#include "algorithms.cu"
#include "arithmetic.cu"
#include "atomics.cu"
#include "control.cu"
#include "memory.cu"
#include "warps.cu"
