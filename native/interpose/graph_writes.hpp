// What each executable graph may write: taken when it is instantiated, followed through its updates; for shadow
// execution and for copy-on-write, which differ in what they note of a node.
//
// Nodes are known by the handle they had in the graph they came from. Where that does not say which node was changed,
// what it may write now is added and what it might write before is kept.
#pragma once

#include "graph_walk.hpp"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace woodfrog::interpose {

// Notes::Node is noted of a node, Notes::Whole of a graph. Notes has of_kernel, of_copy, of_fill and unknown, which
// make a Node, may_change, which marks a kernel's that the device may change, and compose, which makes a Whole of all
// nodes and is never called twice at a time.
template <typename Notes> class GraphTable {
    using Node = typename Notes::Node;
    using Whole = typename Notes::Whole;

    using Nodes = std::unordered_map<CUgraphNode, Node>;

    struct Executable {
        Nodes nodes;
        std::shared_ptr<const Whole> whole; // null after a change
    };

    struct All {
        std::mutex mutex;
        std::unordered_map<CUgraphExec, Executable> executables;
    };

    struct Visitor {
        Nodes nodes;
        void kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 &parameters, bool device_may_change) {
            nodes[node] = Notes::of_kernel(parameters);
            if (device_may_change)
                Notes::may_change(nodes[node]);
        }
        void copy(CUgraphNode node, const CUDA_MEMCPY3D &copy) { nodes[node] = Notes::of_copy(copy); }
        void fill(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS &fill) { nodes[node] = Notes::of_fill(fill); }
        void unknown(CUgraphNode node) { nodes[node] = Notes::unknown(); }
    };

    static All &all() {
        static All *const instance = new All;
        return *instance;
    }

    static Nodes nodes_of(CUgraph graph) {
        Visitor visitor;
        walk_graph(graph, visitor);
        return std::move(visitor.nodes);
    }

    static void take(CUgraphExec executable, CUgraph graph) {
        Nodes nodes = nodes_of(graph);
        std::lock_guard lock(all().mutex);
        all().executables[executable] = {std::move(nodes), nullptr};
    }

    static void change(CUgraphExec executable, CUgraphNode node, Node writes) {
        std::lock_guard lock(all().mutex);
        const auto found = all().executables.find(executable);
        if (found == all().executables.end())
            return; // it may write anything
        found->second.nodes[node] = std::move(writes);
        found->second.whole = nullptr;
    }

  public:
    // Null for a graph that came in an unknown way: it may write anything.
    static std::shared_ptr<const Whole> writes_of(CUgraphExec executable) {
        std::lock_guard lock(all().mutex);
        const auto found = all().executables.find(executable);
        if (found == all().executables.end())
            return nullptr;
        if (found->second.whole == nullptr)
            found->second.whole = Notes::compose(found->second.nodes);
        return found->second.whole;
    }

    // Calls visit(const Whole &) for what is known of executable graphs that were launched.
    template <typename Visit> static void each_whole(const Visit &visit) {
        std::lock_guard lock(all().mutex);
        for (const auto &[executable, known] : all().executables)
            if (known.whole != nullptr)
                visit(*known.whole);
    }

    // Around the driver's functions of these names.
    static constexpr auto kInstantiated = [](CUgraphExec *executable, CUgraph graph, auto...) {
        take(*executable, graph);
    };
    static constexpr auto kUpdated = [](CUgraphExec executable, CUgraph graph, auto...) { take(executable, graph); };
    static constexpr auto kDestroyed = [](CUgraphExec executable) {
        std::lock_guard lock(all().mutex);
        all().executables.erase(executable);
    };
    static constexpr auto kKernelChanged = [](CUgraphExec executable, CUgraphNode node, const auto *parameters) {
        change(executable, node, Notes::of_kernel(*parameters));
    };
    static constexpr auto kCopyChanged = [](CUgraphExec executable, CUgraphNode node, const CUDA_MEMCPY3D *copy,
                                            CUcontext) { change(executable, node, Notes::of_copy(*copy)); };
    static constexpr auto kFillChanged = [](CUgraphExec executable, CUgraphNode node,
                                            const CUDA_MEMSET_NODE_PARAMS *fill,
                                            CUcontext) { change(executable, node, Notes::of_fill(*fill)); };
    static constexpr auto kChildChanged = [](CUgraphExec executable, CUgraphNode, CUgraph child) {
        for (auto &[node, writes] : nodes_of(child))
            change(executable, node, std::move(writes));
    };
    static constexpr auto kOtherChanged = [](CUgraphExec executable, CUgraphNode node, const auto *) {
        change(executable, node, Notes::unknown());
    };
};

} // namespace woodfrog::interpose
