// Graph nodes of every type: adding them, reading and changing their parameters, in a graph or in what it was
// instantiated to.
#include <cuda.h>

#include "api.hpp"
#include "copy.hpp"
#include "event.hpp"
#include "graph_api.hpp"
#include "launch.hpp"
#include "module.hpp"

namespace simgpu {
namespace {

template <class Kind> std::shared_ptr<Kind> work_of(CUgraphNode handle) {
    auto work = std::dynamic_pointer_cast<Kind>(node_argument(handle)->work);
    require(work != nullptr);
    return work;
}

// From parameters to work, for each type of node.
std::shared_ptr<Work> make(const CUDA_KERNEL_NODE_PARAMS_v2 &p) {
    auto context =
        p.func == nullptr && p.ctx != nullptr ? contexts().get(p.ctx, CUDA_ERROR_INVALID_CONTEXT) : require_context();
    auto handle = p.func != nullptr ? p.func : reinterpret_cast<CUfunction>(p.kern);
    const unsigned grid[3] = {p.gridDimX, p.gridDimY, p.gridDimZ};
    const unsigned block[3] = {p.blockDimX, p.blockDimY, p.blockDimZ};
    auto work =
        make_kernel_work(resolve_function(handle, *context), grid, block, p.sharedMemBytes, p.kernelParams, p.extra);
    if (kernels().find(handle))
        work->kernel_handle = reinterpret_cast<CUkernel>(handle);
    return work;
}

std::shared_ptr<Work> make(const CUDA_MEMCPY3D &p) {
    CUDA_MEMCPY3D checked = p;
    check_copy(checked);
    return std::make_shared<CopyWork>(checked);
}

std::shared_ptr<Work> make(const CUDA_MEMSET_NODE_PARAMS &p) {
    CUDA_MEMSET_NODE_PARAMS checked = p;
    check_memset(checked);
    return std::make_shared<MemsetWork>(checked);
}

std::shared_ptr<Work> make(const CUDA_HOST_NODE_PARAMS &p) {
    require(p.fn != nullptr);
    return std::make_shared<HostWork>(p);
}

std::shared_ptr<Work> make(const CUDA_BATCH_MEM_OP_NODE_PARAMS &p) {
    require(p.paramArray != nullptr && p.count > 0 && p.count <= 256);
    return std::make_shared<MemoryOperationWork>(std::vector(p.paramArray, p.paramArray + p.count));
}

std::shared_ptr<Work> make_child(CUgraph graph) {
    return std::make_shared<ChildGraphWork>(graph_argument(graph)->clone());
}

std::shared_ptr<Work> make_record(CUevent event) {
    return std::make_shared<EventRecordWork>(events().get(event, CUDA_ERROR_INVALID_VALUE), nullptr);
}

std::shared_ptr<Work> make_wait(CUevent event) {
    return std::make_shared<EventWaitWork>(events().get(event, CUDA_ERROR_INVALID_VALUE));
}

// The general form of cuGraphAddNode and its setters.
std::shared_ptr<Work> make(const CUgraphNodeParams &p) {
    switch (p.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        const auto &k = p.kernel;
        return make(CUDA_KERNEL_NODE_PARAMS_v2{k.func, k.gridDimX, k.gridDimY, k.gridDimZ, k.blockDimX, k.blockDimY,
                                               k.blockDimZ, k.sharedMemBytes, k.kernelParams, k.extra, k.kern, k.ctx});
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return make(p.memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
        const auto &m = p.memset;
        return make(CUDA_MEMSET_NODE_PARAMS{m.dst, m.pitch, m.value, m.elementSize, m.width, m.height});
    }
    case CU_GRAPH_NODE_TYPE_HOST:
        return make(CUDA_HOST_NODE_PARAMS{p.host.fn, p.host.userData});
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return make_child(p.graph.graph);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return std::make_shared<EmptyWork>();
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return make_record(p.eventRecord.event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return make_wait(p.eventWait.event);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        return make(CUDA_BATCH_MEM_OP_NODE_PARAMS{p.memOp.ctx, p.memOp.count, p.memOp.paramArray, p.memOp.flags});
    default: // memory nodes, external semaphores, conditions
        throw Error{CUDA_ERROR_NOT_SUPPORTED};
    }
}

CUresult add(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies, size_t count,
             const std::function<std::shared_ptr<Work>()> &work) {
    return call([&] {
        require(result != nullptr);
        *result = add_node(graph, dependencies, count, work());
    });
}

// A node keeps its type for life.
CUresult change(CUgraphNode handle, const std::function<std::shared_ptr<Work>()> &work) {
    return call([&] {
        auto node = node_argument(handle);
        auto fresh = work();
        require(fresh->type() == node->work->type());
        node->work = std::move(fresh);
    });
}

CUresult change(CUgraphExec exec_handle, CUgraphNode node, const std::function<std::shared_ptr<Work>()> &work) {
    return call([&] {
        auto exec = exec_argument(exec_handle);
        auto fresh = work();
        std::lock_guard lock(exec->mutex);
        auto *entry = exec->find(node);
        require(entry != nullptr && entry->work->type() == fresh->type());
        entry->work = std::move(fresh);
    });
}

template <class Parameters> std::function<std::shared_ptr<Work>()> from(const Parameters *parameters) {
    return [parameters] {
        require(parameters != nullptr);
        return make(*parameters);
    };
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    return call([&] {
        require(type != nullptr);
        *type = node_argument(node)->work->type();
    });
}

CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies,
                                   const CUgraphEdgeData *, size_t count, CUgraphNodeParams *parameters) {
    return add(result, graph, dependencies, count, from(parameters));
}

CUresult CUDAAPI cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *parameters) {
    return change(node, from(parameters));
}

CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *parameters) {
    return change(exec, node, from(parameters));
}

CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                      const CUDA_KERNEL_NODE_PARAMS *parameters) {
    return add(result, graph, dependencies, count, from(parameters));
}

CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *parameters) {
    return call([&] {
        require(parameters != nullptr);
        auto work = work_of<KernelWork>(node);
        *parameters = {};
        // A node made of a CUkernel names that one, as on a real driver.
        if (work->kernel_handle != nullptr) {
            parameters->kern = work->kernel_handle;
        } else {
            parameters->func = work->function->handle();
        }
        parameters->gridDimX = work->grid[0];
        parameters->gridDimY = work->grid[1];
        parameters->gridDimZ = work->grid[2];
        parameters->blockDimX = work->block[0];
        parameters->blockDimY = work->block[1];
        parameters->blockDimZ = work->block[2];
        parameters->sharedMemBytes = work->dynamic_shared_bytes;
        parameters->kernelParams = work->parameter_slots.data();
    });
}

CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *parameters) {
    return change(node, from(parameters));
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                const CUDA_KERNEL_NODE_PARAMS *parameters) {
    return change(exec, node, from(parameters));
}

CUresult CUDAAPI cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from_node) {
    return call([&] {
        work_of<KernelWork>(to);
        work_of<KernelWork>(from_node);
    });
}

CUresult CUDAAPI cuGraphKernelNodeGetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute,
                                               CUkernelNodeAttrValue *value) {
    return call([&] {
        require(value != nullptr);
        auto work = work_of<KernelWork>(node);
        *value = {};
        if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            value->cooperative = work->cooperative;
    });
}

CUresult CUDAAPI cuGraphKernelNodeSetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute,
                                               const CUkernelNodeAttrValue *value) {
    return call([&] {
        require(value != nullptr);
        auto work = work_of<KernelWork>(node);
        if (attribute == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            work->cooperative = value->cooperative != 0;
    });
}

CUresult CUDAAPI cuGraphAddMemcpyNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                      const CUDA_MEMCPY3D *parameters, CUcontext) {
    return add(result, graph, dependencies, count, from(parameters));
}

CUresult CUDAAPI cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *parameters) {
    return call([&] {
        require(parameters != nullptr);
        *parameters = work_of<CopyWork>(node)->description();
    });
}

CUresult CUDAAPI cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *parameters) {
    return change(node, from(parameters));
}

CUresult CUDAAPI cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *parameters,
                                                CUcontext) {
    return change(exec, node, from(parameters));
}

CUresult CUDAAPI cuGraphAddMemsetNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                      const CUDA_MEMSET_NODE_PARAMS *parameters, CUcontext) {
    return add(result, graph, dependencies, count, from(parameters));
}

