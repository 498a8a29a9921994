// One piece of physical device memory behind a handle of the driver: made, exported, given up, taken back.
//
// The pieces of a target are what moves between it and the daemon. Nothing here knows at which addresses they are
// mapped, and nothing here takes a lock.
#pragma once

#include "driver.hpp"
#include "kept_fd.hpp"

namespace woodfrog::interpose {

struct Physical {
    uint64_t id = 0;                         // its number in the messages to the daemon; never used again
    CUmemGenericAllocationHandle handle = 0; // the driver's; another one after each return
    bool present = false;                    // `handle` is valid
    size_t size_bytes = 0;
    CUdevice device = 0;      // of host memory: one whose context reaches it
    int host_node = -1;       // the NUMA node of host memory
    bool imported = false;    // such a handle cannot be exported again: `kept` is passed on instead
    bool on_host = false;     // the device's to the application, but on host memory until it is promoted (hosted.hpp)
    bool was_on_host = false; // when it was given up
    uint32_t exports = 0;     // how often by descriptor: another process may have it
    bool by_ipc = false;      // exported by cuIpcGetMemHandle: another process of ours may have it
    // A descriptor of it that stays open: of imported memory, of what was ever shared with another process, and of what
    // was made ready for an export. Whoever gets the memory gets a copy of this one, so that all can be told to be the
    // same memory.
    KeptFd kept;
    // Its units in the page of the snapshot that is being captured, if `arming` is that one's (cow.cpp).
    struct Guard {
        uint32_t arming = 0, first = 0, count = 0;
    } guard;
};

uint64_t next_physical_id();

// Properties of memory that this library makes on `device`: pinned, exportable as a file descriptor.
CUmemAllocationProp exportable_properties(CUdevice device);

CUresult create_physical(CUdevice device, size_t size_bytes, Physical *physical);
// Gives the handle and the kept descriptor up. Nothing may be mapped from it any more.
CUresult release_physical(Physical *physical);
// Whether `kept` cannot be replaced: the driver exports imported memory to nobody, and others may have that very file.
bool needs_kept(const Physical &physical);
// Makes `kept`, where there is none.
CUresult keep_physical_fd(Physical *physical);
// A new descriptor for it, close-on-exec and announced (kept_fd.hpp), which the caller owns.
CUresult physical_fd(const Physical &physical, int *fd);
// A new descriptor for another process, which the caller owns (announced): always of the same open file.
CUresult shared_fd(Physical *physical, int *fd);
// Makes it the memory behind `fd`, which is taken over (and kept) on success and closed otherwise. `same`: the memory
// that was given up, so that the driver need not be asked where it lies, a call more for each handle.
CUresult import_physical(Physical *physical, int fd, bool same = false);
// How many are `on_host` now.
size_t physicals_on_host();

} // namespace woodfrog::interpose
