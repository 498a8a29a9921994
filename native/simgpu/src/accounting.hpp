// How much of a device's memory is in use, counted over all processes.
//
// Physical memory is a memfd whose name tells its device, so whoever holds a descriptor of it keeps it alive. The
// count walks /proc/*/fd and takes each inode once. It must never be kept in a shared counter: a process that is
// killed could not take its share out again.
#pragma once

#include <cstddef>
#include <string>

namespace simgpu {

// The memfd name of memory on physical device `device_index`, e.g. "simgpu-dev0".
std::string memfd_name(int device_index);

// Bytes of all living allocations on the device, those of this process and of every readable other one.
// Descriptors in flight inside a socket are not seen until they are received.
size_t used_bytes(int device_index);

// To be called with an allocation of `size_bytes` already made: false when the device is overcommitted by it. Two
// processes that race for the last memory may both be refused; never are both accepted.
bool fits(int device_index, size_t size_bytes);

} // namespace simgpu