CUresult CUDAAPI cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *parameters) {
    return call([&] {
        require(parameters != nullptr);
        *parameters = work_of<MemsetWork>(node)->parameters();
    });
}

CUresult CUDAAPI cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *parameters) {
    return change(node, from(parameters));
}

CUresult CUDAAPI cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                const CUDA_MEMSET_NODE_PARAMS *parameters, CUcontext) {
    return change(exec, node, from(parameters));
}

CUresult CUDAAPI cuGraphAddHostNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                    const CUDA_HOST_NODE_PARAMS *parameters) {
    return add(result, graph, dependencies, count, from(parameters));
}

CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS *parameters) {
    return call([&] {
        require(parameters != nullptr);
        *parameters = work_of<HostWork>(node)->parameters();
    });
}

CUresult CUDAAPI cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *parameters) {
    return change(node, from(parameters));
}

CUresult CUDAAPI cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                              const CUDA_HOST_NODE_PARAMS *parameters) {
    return change(exec, node, from(parameters));
}

CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies,
                                          size_t count, CUgraph child) {
    return add(result, graph, dependencies, count, [child] { return make_child(child); });
}

CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph) {
    return call([&] {
        require(graph != nullptr);
        *graph = reinterpret_cast<CUgraph>(work_of<ChildGraphWork>(node)->graph.get());
    });
}

CUresult CUDAAPI cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
    return change(exec, node, [child] { return make_child(child); });
}

CUresult CUDAAPI cuGraphAddEmptyNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies,
                                     size_t count) {
    return add(result, graph, dependencies, count, [] { return std::make_shared<EmptyWork>(); });
}

CUresult CUDAAPI cuGraphAddEventRecordNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies,
                                           size_t count, CUevent event) {
    return add(result, graph, dependencies, count, [event] { return make_record(event); });
}

CUresult CUDAAPI cuGraphEventRecordNodeGetEvent(CUgraphNode node, CUevent *event) {
    return call([&] {
        require(event != nullptr);
        *event = reinterpret_cast<CUevent>(work_of<EventRecordWork>(node)->event.get());
    });
}

CUresult CUDAAPI cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
    return change(node, [event] { return make_record(event); });
}

CUresult CUDAAPI cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
    return change(exec, node, [event] { return make_record(event); });
}

CUresult CUDAAPI cuGraphAddEventWaitNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies,
                                         size_t count, CUevent event) {
    return add(result, graph, dependencies, count, [event] { return make_wait(event); });
}

CUresult CUDAAPI cuGraphEventWaitNodeGetEvent(CUgraphNode node, CUevent *event) {
    return call([&] {
        require(event != nullptr);
        *event = reinterpret_cast<CUevent>(work_of<EventWaitWork>(node)->event.get());
    });
}

CUresult CUDAAPI cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
    return change(node, [event] { return make_wait(event); });
}

CUresult CUDAAPI cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
    return change(exec, node, [event] { return make_wait(event); });
}

CUresult CUDAAPI cuGraphAddBatchMemOpNode(CUgraphNode *result, CUgraph graph, const CUgraphNode *dependencies,
                                          size_t count, const CUDA_BATCH_MEM_OP_NODE_PARAMS *parameters) {
    return add(result, graph, dependencies, count, from(parameters));
}

CUresult CUDAAPI cuGraphBatchMemOpNodeGetParams(CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS *parameters) {
    return call([&] {
        require(parameters != nullptr);
        auto work = work_of<MemoryOperationWork>(node);
        *parameters = {};
        parameters->count = static_cast<unsigned>(work->operations.size());
        parameters->paramArray = work->operations.data();
    });
}

CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec handle, CUgraphNode node, unsigned int enabled) {
    return call([&] {
        auto exec = exec_argument(handle);
        std::lock_guard lock(exec->mutex);
        auto *entry = exec->find(node);
        require(entry != nullptr);
        entry->enabled = enabled != 0;
    });
}

CUresult CUDAAPI cuGraphNodeGetEnabled(CUgraphExec handle, CUgraphNode node, unsigned int *enabled) {
    return call([&] {
        require(enabled != nullptr);
        auto exec = exec_argument(handle);
        std::lock_guard lock(exec->mutex);
        auto *entry = exec->find(node);
        require(entry != nullptr);
        *enabled = entry->enabled ? 1 : 0;
    });
}

} // extern "C"
