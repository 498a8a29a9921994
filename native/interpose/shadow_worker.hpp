// What the agent asks of shadow execution, with the gate closed.
#pragma once

#include "gate.hpp"
#include "shadow_code.hpp"
#include "shadow_dirty.hpp"

namespace woodfrog::interpose::shadow {

struct Report {
    DirtyReport dirty;
    std::vector<KernelUse> kernels;     // launched since the last report
    uint64_t launches = 0, covered = 0; // since the last report, and how many of them had a template
};

// Finishes what is waiting, until the deadline at most; what is not finished counts as everything.
Report take_report(uint64_t operation, Deadline deadline);

// The process is about to be saved: no file of ours should be mapped into it. Catalogues are loaded again when needed.
// Waits for the worker, which may have to wait for the loader's lock; at the deadline they stay.
void unload_code(Deadline deadline);

} // namespace woodfrog::interpose::shadow
