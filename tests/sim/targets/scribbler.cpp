// A target for the tests that does as it is told: allocates, frees, writes and shows GPU memory.
//
//     scribbler COMMANDS [KERNELS.ptx]
//
// Orders are lines appended to the file COMMANDS; SIGUSR1 says that there are more. Each is answered by one line on
// standard output, "N answer" for order N (from 1). No socket, pipe or open file stands in the way of a dump.
//
//     alloc SIZE                 the address, in hexadecimal
//     free ADDRESS
//     write ADDRESS SIZE SEED    SIZE bytes of the generator below
//     fill ADDRESS SIZE BYTE     by cuMemsetD8
//     copy TO FROM SIZE          on the device
//     launch ADDRESS WORDS SEED  by the kernel `fill` of stepper_kernels.cu
//     record ADDRESS WORDS SEED  a graph of that launch, in place of the last one that was recorded
//     replay                     launches that graph
//     show ADDRESS SIZE FILE     its contents, appended to FILE
//     ask ADDRESS                what the driver tells of it: memory type, device, mapped, base, size, free memory
//     end                        exits 0
// Any failure of a driver call is answered by "error NAME", and changes nothing else.
#include "orders.hpp"

#include <cuda.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

// A prime: no two chunks of a megabyte begin at the same place in it.
constexpr size_t kPeriod = 8191;

// Bytes that tests/support/scribbler.py makes too: the upper bytes of a 64-bit linear congruential generator, repeated.
std::vector<uint8_t> bytes_of(uint64_t seed, size_t size) {
    std::vector<uint8_t> bytes(size);
    uint64_t state = seed;
    for (size_t at = 0; at < size; ++at) {
        state = state * 6364136223846793005ull + 1442695040888963407ull; // Knuth, MMIX
        bytes[at] = at < kPeriod ? static_cast<uint8_t>(state >> 56) : bytes[at - kPeriod];
    }
    return bytes;
}

const char *kernels_path = nullptr;

// Launches `fill`, as the next work of the stream.
CUresult launch_fill(CUdeviceptr address, unsigned words, unsigned seed, CUstream stream) {
    static CUfunction fill = nullptr;
    if (fill == nullptr) {
        CUmodule module = nullptr;
        if (const CUresult loaded = cuModuleLoad(&module, kernels_path); loaded != CUDA_SUCCESS)
            return loaded;
        if (const CUresult found = cuModuleGetFunction(&fill, module, "fill"); found != CUDA_SUCCESS)
            return found;
    }
    void *arguments[] = {&address, &words, &seed};
    return cuLaunchKernel(fill, 2, 1, 1, 64, 1, 1, 0, stream, arguments, nullptr);
}

CUgraphExec recorded = nullptr;

CUresult record(CUdeviceptr address, unsigned words, unsigned seed) {
    if (recorded != nullptr)
        cuGraphExecDestroy(recorded);
    recorded = nullptr;
    CUstream stream = nullptr;
    CUgraph graph = nullptr;
    CUresult result = launch_fill(address, words, seed, nullptr); // modules are not loaded within a capture
    if (result == CUDA_SUCCESS)
        result = cuCtxSynchronize();
    if (result == CUDA_SUCCESS)
        result = cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        result = cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    if (result == CUDA_SUCCESS)
        result = launch_fill(address, words, seed, stream);
    if (result == CUDA_SUCCESS)
        result = cuStreamEndCapture(stream, &graph);
    if (result == CUDA_SUCCESS)
        result = cuGraphInstantiate(&recorded, graph, 0);
    if (graph != nullptr)
        cuGraphDestroy(graph);
    if (stream != nullptr)
        cuStreamDestroy(stream);
    return result;
}

std::string told(CUresult result, const std::string &answer = "ok") {
    if (result == CUDA_SUCCESS)
        return answer;
    const char *name = "?";
    cuGetErrorName(result, &name);
    return std::string("error ") + name;
}

std::string obey(const std::string &line) {
    std::istringstream words(line);
    std::string verb;
    words >> verb;
    CUdeviceptr address = 0;
    size_t size = 0;
    if (verb == "alloc") {
        words >> std::dec >> size;
        const CUresult result = cuMemAlloc(&address, size);
        char text[32];
        std::snprintf(text, sizeof(text), "%llx", address);
        return told(result, text);
    }
    if (verb == "replay") {
        const CUresult result = cuGraphLaunch(recorded, nullptr);
        return told(result == CUDA_SUCCESS ? cuCtxSynchronize() : result);
    }
    words >> std::hex >> address;
    if (verb == "free")
        return told(cuMemFree(address));
    if (verb == "copy") {
        CUdeviceptr from = 0;
        words >> std::hex >> from >> std::dec >> size;
        const CUresult result = cuMemcpyDtoD(address, from, size);
        return told(result == CUDA_SUCCESS ? cuCtxSynchronize() : result);
    }
    words >> std::dec >> size;
    if (verb == "write") {
        uint64_t seed = 0;
        words >> seed;
        return told(cuMemcpyHtoD(address, bytes_of(seed, size).data(), size));
    }
    if (verb == "launch" || verb == "record") {
        unsigned seed = 0;
        words >> seed;
        const auto count = static_cast<unsigned>(size);
        const CUresult result =
            verb == "launch" ? launch_fill(address, count, seed, nullptr) : record(address, count, seed);
        return told(result == CUDA_SUCCESS ? cuCtxSynchronize() : result);
    }
    if (verb == "fill") {
        unsigned value = 0;
        words >> value;
        const CUresult result = cuMemsetD8(address, static_cast<unsigned char>(value), size);
        return told(result == CUDA_SUCCESS ? cuCtxSynchronize() : result);
    }
    if (verb == "show") {
        std::string path;
        words >> path;
        std::vector<uint8_t> bytes(size);
        const CUresult result = cuMemcpyDtoH(bytes.data(), address, size);
        std::ofstream(path, std::ios::binary | std::ios::app)
            .write(reinterpret_cast<const char *>(bytes.data()), static_cast<std::streamsize>(size));
        return told(result);
    }
    if (verb == "ask") {
        words >> std::hex >> address;
        unsigned type = 0;
        int device = -1;
        bool mapped = false;
        CUdeviceptr base = 0;
        size_t bytes = 0, free = 0, total = 0;
        CUresult result = cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
        if (result == CUDA_SUCCESS)
            result = cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
        if (result == CUDA_SUCCESS)
            result = cuPointerGetAttribute(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, address);
        if (result == CUDA_SUCCESS)
            result = cuMemGetAddressRange(&base, &bytes, address);
        if (result == CUDA_SUCCESS)
            result = cuMemGetInfo(&free, &total);
        char text[160];
        std::snprintf(text, sizeof(text), "%u %d %d %llx %zu %zu", type, device, mapped ? 1 : 0, base, bytes, free);
        return told(result, text);
    }
    return "error unknown order";
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3)
        return 2;
    kernels_path = argc == 3 ? argv[2] : "";
    const auto prepare = [] {
        CUdevice device = 0;
        CUcontext context = nullptr;
        return cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS &&
               cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS && cuCtxSetCurrent(context) == CUDA_SUCCESS;
    };
    return orders::take(argv[1], prepare, obey);
}
