// A libcuda.so.1 of a few functions whose cuGetProcAddress returns entry points that are not exported, one of a name
// that no header knows, and NULL with success.
#include <cuda.h>

#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

static CUresult hidden_flags(unsigned *flags) {
    *flags = 4711;
    return CUDA_SUCCESS;
}

// Arguments in every kind of place that the calling convention has.
static CUresult brand_new(int a, int b, int c, int d, int e, int f, int g, long h, double x, float y, double z) {
    return static_cast<CUresult>(a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * x + 10 * y + 11 * z);
}

EXPORT CUresult cuInit(unsigned) {
    return CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t,
                                    CUdriverProcAddressQueryResult *status) {
    *function = nullptr;
    if (status != nullptr)
        *status = CU_GET_PROC_ADDRESS_SUCCESS;
    if (std::strcmp(symbol, "cuGetProcAddress") == 0)
        *function = reinterpret_cast<void *>(&cuGetProcAddress_v2);
    else if (std::strcmp(symbol, "cuInit") == 0)
        *function = reinterpret_cast<void *>(&cuInit);
    else if (std::strcmp(symbol, "cuCtxGetFlags") == 0 && version >= 7000)
        *function = reinterpret_cast<void *>(&hidden_flags);
    else if (std::strcmp(symbol, "cuBrandNew") == 0)
        *function = reinterpret_cast<void *>(&brand_new);
    return CUDA_SUCCESS;
}
