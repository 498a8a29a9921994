// Graphs of work and what they are instantiated to. The API of graphs is in graph_api.cpp and graph_node_api.cpp.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <cuda.h>

#include "handles.hpp"
#include "work.hpp"

namespace simgpu {

struct GraphNode {
    Graph *graph = nullptr;
    std::shared_ptr<Work> work;
    std::vector<GraphNode *> dependencies;
    std::vector<GraphNode *> dependents;
    const GraphNode *cloned_from = nullptr;

    CUgraphNode handle() { return reinterpret_cast<CUgraphNode>(this); }
};

// A graph is not safe to be changed by two threads at once; that is the rule of CUDA as well.
struct Graph {
    ~Graph();

    GraphNode *add(std::shared_ptr<Work> work, const std::vector<GraphNode *> &dependencies);
    void remove(GraphNode *node);
    void connect(GraphNode *from, GraphNode *to);
    void disconnect(GraphNode *from, GraphNode *to);
    // Dependencies first, otherwise in the order of creation. Throws CUDA_ERROR_INVALID_VALUE on a cycle.
    std::vector<GraphNode *> ordered() const;
    std::shared_ptr<Graph> clone() const;
    bool owns(const GraphNode *node) const { return node != nullptr && node->graph == this; }

    std::vector<std::shared_ptr<GraphNode>> nodes;
    std::vector<std::shared_ptr<void>> user_objects;
    bool child = false; // belongs to a child graph node: may not be destroyed by itself
};

struct GraphExec {
    struct Entry {
        const GraphNode *source = nullptr;
        std::shared_ptr<Work> work;
        bool enabled = true;
    };

    std::mutex mutex;
    std::vector<Entry> entries;
    std::shared_ptr<Graph> shape; // a copy of the graph, to compare updates with
    unsigned long long flags = 0;

    Entry *find(CUgraphNode node);
};

HandleTable<Graph> &graphs();
HandleTable<GraphNode> &graph_nodes();
HandleTable<GraphExec> &graph_execs();

std::shared_ptr<GraphExec> instantiate(const Graph &graph, unsigned long long flags);
// Submits one launch of the executable graph to the stream.
void launch_graph(GraphExec &exec, Stream &stream);

} // namespace simgpu
