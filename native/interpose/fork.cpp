// A forked child has no CUDA, no agent and no descriptor of ours: its driver calls go to the driver as they are, which
// answers as it does in any forked child. vfork and posix_spawn run no handlers and need none: what is ours closes on
// exec, and nothing of the parent's memory is written.
#include "fork.hpp"

#include "control_memory.hpp"
#include "cow.hpp"
#include "gate.hpp"
#include "inherited.hpp"
#include "ipc.hpp"
#include "kept_fd.hpp"
#include "memory.hpp"
#include "shadow.hpp"
#include "torch_clock.hpp"

#include <pthread.h>

namespace woodfrog::interpose {
namespace {

void in_child() {
    set_driver_only(true);
    gate_forget();
    shadow::in_forked_child();
    cow::in_forked_child();
    kept_fds_after_fork_in_child();
    inherited_files_after_fork_in_child();
    control_memory_after_fork_in_child();
    torch_clock_after_fork_in_child();
    ipc_in_forked_child();
}

} // namespace

void install_fork_handlers() {
    // Fails only without memory; the child then keeps descriptors until it executes another program.
    pthread_atfork(&kept_fds_before_fork, &kept_fds_after_fork_in_parent, &in_child);
}

} // namespace woodfrog::interpose
