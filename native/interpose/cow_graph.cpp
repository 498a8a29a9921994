// What the launch of a graph may write, taken long before a snapshot is (graph_writes.hpp): of an executable graph the
// driver tells nothing later.
#include "cow.hpp"

#include "graph_writes.hpp"

#include <algorithm>

namespace woodfrog::interpose::cow {
namespace {

struct Writes {
    std::vector<uint64_t> words; // what in the arguments of kernels may be an address
    std::vector<shadow::Span> spans;
    std::shared_ptr<const Kernel> kernel;
    bool anything = false;
};

// All nodes together; not changed once it is made.
struct Whole {
    std::vector<uint64_t> words;
    std::vector<shadow::Span> spans;
    std::vector<std::shared_ptr<const Kernel>> kernels;
    bool anything = false;
};

Writes of_span(const std::optional<shadow::Span> &span) {
    Writes writes;
    if (span)
        writes.spans.push_back(*span);
    else
        writes.anything = true;
    return writes;
}

struct Notes {
    using Node = Writes;
    using Whole = cow::Whole;

    static Writes unknown() {
        Writes writes;
        writes.anything = true;
        return writes;
    }

    template <typename Parameters> static Writes of_kernel(const Parameters &parameters) {
        const LaunchArguments launch = arguments_of(parameters);
        Writes writes;
        if (launch.function == nullptr)
            return unknown();
        writes.kernel = kernel_of(launch.function);
        writes.anything = !add_words(*writes.kernel, launch, &writes.words);
        return writes;
    }

    static void may_change(Writes &writes) { writes.anything = true; }

    static Writes of_copy(const CUDA_MEMCPY3D &copy) { return of_span(shadow::span_of_copy(copy)); }

    static Writes of_fill(const CUDA_MEMSET_NODE_PARAMS &fill) { return of_span(shadow::span_of_fill(fill)); }

    template <typename Nodes> static std::shared_ptr<const cow::Whole> compose(const Nodes &nodes) {
        auto whole = std::make_shared<cow::Whole>();
        for (const auto &[node, writes] : nodes) {
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
};

using Table = GraphTable<Notes>;

} // namespace

void will_launch_graph(CUgraphExec executable) {
    const std::shared_ptr<const Whole> whole = Table::writes_of(executable);
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
        WF_WRAPPED(NotedAfter, cuGraphInstantiate, Table::kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphInstantiate_v2, Table::kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphInstantiateWithFlags, Table::kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphInstantiateWithParams, Table::kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphInstantiateWithParams_ptsz, Table::kInstantiated),
        WF_WRAPPED(NotedAfter, cuGraphExecUpdate, Table::kUpdated),
        WF_WRAPPED(NotedAfter, cuGraphExecUpdate_v2, Table::kUpdated),
        WF_WRAPPED(NotedBefore, cuGraphExecDestroy, Table::kDestroyed),
        WF_WRAPPED(NotedAfter, cuGraphExecKernelNodeSetParams, Table::kKernelChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecKernelNodeSetParams_v2, Table::kKernelChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecMemcpyNodeSetParams, Table::kCopyChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecMemsetNodeSetParams, Table::kFillChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecChildGraphNodeSetParams, Table::kChildChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecBatchMemOpNodeSetParams, Table::kOtherChanged),
        WF_WRAPPED(NotedAfter, cuGraphExecNodeSetParams, Table::kOtherChanged),
    };
}

} // namespace woodfrog::interpose::cow
