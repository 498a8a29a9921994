// See tracking_agent.hpp.
#include "tracking_agent.hpp"

#include <algorithm>

namespace woodfrog::interpose {

Outcome send_dirty(Connection &connection, uint64_t sequence, const shadow::Report &report) {
    const Outcome gone{wire::Status::bad_message, CUDA_SUCCESS, 0, "the daemon is gone"};
    wire::Tracking tracking{};
    tracking.baseline = report.dirty.baseline;
    tracking.launches = report.launches;
    tracking.covered = report.covered;
    tracking.everything = report.dirty.everything ? 1 : 0;
    copy_text(tracking.why, report.dirty.why.c_str());
    const auto &ranges = report.dirty.ranges;
    std::vector<wire::Dirty> batch;
    for (size_t first = 0; first == 0 || first < ranges.size(); first += WF_MAX_ENTRIES) {
        const size_t end = std::min(first + WF_MAX_ENTRIES, ranges.size());
        batch.clear();
        for (size_t i = first; i < end; ++i)
            batch.push_back({ranges[i].id, ranges[i].offset_bytes, ranges[i].size_bytes});
        const uint32_t flags = end == ranges.size() ? WF_FLAG_LAST : 0;
        if (!connection.send(wire::Type::dirty_batch, sequence, wire::Status::ok, flags, &tracking, sizeof(tracking),
                             batch.data(), sizeof(wire::Dirty), static_cast<uint32_t>(batch.size()), nullptr))
            return gone;
    }
    std::vector<wire::Kernel> kernels;
    for (const shadow::KernelUse &use : report.kernels) {
        wire::Kernel kernel{};
        kernel.launches = use.launches;
        kernel.covered = use.covered ? 1 : 0;
        copy_text(kernel.name, use.name.c_str());
        kernels.push_back(kernel);
    }
    if (!connection.send(wire::Type::kernel_batch, sequence, wire::Status::ok, WF_FLAG_LAST, nullptr, 0, kernels.data(),
                         sizeof(wire::Kernel), static_cast<uint32_t>(kernels.size()), nullptr))
        return gone;
    return {};
}

} // namespace woodfrog::interpose
