// Graphs: building, instantiating, updating, launching. Nodes and their parameters are in graph_node_api.cpp.
#include <algorithm>

#include <cuda.h>

#include "api.hpp"
#include "capture.hpp"
#include "graph.hpp"
#include "graph_api.hpp"
#include "submit.hpp"

namespace simgpu {

std::shared_ptr<Graph> graph_argument(CUgraph handle) {
    return graphs().get(handle, CUDA_ERROR_INVALID_VALUE);
}
std::shared_ptr<GraphNode> node_argument(CUgraphNode handle) {
    return graph_nodes().get(handle, CUDA_ERROR_INVALID_VALUE);
}
std::shared_ptr<GraphExec> exec_argument(CUgraphExec handle) {
    return graph_execs().get(handle, CUDA_ERROR_INVALID_VALUE);
}

CUgraphNode add_node(CUgraph handle, const CUgraphNode *dependencies, size_t count, std::shared_ptr<Work> work) {
    auto graph = graph_argument(handle);
    require(dependencies != nullptr || count == 0);
    std::vector<GraphNode *> nodes;
    for (size_t i = 0; i < count; ++i)
        nodes.push_back(node_argument(dependencies[i]).get());
    return graph->add(std::move(work), nodes)->handle();
}

CUresult api_graph_launch(CUgraphExec handle, CUstream on) {
    return call([&] {
        auto exec = exec_argument(handle);
        auto stream = resolve_stream(on);
        if (capture_status(*stream) == CU_STREAM_CAPTURE_STATUS_NONE) {
            launch_graph(*exec, *stream);
        } else {
            submit(*stream, std::make_shared<ChildGraphWork>(exec->shape->clone()));
        }
    });
}

namespace {

// Lists nodes the way all getters do: `count` says how much room there is and becomes how many there are.
void list_nodes(const std::vector<GraphNode *> &nodes, CUgraphNode *list, size_t *count) {
    require(count != nullptr);
    if (list != nullptr) {
        size_t room = *count;
        for (size_t i = 0; i < room; ++i)
            list[i] = i < nodes.size() ? nodes[i]->handle() : nullptr;
        *count = std::min(room, nodes.size());
    } else {
        *count = nodes.size();
    }
}

void no_edge_data(CUgraphEdgeData *edges, const size_t *count) {
    if (edges != nullptr)
        std::fill_n(edges, *count, CUgraphEdgeData{});
}

void change_edges(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, size_t count, bool add) {
    auto graph = graph_argument(handle);
    require((from != nullptr && to != nullptr) || count == 0);
    for (size_t i = 0; i < count; ++i) {
        auto first = node_argument(from[i]);
        auto second = node_argument(to[i]);
        add ? graph->connect(first.get(), second.get()) : graph->disconnect(first.get(), second.get());
    }
}

void instantiate_api(CUgraphExec *result, CUgraph handle, unsigned long long flags) {
    require(result != nullptr);
    *result = reinterpret_cast<CUgraphExec>(graph_execs().add(instantiate(*graph_argument(handle), flags)));
}

// Whether two graphs have the same nodes in the same order, so that one may stand for the other.
bool same_shape(const Graph &a, const Graph &b) {
    if (a.nodes.size() != b.nodes.size())
        return false;
    std::unordered_map<const GraphNode *, size_t> place_a;
    std::unordered_map<const GraphNode *, size_t> place_b;
    for (size_t i = 0; i < a.nodes.size(); ++i) {
        place_a[a.nodes[i].get()] = i;
        place_b[b.nodes[i].get()] = i;
    }
    for (size_t i = 0; i < a.nodes.size(); ++i) {
        const GraphNode &x = *a.nodes[i];
        const GraphNode &y = *b.nodes[i];
        if (x.work->type() != y.work->type() || x.dependencies.size() != y.dependencies.size())
            return false;
        for (size_t k = 0; k < x.dependencies.size(); ++k) {
            if (place_a[x.dependencies[k]] != place_b[y.dependencies[k]])
                return false;
        }
    }
    return true;
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuGraphCreate(CUgraph *result, unsigned int flags) {
    return call([&] {
        require(result != nullptr && flags == 0);
        *result = reinterpret_cast<CUgraph>(graphs().add(std::make_shared<Graph>()));
    });
}

CUresult CUDAAPI cuGraphDestroy(CUgraph handle) {
    return call([&] {
        require(!graph_argument(handle)->child);
        graphs().remove(handle);
    });
}

CUresult CUDAAPI cuGraphClone(CUgraph *result, CUgraph original) {
    return call([&] {
        require(result != nullptr);
        *result = reinterpret_cast<CUgraph>(graphs().add(graph_argument(original)->clone()));
    });
}

CUresult CUDAAPI cuGraphNodeFindInClone(CUgraphNode *result, CUgraphNode original, CUgraph clone) {
    return call([&] {
        require(result != nullptr);
        for (const auto &node : graph_argument(clone)->nodes) {
            if (node->cloned_from != node_argument(original).get())
                continue;
            *result = node->handle();
            return;
        }
        throw Error{CUDA_ERROR_INVALID_VALUE};
    });
}

CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode handle) {
    return call([&] {
        auto node = node_argument(handle);
        node->graph->remove(node.get());
    });
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph handle, CUgraphNode *list, size_t *count) {
    return call([&] {
        std::vector<GraphNode *> nodes;
        for (const auto &node : graph_argument(handle)->nodes)
            nodes.push_back(node.get());
        list_nodes(nodes, list, count);
    });
}

CUresult CUDAAPI cuGraphGetRootNodes(CUgraph handle, CUgraphNode *list, size_t *count) {
    return call([&] {
        std::vector<GraphNode *> nodes;
        for (const auto &node : graph_argument(handle)->nodes) {
            if (node->dependencies.empty())
                nodes.push_back(node.get());
        }
        list_nodes(nodes, list, count);
    });
}

CUresult CUDAAPI cuGraphGetEdges_v2(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edges,
                                    size_t *count) {
    return call([&] {
        std::vector<GraphNode *> firsts;
        std::vector<GraphNode *> seconds;
        for (const auto &node : graph_argument(handle)->nodes) {
            for (GraphNode *dependency : node->dependencies) {
                firsts.push_back(dependency);
                seconds.push_back(node.get());
            }
        }
        require(count != nullptr && (from == nullptr) == (to == nullptr));
        size_t room = *count;
        list_nodes(firsts, from, count);
        *count = from != nullptr ? room : *count;
        list_nodes(seconds, to, count);
        no_edge_data(edges, count);
    });
}

CUresult CUDAAPI cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode *list, CUgraphEdgeData *edges,
                                               size_t *count) {
    return call([&] {
        list_nodes(node_argument(handle)->dependencies, list, count);
        no_edge_data(edges, count);
    });
}

CUresult CUDAAPI cuGraphNodeGetDependentNodes_v2(CUgraphNode handle, CUgraphNode *list, CUgraphEdgeData *edges,
                                                 size_t *count) {
    return call([&] {
        list_nodes(node_argument(handle)->dependents, list, count);
        no_edge_data(edges, count);
    });
}

CUresult CUDAAPI cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                           const CUgraphEdgeData *, size_t count) {
    return call([&] { change_edges(graph, from, to, count, true); });
}

