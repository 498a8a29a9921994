// See copy.hpp.
#include "copy.hpp"

#include "parallel.hpp"

#include <algorithm>
#include <atomic>

namespace woodfrog::transfer {
namespace {

void copy_device(Direction direction, const DeviceCopies &device, Arena &arena, uint64_t chunk_bytes,
                 Progress &progress, const Failure &failure) {
    Streams streams(*device.context, direction);
    uint64_t filled = 0;
    auto end_batch = [&] {
        if (streams.batches() == Streams::most_batches)
            progress.add(streams.finish_oldest());
        streams.end_batch(filled);
        filled = 0;
    };
    for (const Copy &copy : device.copies) {
        for (uint64_t done = 0; done < copy.size;) {
            if (failure.happened())
                return;
            progress.check();
            const uint64_t here = std::min(chunk_bytes - filled, copy.size - done);
            streams.submit(arena, copy.arena_offset + done, copy.device + done, here);
            done += here;
            filled += here;
            if (filled == chunk_bytes)
                end_batch();
        }
    }
    if (filled > 0)
        end_batch();
    while (streams.batches() > 0) {
        progress.check();
        progress.add(streams.finish_oldest());
    }
}

} // namespace

void copy_extents(const char *operation, Direction direction, const std::vector<Extent> &extents, Arena &arena,
                  uint64_t chunk_bytes, Progress &progress) {
    check_chunk_bytes(operation, chunk_bytes);
    Use arena_use = arena.use();
    const std::vector<Use> uses = use_all(extents);
    const std::vector<DeviceCopies> devices = join(operation, arena, extents);
    uint64_t total = 0;
    for (const DeviceCopies &device : devices)
        for (const Copy &copy : device.copies)
            total += copy.size;
    progress.begin(total);
    if (devices.empty())
        return;
    std::atomic<size_t> next{0};
    run_parallel(static_cast<unsigned>(devices.size()), [&](Failure &failure) {
        for (size_t i = next++; i < devices.size() && !failure.happened(); i = next++)
            copy_device(direction, devices[i], arena, chunk_bytes, progress, failure);
    });
}

} // namespace woodfrog::transfer
