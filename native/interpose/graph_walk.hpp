// What the nodes of a graph do, child graphs included; for shadow execution and for copy-on-write.
//
// Only functions of the driver that look are called, through the table of real functions, where nothing of ours stands
// in their place.
#pragma once

#include "capture.hpp"
#include "driver.hpp"

#include <vector>

namespace woodfrog::interpose {

namespace detail {

inline constexpr unsigned kDeepestGraph = 16; // child graphs in child graphs

inline bool device_may_change(CUgraphNode node) {
#if CUDA_VERSION >= 12040
    CUkernelNodeAttrValue value{};
    return WF_REAL(cuGraphKernelNodeGetAttribute)(node, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &value) ==
               CUDA_SUCCESS &&
           value.deviceUpdatableKernelNode.deviceUpdatable != 0;
#else
    static_cast<void>(node);
    return false;
#endif
}

template <typename Visitor> void visit_node(CUgraphNode node, CUgraphNodeType type, Visitor &visitor) {
    CUDA_KERNEL_NODE_PARAMS_v2 kernel{};
    CUDA_MEMCPY3D copy{};
    CUDA_MEMSET_NODE_PARAMS fill{};
    switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        if (WF_REAL(cuGraphKernelNodeGetParams_v2)(node, &kernel) == CUDA_SUCCESS)
            return visitor.kernel(node, kernel, device_may_change(node));
        return visitor.unknown(node);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        if (WF_REAL(cuGraphMemcpyNodeGetParams)(node, &copy) == CUDA_SUCCESS)
            return visitor.copy(node, copy);
        return visitor.unknown(node);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        if (WF_REAL(cuGraphMemsetNodeGetParams)(node, &fill) == CUDA_SUCCESS)
            return visitor.fill(node, fill);
        return visitor.unknown(node);
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_EMPTY:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return; // write nothing that is owned
    default:
        return visitor.unknown(node);
    }
}

template <typename Visitor> bool walk(CUgraph graph, unsigned depth, Visitor &visitor) {
    size_t count = 0;
    if (depth > kDeepestGraph || WF_REAL(cuGraphGetNodes)(graph, nullptr, &count) != CUDA_SUCCESS)
        return false;
    std::vector<CUgraphNode> nodes(count);
    if (count != 0 && WF_REAL(cuGraphGetNodes)(graph, nodes.data(), &count) != CUDA_SUCCESS)
        return false;
    for (const CUgraphNode node : nodes) {
        CUgraphNodeType type{};
        CUgraph child = nullptr;
        if (WF_REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
            return false;
        if (type != CU_GRAPH_NODE_TYPE_GRAPH)
            visit_node(node, type, visitor);
        else if (WF_REAL(cuGraphChildGraphNodeGetGraph)(node, &child) != CUDA_SUCCESS ||
                 !walk(child, depth + 1, visitor))
            return false;
    }
    return true;
}

} // namespace detail

// Calls visitor.kernel(node, parameters, device_may_change), .copy(node, parameters), .fill(node, parameters) or
// .unknown(node) for each node that may write, and .unknown(nullptr) when the graph cannot be read.
template <typename Visitor> void walk_graph(CUgraph graph, Visitor &visitor) {
    const RelaxedScope relaxed;
    if (!detail::walk(graph, 0, visitor))
        visitor.unknown(nullptr);
}

} // namespace woodfrog::interpose
