// What the pieces of work do when a stream runs them; kernels are in launch.cpp.
#include "work.hpp"

#include <chrono>
#include <cstring>
#include <sched.h>

#include "address_space.hpp"
#include "context.hpp"
#include "error.hpp"
#include "event.hpp"
#include "graph.hpp"
#include "process.hpp"
#include "ptx/ptx.hpp"

namespace simgpu {
namespace {

// A side of a copy: where its first byte is and how far its rows and slices lie apart.
struct Side {
    std::uint64_t base = 0;
    size_t pitch_bytes = 0;
    size_t slice_bytes = 0;
    bool device = false;
};

Side source_of(const CUDA_MEMCPY3D &d) {
    Side side;
    side.device = d.srcMemoryType != CU_MEMORYTYPE_HOST;
    side.base = side.device ? d.srcDevice : reinterpret_cast<std::uint64_t>(d.srcHost);
    side.pitch_bytes = d.srcPitch;
    side.slice_bytes = d.srcPitch * d.srcHeight;
    side.base += d.srcXInBytes + d.srcY * side.pitch_bytes + d.srcZ * side.slice_bytes;
    return side;
}

Side destination_of(const CUDA_MEMCPY3D &d) {
    Side side;
    side.device = d.dstMemoryType != CU_MEMORYTYPE_HOST;
    side.base = side.device ? d.dstDevice : reinterpret_cast<std::uint64_t>(d.dstHost);
    side.pitch_bytes = d.dstPitch;
    side.slice_bytes = d.dstPitch * d.dstHeight;
    side.base += d.dstXInBytes + d.dstY * side.pitch_bytes + d.dstZ * side.slice_bytes;
    return side;
}

// The memory was checked when the copy was submitted; a device address may have been unmapped since.
void require_still_mapped(const Spans &spans, const Side &side, std::uint64_t address, size_t size_bytes) {
    if (!side.device)
        return;
    // An address that no span holds is pageable host memory (CU_MEMORYTYPE_UNIFIED), which the kernel looks after.
    if (span_at(spans, address) == nullptr && !AddressSpace::instance().reserved(address, size_bytes))
        return;
    const Span *span = span_at(spans, address);
    require(span != nullptr, CUDA_ERROR_ILLEGAL_ADDRESS);
}

} // namespace

void run_guarded(Work &work, Context &context) {
    if (context.failure.load() != CUDA_SUCCESS && !work.always())
        return;
    try {
        work.run(context);
    } catch (const Error &error) {
        context.fail(error.code, "a copy, memset or launch needed memory or code that is gone");
    } catch (const ptx::Fault &fault) {
        CUresult code = CUDA_ERROR_LAUNCH_FAILED;
        switch (fault.kind) {
        case ptx::Fault::Kind::illegal_address:
            code = CUDA_ERROR_ILLEGAL_ADDRESS;
            break;
        case ptx::Fault::Kind::misaligned:
            code = CUDA_ERROR_MISALIGNED_ADDRESS;
            break;
        case ptx::Fault::Kind::illegal_instruction:
        case ptx::Fault::Kind::unsupported:
            code = CUDA_ERROR_ILLEGAL_INSTRUCTION;
            break;
        case ptx::Fault::Kind::assert_failed:
            code = CUDA_ERROR_ASSERT;
            break;
        case ptx::Fault::Kind::launch_timeout:
            code = CUDA_ERROR_LAUNCH_TIMEOUT;
            break;
        case ptx::Fault::Kind::trap:
        case ptx::Fault::Kind::invalid_launch:
        case ptx::Fault::Kind::out_of_memory:
            break;
        }
        context.fail(code, fault.what());
    } catch (const std::bad_alloc &) {
        context.fail(CUDA_ERROR_OUT_OF_MEMORY, "the host has no memory left for a kernel");
    }
}

void CopyWork::run(Context &) {
    Side from = source_of(description_);
    Side to = destination_of(description_);
    auto spans = AddressSpace::instance().spans();
    const size_t width = description_.WidthInBytes;
    for (size_t slice = 0; slice < description_.Depth; ++slice) {
        for (size_t row = 0; row < description_.Height; ++row) {
            std::uint64_t source = from.base + slice * from.slice_bytes + row * from.pitch_bytes;
            std::uint64_t destination = to.base + slice * to.slice_bytes + row * to.pitch_bytes;
            require_still_mapped(*spans, from, source, width);
            require_still_mapped(*spans, to, destination, width);
            std::memmove(reinterpret_cast<void *>(destination), reinterpret_cast<const void *>(source), width);
        }
    }
}

StagedCopyWork::StagedCopyWork(CUdeviceptr destination, const void *source, size_t size_bytes)
    : destination_(destination), bytes_(size_bytes) {
    std::memcpy(bytes_.data(), source, size_bytes);
}

void StagedCopyWork::run(Context &) {
    std::memcpy(reinterpret_cast<void *>(destination_), bytes_.data(), bytes_.size());
}

void MemsetWork::run(Context &) {
    auto spans = AddressSpace::instance().spans();
    for (size_t row = 0; row < parameters_.height; ++row) {
        std::uint64_t address = parameters_.dst + row * parameters_.pitch;
        require(span_at(*spans, address) != nullptr, CUDA_ERROR_ILLEGAL_ADDRESS);
        auto *target = reinterpret_cast<void *>(address);
        switch (parameters_.elementSize) {
        case 1:
            std::memset(target, static_cast<int>(parameters_.value & 0xff), parameters_.width);
            break;
        case 2:
            std::fill_n(static_cast<std::uint16_t *>(target), parameters_.width,
                        static_cast<std::uint16_t>(parameters_.value));
            break;
        default:
            std::fill_n(static_cast<std::uint32_t *>(target), parameters_.width, parameters_.value);
            break;
        }
    }
}

void HostWork::run(Context &) {
    CallbackScope scope;
    parameters_.fn(parameters_.userData);
}

void EventRecordWork::run(Context &) {
    if (!record)
        return;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    record->time_ns.store(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void MemoryOperationWork::run(Context &context) {
    // The other side may be a plain store of a host thread, so these are atomic accesses.
    for (const CUstreamBatchMemOpParams &operation : operations) {
        bool wide = operation.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 ||
                    operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
        if (operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
            __atomic_store_n(reinterpret_cast<cuuint32_t *>(operation.writeValue.address), operation.writeValue.value,
                             __ATOMIC_SEQ_CST);
        } else if (operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
            __atomic_store_n(reinterpret_cast<cuuint64_t *>(operation.writeValue.address), operation.writeValue.value64,
                             __ATOMIC_SEQ_CST);
        } else if (operation.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || wide) {
            const auto &wait = operation.waitValue;
            cuuint64_t wanted = wide ? wait.value64 : wait.value;
            auto reached = [&] {
                cuuint64_t now = wide ? __atomic_load_n(reinterpret_cast<cuuint64_t *>(wait.address), __ATOMIC_SEQ_CST)
                                      : __atomic_load_n(reinterpret_cast<cuuint32_t *>(wait.address), __ATOMIC_SEQ_CST);
                switch (wait.flags & 3) {
                case CU_STREAM_WAIT_VALUE_EQ:
                    return now == wanted;
                case CU_STREAM_WAIT_VALUE_AND:
                    return (now & wanted) != 0;
                case CU_STREAM_WAIT_VALUE_NOR:
                    return ~(now | wanted) != 0;
                default: // GEQ: cyclic, as documented
                    return wide ? static_cast<std::int64_t>(now - wanted) >= 0
                                : static_cast<std::int32_t>(static_cast<cuuint32_t>(now - wanted)) >= 0;
                }
            };
            // Memory gives no signal when it changes, neither here nor on a real device: it is polled.
            while (!reached() && context.alive.load() && context.failure.load() == CUDA_SUCCESS)
                sched_yield();
        }
    }
}

ChildGraphWork::ChildGraphWork(std::shared_ptr<Graph> child) : graph(std::move(child)) {
    graph->child = true;
    graphs().add(graph);
}

ChildGraphWork::~ChildGraphWork() {
    graphs().remove(graph.get());
}

void ChildGraphWork::run(Context &context) {
    for (GraphNode *node : graph->ordered())
        run_guarded(*node->work, context);
}

void GraphLaunchWork::run(Context &context) {
    for (const auto &work : *works_)
        run_guarded(*work, context);
}

} // namespace simgpu
