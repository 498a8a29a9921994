// Giving the process's GPU memory to the node daemon and taking it back. All functions but the first are called by the
// agent with the gate closed; nothing else changes the tables then.
#pragma once

#include "owned.hpp"
#include "quiesce.hpp"
#include "transport.hpp"
#include "wire.h"

#include <functional>

namespace woodfrog::interpose {

// Sends one packet of handles (with a descriptor each) or mappings; false when the daemon is gone.
using SendHandles = std::function<bool(const std::vector<wire::Handle> &, const FdList &, bool last)>;
using SendMappings = std::function<bool(const std::vector<wire::Mapping> &, bool last)>;
using SendShared = std::function<bool(const std::vector<wire::Shared> &, bool last)>;

// While the application runs: descriptors of what is owned, so that the driver need not make them while it waits. They
// stay in this process and are closed with the memory that they are of. The outcome's value: how many were made; fewer
// than all is no failure.
Outcome export_ahead();

// Sends a descriptor for everything owned, then what lies in it, then which of it others may have. Nothing changes in
// this process.
Outcome export_memory(const SendHandles &send_handles, const SendMappings &send_mappings,
                      const SendShared &send_shared);

// Unmaps and releases everything that was exported; the addresses stay reserved. `*changed` tells whether anything was
// given up: when a failure leaves it false the process is as before.
Outcome release_memory(bool *changed);

// How many handles are not there, or not mapped where they belong.
size_t missing_handles(const Inventory &inventory);

// Memory on its way back, from the first packet of handles to the last. While it lives the tables must not change.
class Return {
  public:
    // Takes one handle back and maps it. The descriptor is taken over. A handle that is there already is accepted.
    // `same`: it is the memory that was released.
    Outcome take(const wire::Handle &handle, int fd, bool same);
    // Once nothing is missing: host memory is registered again, and threads that touched what was away go on.
    Outcome finish();

  private:
    Inventory inventory_;
    DeviceScope current_;
};

} // namespace woodfrog::interpose
