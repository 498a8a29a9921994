// The knobs of the simulated GPU, read from the environment once, at cuInit.
//
// Every variable is named WOODFROG_SIMGPU_*; README.md in the folder above lists them. This file must never
// consult the environment later than cuInit: a process that was checkpointed and restored keeps its shape.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <cuda.h>

namespace simgpu {

struct Config {
    int device_count = 1;
    size_t memory_size_bytes = size_t{2} << 30;
    int driver_version = CUDA_VERSION;
    size_t control_state_bytes = 0;     // what a checkpoint maps and has populated, as the real driver does
    bool one_mapping = false;           // whether all device memory goes into that mapping, as the real driver has it
    bool scribbles = false;             // whether a restore writes into that mapping, as no driver should
    bool hidden_maps = false;           // whether tensor maps do not have their address as it is
    bool multicast = false;             // whether multicast objects can be made
    std::string machine;                // "" or a name: devices of different machines share no memory
    std::optional<std::string> visible; // CUDA_VISIBLE_DEVICES
    bool pci_order = false;             // CUDA_DEVICE_ORDER
    bool last_is_fastest = false;       // without it the devices are numbered from the last one on
    std::string failures;               // "checkpoint:1,restore:2:1" or "@/path/of/a/file/with/that"
    std::string latencies;              // "lock:5,checkpoint:200" in milliseconds
};

// Never fails: a value that cannot be understood is reported on stderr once and the default is used.
const Config &config();

// "2GiB", "512MiB", "64KiB" or a plain number of bytes. Empty when `text` is none of these.
std::optional<size_t> parse_size_bytes(std::string_view text);

// The error that the environment asks `action` to fail with, CUDA_SUCCESS when none. An entry "name:code:count"
// fails `count` times, "name:code" always.
CUresult injected_failure(std::string_view action);

// Waits as long as the environment says that `action` takes on the imitated machine.
void imitate_latency(std::string_view action);

} // namespace simgpu
