// Catalogues: compiled templates of the kernels of one image, made by the daemon and loaded when they are there.
//
// A catalogue is code that runs in the application's process, so where it comes from is checked before it is loaded
// (shadow_image.hpp). It is unloaded before memory is released to the daemon: a process image then needs no file of
// ours. The evaluator allocates memory and calls nothing of the driver.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace woodfrog::interpose::shadow {

// As src/woodfrog/kernels/native/evaluate.hpp and numbers.hpp have them.
struct TemplateAllocation {
    uint64_t address, size_bytes;
};
struct TemplateLaunch {
    uint32_t grid[3], block[3];
    const unsigned char *parameters;
    int64_t parameters_bytes;
    const TemplateAllocation *allocations; // sorted by address
    int64_t allocation_count;
    const uint64_t *symbols; // addresses, in the order of the template's
};
struct TemplateRange {
    uint64_t address, size_bytes; // size 0: 2**64 bytes
    uint32_t exactness;           // kEverything: all memory
    uint32_t reserved;
};
inline constexpr uint32_t kEverything = 3;
inline constexpr unsigned kWrites = 1u << 1 | 1u << 2; // stores and atomics, of `kinds`
using Evaluate = int64_t (*)(int64_t number, const TemplateLaunch *launch, unsigned kinds, TemplateRange *out,
                             int64_t capacity);

struct ParameterPlace {
    size_t offset_bytes, size_bytes;
};

struct CatalogueKernel {
    int64_t number = 0;
    int ptx_version = 0;  // as CU_FUNC_ATTRIBUTE_PTX_VERSION counts: 90 for compute_90; 0: of the image's only code
    bool bounded = false; // no write of it is EVERYTHING whatever the launch
    size_t parameters_bytes = 0;
    std::vector<ParameterPlace> parameters;
    std::vector<std::string> symbols;
};

struct Catalogue {
    std::string key;
    std::unordered_multimap<std::string, CatalogueKernel> kernels; // by name
    void *library = nullptr;
    std::atomic<Evaluate> evaluate{nullptr}; // null while the code is not loaded
};

// The catalogue of an image, null while there is none. Never freed. Only the list is read.
Catalogue *find_catalogue(const std::string &key);
// Both take the loader's lock, which a thread of the application may hold while it waits at the closed gate: the agent
// must call neither.
bool load_catalogue(Catalogue *catalogue);
void unload_catalogue(Catalogue *catalogue);

} // namespace woodfrog::interpose::shadow