CUresult CUDAAPI cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                              const CUgraphEdgeData *, size_t count) {
    return call([&] { change_edges(graph, from, to, count, false); });
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *result, CUgraph graph, unsigned long long flags) {
    return call([&] { instantiate_api(result, graph, flags); });
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *result, CUgraph graph,
                                              CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    return call([&] {
        require(parameters != nullptr);
        parameters->hErrNode_out = nullptr;
        parameters->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
        instantiate_api(result, graph, parameters->flags);
        parameters->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    });
}

CUresult CUDAAPI cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t *flags) {
    return call([&] {
        require(flags != nullptr);
        *flags = exec_argument(handle)->flags;
    });
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec handle) {
    return call([&] { require(graph_execs().remove(handle) != nullptr); });
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec handle, CUstream stream) {
    return call([&] {
        exec_argument(handle);
        resolve_stream(stream);
    });
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec handle, CUstream stream) {
    return api_graph_launch(handle, stream);
}

CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph with, CUgraphExecUpdateResultInfo *info) {
    return call([&] {
        require(info != nullptr);
        auto exec = exec_argument(handle);
        auto graph = graph_argument(with);
        *info = {};
        info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        std::lock_guard lock(exec->mutex);
        require(same_shape(*exec->shape, *graph), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
        // The application goes on naming the nodes of the graph that was instantiated first.
        std::unordered_map<const GraphNode *, std::shared_ptr<Work>> fresh;
        auto copy = graph->clone();
        for (size_t i = 0; i < copy->nodes.size(); ++i) {
            exec->shape->nodes[i]->work = copy->nodes[i]->work;
            fresh[exec->shape->nodes[i]->cloned_from] = copy->nodes[i]->work;
        }
        for (GraphExec::Entry &entry : exec->entries)
            entry.work = fresh[entry.source];
        info->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
    });
}

CUresult CUDAAPI cuGraphDebugDotPrint(CUgraph, const char *, unsigned int) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuUserObjectCreate(CUuserObject *result, void *pointer, CUhostFn destroy, unsigned int references,
                                    unsigned int flags) {
    return call([&] {
        require(result != nullptr && destroy != nullptr && references > 0 &&
                flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
        *result = create_user_object(pointer, destroy, references);
    });
}

CUresult CUDAAPI cuUserObjectRetain(CUuserObject object, unsigned int count) {
    return call([&] { retain_user_object(object, count); });
}

CUresult CUDAAPI cuUserObjectRelease(CUuserObject object, unsigned int count) {
    return call([&] { release_user_object(object, count); });
}

CUresult CUDAAPI cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags) {
    return call([&] { give_user_object(*graph_argument(graph), object, count, flags); });
}

CUresult CUDAAPI cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count) {
    return call([&] { take_user_object(*graph_argument(graph), object, count); });
}

CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice) {
    return call([] {});
}

} // extern "C"
