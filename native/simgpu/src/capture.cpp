// See capture.hpp. One lock guards all captures: they are rare and short.
#include "capture.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <pthread.h>
#include <set>
#include <utility>

#include "context.hpp"
#include "error.hpp"
#include "event.hpp"
#include "graph.hpp"
#include "submit.hpp"

namespace simgpu {
namespace {

std::mutex &capture_mutex() {
    static auto *mutex = new std::mutex;
    return *mutex;
}

std::vector<std::shared_ptr<Capture>> &active() {
    static auto *list = new std::vector<std::shared_ptr<Capture>>;
    return *list;
}

std::atomic<int> active_count{0}; // read without the lock by every submission
cuuint64_t next_capture_id = 1;   // under the lock
thread_local CUstreamCaptureMode t_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

unsigned long this_thread() {
    return static_cast<unsigned long>(pthread_self());
}

// Nodes from which `from` can be reached, `from` included.
std::set<const GraphNode *> ancestors(const std::vector<GraphNode *> &from) {
    std::set<const GraphNode *> reached;
    std::vector<const GraphNode *> open(from.begin(), from.end());
    while (!open.empty()) {
        const GraphNode *node = open.back();
        open.pop_back();
        if (!reached.insert(node).second)
            continue;
        open.insert(open.end(), node->dependencies.begin(), node->dependencies.end());
    }
    return reached;
}

void require_valid(const Capture &capture) {
    require(!capture.invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

void join(Stream &stream, const std::shared_ptr<Capture> &capture) {
    stream.capture = capture;
    stream.frontier.clear();
    capture->streams.push_back(stream.weak_from_this());
}

void add_to_frontier(Stream &stream, const std::vector<GraphNode *> &nodes) {
    for (GraphNode *node : nodes) {
        if (std::find(stream.frontier.begin(), stream.frontier.end(), node) == stream.frontier.end()) {
            stream.frontier.push_back(node);
        }
    }
}

} // namespace

bool capture_node(Stream &stream, const std::shared_ptr<Work> &work) {
    if (active_count.load() == 0)
        return false;
    std::lock_guard lock(capture_mutex());
    if (!stream.capture) {
        if (stream.kind() != Stream::Kind::kLegacyDefault)
            return false;
        for (const auto &capture : active()) {
            auto origin = capture->origin.lock();
            if (!origin || !origin->blocking() || origin->context() != stream.context())
                continue;
            capture->invalid = true;
            throw Error{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT};
        }
        return false;
    }
    require_valid(*stream.capture);
    GraphNode *node = stream.capture->graph->add(work, stream.frontier);
    stream.frontier = {node};
    return true;
}

void forbid_during_capture() {
    if (active_count.load() == 0 || t_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return;
    std::lock_guard lock(capture_mutex());
    bool forbidden = false;
    for (const auto &capture : active()) {
        if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
            continue;
        bool own = capture->owner == this_thread();
        bool others = t_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!own && !others)
            continue;
        capture->invalid = true;
        forbidden = true;
    }
    require(!forbidden, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void forbid_on_capturing(Stream &stream) {
    if (active_count.load() == 0)
        return;
    std::lock_guard lock(capture_mutex());
    if (!stream.capture)
        return;
    stream.capture->invalid = true;
    throw Error{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
}

void begin_capture(Stream &stream, CUstreamCaptureMode mode, std::shared_ptr<Graph> graph,
                   std::vector<GraphNode *> dependencies) {
    require(stream.kind() != Stream::Kind::kLegacyDefault, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    std::lock_guard lock(capture_mutex());
    require(!stream.capture, CUDA_ERROR_ILLEGAL_STATE);
    auto capture = std::make_shared<Capture>();
    capture->id = next_capture_id++;
    capture->mode = mode;
    capture->owner = this_thread();
    capture->origin = stream.weak_from_this();
    capture->graph = std::move(graph);
    join(stream, capture);
    stream.frontier = std::move(dependencies);
    active().push_back(capture);
    active_count.fetch_add(1);
}

std::shared_ptr<Graph> end_capture(Stream &stream) {
    std::lock_guard lock(capture_mutex());
    auto capture = stream.capture;
    require(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
    if (capture->origin.lock().get() != &stream) {
        capture->invalid = true;
        throw Error{CUDA_ERROR_STREAM_CAPTURE_UNMATCHED};
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->owner != this_thread()) {
        throw Error{CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD};
    }
    bool unjoined = false;
    auto joined = ancestors(stream.frontier);
    for (const auto &entry : capture->streams) {
        auto other = entry.lock();
        if (!other || other->capture != capture)
            continue;
        for (const GraphNode *node : other->frontier)
            unjoined |= !joined.contains(node);
        other->capture.reset();
        other->frontier.clear();
    }
    std::erase(active(), capture);
    active_count.fetch_sub(1);
    require_valid(*capture);
    capture->invalid = true; // events recorded into it stand for nothing any more
    require(!unjoined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    return capture->graph;
}

CUstreamCaptureStatus capture_status(Stream &stream) {
    std::lock_guard lock(capture_mutex());
    if (!stream.capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream.capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

std::shared_ptr<Capture> capture_of(Stream &stream, std::vector<GraphNode *> *frontier) {
    std::lock_guard lock(capture_mutex());
    if (frontier != nullptr)
        *frontier = stream.frontier;
    return stream.capture;
}

void set_frontier(Stream &stream, std::vector<GraphNode *> nodes, bool add) {
    std::lock_guard lock(capture_mutex());
    require(stream.capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
    require_valid(*stream.capture);
    if (!add)
        stream.frontier.clear();
    add_to_frontier(stream, nodes);
}

bool capture_event_record(Event &event, Stream &stream) {
    if (active_count.load() == 0)
        return false;
    std::lock_guard lock(capture_mutex());
    if (!stream.capture)
        return false;
    require_valid(*stream.capture);
    std::lock_guard event_lock(event.mutex);
    event.capture = stream.capture;
    event.nodes = stream.frontier;
    return true;
}

bool capture_event_wait(Stream &stream, const std::shared_ptr<Event> &event, bool external) {
    if (active_count.load() == 0)
        return false;
    std::lock_guard lock(capture_mutex());
    std::shared_ptr<Capture> from;
    std::vector<GraphNode *> nodes;
    {
        std::lock_guard event_lock(event->mutex);
        if (event->capture && !external) {
            from = event->capture;
            nodes = event->nodes;
        }
    }
    if (!from) {
        if (!stream.capture)
            return false;
        require_valid(*stream.capture);
        if (!external) {
            stream.capture->invalid = true;
            throw Error{CUDA_ERROR_STREAM_CAPTURE_ISOLATION};
        }
        GraphNode *node = stream.capture->graph->add(std::make_shared<EventWaitWork>(event), stream.frontier);
        stream.frontier = {node};
        return true;
    }
    require(stream.kind() != Stream::Kind::kLegacyDefault, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    require_valid(*from);
    if (!stream.capture)
        join(stream, from);
    if (stream.capture != from) {
        stream.capture->invalid = from->invalid = true;
        throw Error{CUDA_ERROR_STREAM_CAPTURE_MERGE};
    }
    add_to_frontier(stream, nodes);
    return true;
}

CUstreamCaptureMode exchange_thread_mode(CUstreamCaptureMode mode) {
    return std::exchange(t_mode, mode);
}

} // namespace simgpu
