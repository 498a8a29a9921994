// Threads that make and give up everything the driver has, at random: device memory of all kinds, mappings, streams,
// events, graphs, modules, host memory, contexts of their own. Each checks the bytes it wrote. Answers each letter of
// its input with "step N"; at the end of the input prints "done N errors E".
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <random>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr int kThreads = 4;
constexpr size_t kGranularity = size_t{2} << 20;
constexpr const char *kPtx = R"(
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 counter = 0;
.visible .entry bump()
{
    .reg .b32 %r<2>;
    atom.global.add.u32 %r1, [counter], 1;
    ret;
}
)";

std::atomic<bool> stopping{false};
std::atomic<long> steps{0};
std::atomic<long> errors{0};

void check(CUresult code, const char *what, int line) {
    if (code == CUDA_SUCCESS)
        return;
    const char *name = nullptr;
    cuGetErrorName(code, &name);
    std::fprintf(stderr, "line %d: %s: %s\n", line, what, name != nullptr ? name : "?");
    std::exit(3);
}

#define CHECK(call) check(call, #call, __LINE__)

void expect(bool condition) {
    errors += condition ? 0 : 1;
}

void fill_and_check(CUdeviceptr memory, size_t size, std::uint8_t value, CUstream stream) {
    CHECK(cuMemsetD8Async(memory, value, size, stream));
    std::vector<std::uint8_t> back(size);
    CHECK(cuMemcpyDtoHAsync(back.data(), memory, size, stream));
    CHECK(cuStreamSynchronize(stream));
    for (std::uint8_t byte : back) {
        if (byte == value)
            continue;
        expect(false);
        return;
    }
}

void device_memory(CUstream stream, std::uint8_t value) {
    CUdeviceptr small, large, ordered;
    CHECK(cuMemAlloc(&small, 3000));
    CHECK(cuMemAlloc(&large, 3 << 20));
    CHECK(cuMemAllocAsync(&ordered, 10000, stream));
    fill_and_check(small, 3000, value, stream);
    fill_and_check(large, 100000, value, stream);
    fill_and_check(ordered, 10000, value, stream);
    CHECK(cuMemFreeAsync(ordered, stream));
    CHECK(cuMemFree(large));
    CHECK(cuMemFree(small));
}

void mapped_memory(CUdevice device, CUstream stream, std::uint8_t value) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, 2 * kGranularity, 0, 0, 0));
    CHECK(cuMemCreate(&handle, kGranularity, &properties, 0));
    CHECK(cuMemMap(address, kGranularity, 0, handle, 0));
    CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CHECK(cuMemSetAccess(address, kGranularity, &access, 1));
    fill_and_check(address, 50000, value, stream);
    int fd = -1;
    CHECK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CHECK(cuMemUnmap(address, kGranularity));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(address, 2 * kGranularity));
    close(fd);
}

void graph(CUfunction bump, CUstream stream) {
    CUgraph captured;
    CUgraphExec executable;
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
    CHECK(cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
    CHECK(cuStreamEndCapture(stream, &captured));
    CHECK(cuGraphInstantiate(&executable, captured, 0));
    CHECK(cuGraphLaunch(executable, stream));
    CHECK(cuGraphExecDestroy(executable));
    CHECK(cuGraphDestroy(captured));
    CHECK(cuStreamSynchronize(stream));
}

void module_and_graph(CUstream stream) {
    CUmodule module;
    CUfunction bump;
    CUdeviceptr counter;
    size_t size;
    CHECK(cuModuleLoadData(&module, kPtx));
    CHECK(cuModuleGetFunction(&bump, module, "bump"));
    CHECK(cuModuleGetGlobal(&counter, &size, module, "counter"));
    graph(bump, stream);
    CHECK(cuLaunchKernel(bump, 3, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr));
    std::uint32_t count = 0;
    CHECK(cuMemcpyDtoHAsync(&count, counter, 4, stream));
    CHECK(cuStreamSynchronize(stream));
    expect(count == 5);
    CHECK(cuModuleUnload(module));
}

void host_memory_and_event(CUstream stream, std::uint8_t value) {
    void *host = nullptr;
    CHECK(cuMemHostAlloc(&host, 5000, 0));
    CHECK(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(host), value, 5000, stream));
    CUevent event;
    CHECK(cuEventCreate(&event, CU_EVENT_DEFAULT));
    CHECK(cuEventRecord(event, stream));
    CHECK(cuEventSynchronize(event));
    CHECK(cuEventDestroy(event));
    expect(static_cast<std::uint8_t *>(host)[4999] == value);
    CHECK(cuMemFreeHost(host));
}

void own_context(CUdevice device) {
    CUcontext context;
    CHECK(cuCtxCreate(&context, nullptr, 0, device));
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
    CUdeviceptr memory;
    CHECK(cuMemAlloc(&memory, 5000));
    fill_and_check(memory, 5000, 1, stream);
    CHECK(cuCtxDestroy(context)); // with everything in it
}

void work(CUdevice device, CUcontext context, int number) {
    CHECK(cuCtxSetCurrent(context));
    std::mt19937 random(static_cast<unsigned>(number));
    while (!stopping.load()) {
        CUstream stream;
        CHECK(cuStreamCreate(&stream, random() % 2 == 0 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING));
        auto value = static_cast<std::uint8_t>(random());
        switch (random() % 5) {
        case 0:
            device_memory(stream, value);
            break;
        case 1:
            mapped_memory(device, stream, value);
            break;
        case 2:
            module_and_graph(stream);
            break;
        case 3:
            host_memory_and_event(stream, value);
            break;
        default:
            own_context(device);
            break;
        }
        CHECK(cuStreamDestroy(stream));
        ++steps;
    }
}

} // namespace

int main() {
    CHECK(cuInit(0));
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
        threads.emplace_back(work, device, context, i);
    for (char letter; read(0, &letter, 1) == 1;) {
        std::printf("step %ld\n", steps.load());
        std::fflush(stdout);
    }
    stopping = true;
    for (std::thread &thread : threads)
        thread.join();
    std::printf("done %ld errors %ld\n", steps.load(), errors.load());
    std::fflush(stdout);
    CHECK(cuDevicePrimaryCtxRelease(device));
    return errors.load() == 0 ? 0 : 1;
}
