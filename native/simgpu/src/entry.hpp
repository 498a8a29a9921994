// The table behind cuGetProcAddress: every function that the simulated driver has, by name and by the CUDA version
// that introduced this form of it.
#pragma once

#include <cstddef>

namespace simgpu {

struct EntryPoint {
    const char *name; // without version suffix
    int since;        // CUDA version, 1000 * major + 10 * minor
    bool per_thread;  // the _ptds or _ptsz variant
    void *function;
};

// Sorted by name.
extern const EntryPoint kEntryPoints[];
extern const std::size_t kEntryPointCount;

} // namespace simgpu
