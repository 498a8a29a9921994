// The pieces of work that streams run and graphs are made of. A Work is immutable once it was submitted and may run
// many times (as a graph node), in several streams at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <cuda.h>

#include "stream.hpp"

namespace simgpu {

struct Context;
struct Function;
struct Event;
struct Graph;

class Work {
  public:
    virtual ~Work() = default;
    // Runs on a stream's thread. `context` is the one whose devices' memory it touches; throws Error or ptx::Fault,
    // which makes the context fail for good.
    virtual void run(Context &context) = 0;
    virtual CUgraphNodeType type() const = 0;
    // Runs even after the context has failed: whoever waits for it would hang otherwise.
    virtual bool always() const { return false; }
};

class EmptyWork : public Work {
  public:
    void run(Context &) override {}
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_EMPTY; }
};

class KernelWork : public Work {
  public:
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_KERNEL; }

    std::shared_ptr<Function> function;
    CUkernel kernel_handle = nullptr; // when the launch named a CUkernel
    unsigned grid[3] = {1, 1, 1};
    unsigned block[3] = {1, 1, 1};
    unsigned cluster[3] = {1, 1, 1};
    unsigned dynamic_shared_bytes = 0;
    bool cooperative = false;
    std::vector<std::byte> parameters;   // laid out as the kernel says
    std::vector<void *> parameter_slots; // pointers into `parameters`, for CUDA_KERNEL_NODE_PARAMS
};

// Every copy, as the three-dimensional one it is a special case of. Host and device pointers only, no arrays.
class CopyWork : public Work {
  public:
    explicit CopyWork(const CUDA_MEMCPY3D &description) : description_(description) {}
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_MEMCPY; }
    const CUDA_MEMCPY3D &description() const { return description_; }

  private:
    CUDA_MEMCPY3D description_;
};

// A copy out of pageable host memory that was saved at the call, so that the application may reuse it at once.
class StagedCopyWork : public Work {
  public:
    StagedCopyWork(CUdeviceptr destination, const void *source, size_t size_bytes);
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_MEMCPY; }

  private:
    CUdeviceptr destination_;
    std::vector<std::byte> bytes_;
};

class MemsetWork : public Work {
  public:
    explicit MemsetWork(const CUDA_MEMSET_NODE_PARAMS &parameters) : parameters_(parameters) {}
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_MEMSET; }
    const CUDA_MEMSET_NODE_PARAMS &parameters() const { return parameters_; }

  private:
    CUDA_MEMSET_NODE_PARAMS parameters_;
};

class HostWork : public Work {
  public:
    explicit HostWork(const CUDA_HOST_NODE_PARAMS &parameters) : parameters_(parameters) {}
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_HOST; }
    const CUDA_HOST_NODE_PARAMS &parameters() const { return parameters_; }

  private:
    CUDA_HOST_NODE_PARAMS parameters_;
};

// Code of the driver itself: stream callbacks, the end of a stream-ordered free.
class InternalWork : public Work {
  public:
    explicit InternalWork(std::function<void(Context &)> action) : action_(std::move(action)) {}
    void run(Context &context) override { action_(context); }
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_EMPTY; }
    bool always() const override { return true; }

  private:
    std::function<void(Context &)> action_;
};

// Sets the time of an event. What waits for the event waits for this work's ticket.
struct EventRecord {
    Ticket ticket;
    std::atomic<std::int64_t> time_ns{0};
};

class EventRecordWork : public Work {
  public:
    EventRecordWork(std::shared_ptr<Event> recorded, std::shared_ptr<EventRecord> into)
        : event(std::move(recorded)), record(std::move(into)) {}
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_EVENT_RECORD; }
    bool always() const override { return true; }

    std::shared_ptr<Event> event;
    std::shared_ptr<EventRecord> record; // null in a graph: each launch makes its own
};

// Only in graphs: the launch of the graph depends on the event.
class EventWaitWork : public Work {
  public:
    explicit EventWaitWork(std::shared_ptr<Event> awaited) : event(std::move(awaited)) {}
    void run(Context &) override {}
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_WAIT_EVENT; }

    std::shared_ptr<Event> event;
};

// cuStreamWaitValue, cuStreamWriteValue and batches of them.
class MemoryOperationWork : public Work {
  public:
    explicit MemoryOperationWork(std::vector<CUstreamBatchMemOpParams> list) : operations(std::move(list)) {}
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP; }

    std::vector<CUstreamBatchMemOpParams> operations;
};

class ChildGraphWork : public Work {
  public:
    // `child` belongs to this work alone; its handle is valid as long as the work lives.
    explicit ChildGraphWork(std::shared_ptr<Graph> child);
    ~ChildGraphWork() override;
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_GRAPH; }

    std::shared_ptr<Graph> graph;
};

// A launched graph: the works of its nodes, in an order that respects their dependencies.
class GraphLaunchWork : public Work {
  public:
    using List = std::vector<std::shared_ptr<Work>>;
    explicit GraphLaunchWork(std::shared_ptr<const List> works) : works_(std::move(works)) {}
    void run(Context &context) override;
    CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_GRAPH; }

  private:
    std::shared_ptr<const List> works_;
};

// Runs one piece of work as a stream does: not when the context has failed, and what it throws makes it fail.
void run_guarded(Work &work, Context &context);

} // namespace simgpu
