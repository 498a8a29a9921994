// Measures what the interposer adds: nanoseconds of a driver call that does nothing (`calls`, with the stub driver),
// and pairs of cuMemAlloc + cuMemFree a second (`pairs SIZE`). The best of several rounds: others use the machine too.
#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>

namespace {

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename Call> double best_ns(int rounds, int calls, Call call) {
    double best = 1e9;
    for (int round = 0; round < rounds; ++round) {
        const double start_s = now_s();
        for (int i = 0; i < calls; ++i)
            call();
        best = std::min(best, (now_s() - start_s) / calls * 1e9);
    }
    return best;
}

template <typename F> F *find(void *library, const char *name) {
    void *function = dlsym(library, name);
    if (function == nullptr) {
        std::fprintf(stderr, "no %s\n", name);
        std::exit(1);
    }
    return reinterpret_cast<F *>(function);
}

} // namespace

int main(int, char **argv) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    if (std::string(argv[1]) == "calls") {
        auto *ask = find<CUresult(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *)>(
            library, "cuGetProcAddress_v2");
        void *pointer = nullptr;
        ask("cuCtxGetFlags", &pointer, 12000, 0, nullptr);
        auto *call = reinterpret_cast<CUresult (*)(unsigned *)>(pointer);
        unsigned flags = 0;
        std::printf("%.3f\n", best_ns(20, 200000, [&] { call(&flags); }));
        return flags == 4711 ? 0 : 1;
    }
    const size_t size = std::strtoull(argv[2], nullptr, 10);
    CUdevice device = 0;
    CUcontext context = nullptr;
    CUdeviceptr address = 0;
    auto *allocate = find<CUresult(CUdeviceptr *, size_t)>(library, "cuMemAlloc_v2");
    auto *release = find<CUresult(CUdeviceptr)>(library, "cuMemFree_v2");
    if (find<CUresult(unsigned)>(library, "cuInit")(0) != CUDA_SUCCESS ||
        find<CUresult(CUdevice *, int)>(library, "cuDeviceGet")(&device, 0) != CUDA_SUCCESS ||
        find<CUresult(CUcontext *, CUdevice)>(library, "cuDevicePrimaryCtxRetain")(&context, device) != CUDA_SUCCESS ||
        find<CUresult(CUcontext)>(library, "cuCtxSetCurrent")(context) != CUDA_SUCCESS)
        return 1;
    const double pair_ns = best_ns(5, 200, [&] {
        if (allocate(&address, size) != CUDA_SUCCESS || release(address) != CUDA_SUCCESS)
            std::exit(1);
    });
    std::printf("%.0f\n", 1e9 / pair_ns);
    return 0;
}
