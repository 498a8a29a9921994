// A process to be quiesced and handed over: it does what the lines of its input say and answers each with one line.
// Buffers are filled with a pattern of their number, so that every byte of every buffer can be checked.
//
//   alloc COUNT SIZE     buffers of SIZE bytes        check              "ok", or what is wrong
//   fill                 writes all of them again
//   loop THREADS         threads that call for ever   calls              how many calls they have made
//   block | unblock      a host function in a stream that waits
//   spin                 a kernel that never ends     stop_spin          ends it
//   capture | end        a stream capture             fork | exec …
#include <cuda.h>

#include <atomic>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

// Says in the word after the one at its argument that it runs, and loops until that one is not zero.
constexpr char kSpinPtx[] = R"(
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 flag)
{
  .reg .u64 %rd<3>; .reg .u32 %r<3>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [flag];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r2, 1;
  st.volatile.global.u32 [%rd2+4], %r2;
again:
  ld.volatile.global.u32 %r1, [%rd2];
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra again;
  ret;
}
.visible .entry nothing(.param .u64 flag)
{
  ret;
}
)";

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        const CUresult check_result = (call);                                                                          \
        if (check_result != CUDA_SUCCESS) {                                                                            \
            const char *check_name = "?";                                                                              \
            cuGetErrorName(check_result, &check_name);                                                                 \
            std::printf("%s: %s\n", #call, check_name);                                                                \
            std::fflush(stdout);                                                                                       \
            std::_Exit(3);                                                                                             \
        }                                                                                                              \
    } while (0)

struct Buffer {
    CUdeviceptr address;
    size_t size_bytes;
    uint32_t seed;
};

CUcontext context;
CUstream stream, capturing;
CUfunction spin, nothing;
CUdeviceptr flag;
std::vector<Buffer> buffers;
std::vector<std::thread> loops;
std::atomic<bool> stop{false};
std::atomic<uint64_t> calls{0};
std::mutex mutex;
std::condition_variable unblocked;
bool blocked = false;
std::atomic<uint32_t> next_seed{1};

std::vector<uint32_t> pattern(const Buffer &buffer) {
    std::vector<uint32_t> words(buffer.size_bytes / 4);
    uint32_t value = buffer.seed * 2654435761u;
    for (uint32_t &word : words)
        word = value = value * 1664525u + 1013904223u; // Numerical Recipes' generator
    return words;
}

Buffer make(size_t size_bytes) {
    Buffer buffer{0, size_bytes / 4 * 4, next_seed++};
    CHECK(cuMemAlloc(&buffer.address, buffer.size_bytes));
    CHECK(cuMemcpyHtoD(buffer.address, pattern(buffer).data(), buffer.size_bytes));
    return buffer;
}

std::string wrong(const Buffer &buffer) {
    std::vector<uint32_t> found(buffer.size_bytes / 4);
    CHECK(cuMemcpyDtoH(found.data(), buffer.address, buffer.size_bytes));
    const std::vector<uint32_t> expected = pattern(buffer);
    for (size_t i = 0; i < found.size(); ++i)
        if (found[i] != expected[i])
            return "buffer " + std::to_string(buffer.seed) + " is wrong at word " + std::to_string(i);
    return "";
}

