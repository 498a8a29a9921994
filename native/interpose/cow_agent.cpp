// The messages `guard` and `guard_end`; see cow_agent.hpp.
#include "cow_agent.hpp"

#include <algorithm>
#include <cstring>

namespace woodfrog::interpose::cow {
namespace {

Outcome refuse(const char *why) {
    return {wire::Status::bad_message, CUDA_SUCCESS, 0, why};
}

} // namespace

bool Batches::take(Packet &packet, Outcome *outcome) {
    const size_t count = packet.header.count;
    if (failure_.ok() && !outcome->ok())
        failure_ = *outcome;
    if (failure_.ok() && packet.payload.size() != count * sizeof(wire::Guarded))
        failure_ = refuse("guard has the wrong length");
    if (failure_.ok() && count != 0) {
        const size_t before = handles_.size();
        handles_.resize(before + count);
        memcpy(handles_.data() + before, packet.payload.data(), packet.payload.size());
    }
    if (packet.fds.size() == 1 && page_.size() == 0)
        page_.add(packet.fds.take(0));
    packet.fds.clear();
    if ((packet.header.flags & WF_FLAG_LAST) == 0)
        return false;
    if (failure_.ok() && page_.size() != 1)
        failure_ = refuse("guard came without its page");
    *outcome = failure_.ok() ? arm(page_.take(0), handles_) : failure_;
    forget();
    return true;
}

void Batches::forget() {
    page_.clear();
    handles_.clear();
    failure_ = Outcome{};
}

std::vector<wire::Kernel> kernels_of(const Report &report, uint64_t *waits) {
    *waits = report.waits;
    std::vector<wire::Kernel> kernels;
    for (size_t i = 0; i < report.kernels.size() && i < WF_MAX_ENTRIES; ++i) {
        wire::Kernel kernel{};
        kernel.launches = report.kernels[i].count;
        memcpy(kernel.name, report.kernels[i].name.data(),
               std::min(report.kernels[i].name.size(), sizeof(kernel.name) - 1));
        kernels.push_back(kernel);
    }
    return kernels;
}

} // namespace woodfrog::interpose::cow
