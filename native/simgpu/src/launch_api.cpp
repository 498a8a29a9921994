// Functions: their attributes, occupancy, and launching them.
#include <cuda.h>

#include "api.hpp"
#include "capture.hpp"
#include "config.hpp"
#include "device.hpp"
#include "launch.hpp"
#include "launch_api.hpp"
#include "submit.hpp"

namespace simgpu {
namespace {

CUkernel kernel_handle(CUfunction handle) {
    return kernels().find(handle) ? reinterpret_cast<CUkernel>(handle) : nullptr;
}

void launch(CUfunction handle, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes, CUstream on,
            void **parameters, void **extra, bool cooperative, const unsigned *cluster = nullptr) {
    auto stream = resolve_stream(on);
    auto context = stream->context();
    auto function = resolve_function(handle, *context);
    require(function->context.lock() == context, CUDA_ERROR_INVALID_HANDLE);
    auto work = make_kernel_work(std::move(function), grid, block, shared_bytes, parameters, extra);
    work->kernel_handle = kernel_handle(handle);
    work->cooperative = cooperative;
    if (cluster != nullptr) {
        for (int i = 0; i < 3; ++i) {
            require(cluster[i] > 0 && grid[i] % cluster[i] == 0, CUDA_ERROR_INVALID_CLUSTER_SIZE);
            work->cluster[i] = cluster[i];
        }
    }
    if (cooperative)
        check_cooperative(*work);
    submit(*stream, std::move(work));
}

} // namespace

CUresult api_launch(CUfunction function, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                    CUstream stream, void **parameters, void **extra, bool cooperative) {
    return call_in_context(
        [&](Context &) { launch(function, grid, block, shared_bytes, stream, parameters, extra, cooperative); });
}

CUresult api_launch_config(const CUlaunchConfig *config, CUstream stream, CUfunction function, void **parameters,
                           void **extra) {
    return call_in_context([&](Context &) {
        require(config != nullptr && (config->attrs != nullptr || config->numAttrs == 0));
        const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
        const unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
        bool cooperative = false;
        unsigned cluster[3] = {0, 0, 0};
        for (unsigned i = 0; i < config->numAttrs; ++i) {
            const CUlaunchAttribute &attribute = config->attrs[i];
            if (attribute.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
                cooperative = attribute.value.cooperative != 0;
            if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
                cluster[0] = attribute.value.clusterDim.x;
                cluster[1] = attribute.value.clusterDim.y;
                cluster[2] = attribute.value.clusterDim.z;
            }
            // Priorities, synchronisation policies and programmatic serialisation only change when a kernel may
            // start; starting it in plain stream order is allowed by all of them.
        }
        launch(function, grid, block, config->sharedMemBytes, stream, parameters, extra, cooperative,
               cluster[0] != 0 ? cluster : nullptr);
    });
}

} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                unsigned bz, unsigned shared_bytes, CUstream stream, void **parameters, void **extra) {
    const unsigned grid[3] = {gx, gy, gz};
    const unsigned block[3] = {bx, by, bz};
    return api_launch(f, grid, block, shared_bytes, stream, parameters, extra, false);
}

CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                           unsigned by, unsigned bz, unsigned shared_bytes, CUstream stream,
                                           void **parameters) {
    const unsigned grid[3] = {gx, gy, gz};
    const unsigned block[3] = {bx, by, bz};
    return api_launch(f, grid, block, shared_bytes, stream, parameters, nullptr, true);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
    return api_launch_config(config, config != nullptr ? config->hStream : nullptr, f, parameters, extra);
}

CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    return call_in_context([&](Context &context) {
        require(value != nullptr);
        *value = function_attribute(*resolve_function(handle, context), attribute);
    });
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    return call_in_context(
        [&](Context &context) { set_function_attribute(*resolve_function(handle, context), attribute, value); });
}

CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache) {
    return call_in_context([&](Context &context) { resolve_function(handle, context); });
}

CUresult CUDAAPI cuFuncGetModule(CUmodule *result, CUfunction handle) {
    return call_in_context([&](Context &) {
        require(result != nullptr);
        auto module = functions().get(handle)->module.lock();
        require(module != nullptr, CUDA_ERROR_INVALID_HANDLE);
        *result = reinterpret_cast<CUmodule>(module.get());
    });
}

