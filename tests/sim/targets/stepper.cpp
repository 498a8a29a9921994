// A target for the tests: buffers whose every element is known at every step, checked on the GPU as it goes.
//
//     stepper --ptx FILE [--kib N] [--buffers N] [--idle-kib N] [--threads N] [--tiny N] [--pace-us N] [--steps N]
//             [--child] [--device N] [--spread] [--hold FILE] [--linger FILE]
//
// One line a step goes to standard output: "step N errors E". On SIGTERM (or after --steps) it checks everything once
// more, the idle buffer and the module's own counter included, prints "done steps N errors E" and exits 0 if E is 0.
// --child forks a process without a GPU first, which prints "child N" lines and ends with its parent's pipe.
// --spread: thread k works on device N + 1 + k instead of N, so that one process uses several.
// --hold: a kernel-side busy host callback holds the stream while FILE exists (work that does not come to rest).
// --linger: at its end it prints "lingering" and stays in an exit handler while FILE exists.
// Single-threaded output by write(2) of whole lines; it must never print what it has not checked.
#include <cuda.h>

#include <atomic>
#include <cinttypes>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace {

volatile std::sig_atomic_t ending = 0;

void check(CUresult result, const char *what) {
    if (result != CUDA_SUCCESS) {
        const char *name = "?";
        cuGetErrorName(result, &name);
        std::fprintf(stderr, "stepper: %s: %s\n", what, name);
        std::exit(3);
    }
}

void say(const std::string &line) {
    const std::string whole = line + "\n";
    if (write(STDOUT_FILENO, whole.data(), whole.size()) != static_cast<ssize_t>(whole.size())) {
        std::exit(4);
    }
}

void pause_us(long microseconds) {
    timespec left{microseconds / 1000000, (microseconds % 1000000) * 1000};
    while (nanosleep(&left, &left) != 0) {
    }
}

struct Options {
    std::string ptx;
    std::string hold;
    std::string linger;
    uint32_t kib = 64;
    uint32_t buffers = 2;
    uint32_t idle_kib = 0;
    uint32_t threads = 0;
    uint32_t tiny = 0;
    uint32_t device = 0;
    long pace_us = 10000;
    uint64_t steps = 0; // 0: until SIGTERM
    bool child = false;
    bool spread = false;
};

Options parse(int argc, char **argv) {
    Options options;
    for (int index = 1; index < argc; ++index) {
        const std::string name = argv[index];
        if (name == "--child" || name == "--spread") {
            (name == "--child" ? options.child : options.spread) = true;
            continue;
        }
        if (index + 1 >= argc) {
            std::fprintf(stderr, "stepper: %s needs a value\n", name.c_str());
            std::exit(2);
        }
        const char *value = argv[++index];
        const unsigned long number = std::strtoul(value, nullptr, 10);
        if (name == "--ptx")
            options.ptx = value;
        else if (name == "--hold")
            options.hold = value;
        else if (name == "--linger")
            options.linger = value;
        else if (name == "--kib")
            options.kib = static_cast<uint32_t>(number);
        else if (name == "--buffers")
            options.buffers = static_cast<uint32_t>(number);
        else if (name == "--idle-kib")
            options.idle_kib = static_cast<uint32_t>(number);
        else if (name == "--threads")
            options.threads = static_cast<uint32_t>(number);
        else if (name == "--tiny")
            options.tiny = static_cast<uint32_t>(number);
        else if (name == "--device")
            options.device = static_cast<uint32_t>(number);
        else if (name == "--pace-us")
            options.pace_us = static_cast<long>(number);
        else if (name == "--steps")
            options.steps = number;
        else {
            std::fprintf(stderr, "stepper: unknown option %s\n", name.c_str());
            std::exit(2);
        }
    }
    return options;
}

// The kernels in the current context.
struct Kernels {
    CUmodule module = nullptr;
    CUfunction fill = nullptr, step = nullptr, check = nullptr, tiny = nullptr;

