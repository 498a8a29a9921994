// A target that is never idle: threads with two streams each launch kernels, record events, copy and replay a graph,
// and check every result. Answers each letter of its input with "step N"; at the end of the input it finishes the step
// and prints "done N errors E". With an argument it prints "step N" by itself and ends when that file exists: so it has
// no pipe that would tie it to its parent when CRIU saves it.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr int kThreads = 3;
constexpr unsigned kCount = 2048;
constexpr const char *kPtx = R"(
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 launches = 0;
.visible .entry add(.param .u64 data, .param .u32 amount)
{
    .reg .pred %p<2>;
    .reg .b32 %r<7>;
    .reg .b64 %rd<4>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    ld.param.u64 %rd1, [data];
    mul.wide.u32 %rd2, %r4, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.param.u32 %r5, [amount];
    ld.global.u32 %r6, [%rd3];
    add.u32 %r6, %r6, %r5;
    st.global.u32 [%rd3], %r6;
    setp.ne.u32 %p1, %r4, 0;
    @%p1 bra DONE;
    atom.global.add.u32 %r6, [launches], 1;
DONE:
    ret;
}
)";

std::atomic<bool> stopping{false};
std::atomic<long> steps{0};
std::atomic<long> errors{0};

void check(CUresult code, const char *what) {
    if (code == CUDA_SUCCESS)
        return;
    const char *name = nullptr;
    cuGetErrorName(code, &name);
    std::fprintf(stderr, "%s: %s\n", what, name != nullptr ? name : "?");
    std::exit(3);
}

#define CHECK(call) check(call, #call)

void work(CUcontext context, CUfunction add, int number) {
    CHECK(cuCtxSetCurrent(context));
    CUstream streams[2];
    CHECK(cuStreamCreate(&streams[0], CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&streams[1], CU_STREAM_DEFAULT));
    CUevent done;
    CHECK(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
    CUdeviceptr data;
    CHECK(cuMemAlloc(&data, kCount * 4));
    CHECK(cuMemsetD32(data, 0, kCount));
    std::uint32_t *host = nullptr;
    CHECK(cuMemAllocHost(reinterpret_cast<void **>(&host), kCount * 4));
    std::uint32_t amount = static_cast<std::uint32_t>(number + 1);
    void *parameters[] = {&data, &amount};

    CUgraph graph;
    CUgraphExec replay;
    CHECK(cuStreamBeginCapture(streams[0], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(cuLaunchKernel(add, kCount / 128, 1, 1, 128, 1, 1, 0, streams[0], parameters, nullptr));
    CHECK(cuLaunchKernel(add, kCount / 128, 1, 1, 128, 1, 1, 0, streams[0], parameters, nullptr));
    CHECK(cuStreamEndCapture(streams[0], &graph));
    CHECK(cuGraphInstantiate(&replay, graph, 0));

    std::uint32_t expected = 0;
    while (!stopping.load()) {
        CHECK(cuGraphLaunch(replay, streams[0]));
        CHECK(cuEventRecord(done, streams[0]));
        CHECK(cuStreamWaitEvent(streams[1], done, 0));
        CHECK(cuLaunchKernel(add, kCount / 128, 1, 1, 128, 1, 1, 0, streams[1], parameters, nullptr));
        CHECK(cuMemcpyDtoHAsync(host, data, kCount * 4, streams[1]));
        CUdeviceptr passing;
        CHECK(cuMemAllocAsync(&passing, 4096, streams[1]));
        CHECK(cuMemFreeAsync(passing, streams[1]));
        CHECK(cuStreamSynchronize(streams[1]));
        expected += 3 * amount;
        for (unsigned i = 0; i < kCount; ++i)
            errors += host[i] != expected;
        ++steps;
    }
}

} // namespace

int main(int argc, char **argv) {
    CHECK(cuInit(0));
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CUmodule module;
    CHECK(cuModuleLoadData(&module, kPtx));
    CUfunction add;
    CHECK(cuModuleGetFunction(&add, module, "add"));
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
        threads.emplace_back(work, context, add, i);
    auto report = [] {
        std::printf("step %ld\n", steps.load());
        std::fflush(stdout);
    };
    if (argc > 1) {
        for (; access(argv[1], F_OK) != 0; usleep(20000))
            report();
    } else {
        for (char letter; read(0, &letter, 1) == 1;)
            report();
    }
    stopping = true;
    for (std::thread &thread : threads)
        thread.join();
    CUdeviceptr launches;
    size_t size;
    CHECK(cuModuleGetGlobal(&launches, &size, module, "launches"));
    std::uint32_t count = 0;
    CHECK(cuMemcpyDtoH(&count, launches, 4));
    errors += count != static_cast<std::uint32_t>(3 * steps.load());
    std::printf("done %ld errors %ld\n", steps.load(), errors.load());
    std::fflush(stdout);
    return errors.load() == 0 ? 0 : 1;
}
