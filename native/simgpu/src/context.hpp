// Contexts: the primary one of each device and those the application creates, and which one a thread works in.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <cuda.h>

#include "error.hpp"
#include "handles.hpp"
#include "heap.hpp"
#include "stream.hpp"

namespace simgpu {

struct Context : std::enable_shared_from_this<Context> {
    Context(int of_device, bool is_primary, unsigned with_flags);

    CUcontext handle() { return reinterpret_cast<CUcontext>(this); }
    // Makes every later call in this context return `code`; the first failure stays.
    void fail(CUresult code, const std::string &message);
    // All work of all streams has ended. False at the deadline.
    bool synchronize(Deadline deadline = {});
    std::shared_ptr<Stream> legacy_stream();
    std::vector<std::shared_ptr<Stream>> streams();
    void add_stream(const std::shared_ptr<Stream> &stream);
    // Waits for all work, then gives up streams, modules and memory.
    void tear_down();

    const int device;
    const bool primary;
    const unsigned long long id;
    std::atomic<unsigned> flags;
    std::atomic<CUresult> failure{CUDA_SUCCESS};
    std::atomic<bool> alive{true};
    std::mutex submit_mutex; // held while work is appended to any stream of the context
    Heap heap;
    std::mutex limits_mutex;
    std::map<CUlimit, size_t> limits;
    std::set<unsigned long long> peers; // contexts whose memory this one asked to reach; under limits_mutex
    std::atomic<CUfunc_cache> cache_config{CU_FUNC_CACHE_PREFER_NONE};

  private:
    std::mutex streams_mutex_;
    std::shared_ptr<Stream> legacy_;
    std::vector<std::weak_ptr<Stream>> streams_;
};

HandleTable<Context> &contexts();

// The context that the calling thread works in; null when there is none.
std::shared_ptr<Context> current_context();
std::vector<std::shared_ptr<Context>> &context_stack();
// Throws CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_CONTEXT_IS_DESTROYED.
std::shared_ptr<Context> require_context();

// Primary contexts. The object of a device lives on after the last release, inactive, and keeps its handle.
struct PrimaryContext {
    std::shared_ptr<Context> context;
    unsigned retained = 0;
    unsigned flags = 0;
};
std::mutex &primary_mutex();
PrimaryContext &primary_of(int device);

} // namespace simgpu
