// Memory that stays with the driver: counted for the survey, so that one knows what its own checkpoint will have to
// save, and what it cannot save.
#pragma once

#include "driver.hpp"
#include "memory.hpp"

namespace woodfrog::interpose {

void driver_memory_allocated(CUdeviceptr address, size_t size_bytes);
void driver_memory_freed(CUdeviceptr address);

// Bits of wire::Obstacle that have been seen since the process began (or are in force now, where that can be known).
void mark_obstacle(uint32_t bit);
uint32_t obstacles();

struct DriverMemory {
    uint64_t device_bytes;
    uint64_t host_bytes;
};
// Asks the driver about its pools; the calling thread must be the agent.
DriverMemory driver_memory();

// Calls, and if there is no memory gives spare blocks back and calls again.
template <typename Call> CUresult driver_memory_call(Call call) {
    CUresult result = call();
    if (result == CUDA_ERROR_OUT_OF_MEMORY && !driver_only() && give_back_spare(-1))
        result = call();
    return result;
}

} // namespace woodfrog::interpose
