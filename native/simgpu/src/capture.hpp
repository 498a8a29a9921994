// Stream capture: which streams are being captured into which graph, and which calls that forbids.
#pragma once

#include <memory>
#include <vector>

#include <cuda.h>

#include "stream.hpp"
#include "work.hpp"

namespace simgpu {

struct Event;
struct Graph;
struct GraphNode;

struct Capture {
    cuuint64_t id = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    unsigned long owner = 0; // the thread that began it
    std::weak_ptr<Stream> origin;
    std::vector<std::weak_ptr<Stream>> streams; // all that take part, the origin first
    std::shared_ptr<Graph> graph;
    bool invalid = false;
};

// Adds a node for `work` when the stream is capturing. Throws CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, or
// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT for the legacy stream beside a capture that would have to wait for it.
bool capture_node(Stream &stream, const std::shared_ptr<Work> &work);

// For calls that must not be made during a capture (allocation, synchronisation …): invalidates the captures that
// stand in the way and throws CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
void forbid_during_capture();
// Likewise for calls that are forbidden only on a capturing stream itself.
void forbid_on_capturing(Stream &stream);

void begin_capture(Stream &stream, CUstreamCaptureMode mode, std::shared_ptr<Graph> graph,
                   std::vector<GraphNode *> dependencies);
// Throws when the capture is invalid or ends wrongly; the capture is over in either case.
std::shared_ptr<Graph> end_capture(Stream &stream);
CUstreamCaptureStatus capture_status(Stream &stream);
std::shared_ptr<Capture> capture_of(Stream &stream, std::vector<GraphNode *> *frontier);
void set_frontier(Stream &stream, std::vector<GraphNode *> nodes, bool add);

// Both return false when no capture is concerned.
bool capture_event_record(Event &event, Stream &stream);
bool capture_event_wait(Stream &stream, const std::shared_ptr<Event> &event, bool external);

CUstreamCaptureMode exchange_thread_mode(CUstreamCaptureMode mode);

} // namespace simgpu
