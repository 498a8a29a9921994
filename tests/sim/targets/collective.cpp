// A job in miniature: ranks in processes of their own that meet in a collective on their GPUs at every step.
//
//     collective PTX RANKS [graph] [pace-us N] [fill N] [visible LIST/LIST/…]
//
// The first process uses no GPU. Ranks export memory to each other (VMM descriptors over sockets), and each step's
// kernel of a rank spins until all others have written theirs. Ranks run apart: by a random pace, and up to kSync
// steps ahead of their GPU. Every kSync steps each checks all its values against what they must be; every other time
// they also meet on the CPU, over the sockets. Even ranks wait for the GPU in the driver, odd ones by asking it again
// and again, and each has a second thread that does nothing but ask. With `graph` a step is one graph launch. With
// `visible` each rank has a CUDA_VISIBLE_DEVICES of its own, and is on the first GPU of that; else rank k is on GPU k.
// With `fill` a rank gives its GPU that much more work at each step, one call each.
// A rank prints "rank K gpu UUID" whenever that is another GPU than before.
// Rank 0 prints "step N errors E"; on SIGTERM to the first process all ranks stop at the same step, it prints
// "done steps N errors E", and everybody exits with 0 if nothing was wrong.
#include "descriptors.hpp"

#include <cuda.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr uint32_t kValues = 32, kMostRanks = 4, kFirst = 8;
constexpr uint64_t kSync = 4;
constexpr size_t kSharedBytes = size_t{2} << 20;

volatile std::sig_atomic_t asked_to_end = 0;
pid_t first_rank = 0;

void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS)
        return;
    const char *name = "?";
    cuGetErrorName(result, &name);
    std::fprintf(stderr, "collective: %s: %s\n", what, name);
    _exit(3);
}

void must(bool right, const char *what) {
    if (right)
        return;
    std::fprintf(stderr, "collective: %s (errno %d)\n", what, errno);
    _exit(4);
}

void say(const std::string &line) {
    const std::string whole = line + "\n";
    must(write(STDOUT_FILENO, whole.data(), whole.size()) == static_cast<ssize_t>(whole.size()), "write");
}

void send_fd(int socket, int fd) {
    must(descriptors::send(socket, fd), "sendmsg");
}

int receive_fd(int socket) {
    const int fd = descriptors::receive(socket);
    must(fd >= 0, "recvmsg");
    return fd;
}

void transfer(int socket, char *byte, bool out) {
    for (;;) {
        const ssize_t done = out ? write(socket, byte, 1) : read(socket, byte, 1);
        if (done == 1)
            return;
        must(done < 0 && errno == EINTR, "a socket to another rank ended");
    }
}

struct Options {
    std::string ptx;
    uint32_t ranks = 2;
    bool graph = false;
    long pace_us = 500;
    unsigned long fill = 0;
    std::vector<std::string> visible;
};

struct Peers {
    uint64_t *of[kMostRanks] = {};
};

// What all ranks' values must be, step by step.
class Expected {
  public:
    explicit Expected(uint32_t ranks) : ranks_(ranks), values_(ranks * kValues) {}
    void advance() {
        ++step;
        for (uint32_t i = 0; i < kValues; ++i) {
            uint64_t sum = 0;
            for (uint32_t rank = 0; rank < ranks_; ++rank)
                sum += values_[rank * kValues + i] + step;
            for (uint32_t rank = 0; rank < ranks_; ++rank)
                values_[rank * kValues + i] = (sum * 6364136223846793005ull + rank * 7 + i) * 3 + rank + 1;
        }
    }
    uint64_t errors(uint32_t rank, const uint64_t *state) const {
        uint64_t wrong = state[0] != step ? 1 : 0;
        for (uint32_t i = 0; i < kValues; ++i)
            wrong += state[kFirst + i] != values_[rank * kValues + i] ? 1 : 0;
        return wrong;
    }
    uint64_t step = 0;

  private:
    const uint32_t ranks_;
    std::vector<uint64_t> values_;
};

