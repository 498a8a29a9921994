// The API of stream capture.
#include <cuda.h>

#include "api.hpp"
#include "capture.hpp"
#include "graph.hpp"
#include "submit.hpp"

namespace simgpu {
namespace {

std::vector<GraphNode *> nodes_of(Graph &graph, const CUgraphNode *list, size_t count) {
    require(list != nullptr || count == 0);
    std::vector<GraphNode *> nodes;
    for (size_t i = 0; i < count; ++i) {
        auto node = graph_nodes().get(list[i], CUDA_ERROR_INVALID_VALUE);
        require(graph.owns(node.get()));
        nodes.push_back(node.get());
    }
    return nodes;
}

// The nodes that the next captured one will depend on. Valid until the thread asks again, as the real driver's
// pointer is until the next call on the stream.
const CUgraphNode *as_handles(const std::vector<GraphNode *> &nodes) {
    thread_local std::vector<CUgraphNode> handles;
    handles.clear();
    for (GraphNode *node : nodes)
        handles.push_back(node->handle());
    return handles.data();
}

const CUgraphEdgeData *plain_edges(size_t count) {
    thread_local std::vector<CUgraphEdgeData> edges;
    edges.assign(count, CUgraphEdgeData{});
    return edges.data();
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    return call([&] {
        require(mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
        begin_capture(*resolve_stream(handle), mode, std::make_shared<Graph>(), {});
    });
}

CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph, const CUgraphNode *dependencies,
                                             const CUgraphEdgeData *, size_t count, CUstreamCaptureMode mode) {
    return call([&] {
        require(mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
        auto target = graphs().get(graph, CUDA_ERROR_INVALID_VALUE);
        begin_capture(*resolve_stream(handle), mode, target, nodes_of(*target, dependencies, count));
    });
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph *result) {
    return call([&] {
        require(result != nullptr);
        *result = nullptr;
        auto graph = end_capture(*resolve_stream(handle));
        *result = reinterpret_cast<CUgraph>(graphs().find(graph.get()) ? graph.get() : graphs().add(graph));
    });
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    return call([&] {
        require(status != nullptr);
        *status = capture_status(*resolve_stream(handle));
    });
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **dependencies,
                                           const CUgraphEdgeData **edges, size_t *count) {
    return call([&] {
        require(status != nullptr);
        auto stream = resolve_stream(handle);
        *status = capture_status(*stream);
        if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
            return;
        std::vector<GraphNode *> frontier;
        auto capture = capture_of(*stream, &frontier);
        put(id, capture->id);
        if (graph != nullptr) {
            // The graph may be changed through the API while it is captured, so it needs a handle now.
            if (!graphs().find(capture->graph.get()))
                graphs().add(capture->graph);
            *graph = reinterpret_cast<CUgraph>(capture->graph.get());
        }
        if (dependencies != nullptr)
            *dependencies = as_handles(frontier);
        if (edges != nullptr)
            *edges = plain_edges(frontier.size());
        put(count, frontier.size());
    });
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **dependencies, size_t *count) {
    return cuStreamGetCaptureInfo_v3(handle, status, id, graph, dependencies, nullptr, count);
}

CUresult CUDAAPI cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode *dependencies,
                                                      const CUgraphEdgeData *, size_t count, unsigned int flags) {
    return call([&] {
        require(flags <= CU_STREAM_SET_CAPTURE_DEPENDENCIES);
        auto stream = resolve_stream(handle);
        auto capture = capture_of(*stream, nullptr);
        require(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
        set_frontier(*stream, nodes_of(*capture->graph, dependencies, count),
                     flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
    });
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    return call([&] {
        require(mode != nullptr && *mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
        *mode = exchange_thread_mode(*mode);
    });
}

} // extern "C"
