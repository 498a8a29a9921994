// What the files that bind operations to Python share: the handles that Python holds, the conversion of arguments, and
// the way in which an operation runs without the GIL. Only files that define parts of the module include it.
#pragma once
#include "chunks.hpp"
#include "progress.hpp"

#include <mutex>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <optional>
#include <string_view>

namespace nb = nanobind;

namespace woodfrog::transfer {

// What Python holds; see the rule in module.cpp.
struct MemoryHandle {
    std::shared_ptr<Memory> memory;
};

struct Device {
    explicit Device(int ordinal) : ordinal(ordinal) {}
    int ordinal;
    std::mutex mutex;
    std::shared_ptr<Context> retained; // from the first call that needs it to the end of the Device

    std::shared_ptr<Context> context() {
        std::lock_guard lock(mutex);
        if (!retained)
            retained = Context::of(ordinal);
        return retained;
    }
    CUdevice device() const {
        CUdevice device = 0;
        WF_CUDA(cuDeviceGet, &device, ordinal);
        return device;
    }
};

using PieceArgument = std::tuple<MemoryHandle *, uint64_t, uint64_t>;
using ExtentArgument = std::tuple<MemoryHandle *, uint64_t, uint64_t, uint64_t>;
using RangeArgument = std::tuple<uint64_t, uint64_t>;

inline std::shared_ptr<Memory> memory_of(const MemoryHandle *handle) {
    if (!handle)
        throw nb::type_error("a Memory is needed, not None");
    return handle->memory;
}

inline std::vector<Piece> to_pieces(const std::vector<PieceArgument> &arguments) {
    std::vector<Piece> pieces;
    pieces.reserve(arguments.size());
    for (const auto &[handle, offset, size] : arguments)
        pieces.push_back({memory_of(handle), offset, size});
    return pieces;
}

inline std::vector<Extent> to_extents(const std::vector<ExtentArgument> &arguments) {
    std::vector<Extent> extents;
    extents.reserve(arguments.size());
    for (const auto &[handle, memory_offset, arena_offset, size] : arguments)
        extents.push_back({memory_of(handle), memory_offset, arena_offset, size});
    return extents;
}

inline std::vector<Range> to_ranges(const std::vector<RangeArgument> &arguments) {
    std::vector<Range> ranges;
    ranges.reserve(arguments.size());
    for (const auto &[offset, size] : arguments)
        ranges.push_back({offset, size});
    return ranges;
}

inline std::optional<std::string_view> view(const std::optional<nb::bytes> &bytes) {
    if (!bytes)
        return std::nullopt;
    return std::string_view(bytes->c_str(), bytes->size());
}

// Runs `work(progress)` without the GIL; without a Progress of the caller's, with one that nobody sees.
template <typename Work> auto released(Progress *given, const Work &work) {
    Progress unseen;
    nb::gil_scoped_release release;
    return work(given ? *given : unseen);
}

inline nb::bytes to_bytes(const std::string &digests) {
    return nb::bytes(digests.data(), digests.size());
}

inline nb::list to_list(const std::vector<std::shared_ptr<Memory>> &memories) {
    nb::list result;
    for (const std::shared_ptr<Memory> &memory : memories)
        result.append(nb::cast(MemoryHandle{memory}));
    return result;
}

// The parts of the module that are defined in files of their own; module.cpp calls them.
void bind_packs(nb::module_ &m);   // packs and the chunk index: native/packs/module_packs.cpp
void bind_pages(nb::module_ &m);   // pages of processes: native/pages/module_pages.cpp
void bind_guard(nb::module_ &m);   // module_guard.cpp
void bind_hashing(nb::module_ &m); // hash_device, drain_chunks and what goes with them: module_hash.cpp

} // namespace woodfrog::transfer
