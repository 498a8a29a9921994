// What the launch of a graph may write: taken when it is instantiated, followed through its updates, long before a
// snapshot is taken: of an executable graph the driver tells nothing later.
//
// Nodes are known by the handle they had in the graph they came from. Where that does not say which node was changed,
// what it may write now is added and what it might write before is kept.
#include "cow.hpp"

#include "graph_walk.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace woodfrog::interpose::cow {
namespace {

struct Writes {
    std::vector<uint64_t> words; // what in the arguments of kernels may be an address
    std::vector<shadow::Span> spans;
    std::shared_ptr<const Kernel> kernel;
    bool anything = false;
};

using Nodes = std::unordered_map<CUgraphNode, Writes>;

// All nodes together; not changed once it is made.
struct Whole {
    std::vector<uint64_t> words;
    std::vector<shadow::Span> spans;
    std::vector<std::shared_ptr<const Kernel>> kernels;
    bool anything = false;
};

struct Executable {
    Nodes nodes;
    std::shared_ptr<const Whole> whole; // null after a change
};

struct Graphs {
    std::mutex mutex;
    std::unordered_map<CUgraphExec, Executable> executables;
};

Graphs &graphs() {
    static Graphs *const instance = new Graphs;
    return *instance;
}

Writes of_span(const std::optional<shadow::Span> &span) {
    Writes writes;
    if (span)
        writes.spans.push_back(*span);
    else
        writes.anything = true;
    return writes;
}

Writes of_anything() {
    Writes writes;
    writes.anything = true;
    return writes;
}

template <typename Parameters> Writes of_kernel(const Parameters &parameters) {
    const LaunchArguments launch = arguments_of(parameters);
    Writes writes;
    if (launch.function == nullptr)
        return of_anything();
    writes.kernel = kernel_of(launch.function);
    writes.anything = !add_words(*writes.kernel, launch, &writes.words);
    return writes;
}

Writes of_copy(const CUDA_MEMCPY3D &copy) {
    return of_span(shadow::span_of_copy(copy));
}

Writes of_fill(const CUDA_MEMSET_NODE_PARAMS &fill) {
    return of_span(shadow::span_of_box(fill.dst, 0, 0, 0, fill.height <= 1 ? 0 : fill.pitch, 0,
                                       fill.width * fill.elementSize, fill.height, 1));
}

struct Visitor {
    Nodes nodes;
    void kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 &parameters, bool device_may_change) {
        nodes[node] = of_kernel(parameters);
        nodes[node].anything |= device_may_change;
    }
    void copy(CUgraphNode node, const CUDA_MEMCPY3D &copy) { nodes[node] = of_copy(copy); }
    void fill(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS &fill) { nodes[node] = of_fill(fill); }
    void unknown(CUgraphNode node) { nodes[node] = of_anything(); }
};

Nodes nodes_of(CUgraph graph) {
    Visitor visitor;
    walk_graph(graph, visitor);
    return std::move(visitor.nodes);
}

void take_nodes(CUgraphExec executable, CUgraph graph) {
    Nodes nodes = nodes_of(graph);
    std::lock_guard lock(graphs().mutex);
    graphs().executables[executable] = {std::move(nodes), nullptr};
}

void change_node(CUgraphExec executable, CUgraphNode node, Writes writes) {
    std::lock_guard lock(graphs().mutex);
    const auto found = graphs().executables.find(executable);
    if (found == graphs().executables.end())
        return; // it may write anything
    found->second.nodes[node] = std::move(writes);
    found->second.whole = nullptr;
}

std::shared_ptr<const Whole> compose(const Executable &executable) {
    auto whole = std::make_shared<Whole>();
    for (const auto &[node, writes] : executable.nodes) {
        whole->anything |= writes.anything;
        whole->words.insert(whole->words.end(), writes.words.begin(), writes.words.end());
        whole->spans.insert(whole->spans.end(), writes.spans.begin(), writes.spans.end());
        if (writes.kernel != nullptr)
            whole->kernels.push_back(writes.kernel);
    }
    const auto once = [](auto *all) {
        std::sort(all->begin(), all->end());
        all->erase(std::unique(all->begin(), all->end()), all->end());
    };
    once(&whole->words);
    once(&whole->kernels);
    return whole;
}

std::shared_ptr<const Whole> writes_of(CUgraphExec executable) {
    std::lock_guard lock(graphs().mutex);
    const auto found = graphs().executables.find(executable);
    if (found == graphs().executables.end())
        return nullptr;
    if (found->second.whole == nullptr)
        found->second.whole = compose(found->second);
    return found->second.whole;
}

constexpr auto kInstantiated = [](CUgraphExec *executable, CUgraph graph, auto...) { take_nodes(*executable, graph); };
constexpr auto kUpdated = [](CUgraphExec executable, CUgraph graph, auto...) { take_nodes(executable, graph); };
constexpr auto kDestroyed = [](CUgraphExec executable) {
    std::lock_guard lock(graphs().mutex);
    graphs().executables.erase(executable);
};
constexpr auto kKernelChanged = [](CUgraphExec executable, CUgraphNode node, const auto *parameters) {
    change_node(executable, node, of_kernel(*parameters));
};
constexpr auto kCopyChanged = [](CUgraphExec executable, CUgraphNode node, const CUDA_MEMCPY3D *copy, CUcontext) {
    change_node(executable, node, of_copy(*copy));
};
constexpr auto kFillChanged = [](CUgraphExec executable, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill,
                                 CUcontext) { change_node(executable, node, of_fill(*fill)); };
constexpr auto kChildChanged = [](CUgraphExec executable, CUgraphNode, CUgraph child) {
    for (auto &[node, writes] : nodes_of(child))
        change_node(executable, node, std::move(writes));
};
constexpr auto kOtherChanged = [](CUgraphExec executable, CUgraphNode node, const auto *) {
    change_node(executable, node, of_anything());
};

} // namespace

void will_launch_graph(CUgraphExec executable) {
    const std::shared_ptr<const Whole> whole = writes_of(executable);
    if (whole == nullptr)
        return will_write_anything();
    for (const auto &kernel : whole->kernels)
        count_launch(*kernel);
    if (whole->anything)
        return will_write_anything();
    will_write(whole->spans, whole->words);
}

shadow::Overrides graph_overrides() {
    return {
        WF_WRAPPED(NotedAfter, cuGraphInstantiate, kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphInstantiate_v2, kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphInstantiateWithFlags, kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphInstantiateWithParams, kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphInstantiateWithParams_ptsz, kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphExecUpdate, kUpdated),
        WF_WRAPPED(NotedAfter, cuGraphExecUpdate_v2, kUpdated),
        WF_WRAPPED(NotedBefore, cuGraphExecDestroy, kDestroyed),
        WF_WRAPPED(NotedAfter, cuGraphExecKernelNodeSetParams, kKernelChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecKernelNodeSetParams_v2, kKernelChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecMemcpyNodeSetParams, kCopyChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecMemsetNodeSetParams, kFillChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecChildGraphNodeSetParams, kChildChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecBatchMemOpNodeSetParams, kOtherChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecNodeSetParams, kOtherChanged),
    };
}

} // namespace woodfrog::interpose::cow
