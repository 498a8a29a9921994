// Device memory that lies on host memory for a while: a target that was restored with `--mode mapped` runs before its
// data is on the GPU. Its addresses are mapped to host memory, which kernels reach across the bus, and the daemon moves
// it: copies some while the gate is closed, and passes device memory that takes its place at the same address.
//
// Which memory that is the driver knows (Physical::on_host is asked of it when memory is imported), so it is right
// after whatever way the memory came: a restore, or a checkpoint in between. Only blocks of cuMemAlloc and slabs.
#pragma once

#include "handover.hpp"

namespace woodfrog::interpose {

// Sends a descriptor for each block that lies on host memory. In any state.
Outcome send_hosted(const SendHandles &send);

// A packet of device memory, with the gate closed and nothing running: each takes the place of the host memory behind
// the handle of that number, whose contents it has. Those that were replaced are told in `replaced`. What has been
// freed, is on the device already, or may be another process's too is left as it is, which is no failure. When a
// driver call fails the memory is as it was, unless that cannot be mapped again: then it is missing (missing_handles).
Outcome replace_handles(Packet &packet, std::vector<wire::Handle> *replaced);

} // namespace woodfrog::interpose
