// See context.hpp.
#include "context.hpp"

#include <algorithm>
#include <cstdio>
#include <sys/syscall.h>
#include <unistd.h>

#include "device.hpp"
#include "module.hpp"
#include "submit.hpp"

namespace simgpu {
namespace {

std::atomic<unsigned long long> next_context_id{1};

thread_local std::vector<std::shared_ptr<Context>> *t_stack = nullptr;

// Gives a thread's stack up at its end. The main thread keeps its own: destructors of libraries call the driver after
// the thread's locals are gone.
struct StackCleaner {
    ~StackCleaner() {
        if (syscall(SYS_gettid) == getpid())
            return;
        delete t_stack;
        t_stack = nullptr;
    }
};

} // namespace

Context::Context(int of_device, bool is_primary, unsigned with_flags)
    : device(of_device), primary(is_primary), id(next_context_id.fetch_add(1)), flags(with_flags), heap(of_device) {
    limits = {{CU_LIMIT_STACK_SIZE, 1024},
              {CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 20},
              {CU_LIMIT_MALLOC_HEAP_SIZE, 8 << 20},
              {CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 2},
              {CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 2048},
              {CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 64},
              {CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 0}};
}

void Context::fail(CUresult code, const std::string &message) {
    CUresult expected = CUDA_SUCCESS;
    if (!failure.compare_exchange_strong(expected, code))
        return;
    std::fprintf(stderr, "simulated GPU %d: %s; every later call in this context fails with error %d\n", device,
                 message.c_str(), static_cast<int>(code));
}

std::shared_ptr<Stream> Context::legacy_stream() {
    std::lock_guard lock(streams_mutex_);
    if (!legacy_) {
        legacy_ = std::make_shared<Stream>(shared_from_this(), Stream::Kind::kLegacyDefault, 0u, 0);
        streams_.push_back(legacy_);
    }
    return legacy_;
}

void Context::add_stream(const std::shared_ptr<Stream> &stream) {
    std::lock_guard lock(streams_mutex_);
    std::erase_if(streams_, [](const auto &entry) { return entry.expired(); });
    streams_.push_back(stream);
}

std::vector<std::shared_ptr<Stream>> Context::streams() {
    std::lock_guard lock(streams_mutex_);
    std::vector<std::shared_ptr<Stream>> living;
    for (const auto &entry : streams_) {
        if (auto stream = entry.lock())
            living.push_back(stream);
    }
    return living;
}

bool Context::synchronize(Deadline deadline) {
    std::vector<Ticket> tickets;
    {
        std::lock_guard lock(submit_mutex);
        for (const auto &stream : streams())
            tickets.push_back(stream->last());
    }
    return std::all_of(tickets.begin(), tickets.end(), [&](const Ticket &ticket) { return ticket.wait(deadline); });
}

void Context::tear_down() {
    alive.store(false);
    synchronize();
    unload_modules_of(*this);
    for (const auto &stream : streams()) {
        stream->retire();
        stream_table().remove(stream.get());
    }
    {
        std::lock_guard lock(streams_mutex_);
        legacy_.reset();
        streams_.clear();
    }
    for (const Allocation &allocation : AddressSpace::instance().allocations_of(this)) {
        if (allocation.kind == AllocationKind::kHostPinned || allocation.kind == AllocationKind::kHostRegistered)
            continue;
        AddressSpace::instance().remove_allocation(allocation.base);
    }
    heap.free_all();
}

HandleTable<Context> &contexts() {
    static auto *table = new HandleTable<Context>;
    return *table;
}

std::vector<std::shared_ptr<Context>> &context_stack() {
    if (t_stack == nullptr) {
        t_stack = new std::vector<std::shared_ptr<Context>>;
        thread_local StackCleaner cleaner;
        (void)cleaner;
    }
    return *t_stack;
}

std::shared_ptr<Context> current_context() {
    const auto &stack = context_stack();
    return stack.empty() ? nullptr : stack.back();
}

std::shared_ptr<Context> require_context() {
    auto context = current_context();
    require(context != nullptr, CUDA_ERROR_INVALID_CONTEXT);
    require(context->alive.load(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return context;
}

std::mutex &primary_mutex() {
    static auto *mutex = new std::mutex;
    return *mutex;
}

PrimaryContext &primary_of(int device) {
    static auto *table = new std::map<int, PrimaryContext>;
    return (*table)[device];
}

} // namespace simgpu