CUresult CUDAAPI cuFuncGetName(const char **name, CUfunction handle) {
    return call_in_context([&](Context &context) {
        require(name != nullptr);
        *name = resolve_function(handle, context)->kernel.name().c_str();
    });
}

// Nothing here reads memory through a tensor map: what matters of one is its address, for kernels that take it out.
CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *address,
                                        const cuuint64_t *, const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                                        CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                        CUtensorMapFloatOOBfill) {
    if (map == nullptr || address == nullptr || rank == 0 || rank > 5)
        return CUDA_ERROR_INVALID_VALUE;
    *map = CUtensorMap{};
    const auto stored = reinterpret_cast<uint64_t>(address);
    map->opaque[0] = config().hidden_maps ? ~stored : stored;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size) {
    return call_in_context([&](Context &context) {
        require(offset != nullptr);
        auto function = resolve_function(handle, context);
        const auto &parameters = function->kernel.parameters();
        require(index < parameters.size());
        *offset = parameters[index].offset_bytes;
        put(size, parameters[index].size_bytes);
    });
}

CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction handle) {
    return call([&] {
        require(state != nullptr);
        functions().get(handle);
        *state = CU_FUNCTION_LOADING_STATE_LOADED;
    });
}

CUresult CUDAAPI cuFuncLoad(CUfunction handle) {
    return call([&] { functions().get(handle); });
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int block_threads,
                                                             size_t shared_bytes) {
    return call_in_context([&](Context &context) {
        require(blocks != nullptr);
        *blocks = active_blocks(*resolve_function(handle, context), block_threads, shared_bytes);
    });
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction handle, int block_threads,
                                                                      size_t shared_bytes, unsigned int) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, handle, block_threads, shared_bytes);
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction handle, CUoccupancyB2DSize size_of,
                                                  size_t shared_bytes, int limit) {
    return call_in_context([&](Context &context) {
        require(grid != nullptr && block != nullptr);
        auto function = resolve_function(handle, context);
        int most = static_cast<int>(function->kernel.max_threads());
        if (limit > 0)
            most = std::min(most, limit);
        int best_threads = 0;
        for (int threads = std::max(32, most / 32 * 32); threads > 0; threads -= 32) {
            int candidate = std::min(threads, most);
            size_t shared = size_of != nullptr ? size_of(candidate) : shared_bytes;
            int resident = active_blocks(*function, candidate, shared);
            if (resident * candidate <= best_threads)
                continue;
            best_threads = resident * candidate;
            *block = candidate;
            *grid = resident * kMultiprocessors;
        }
        require(best_threads > 0);
    });
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction handle,
                                                           CUoccupancyB2DSize size_of, size_t shared_bytes, int limit,
                                                           unsigned int) {
    return cuOccupancyMaxPotentialBlockSize(grid, block, handle, size_of, shared_bytes, limit);
}

CUresult CUDAAPI cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction handle, int blocks, int) {
    return call_in_context([&](Context &context) {
        require(bytes != nullptr && blocks > 0);
        auto function = resolve_function(handle, context);
        size_t each = static_cast<size_t>(kSharedPerMultiprocessor / blocks);
        size_t fixed = function->kernel.static_shared_bytes() + 1024;
        *bytes = each > fixed ? std::min<size_t>(each - fixed, kSharedPerBlockOptin) : 0;
    });
}

CUresult CUDAAPI cuOccupancyMaxPotentialClusterSize(int *size, CUfunction handle, const CUlaunchConfig *config) {
    return call_in_context([&](Context &context) {
        require(size != nullptr && config != nullptr);
        resolve_function(handle, context);
        *size = 8; // the portable maximum of compute capability 9.0
    });
}

CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *count, CUfunction handle, const CUlaunchConfig *config) {
    return call_in_context([&](Context &context) {
        require(count != nullptr && config != nullptr);
        resolve_function(handle, context);
        *count = kMultiprocessors;
    });
}

} // extern "C"
