// Graphs: what the nodes of an executable graph may write is taken when it is instantiated, follows its updates, and is
// noted as a whole at each launch.
//
// Nodes are known by the handle they had in the graph they came from. Where that does not say which node was changed,
// what it may write now is added and what it might write before is kept.
#include "graph_walk.hpp"
#include "shadow_copy.hpp"
#include "shadow_dirty.hpp"
#include "shadow_records.hpp"

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace woodfrog::interpose::shadow {
namespace {

constexpr size_t kLargestGraph = size_t{64} << 20; // bytes of records
constexpr const char *kUnknownNode = "a graph's node of a kind that is not followed";

struct NodeWrites {
    std::vector<std::vector<unsigned char>> records;
    std::vector<std::pair<Kernel *, CUfunction>> kernels;
    std::string everything;
};

struct Executable {
    std::unordered_map<CUgraphNode, NodeWrites> nodes;
    std::shared_ptr<const GraphWrites> whole; // null after a change
};

struct Graphs {
    std::mutex mutex;
    std::unordered_map<CUgraphExec, Executable> executables;
    uint64_t last_number = 0;
};

Graphs &graphs() {
    static Graphs *const instance = new Graphs;
    return *instance;
}

void add_span(const std::optional<Span> &span, NodeWrites *writes) {
    if (!span) {
        writes->everything = "a copy of impossible size";
        return;
    }
    RangeRecord record{RecordKind::range, 0, span->address, span->size_bytes};
    std::vector<unsigned char> bytes(sizeof(record));
    memcpy(bytes.data(), &record, sizeof(record));
    writes->records.push_back(std::move(bytes));
}

void add_kernel(const LaunchArguments &launch, NodeWrites *writes) {
    Kernel *kernel = launch.function == nullptr ? nullptr : kernel_of(launch.function);
    if (kernel == nullptr) {
        writes->everything = "a graph's kernel that came in an unknown way";
        return;
    }
    writes->kernels.emplace_back(kernel, launch.function);
    const size_t size_bytes = lay_out(kernel, launch.function) ? launch_record_bytes(*kernel, launch) : 0;
    if (size_bytes == 0) {
        writes->everything = "a graph's kernel whose arguments cannot be told: " + kernel->name;
        return;
    }
    std::vector<unsigned char> bytes(size_bytes);
    write_launch_record(kernel, launch, size_bytes, bytes.data());
    writes->records.push_back(std::move(bytes));
}

template <typename Parameters> NodeWrites kernel_writes(const Parameters &parameters) {
    NodeWrites writes;
    add_kernel(arguments_of(parameters), &writes);
    return writes;
}

NodeWrites fill_writes(const CUDA_MEMSET_NODE_PARAMS &fill) {
    NodeWrites writes;
    add_span(span_of_box(fill.dst, 0, 0, 0, fill.height <= 1 ? 0 : fill.pitch, 0, fill.width * fill.elementSize,
                         fill.height, 1),
             &writes);
    return writes;
}

NodeWrites copy_writes(const CUDA_MEMCPY3D &copy) {
    NodeWrites writes;
    add_span(span_of_copy(copy), &writes);
    return writes;
}

NodeWrites unknown_writes() {
    NodeWrites writes;
    writes.everything = kUnknownNode;
    return writes;
}

using Nodes = std::unordered_map<CUgraphNode, NodeWrites>;

struct Visitor {
    Nodes nodes;
    void kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 &parameters, bool device_may_change) {
        nodes[node] = kernel_writes(parameters);
        if (device_may_change)
            nodes[node].everything = "a graph's kernel that the device may change";
    }
    void copy(CUgraphNode node, const CUDA_MEMCPY3D &copy) { nodes[node] = copy_writes(copy); }
    void fill(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS &fill) { nodes[node] = fill_writes(fill); }
    void unknown(CUgraphNode node) { nodes[node] = unknown_writes(); }
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

void change_node(CUgraphExec executable, CUgraphNode node, NodeWrites writes) {
    std::lock_guard lock(graphs().mutex);
    const auto found = graphs().executables.find(executable);
    if (found == graphs().executables.end())
        return; // its launches count as everything
    found->second.nodes[node] = std::move(writes);
    found->second.whole = nullptr;
}

std::shared_ptr<const GraphWrites> compose(const Executable &executable, uint64_t number) {
    auto whole = std::make_shared<GraphWrites>();
    whole->number = number;
    size_t bytes = 0;
    for (const auto &[node, writes] : executable.nodes) {
        if (!writes.everything.empty())
            whole->everything = writes.everything;
        whole->kernels.insert(whole->kernels.end(), writes.kernels.begin(), writes.kernels.end());
        for (const auto &record : writes.records)
            bytes += record.size();
    }
    if (bytes > kLargestGraph)
        whole->everything = "a graph too large to be followed";
    if (whole->everything.empty())
        for (const auto &[node, writes] : executable.nodes)
            whole->records.insert(whole->records.end(), writes.records.begin(), writes.records.end());
    return whole;
}

std::shared_ptr<const GraphWrites> writes_of(CUgraphExec executable) {
    std::lock_guard lock(graphs().mutex);
    const auto found = graphs().executables.find(executable);
    if (found == graphs().executables.end())
        return nullptr;
    if (found->second.whole == nullptr)
        found->second.whole = compose(found->second, ++graphs().last_number);
    return found->second.whole;
}

void launched(CUgraphExec executable) {
    const std::shared_ptr<const GraphWrites> writes = writes_of(executable);
    if (writes == nullptr) {
        counts().launches.fetch_add(1, std::memory_order_relaxed);
        return wrote_everything("a graph that came in an unknown way");
    }
    counts().launches.fetch_add(writes->kernels.size(), std::memory_order_relaxed);
    size_t covered = 0;
    const Kernel *without = nullptr;
    for (const auto &[kernel, function] : writes->kernels) {
        kernel->launches.fetch_add(1, std::memory_order_relaxed);
        if (!has_template(kernel, function))
            without = kernel;
        else if (!is_unbounded(*kernel))
            ++covered;
    }
    counts().covered.fetch_add(static_cast<int64_t>(covered), std::memory_order_relaxed);
    if (without != nullptr)
        return wrote_everything(without->why, without->name.c_str());
    if (!writes->everything.empty())
        return wrote_everything("a graph", writes->everything.c_str());
    if (everything_marked())
        return;
    GraphRecord record;
    auto own = std::make_unique<const std::shared_ptr<const GraphWrites>>(writes);
    record.writes = own.get();
    if (submit(sizeof(record), [&](unsigned char *to) { memcpy(to, &record, sizeof(record)); }))
        static_cast<void>(own.release()); // the reader frees it
}

constexpr auto kInstantiated = [](CUgraphExec *executable, CUgraph graph, auto...) { take_nodes(*executable, graph); };
constexpr auto kUpdated = [](CUgraphExec executable, CUgraph graph, auto...) { take_nodes(executable, graph); };
constexpr auto kDestroyed = [](CUgraphExec executable) {
    std::lock_guard lock(graphs().mutex);
    graphs().executables.erase(executable);
};
constexpr auto kLaunched = [](CUgraphExec executable, CUstream) { launched(executable); };
constexpr auto kKernelChanged = [](CUgraphExec executable, CUgraphNode node, const auto *parameters) {
    change_node(executable, node, kernel_writes(*parameters));
};
constexpr auto kCopyChanged = [](CUgraphExec executable, CUgraphNode node, const CUDA_MEMCPY3D *copy, CUcontext) {
    change_node(executable, node, copy_writes(*copy));
};
constexpr auto kFillChanged = [](CUgraphExec executable, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill,
                                 CUcontext) { change_node(executable, node, fill_writes(*fill)); };
constexpr auto kChildChanged = [](CUgraphExec executable, CUgraphNode, CUgraph child) {
    for (auto &[node, writes] : nodes_of(child))
        change_node(executable, node, std::move(writes));
};
constexpr auto kOtherChanged = [](CUgraphExec executable, CUgraphNode node, const auto *) {
    change_node(executable, node, unknown_writes());
};

} // namespace

Overrides graph_overrides() {
    return {
        WF_AFTER(cuGraphInstantiate, kInstantiated),
        WF_AFTER(cuGraphInstantiate_v2, kInstantiated),
        WF_AFTER(cuGraphInstantiateWithFlags, kInstantiated),
        WF_AFTER(cuGraphInstantiateWithParams, kInstantiated),
        WF_AFTER(cuGraphInstantiateWithParams_ptsz, kInstantiated),
        WF_AFTER(cuGraphExecUpdate, kUpdated),
        WF_AFTER(cuGraphExecUpdate_v2, kUpdated),
        WF_BEFORE(cuGraphExecDestroy, kDestroyed),
        WF_BEFORE(cuGraphLaunch, kLaunched),
        WF_BEFORE(cuGraphLaunch_ptsz, kLaunched),
        WF_AFTER(cuGraphExecKernelNodeSetParams, kKernelChanged),
        WF_AFTER(cuGraphExecKernelNodeSetParams_v2, kKernelChanged),
        WF_AFTER(cuGraphExecMemcpyNodeSetParams, kCopyChanged),
        WF_AFTER(cuGraphExecMemsetNodeSetParams, kFillChanged),
        WF_AFTER(cuGraphExecChildGraphNodeSetParams, kChildChanged),
        WF_AFTER(cuGraphExecBatchMemOpNodeSetParams, kOtherChanged),
        WF_AFTER(cuGraphExecNodeSetParams, kOtherChanged),
    };
}

} // namespace woodfrog::interpose::shadow
