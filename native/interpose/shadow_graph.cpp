// Graphs: what the nodes of an executable graph may write (graph_writes.hpp) is noted as a whole at each launch.
#include "changes.hpp"
#include "graph_writes.hpp"
#include "shadow_copy.hpp"
#include "shadow_dirty.hpp"
#include "shadow_records.hpp"

#include <cstring>

namespace woodfrog::interpose::shadow {
namespace {

constexpr size_t kLargestGraph = size_t{64} << 20; // bytes of records
constexpr const char *kUnknownNode = "a graph's node of a kind that is not followed";

struct NodeWrites {
    std::vector<std::vector<unsigned char>> records;
    std::vector<std::pair<Kernel *, CUfunction>> kernels;
    std::string everything;
};

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

struct Notes {
    using Node = NodeWrites;
    using Whole = GraphWrites;

    template <typename Parameters> static NodeWrites of_kernel(const Parameters &parameters) {
        NodeWrites writes;
        add_kernel(arguments_of(parameters), &writes);
        return writes;
    }

    static void may_change(NodeWrites &writes) { writes.everything = "a graph's kernel that the device may change"; }

    static NodeWrites of_copy(const CUDA_MEMCPY3D &copy) {
        NodeWrites writes;
        add_span(span_of_copy(copy), &writes);
        return writes;
    }

    static NodeWrites of_fill(const CUDA_MEMSET_NODE_PARAMS &fill) {
        NodeWrites writes;
        add_span(span_of_fill(fill), &writes);
        return writes;
    }

    static NodeWrites unknown() {
        NodeWrites writes;
        writes.everything = kUnknownNode;
        return writes;
    }

    template <typename Nodes> static std::shared_ptr<const GraphWrites> compose(const Nodes &nodes) {
        static constinit uint64_t last_number = 0;
        auto whole = std::make_shared<GraphWrites>();
        whole->number = ++last_number;
        size_t bytes = 0;
        for (const auto &[node, writes] : nodes) {
            if (!writes.everything.empty())
                whole->everything = writes.everything;
            whole->kernels.insert(whole->kernels.end(), writes.kernels.begin(), writes.kernels.end());
            for (const auto &record : writes.records)
                bytes += record.size();
        }
        if (bytes > kLargestGraph)
            whole->everything = "a graph too large to be followed";
        if (whole->everything.empty())
            for (const auto &[node, writes] : nodes)
                whole->records.insert(whole->records.end(), writes.records.begin(), writes.records.end());
        return whole;
    }
};

using Table = GraphTable<Notes>;

void launched(CUgraphExec executable) {
    const uint64_t now = changes(); // before anything that depends on what is counted
    const std::shared_ptr<const GraphWrites> writes = Table::writes_of(executable);
    if (writes == nullptr) {
        counts().launches.fetch_add(1, std::memory_order_relaxed);
        return wrote_everything("a graph that came in an unknown way");
    }
    counts().launches.fetch_add(writes->kernels.size(), std::memory_order_relaxed);
    if (writes->told_at.load(std::memory_order_acquire) == now) {
        writes->again.fetch_add(1, std::memory_order_relaxed);
        counts().covered.fetch_add(static_cast<int64_t>(writes->covered.load(std::memory_order_relaxed)),
                                   std::memory_order_relaxed);
        if (const Kernel *without = writes->without.load(std::memory_order_relaxed); without != nullptr)
            wrote_everything(without->why.load(std::memory_order_relaxed), without->name.c_str());
        return;
    }
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
    const auto told = [&] {
        writes->covered.store(covered, std::memory_order_relaxed);
        writes->without.store(without, std::memory_order_relaxed);
        writes->told_at.store(now, std::memory_order_release);
    };
    if (without != nullptr) {
        told();
        return wrote_everything(without->why.load(std::memory_order_relaxed), without->name.c_str());
    }
    if (!writes->everything.empty())
        return wrote_everything("a graph", writes->everything.c_str());
    if (everything_marked())
        return;
    GraphRecord record;
    auto own = std::make_unique<const std::shared_ptr<const GraphWrites>>(writes);
    record.writes = own.get();
    if (submit(sizeof(record), [&](unsigned char *to) { memcpy(to, &record, sizeof(record)); })) {
        static_cast<void>(own.release()); // the reader frees it
        told();
    }
}

constexpr auto kLaunched = [](CUgraphExec executable, CUstream) { launched(executable); };

} // namespace

void add_graph_counts() {
    Table::each_whole([](const GraphWrites &writes) { writes.add_counts(); });
}

Overrides graph_overrides() {
    return {
        WF_AFTER(cuGraphInstantiate, Table::kInstantiated),
        WF_AFTER(cuGraphInstantiate_v2, Table::kInstantiated),
        WF_AFTER(cuGraphInstantiateWithFlags, Table::kInstantiated),
        WF_AFTER(cuGraphInstantiateWithParams, Table::kInstantiated),
        WF_AFTER(cuGraphInstantiateWithParams_ptsz, Table::kInstantiated),
        WF_AFTER(cuGraphExecUpdate, Table::kUpdated),
        WF_AFTER(cuGraphExecUpdate_v2, Table::kUpdated),
        WF_BEFORE(cuGraphExecDestroy, Table::kDestroyed),
        WF_BEFORE(cuGraphLaunch, kLaunched),
        WF_BEFORE(cuGraphLaunch_ptsz, kLaunched),
        WF_AFTER(cuGraphExecKernelNodeSetParams, Table::kKernelChanged),
        WF_AFTER(cuGraphExecKernelNodeSetParams_v2, Table::kKernelChanged),
        WF_AFTER(cuGraphExecMemcpyNodeSetParams, Table::kCopyChanged),
        WF_AFTER(cuGraphExecMemsetNodeSetParams, Table::kFillChanged),
        WF_AFTER(cuGraphExecChildGraphNodeSetParams, Table::kChildChanged),
        WF_AFTER(cuGraphExecBatchMemOpNodeSetParams, Table::kOtherChanged),
        WF_AFTER(cuGraphExecNodeSetParams, Table::kOtherChanged),
    };
}

} // namespace woodfrog::interpose::shadow
