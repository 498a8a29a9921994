// What the entry points of graphs share.
#pragma once

#include <memory>

#include <cuda.h>

#include "graph.hpp"

namespace simgpu {

// Throw CUDA_ERROR_INVALID_VALUE for handles that are not valid.
std::shared_ptr<Graph> graph_argument(CUgraph handle);
std::shared_ptr<GraphNode> node_argument(CUgraphNode handle);
std::shared_ptr<GraphExec> exec_argument(CUgraphExec handle);

CUgraphNode add_node(CUgraph graph, const CUgraphNode *dependencies, size_t count, std::shared_ptr<Work> work);
CUresult api_graph_launch(CUgraphExec exec, CUstream stream);

// User objects: counted references to something of the application's, destroyed with the last one.
CUuserObject create_user_object(void *pointer, CUhostFn destroy, unsigned references);
void retain_user_object(CUuserObject object, unsigned count);
void release_user_object(CUuserObject object, unsigned count);
void give_user_object(Graph &graph, CUuserObject object, unsigned count, unsigned flags);
void take_user_object(Graph &graph, CUuserObject object, unsigned count);

} // namespace simgpu