class Rank {
  public:
    Rank(const Options &options, uint32_t rank, std::vector<int> to, std::vector<int> from)
        : options_(options), rank_(rank), to_(std::move(to)), from_(std::move(from)), random_(rank + 1) {
        int devices = 0;
        CUcontext context = nullptr;
        if (!options.visible.empty())
            must(setenv("CUDA_VISIBLE_DEVICES", options.visible[rank].c_str(), 1) == 0, "setenv");
        check(cuInit(0), "cuInit");
        check(cuDeviceGetCount(&devices), "cuDeviceGetCount");
        device_ = options.visible.empty() ? static_cast<int>(rank) % devices : 0;
        check(cuDevicePrimaryCtxRetain(&context, device_), "cuDevicePrimaryCtxRetain");
        check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
        context_ = context;
        std::ifstream file(options.ptx);
        const std::string ptx((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        CUmodule module = nullptr;
        check(cuModuleLoadData(&module, ptx.c_str()), "cuModuleLoadData");
        check(cuModuleGetFunction(&reduce_, module, "all_reduce"), "all_reduce");
        check(cuModuleGetFunction(&local_, module, "local"), "local");
        check(cuMemAlloc(&state_, 4096), "cuMemAlloc");
        check(cuMemsetD8(state_, 0, 4096), "cuMemsetD8");
        check(cuStreamCreate(&together_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
        check(cuStreamCreate(&alone_, rank % 2 == 0 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT), "cuStreamCreate");
        check(cuEventCreate(&reduced_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        check(cuEventCreate(&worked_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        check(cuEventRecord(worked_, alone_), "cuEventRecord");
        share();
        if (options.graph)
            record();
    }

    int run() {
        std::thread asking([this] {
            check(cuCtxSetCurrent(context_), "cuCtxSetCurrent");
            while (!ended_.load()) {
                const CUresult result = cuEventQuery(worked_);
                check(result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result, "cuEventQuery");
                pause_us(1000);
            }
        });
        Expected expected(options_.ranks);
        uint64_t errors = 0, stops = 0;
        for (uint64_t round = 0; stops == 0; ++round) {
            if (rank_ == 0 && asked_to_end)
                check(cuMemsetD32Async(state_ + 8, 1, 1, together_), "cuMemsetD32Async");
            for (uint64_t k = 0; k < kSync; ++k) {
                pause_us(static_cast<long>(random_() % static_cast<unsigned long>(options_.pace_us + 1)));
                step();
                expected.advance();
            }
            uint64_t state[kFirst + kValues] = {};
            wait_for_gpu();
            check(cuMemcpyDtoH(state, state_, sizeof(state)), "cuMemcpyDtoH");
            errors += expected.errors(rank_, state);
            stops = state[2];
            say_gpu();
            if (errors != 0)
                say("rank " + std::to_string(rank_) + " errors " + std::to_string(errors));
            if (rank_ == 0)
                say("step " + std::to_string(expected.step) + " errors " + std::to_string(errors));
            if (round % 2 == 1)
                meet();
        }
        ended_ = true;
        asking.join();
        meet(); // nobody's memory goes while another one may still spin on it
        if (rank_ == 0)
            say("done steps " + std::to_string(expected.step) + " errors " + std::to_string(errors));
        return errors == 0 ? 0 : 1;
    }

  private:
    static void pause_us(long microseconds) {
        timespec left{microseconds / 1000000, (microseconds % 1000000) * 1000};
        while (nanosleep(&left, &left) != 0)
            ;
    }

    // Which GPU its device is, whenever that has changed.
    void say_gpu() {
        CUuuid uuid{};
        check(cuDeviceGetUuid(&uuid, device_), "cuDeviceGetUuid");
        std::string text;
        for (const char byte : uuid.bytes) {
            char digits[3];
            std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned>(byte) & 0xff);
            text += digits;
        }
        if (text != gpu_)
            say("rank " + std::to_string(rank_) + " gpu " + text);
        gpu_ = text;
    }

    CUdeviceptr map(CUmemGenericAllocationHandle handle) const {
        CUdeviceptr address = 0;
        check(cuMemAddressReserve(&address, kSharedBytes, 0, 0, 0), "cuMemAddressReserve");
        check(cuMemMap(address, kSharedBytes, 0, handle, 0), "cuMemMap");
        CUmemAccessDesc access{};
        access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        check(cuMemSetAccess(address, kSharedBytes, &access, 1), "cuMemSetAccess");
        return address;
    }

    void share() {
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
        CUmemGenericAllocationHandle mine = 0;
        check(cuMemCreate(&mine, kSharedBytes, &properties, 0), "cuMemCreate");
        const CUdeviceptr own = map(mine);
        check(cuMemsetD8(own, 0, kSharedBytes), "cuMemsetD8");
        peers_.of[rank_] = reinterpret_cast<uint64_t *>(own);
        for (uint32_t other = 0; other < options_.ranks; ++other) {
            if (other == rank_)
                continue;
            int fd = -1;
            check(cuMemExportToShareableHandle(&fd, mine, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                  "cuMemExportToShareableHandle");
            send_fd(to_[other], fd);
            close(fd);
        }
        for (uint32_t other = 0; other < options_.ranks; ++other) {
            if (other == rank_)
                continue;
            const int fd = receive_fd(from_[other]);
            CUmemGenericAllocationHandle theirs = 0;
            check(cuMemImportFromShareableHandle(&theirs, reinterpret_cast<void *>(static_cast<intptr_t>(fd)),
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                  "cuMemImportFromShareableHandle");
            close(fd);
            peers_.of[other] = reinterpret_cast<uint64_t *>(map(theirs));
            check(cuMemRelease(theirs), "cuMemRelease"); // the mapping keeps it, as NCCL does it
        }
    }

    void launch() {
        uint32_t rank = rank_, ranks = options_.ranks;
        uint64_t *state = reinterpret_cast<uint64_t *>(state_);
        void *both[] = {&peers_, &state, &rank, &ranks};
        check(cuLaunchKernel(reduce_, 1, 1, 1, kValues, 1, 1, 0, together_, both, nullptr), "all_reduce");
        check(cuEventRecord(reduced_, together_), "cuEventRecord");
        check(cuStreamWaitEvent(alone_, reduced_, 0), "cuStreamWaitEvent");
        void *one[] = {&state, &rank};
        check(cuLaunchKernel(local_, 1, 1, 1, kValues, 1, 1, 0, alone_, one, nullptr), "local");
        check(cuEventRecord(worked_, alone_), "cuEventRecord");
        check(cuStreamWaitEvent(together_, worked_, 0), "cuStreamWaitEvent");
    }

    void record() {
        CUgraph graph = nullptr;
        check(cuStreamBeginCapture(together_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
        launch();
        check(cuStreamEndCapture(together_, &graph), "cuStreamEndCapture");
        check(cuGraphInstantiate(&graph_, graph, 0), "cuGraphInstantiate");
        check(cuEventRecord(worked_, alone_), "cuEventRecord"); // one that is no part of a capture can be asked
    }

    void step() {
        for (unsigned long count = 0; count < options_.fill; ++count)
            check(cuMemsetD32Async(state_ + 2048, static_cast<unsigned>(count), 16, together_), "cuMemsetD32Async");
        if (graph_ != nullptr)
            check(cuGraphLaunch(graph_, together_), "cuGraphLaunch");
        else
            launch();
    }

    void wait_for_gpu() {
        if (rank_ % 2 == 0)
            return check(cuStreamSynchronize(together_), "cuStreamSynchronize");
        CUresult result = CUDA_SUCCESS;
        while ((result = cuStreamQuery(together_)) == CUDA_ERROR_NOT_READY)
            pause_us(200);
        check(result, "cuStreamQuery");
    }

    // Nobody goes on before everybody has come.
    void meet() {
        char byte = 'm';
        for (uint32_t other = 0; other < options_.ranks; ++other)
            if (other != rank_)
                transfer(to_[other], &byte, true);
        for (uint32_t other = 0; other < options_.ranks; ++other)
            if (other != rank_)
                transfer(from_[other], &byte, false);
    }

    const Options options_;
    const uint32_t rank_;
    const std::vector<int> to_, from_;
    std::minstd_rand random_;
    int device_ = 0;
    std::string gpu_;
    CUcontext context_ = nullptr;
    CUfunction reduce_ = nullptr, local_ = nullptr;
    CUdeviceptr state_ = 0;
    Peers peers_;
    CUstream together_ = nullptr, alone_ = nullptr;
    CUevent reduced_ = nullptr, worked_ = nullptr;
    CUgraphExec graph_ = nullptr;
    std::atomic<bool> ended_{false};
};

Options parse(int argc, char **argv) {
    Options options;
    must(argc >= 3, "collective PTX RANKS [graph] [pace-us N]");
    options.ptx = argv[1];
    options.ranks = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
    must(options.ranks >= 1 && options.ranks <= kMostRanks, "one to four ranks");
    for (int index = 3; index < argc; ++index) {
        if (std::string(argv[index]) == "graph")
            options.graph = true;
        else if (std::string(argv[index]) == "pace-us" && index + 1 < argc)
            options.pace_us = std::strtol(argv[++index], nullptr, 10);
        else if (std::string(argv[index]) == "fill" && index + 1 < argc)
            options.fill = std::strtoul(argv[++index], nullptr, 10);
        else if (std::string(argv[index]) == "visible" && index + 1 < argc) {
            std::istringstream lists(argv[++index]);
            for (std::string list; std::getline(lists, list, '/');)
                options.visible.push_back(list);
            must(options.visible.size() == options.ranks, "a list of visible devices for each rank");
        }
    }
    return options;
}

} // namespace

int main(int argc, char **argv) {
    const Options options = parse(argc, argv);
    std::vector<std::vector<std::pair<int, int>>> sockets(options.ranks); // i writes to the first end, j reads
    for (auto &row : sockets)
        for (uint32_t j = 0; j < options.ranks; ++j) {
            int ends[2];
            must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
            row.emplace_back(ends[0], ends[1]);
        }
    std::vector<pid_t> pids;
    std::signal(SIGTERM, [](int) { asked_to_end = 1; });
    for (uint32_t rank = 0; rank < options.ranks; ++rank) {
        const pid_t pid = fork();
        must(pid >= 0, "fork");
        if (pid == 0) {
            std::vector<int> to, from;
            for (uint32_t other = 0; other < options.ranks; ++other) {
                to.push_back(sockets[rank][other].first);
                from.push_back(sockets[other][rank].second);
            }
            for (uint32_t i = 0; i < options.ranks; ++i)
                for (uint32_t j = 0; j < options.ranks; ++j) {
                    if (i != rank)
                        close(sockets[i][j].first);
                    if (j != rank)
                        close(sockets[i][j].second);
                }
            _exit(Rank(options, rank, to, from).run());
        }
        pids.push_back(pid);
    }
    first_rank = pids[0];
    std::signal(SIGTERM, [](int) { kill(first_rank, SIGTERM); });
    for (auto &row : sockets)
        for (auto &pair : row) {
            close(pair.first);
            close(pair.second);
        }
    int worst = 0;
    for (const pid_t pid : pids) {
        int status = 0;
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        worst = status != 0 ? 5 : worst;
    }
    return worst;
}
