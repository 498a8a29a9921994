// See process.hpp.
#include "process.hpp"

#include <mutex>
#include <pthread.h>

#include "checkpoint_service.hpp"
#include "config.hpp"
#include "device.hpp"
#include "error.hpp"
#include "owned_fds.hpp"

namespace simgpu {
namespace {

thread_local bool t_internal = false;
thread_local int t_depth = 0;
thread_local int t_callback = 0;

void forget_everything_in_child() {
    Process::instance().forked.store(true);
    OwnedFds::instance().close_all();
}

} // namespace

Process &Process::instance() {
    static Process *process = new Process;
    return *process;
}

void mark_internal_thread() {
    t_internal = true;
}

CallbackScope::CallbackScope() {
    ++t_callback;
}
CallbackScope::~CallbackScope() {
    --t_callback;
}

ApiCall::ApiCall() {
    Process &process = Process::instance();
    require(!process.forked.load(), CUDA_ERROR_NOT_INITIALIZED);
    require(process.initialised.load(), CUDA_ERROR_NOT_INITIALIZED);
    require(t_callback == 0, CUDA_ERROR_NOT_PERMITTED);
    if (t_internal || t_depth++ > 0)
        return;
    process.gate.enter();
    entered_ = true;
}

ApiCall::~ApiCall() {
    if (t_internal)
        return;
    --t_depth;
    if (entered_)
        Process::instance().gate.leave();
}

int initialise_process() {
    Process &process = Process::instance();
    if (process.forked.load())
        return CUDA_ERROR_NOT_INITIALIZED;
    static std::mutex &mutex = *new std::mutex;
    std::lock_guard lock(mutex);
    if (process.initialised.load())
        return CUDA_SUCCESS;
    if (devices().empty())
        initialise_devices();
    if (devices().empty())
        return CUDA_ERROR_NO_DEVICE;
    OwnedFds::instance();
    pthread_atfork(nullptr, nullptr, forget_everything_in_child);
    start_checkpoint_service();
    process.initialised.store(true);
    return CUDA_SUCCESS;
}

} // namespace simgpu
