// Legacy CUDA IPC (cuIpcGetMemHandle and its kin), which the driver refuses for memory of the virtual memory API, over
// the sharing of descriptors.
//
// A handle's 64 bytes name the exporting process by a random number, the allocation's block, and where in it the
// allocation lies. Whoever opens it asks the exporter for a descriptor of the block, at a socket with that number in
// its abstract name, and maps the block. The thread behind the socket starts with the first handle that is made.
#pragma once

#include "driver.hpp"

namespace woodfrog::interpose {

// What CUipcMemHandle holds when it is ours.
struct IpcHandle {
    uint64_t magic;
    uint64_t process; // random; the socket's name
    uint64_t block;   // the number of its physical memory, never used again in that process
    uint64_t block_bytes;
    uint64_t offset_bytes; // of the allocation in the block
    uint64_t size_bytes;
    uint32_t pid; // for the survey
    uint32_t reserved[3];
};
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));

// ── ipc_server.cpp ──
// This process's number; starts the thread that serves it. 0 when that fails.
uint64_t serve_ipc();
// Whether the number is that of this process, without starting anything.
bool is_own_ipc(uint64_t process);
// From the exporter: a descriptor (announced, kept_fd.hpp) of the block, -1 when there is no such block or exporter.
int ask_for_block(const IpcHandle &handle);
// Memory that was with the daemon is here again: requests that came meanwhile are answered.
void ipc_memory_is_back();
void ipc_in_forked_child();

// ── ipc_memory.cpp ──
// The range of the exported allocation that an opened address lies in.
bool ipc_address_range(CUdeviceptr address, CUdeviceptr *base, size_t *size_bytes);

} // namespace woodfrog::interpose
