// Launches, noted with copies of their arguments.
#include "shadow_dirty.hpp"
#include "shadow_records.hpp"

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
    for (size_t i = 0; i < kernel->parameters.size(); ++i)
        memcpy(block + kernel->parameters[i].offset_bytes, launch.parameters[i], kernel->parameters[i].size_bytes);
}

namespace {

void launched(const LaunchArguments &launch) {
    counts().launches.fetch_add(1, std::memory_order_relaxed);
    Kernel *kernel = kernel_of(launch.function);
    if (kernel == nullptr)
        return wrote_everything("a kernel that came in an unknown way");
    kernel->launches.fetch_add(1, std::memory_order_relaxed);
    if (!has_template(kernel, launch.function))
        return wrote_everything(kernel->why, kernel->name.c_str());
    if (!is_unbounded(*kernel))
        counts().covered.fetch_add(1, std::memory_order_relaxed);
    if (everything_marked())
        return;
    const size_t size_bytes = lay_out(kernel, launch.function) ? launch_record_bytes(*kernel, launch) : 0;
    if (size_bytes == 0)
        return wrote_everything("a launch whose arguments cannot be told", kernel->name.c_str());
    submit(size_bytes, [&](unsigned char *to) { write_launch_record(kernel, launch, size_bytes, to); });
}

struct Sink {
    static void launched(const LaunchArguments &launch) { shadow::launched(launch); }
};

} // namespace

Overrides launch_overrides() {
    return launch_table<Sink, Before>();
}

} // namespace woodfrog::interpose::shadow