// Allocates, fills, checks and frees for ever; ends the process when a byte is wrong.
void loop(unsigned number) {
    CHECK(cuCtxSetCurrent(context));
    CUstream own;
    CHECK(cuStreamCreate(&own, number % 2 == 0 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
    const Buffer kept = make(64 << 10);
    while (!stop) {
        const Buffer buffer = make((size_t{1} << (12 + calls % 10)) + 64);
        void *arguments[] = {&flag};
        for (int i = 0; i < 4; ++i)
            CHECK(cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, own, arguments, nullptr));
        CHECK(cuStreamSynchronize(own));
        for (const Buffer &one : {kept, buffer})
            if (const std::string what = wrong(one); !what.empty()) {
                std::printf("%s\n", what.c_str());
                std::fflush(stdout);
                std::_Exit(4);
            }
        CHECK(cuMemFree(buffer.address));
        calls += 12;
    }
    CHECK(cuMemFree(kept.address));
    CHECK(cuStreamDestroy(own));
}

void wait_for_unblock(void *) {
    CUcontext current;
    cuCtxGetCurrent(&current); // a host function should not, but some do: it must not be stopped at a closed gate
    std::unique_lock lock(mutex);
    unblocked.wait(lock, [] { return !blocked; });
}

bool asleep(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string text;
    std::getline(file, text);
    const size_t end = text.rfind(')');
    return end != std::string::npos && text.compare(end + 2, 1, "S") == 0;
}

std::string in_child() {
    const pid_t child = fork();
    if (child == 0) {
        CUdeviceptr address = 0;
        const CUresult result = cuMemAlloc(&address, 100); // must return, and CUDA does not work in a forked child
        std::_Exit(result == CUDA_SUCCESS ? 9 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return "child " + std::to_string(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
}

std::string obey(const std::string &verb, std::istringstream &in) {
    if (verb == "alloc") {
        size_t count = 0, size = 0;
        in >> count >> size;
        for (size_t i = 0; i < count; ++i)
            buffers.push_back(make(size));
        return "allocated " + std::to_string(buffers.size());
    }
    if (verb == "free") {
        size_t count = 0;
        in >> count;
        for (; count > 0 && !buffers.empty(); --count) {
            CHECK(cuMemFree(buffers.back().address));
            buffers.pop_back();
        }
        return "allocated " + std::to_string(buffers.size());
    }
    if (verb == "fill") {
        for (const Buffer &buffer : buffers)
            CHECK(cuMemcpyHtoD(buffer.address, pattern(buffer).data(), buffer.size_bytes));
        return "filled";
    }
    if (verb == "check") {
        for (const Buffer &buffer : buffers)
            if (const std::string what = wrong(buffer); !what.empty())
                return what;
        return "ok";
    }
    if (verb == "addresses") {
        std::string text;
        for (const Buffer &buffer : buffers)
            text += std::to_string(buffer.address) + " ";
        return text;
    }
    if (verb == "loop") {
        unsigned threads = 0;
        in >> threads;
        for (unsigned i = 0; i < threads; ++i)
            loops.emplace_back(loop, i);
        return "looping";
    }
    if (verb == "end_loop") {
        stop = true;
        for (std::thread &thread : loops)
            thread.join();
        loops.clear();
        stop = false;
        return "calls " + std::to_string(calls);
    }
    if (verb == "calls") // answered without a driver call
        return std::to_string(calls);
    if (verb == "block") {
        blocked = true;
        CHECK(cuLaunchHostFunc(stream, wait_for_unblock, nullptr));
        return "blocked";
    }
    if (verb == "unblock") {
        {
            std::lock_guard lock(mutex);
            blocked = false;
        }
        unblocked.notify_all();
        return "unblocked";
    }
    if (verb == "spin") {
        CHECK(cuMemsetD32(flag, 0, 2));
        void *arguments[] = {&flag};
        CHECK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
        // Who waits for a stream may run its work: from here on that is the driver's thread.
        for (uint32_t runs = 0; runs == 0;) {
            CHECK(cuMemcpyDtoHAsync(&runs, flag + 4, sizeof runs, capturing));
            CHECK(cuStreamSynchronize(capturing));
        }
        return "spinning";
    }
    if (verb == "spin_then_call") { // a host function that calls the driver, behind a copy that takes a moment
        static std::vector<char> scratch(8 << 20);
        static CUdeviceptr space = 0;
        if (space == 0)
            CHECK(cuMemAlloc(&space, scratch.size()));
        CHECK(cuMemcpyHtoDAsync(space, scratch.data(), scratch.size(), stream));
        CHECK(cuLaunchHostFunc(stream, wait_for_unblock, nullptr));
        return "queued";
    }
    if (verb == "synchronize_in_thread") {
        std::atomic<pid_t> waiter{0};
        loops.emplace_back([&waiter] {
            pthread_setname_np(pthread_self(), "waiter");
            CHECK(cuCtxSetCurrent(context));
            waiter = gettid();
            CHECK(cuStreamSynchronize(stream));
        });
        while (waiter == 0 || !asleep(waiter))
            std::this_thread::yield();
        return "waiting";
    }
    if (verb == "stop_spin") {
        CHECK(cuMemsetD32Async(flag, 1, 1, capturing));
        CHECK(cuStreamSynchronize(stream));
        return "stopped";
    }
    if (verb == "capture") {
        CHECK(cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
        return "capturing";
    }
    if (verb == "free_in_capture") {
        CHECK(cuMemFree(buffers.back().address));
        buffers.pop_back();
        return "freed";
    }
    if (verb == "end") {
        CUgraph graph;
        CHECK(cuMemsetD32Async(flag, 1, 1, capturing));
        CHECK(cuStreamEndCapture(capturing, &graph));
        CHECK(cuGraphDestroy(graph));
        return "captured";
    }
    if (verb == "reset") {
        buffers.clear();
        CHECK(cuDevicePrimaryCtxReset(0));
        return "reset";
    }
    if (verb == "fork")
        return in_child();
    if (verb == "fork_descriptors") { // how many descriptors above those of an ordinary program a child has
        const pid_t child = fork();
        if (child == 0) {
            int high = 0;
            for (int fd = 128; fd < 8192; ++fd)
                high += fcntl(fd, F_GETFD) >= 0;
            std::_Exit(high);
        }
        int status = 0;
        waitpid(child, &status, 0);
        return "child " + std::to_string(WEXITSTATUS(status));
    }
    if (verb == "exec") {
        std::string command;
        std::getline(in, command);
        return "exec " + std::to_string(std::system(command.c_str()));
    }
    if (verb == "closefrom") { // what a daemonising library does
        int first = 3;
        in >> first;
        for (int fd = first; fd < 8192; ++fd)
            close(fd);
        return "closed";
    }
    return "unknown command " + verb;
}

} // namespace

int main() {
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&capturing, CU_STREAM_NON_BLOCKING));
    CUmodule module;
    CHECK(cuModuleLoadData(&module, kSpinPtx));
    CHECK(cuModuleGetFunction(&spin, module, "spin"));
    CHECK(cuModuleGetFunction(&nothing, module, "nothing"));
    CHECK(cuMemAlloc(&flag, 8));
    std::printf("ready %d\n", getpid());
    std::fflush(stdout);
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream in(line);
        std::string verb;
        in >> verb;
        std::printf("%s\n", obey(verb, in).c_str());
        std::fflush(stdout);
    }
    stop = true;
    for (std::thread &thread : loops)
        thread.join();
    return 0;
}
