// Events. What a record or a wait means during a stream capture is capture.cpp's subject.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <cuda.h>

#include "handles.hpp"
#include "work.hpp"

namespace simgpu {

struct Event {
    std::weak_ptr<Context> context;
    unsigned flags = 0;
    std::mutex mutex;                    // guards the rest
    std::shared_ptr<EventRecord> record; // null: never recorded
    std::shared_ptr<Capture> capture;    // recorded last into a capture, then `nodes` are what it stands for
    std::vector<GraphNode *> nodes;
};

HandleTable<Event> &events();

// Records `event` as done when everything submitted to `stream` so far is.
void record_event(const std::shared_ptr<Event> &event, Stream &stream);
// What was recorded last; a ticket that is done when nothing was. Throws CUDA_ERROR_CAPTURED_EVENT.
Ticket event_ticket(Event &event);

} // namespace simgpu