    explicit Kernels(const std::string &text) {
        ::check(cuModuleLoadData(&module, text.c_str()), "cuModuleLoadData");
        ::check(cuModuleGetFunction(&fill, module, "fill"), "cuModuleGetFunction");
        ::check(cuModuleGetFunction(&step, module, "step"), "cuModuleGetFunction");
        ::check(cuModuleGetFunction(&check, module, "check"), "cuModuleGetFunction");
        ::check(cuModuleGetFunction(&tiny, module, "tiny"), "cuModuleGetFunction");
    }
};

CUcontext use_device(uint32_t ordinal) {
    CUdevice device = 0;
    CUcontext context = nullptr;
    check(cuDeviceGet(&device, static_cast<int>(ordinal)), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    return context;
}

// A buffer that is stepped, with its own error counter.
class Stepped {
  public:
    Stepped(const Kernels &kernels, CUstream stream, uint32_t bytes, uint32_t seed)
        : kernels_(kernels), stream_(stream), count_(bytes / 4), seed_(seed) {
        ::check(cuMemAlloc(&buffer_, bytes), "cuMemAlloc");
        ::check(cuMemAlloc(&errors_, 4), "cuMemAlloc");
        ::check(cuMemsetD32(errors_, 0, 1), "cuMemsetD32");
        void *arguments[] = {&buffer_, &count_, &seed_};
        launch(kernels_.fill, arguments);
    }

    void step() {
        void *arguments[] = {&buffer_, &count_, &seed_, &steps_, &errors_};
        launch(kernels_.step, arguments);
        ++steps_;
    }

    void verify() {
        void *arguments[] = {&buffer_, &count_, &seed_, &steps_, &errors_};
        launch(kernels_.check, arguments);
    }

    uint32_t errors() {
        uint32_t found = 0;
        ::check(cuStreamSynchronize(stream_), "cuStreamSynchronize");
        ::check(cuMemcpyDtoH(&found, errors_, 4), "cuMemcpyDtoH");
        return found;
    }

  private:
    void launch(CUfunction function, void **arguments) {
        ::check(cuLaunchKernel(function, 4, 1, 1, 64, 1, 1, 0, stream_, arguments, nullptr), "cuLaunchKernel");
    }

    const Kernels &kernels_;
    CUstream stream_;
    CUdeviceptr buffer_ = 0, errors_ = 0;
    uint32_t count_, seed_, steps_ = 0;
};

std::string read_file(const std::string &path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

[[noreturn]] void be_the_child(int parent) {
    for (uint64_t count = 1;; ++count) {
        char byte = 0;
        say("child " + std::to_string(count));
        pause_us(20000);
        // The parent writes one byte a step; the end of the pipe is the end of the parent.
        if (read(parent, &byte, 1) == 0) {
            _exit(0);
        }
    }
}

int start_child() {
    int ends[2];
    if (pipe(ends) != 0) {
        std::exit(4);
    }
    const pid_t pid = fork();
    if (pid == 0) {
        close(ends[1]);
        be_the_child(ends[0]);
    }
    close(ends[0]);
    return ends[1];
}

void CUDA_CB hold_while_file_exists(void *path) {
    struct stat status;
    while (stat(static_cast<const char *>(path), &status) == 0) {
        pause_us(2000);
    }
}

std::string lingering_file;

void linger() {
    say("lingering");
    hold_while_file_exists(lingering_file.data());
}

} // namespace

int main(int argc, char **argv) {
    const Options options = parse(argc, argv);
    std::signal(SIGTERM, [](int) { ending = 1; });
    std::signal(SIGPIPE, SIG_IGN);
    const int child = options.child ? start_child() : -1;
    if (!options.linger.empty()) {
        lingering_file = options.linger;
        std::atexit(linger); // before the driver is loaded: it runs after all handlers that come with it
    }

    check(cuInit(0), "cuInit");
    use_device(options.device);
    const std::string text = read_file(options.ptx);
    const Kernels kernels(text);
    CUstream stream = nullptr;
    check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");

    std::vector<Stepped> stepped;
    stepped.reserve(options.buffers);
    for (uint32_t index = 0; index < options.buffers; ++index) {
        stepped.emplace_back(kernels, stream, options.kib * 1024, index + 1);
    }
    std::vector<Stepped> idle;
    if (options.idle_kib != 0) {
        idle.emplace_back(kernels, stream, options.idle_kib * 1024, 9001);
    }
    CUdeviceptr tiny_counter = 0;
    check(cuMemAlloc(&tiny_counter, 4), "cuMemAlloc");
    check(cuMemsetD32(tiny_counter, 0, 1), "cuMemsetD32");

    std::atomic<bool> finish{false};
    std::atomic<uint64_t> thread_errors{0};
    std::atomic<uint64_t> thread_steps{0};
    std::vector<std::thread> threads;
    for (uint32_t number = 0; number < options.threads; ++number) {
        threads.emplace_back([&, number] {
            use_device(options.spread ? options.device + 1 + number : options.device);
            const Kernels elsewhere(text);
            CUstream own = nullptr;
            check(cuStreamCreate(&own, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
            Stepped buffer(options.spread ? elsewhere : kernels, own, 4096, 100 + number);
            while (!finish.load()) {
                buffer.step();
                // The counter that is checked at the end is that of the first device's module.
                thread_steps.fetch_add(options.spread ? 0 : 1);
                pause_us(1000);
            }
            buffer.verify();
            thread_errors.fetch_add(buffer.errors());
        });
    }

    uint64_t steps = 0;
    uint64_t tiny_launches = 0;
    uint64_t errors = 0;
    while (ending == 0 && (options.steps == 0 || steps < options.steps)) {
        for (Stepped &buffer : stepped) {
            buffer.step();
        }
        for (uint32_t count = 0; count < options.tiny; ++count) {
            void *arguments[] = {&tiny_counter};
            check(cuLaunchKernel(kernels.tiny, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr), "cuLaunchKernel");
            ++tiny_launches;
        }
        if (!options.hold.empty()) {
            check(cuLaunchHostFunc(stream, hold_while_file_exists, const_cast<char *>(options.hold.c_str())),
                  "cuLaunchHostFunc");
        }
        ++steps;
        errors = 0;
        for (Stepped &buffer : stepped) {
            errors += buffer.errors();
        }
        say("step " + std::to_string(steps) + " errors " + std::to_string(errors));
        if (child >= 0 && write(child, "x", 1) != 1) {
            say("the child is gone");
            return 5;
        }
        pause_us(options.pace_us);
    }

    finish.store(true);
    for (std::thread &thread : threads) {
        thread.join();
    }
    errors = thread_errors.load();
    for (Stepped &buffer : stepped) {
        buffer.verify();
        errors += buffer.errors();
    }
    for (Stepped &buffer : idle) {
        buffer.verify();
        errors += buffer.errors();
    }
    uint32_t counted = 0;
    check(cuMemcpyDtoH(&counted, tiny_counter, 4), "cuMemcpyDtoH");
    errors += counted == static_cast<uint32_t>(tiny_launches) ? 0 : 1;
    CUdeviceptr global = 0;
    size_t bytes = 0;
    unsigned long long in_module = 0;
    check(cuModuleGetGlobal(&global, &bytes, kernels.module, "stepper_steps"), "cuModuleGetGlobal");
    check(cuMemcpyDtoH(&in_module, global, sizeof in_module), "cuMemcpyDtoH");
    errors += in_module == steps * options.buffers + thread_steps.load() ? 0 : 1;
    if (child >= 0) {
        close(child);
        int status = 0;
        errors += waitpid(-1, &status, 0) > 0 && status == 0 ? 0 : 1;
    }
    say("done steps " + std::to_string(steps) + " errors " + std::to_string(errors));
    return errors == 0 ? 0 : 1;
}
