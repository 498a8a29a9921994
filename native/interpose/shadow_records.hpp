// What goes through the ring: launches, ranges and graphs, as bytes.
#pragma once

#include "launches.hpp"
#include "shadow_code.hpp"
#include "shadow_ring.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace woodfrog::interpose::shadow {

enum class RecordKind : uint32_t { range, launch, graph };

struct RangeRecord {
    RecordKind kind = RecordKind::range;
    uint32_t reserved = 0;
    uint64_t address, size_bytes;
};

// Followed by the parameter block.
struct LaunchRecord {
    RecordKind kind = RecordKind::launch;
    uint32_t parameters_bytes = 0;
    Kernel *kernel = nullptr;
    uint32_t grid[3] = {}, block[3] = {};
};

// What one graph may write when it is launched. Not changed once it is launched, but for what is kept of its launches;
// shared by the executable graph and the records of its launches.
struct GraphWrites {
    uint64_t number = 0;                             // never used again
    std::vector<std::vector<unsigned char>> records; // ranges and launches
    std::vector<std::pair<Kernel *, CUfunction>> kernels;
    std::string everything; // why it may write anywhere, empty: it does not

    // While the count of changes() is `told_at`, another launch tells nothing new: it was recorded, or writes
    // everything as `without` has no template. Such launches are counted in `again`, and added to those of its kernels
    // later.
    mutable std::atomic<uint64_t> told_at{0}, again{0};
    mutable std::atomic<size_t> covered{0}; // kernels with a template, then
    mutable std::atomic<const Kernel *> without{nullptr};

    GraphWrites() = default;
    GraphWrites(const GraphWrites &) = delete;
    GraphWrites &operator=(const GraphWrites &) = delete;
    ~GraphWrites() { add_counts(); }
    void add_counts() const {
        if (const uint64_t launches = again.exchange(0, std::memory_order_relaxed); launches != 0)
            for (const auto &[kernel, function] : kernels)
                kernel->launches.fetch_add(launches, std::memory_order_relaxed);
    }
};

struct GraphRecord {
    RecordKind kind = RecordKind::graph;
    uint32_t reserved = 0;
    const std::shared_ptr<const GraphWrites> *writes = nullptr; // the record's own, freed by the reader
};

// Bytes that the record takes; 0 when the parameters cannot be told.
size_t launch_record_bytes(const Kernel &kernel, const LaunchArguments &launch);
void write_launch_record(Kernel *kernel, const LaunchArguments &launch, size_t record_bytes, unsigned char *to);

// shadow_worker.cpp
Ring &ring();
void wake_worker();
void ring_is_full();

// Puts a record into the ring; without room it counts as a write of everything, and false is returned.
template <typename Fill> bool submit(size_t size_bytes, Fill fill) {
    if (!ring().push(size_bytes, fill)) {
        ring_is_full();
        return false;
    }
    if (ring().waiting_bytes() >= Ring::kWakeBytes) [[unlikely]]
        wake_worker();
    return true;
}

// shadow_graph.cpp: adds what is counted of graphs to their kernels' launches.
void add_graph_counts();

// Counted for the daemon.
struct Counts {
    std::atomic<uint64_t> launches{0};
    std::atomic<int64_t> covered{0}; // below zero when a launch is found to write anywhere after it was told
};
Counts &counts();

} // namespace woodfrog::interpose::shadow
