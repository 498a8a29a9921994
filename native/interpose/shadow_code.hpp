// Which kernel a handle of the driver is: module and library loads, the functions taken from them, and for each kernel
// the layout of its parameters and its template.
#pragma once

#include "shadow.hpp"
#include "shadow_catalogue.hpp"

#include <string>
#include <vector>

namespace woodfrog::interpose::shadow {

// Never freed: records of launches and graphs point to it. Everything but the atomics is fixed once `ready` is seen,
// the layout once `laid_out` is.
struct Kernel {
    std::string name;
    std::string image; // its key, empty: no templates are possible
    CUmodule module = nullptr;
    CUlibrary library = nullptr;

    std::atomic<bool> laid_out{false};
    std::vector<ParameterPlace> parameters;
    size_t parameters_bytes = 0;

    std::atomic<bool> ready{false};    // it has a template whose writes are bounded
    std::atomic<uint32_t> tried{0};    // the last epoch in which it had none
    std::atomic<const char *> why{""}; // it has none; another one once it was looked for anew
    Catalogue *catalogue = nullptr;
    int64_t number = 0;
    std::vector<uint64_t> symbols;                      // addresses
    std::vector<TemplateAllocation> symbol_allocations; // the same with sizes

    std::atomic<uint64_t> launches{0};  // since the last report
    std::atomic<uint32_t> unbounded{0}; // the last epoch in which a launch of it might write anywhere
};

// The kernel behind what a launch names, null when that is not known. May ask the driver.
Kernel *kernel_of(CUfunction function);
// Whether the kernel's writes can be told. Looks for its catalogue once an epoch; may ask the driver.
bool has_template(Kernel *kernel, CUfunction function);
// Whether a launch of it is known to write anywhere, in this epoch.
bool is_unbounded(const Kernel &kernel);
// Where its parameters lie. False when nobody says; may ask the driver.
bool lay_out(Kernel *kernel, CUfunction function);

struct KernelUse {
    std::string name;
    uint64_t launches;
    bool covered;
};
// Kernels launched since the last call, most often first, at most `most`.
std::vector<KernelUse> take_kernel_uses(size_t most);
// All catalogues that are loaded. Nothing may be under evaluation.
void unload_all_catalogues();

} // namespace woodfrog::interpose::shadow
