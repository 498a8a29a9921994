// Launches, noted with copies of their arguments.
#include "shadow_dirty.hpp"
#include "shadow_recent.hpp"

#include <algorithm>
#include <cstring>

namespace woodfrog::interpose::shadow {

size_t launch_record_bytes(const Kernel &kernel, const LaunchArguments &launch) {
    if (launch.in_one_buffer()) {
        size_t size_bytes = 0;
        bool known = false;
        for (void **at = launch.extra; *at != CU_LAUNCH_PARAM_END; at += 2) {
            if (*at == CU_LAUNCH_PARAM_BUFFER_SIZE) {
                size_bytes = *static_cast<const size_t *>(at[1]);
                known = true;
            } else if (*at != CU_LAUNCH_PARAM_BUFFER_POINTER) {
                return 0; // nothing that is known here
            }
        }
        // A short buffer is an error of the launch, and its record must not claim more than there is.
        return known && size_bytes >= kernel.parameters_bytes &&
                       size_bytes < Ring::kLargestRecord - sizeof(LaunchRecord)
                   ? sizeof(LaunchRecord) + size_bytes
                   : 0;
    }
    if (launch.parameters == nullptr && kernel.parameters_bytes != 0)
        return 0;
    const size_t size_bytes = sizeof(LaunchRecord) + kernel.parameters_bytes;
    return size_bytes <= Ring::kLargestRecord ? size_bytes : 0;
}

void write_launch_record(Kernel *kernel, const LaunchArguments &launch, size_t record_bytes, unsigned char *to) {
    LaunchRecord record;
    record.kernel = kernel;
    record.parameters_bytes = static_cast<uint32_t>(record_bytes - sizeof(record));
    std::copy(std::begin(launch.grid), std::end(launch.grid), record.grid);
    std::copy(std::begin(launch.block), std::end(launch.block), record.block);
    memcpy(to, &record, sizeof(record));
    unsigned char *block = to + sizeof(record);
    if (launch.in_one_buffer()) {
        for (void **at = launch.extra; *at != CU_LAUNCH_PARAM_END; at += 2)
            if (*at == CU_LAUNCH_PARAM_BUFFER_POINTER)
                memcpy(block, at[1], record.parameters_bytes);
        return;
    }
    memset(block, 0, record.parameters_bytes); // padding: equal launches are equal bytes
    void *const *parameter = launch.parameters;
    for (const ParameterPlace &place : kernel->parameters) {
        unsigned char *there = block + place.offset_bytes;
        const void *from = *parameter++;
        if (place.size_bytes == 8) // nearly all are addresses or numbers: copied without a call
            memcpy(there, from, 8);
        else if (place.size_bytes == 4)
            memcpy(there, from, 4);
        else
            memcpy(there, from, place.size_bytes);
    }
}

namespace {

void count(std::atomic<uint64_t> &one) { // only its own thread adds
    one.store(one.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void launched(const LaunchArguments &launch) {
    Recent *recent = Recent::of_this_thread();
    if (recent == nullptr)
        return wrote_everything("there is no memory to follow launches");
    // Before anything that depends on what is counted.
    const uint64_t now = changes();
    Recent::Known *known = recent->find(launch.function, now);
    if (known == nullptr) {
        counts().launches.fetch_add(1, std::memory_order_relaxed);
        return wrote_everything("a kernel that came in an unknown way");
    }
    Kernel *kernel = known->kernel.load(std::memory_order_relaxed);
    count(known->launches);
    if (!known->has_template)
        return wrote_everything(kernel->why.load(std::memory_order_relaxed), kernel->name.c_str());
    if (!is_unbounded(*kernel))
        count(known->covered);
    if (everything_marked())
        return;
    const size_t size_bytes = launch_record_bytes(*kernel, launch);
    if (size_bytes == 0)
        return wrote_everything("a launch whose arguments cannot be told", kernel->name.c_str());
    if (size_bytes > Recent::kLargestRecord) {
        submit(size_bytes, [&](unsigned char *to) { write_launch_record(kernel, launch, size_bytes, to); });
        return;
    }
    alignas(16) unsigned char record[Recent::kLargestRecord + 8];
    memset(record + size_bytes / 8 * 8, 0, 8); // the rest of the last word
    write_launch_record(kernel, launch, size_bytes, record);
    if (recent->has(record, size_bytes, now))
        return;
    if (submit(size_bytes, [&](unsigned char *to) { memcpy(to, record, size_bytes); }))
        recent->add(record, size_bytes, now);
}

struct Sink {
    static void launched(const LaunchArguments &launch) { shadow::launched(launch); }
};

} // namespace

Overrides launch_overrides() {
    return launch_table<Sink, Before>();
}

} // namespace woodfrog::interpose::shadow
