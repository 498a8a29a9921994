// The one door to the CUDA driver: a table of functions found with dlopen when first needed. Nothing links libcuda, so
// the module imports on a machine without a GPU, and a simulated driver is chosen by the library path alone. cuda.h is
// used for types only. No other file may look up a driver symbol.
#pragma once
#include "error.hpp"

#include <cuda.h>
#include <string>

namespace woodfrog::transfer {

// cuda.h renames some of these to the versions it describes (cuMemHostRegister is cuMemHostRegister_v2); the same
// renaming happens here and where they are called, so type, symbol and call always agree.
#define WF_DRIVER_FUNCTIONS(X)                                                                                         \
    X(cuInit)                                                                                                          \
    X(cuDriverGetVersion)                                                                                              \
    X(cuGetErrorName)                                                                                                  \
    X(cuGetErrorString)                                                                                                \
    X(cuDeviceGetCount)                                                                                                \
    X(cuDeviceGet)                                                                                                     \
    X(cuDeviceGetUuid)                                                                                                 \
    X(cuDeviceGetName)                                                                                                 \
    X(cuDeviceGetAttribute)                                                                                            \
    X(cuDeviceTotalMem)                                                                                                \
    X(cuDevicePrimaryCtxRetain)                                                                                        \
    X(cuDevicePrimaryCtxRelease)                                                                                       \
    X(cuCtxPushCurrent)                                                                                                \
    X(cuCtxPopCurrent)                                                                                                 \
    X(cuMemGetInfo)                                                                                                    \
    X(cuMemCreate)                                                                                                     \
    X(cuMemRelease)                                                                                                    \
    X(cuMemAddressReserve)                                                                                             \
    X(cuMemAddressFree)                                                                                                \
    X(cuMemMap)                                                                                                        \
    X(cuMemUnmap)                                                                                                      \
    X(cuMemSetAccess)                                                                                                  \
    X(cuMemGetAllocationGranularity)                                                                                   \
    X(cuMemExportToShareableHandle)                                                                                    \
    X(cuMemImportFromShareableHandle)                                                                                  \
    X(cuMemAlloc)                                                                                                      \
    X(cuMemFree)                                                                                                       \
    X(cuMemHostAlloc)                                                                                                  \
    X(cuMemFreeHost)                                                                                                   \
    X(cuMemHostGetDevicePointer)                                                                                       \
    X(cuMemHostRegister)                                                                                               \
    X(cuMemHostUnregister)                                                                                             \
    X(cuMemcpyDtoHAsync)                                                                                               \
    X(cuMemcpyHtoDAsync)                                                                                               \
    X(cuMemcpyDtoDAsync)                                                                                               \
    X(cuModuleLoadDataEx)                                                                                              \
    X(cuModuleUnload)                                                                                                  \
    X(cuModuleGetFunction)                                                                                             \
    X(cuFuncSetAttribute)                                                                                              \
    X(cuLaunchKernel)                                                                                                  \
    X(cuStreamWaitEvent)                                                                                               \
    X(cuMemsetD8Async)                                                                                                 \
    X(cuStreamCreate)                                                                                                  \
    X(cuStreamDestroy)                                                                                                 \
    X(cuStreamSynchronize)                                                                                             \
    X(cuEventCreate)                                                                                                   \
    X(cuEventRecord)                                                                                                   \
    X(cuEventSynchronize)                                                                                              \
    X(cuEventDestroy)

struct Driver {
#define WF_DRIVER_MEMBER(name) decltype(&::name) name;
    WF_DRIVER_FUNCTIONS(WF_DRIVER_MEMBER)
#undef WF_DRIVER_MEMBER
};

// The functions of libcuda.so.1; TransferError(-ENOENT, "dlopen") if there is none. A function that this driver lacks
// is null: WF_CUDA says so by name.
const Driver &driver_library();

// The same, after cuInit.
const Driver &driver();

// Throws TransferError with the driver's name and sentence for `result`, unless it is CUDA_SUCCESS.
void check(CUresult result, const char *call);

[[noreturn]] void throw_missing(const char *call);

template <typename Function, typename... Arguments>
CUresult try_call(const char *call, Function *function, Arguments... arguments) {
    if (!function)
        throw_missing(call);
    return function(arguments...);
}

// Calls a driver function: WF_CUDA throws on failure, WF_TRY_CUDA returns the result.
#define WF_TRY_CUDA(function, ...)                                                                                     \
    ::woodfrog::transfer::try_call(#function, ::woodfrog::transfer::driver().function, __VA_ARGS__)
#define WF_CUDA(function, ...) ::woodfrog::transfer::check(WF_TRY_CUDA(function, __VA_ARGS__), #function)

} // namespace woodfrog::transfer
