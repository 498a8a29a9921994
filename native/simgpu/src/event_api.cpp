// Events, and the waits for them.
#include <cuda.h>

#include "api.hpp"
#include "capture.hpp"
#include "event.hpp"
#include "graph.hpp"
#include "stream_api.hpp"
#include "submit.hpp"

namespace simgpu {

HandleTable<Event> &events() {
    static auto *table = new HandleTable<Event>;
    return *table;
}

void record_event(const std::shared_ptr<Event> &event, Stream &stream) {
    auto record = std::make_shared<EventRecord>();
    Ticket ticket = enqueue_ordered(stream, std::make_shared<EventRecordWork>(event, record), {});
    std::lock_guard lock(event->mutex);
    record->ticket = ticket;
    event->record = record;
    event->capture.reset();
    event->nodes.clear();
}

Ticket event_ticket(Event &event) {
    std::lock_guard lock(event.mutex);
    if (event.capture) {
        require(event.capture->invalid, CUDA_ERROR_CAPTURED_EVENT);
        return {}; // its capture has ended
    }
    return event.record ? event.record->ticket : Ticket{};
}

void record_event_api(const std::shared_ptr<Event> &event, Stream &stream, unsigned flags) {
    require((flags & ~static_cast<unsigned>(CU_EVENT_RECORD_EXTERNAL)) == 0);
    if ((flags & CU_EVENT_RECORD_EXTERNAL) != 0 && capture_status(stream) != CU_STREAM_CAPTURE_STATUS_NONE) {
        capture_node(stream, std::make_shared<EventRecordWork>(event, nullptr));
        return;
    }
    if (!capture_event_record(*event, stream))
        record_event(event, stream);
}

void wait_event(Stream &stream, const std::shared_ptr<Event> &event, unsigned flags) {
    require((flags & ~static_cast<unsigned>(CU_EVENT_WAIT_EXTERNAL)) == 0);
    if (capture_event_wait(stream, event, (flags & CU_EVENT_WAIT_EXTERNAL) != 0))
        return;
    Ticket ticket = event_ticket(*event);
    if (ticket.done())
        return;
    enqueue_ordered(stream, std::make_shared<EmptyWork>(), {ticket});
}

Ticket last_including_implicit(Stream &stream) {
    if (stream.kind() != Stream::Kind::kLegacyDefault)
        return stream.last();
    auto context = stream.context();
    for (const auto &other : context->streams()) {
        if (other->blocking() && !other->idle()) {
            return enqueue_ordered(stream, std::make_shared<EmptyWork>(), {});
        }
    }
    return stream.last();
}

} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuEventCreate(CUevent *result, unsigned int flags) {
    return call_in_context([&](Context &context) {
        require(result != nullptr && (flags & ~7u) == 0);
        require((flags & CU_EVENT_INTERPROCESS) == 0, CUDA_ERROR_NOT_SUPPORTED);
        auto event = std::make_shared<Event>();
        event->context = context.weak_from_this();
        event->flags = flags;
        *result = reinterpret_cast<CUevent>(events().add(event));
    });
}

CUresult CUDAAPI cuEventDestroy(CUevent handle) {
    return call([&] { require(events().remove(handle) != nullptr, CUDA_ERROR_INVALID_HANDLE); });
}

CUresult CUDAAPI cuEventRecord(CUevent handle, CUstream stream) {
    return call([&] { record_event_api(events().get(handle), *resolve_stream(stream), 0); });
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent handle, CUstream stream, unsigned int flags) {
    return call([&] { record_event_api(events().get(handle), *resolve_stream(stream), flags); });
}

CUresult CUDAAPI cuEventQuery(CUevent handle) {
    return call([&] {
        auto event = events().get(handle);
        auto context = event->context.lock();
        if (context)
            require(context->failure.load() == CUDA_SUCCESS, context->failure.load());
        Ticket ticket = event_ticket(*event);
        forbid_during_capture();
        require(ticket.done(), CUDA_ERROR_NOT_READY);
    });
}

CUresult CUDAAPI cuEventSynchronize(CUevent handle) {
    return call([&] {
        auto event = events().get(handle);
        Ticket ticket = event_ticket(*event);
        forbid_during_capture();
        ticket.wait();
        auto context = event->context.lock();
        if (context)
            require(context->failure.load() == CUDA_SUCCESS, context->failure.load());
    });
}

CUresult CUDAAPI cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    return call([&] {
        require(milliseconds != nullptr);
        auto first = events().get(start);
        auto second = events().get(end);
        require(((first->flags | second->flags) & CU_EVENT_DISABLE_TIMING) == 0, CUDA_ERROR_INVALID_HANDLE);
        require(first->record && second->record, CUDA_ERROR_INVALID_HANDLE);
        require(event_ticket(*first).done() && event_ticket(*second).done(), CUDA_ERROR_NOT_READY);
        *milliseconds = static_cast<float>(second->record->time_ns - first->record->time_ns) * 1e-6f;
    });
}

} // extern "C"
