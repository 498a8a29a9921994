// Taking stock; see survey.hpp.
#include "survey.hpp"

#include "capture.hpp"
#include "driver_memory.hpp"
#include "ending.hpp"
#include "gate.hpp"
#include "memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/stat.h>

namespace woodfrog::interpose {
namespace {

// Under MPS a control pipe of the server exists; the default directory is that of nvidia-cuda-mps-control.
bool under_mps() {
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    const std::string path = std::string(directory == nullptr ? "/tmp/nvidia-mps" : directory) + "/control";
    struct stat status{};
    return stat(path.c_str(), &status) == 0;
}

bool is_mig(CUdevice device) {
    char name[128] = {};
    return WF_REAL(cuDeviceGetName)(name, sizeof(name) - 1, device) == CUDA_SUCCESS && strstr(name, " MIG ") != nullptr;
}

template <typename Visit> void each_physical(Visit visit) { // with the lock held
    for (const auto &[address, block] : memory().blocks)
        visit(block->physical);
    for (const auto &[number, handle] : memory().virtual_handles)
        visit(handle->physical);
}

} // namespace

void count_owned(uint64_t *bytes, uint64_t *count) {
    *bytes = *count = 0;
    std::lock_guard lock(memory().mutex);
    each_physical([&](const Physical &physical) {
        *bytes += physical.size_bytes;
        ++*count;
    });
}

uint32_t device_count() {
    int count = 0;
    return WF_REAL(cuDeviceGetCount)(&count) == CUDA_SUCCESS ? static_cast<uint32_t>(count) : 0;
}

SurveyResult take_survey() {
    SurveyResult result{};
    count_owned(&result.survey.owned_bytes, &result.survey.owned_count);
    const DriverMemory driver = driver_memory();
    result.survey.driver_owned_bytes = driver.device_bytes;
    result.survey.host_bytes = driver.host_bytes;
    result.survey.launches = gate_launches();
    result.survey.obstacles = obstacles();
    std::map<CUdevice, wire::Device> devices;
    {
        std::lock_guard lock(memory().mutex);
        result.survey.allocation_count = memory().allocations.size() + memory().virtual_mappings.size();
        result.survey.contexts = static_cast<uint32_t>(memory().contexts.size());
        for (const auto &[handle, context] : memory().contexts)
            devices[context->device].ordinal = static_cast<uint32_t>(context->device);
        each_physical([&](const Physical &physical) {
            wire::Device &device = devices[physical.device];
            device.ordinal = static_cast<uint32_t>(physical.device);
            device.owned_bytes += physical.size_bytes;
            device.largest_bytes = std::max<uint64_t>(device.largest_bytes, physical.size_bytes);
            ++device.owned_count;
        });
    }
    bool shared = under_mps();
    for (auto &[ordinal, device] : devices) {
        CUuuid uuid{}; // asked each time: a restore may have put another GPU behind the ordinal
        if (WF_REAL(cuDeviceGetUuid_v2)(&uuid, ordinal) == CUDA_SUCCESS)
            memcpy(device.uuid, uuid.bytes, sizeof(device.uuid));
        shared = shared || is_mig(ordinal);
        result.devices.push_back(device);
    }
    if (shared)
        result.survey.obstacles |= wire::obstacle_mig_or_mps;
    if (is_ending())
        result.survey.obstacles |= wire::obstacle_ending;
    if (result.devices.size() > WF_MAX_ENTRIES)
        result.devices.resize(WF_MAX_ENTRIES);
    return result;
}

} // namespace woodfrog::interpose
