// A tree of processes that share GPU memory as they are told.
//
//     sharer ORDERS WORKERS
//
// The first process uses no GPU: it takes orders (orders.hpp), hands each to the worker that its first word names, and
// says that one's answer. Workers are connected by sockets, over which the descriptors of exported memory go. A worker
// knows its allocations by names of the test's choice:
//
//     K make NAME MIB [host]     cuMemCreate, exportable
//     K send NAME TO             export; the descriptor to TO
//     K keep NAME TO             the same, not closed here
//     K take NAME FROM           import what FROM has sent
//     K map NAME MIB [read|host] at an address of its own
//     K unmap NAME | release NAME | address NAME
//     K write NAME VALUE         every word of it, by the GPU
//     K check NAME VALUE         "ok", or what is there
//     K register NAME MIB        shared memory, registered
//     K poke NAME VALUE          the first word, by the processor
//     K count NAME               a thread that adds to the last word for ever, by the processor
//     K counted NAME             how often it has
//     K alloc NAME KIB           cuMemAlloc
//     K free NAME
//     K ipc_send NAME TO         its legacy IPC handle
//     K ipc_take NAME FROM       opens it
//     K ipc_close NAME
//     K range NAME               cuMemGetAddressRange: offset and size
//     K event TO | wait FROM     an event between processes
//     K multicast NAME           cuMulticastCreate
//     K io_uring                 makes one and keeps it: "ok", or why it cannot
//     K pid
#include "descriptors.hpp"
#include "orders.hpp"

#include <cuda.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <vector>

namespace {

constexpr size_t kMib = size_t{1} << 20;

struct Failed {
    std::string what;
};

void must(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS)
        return;
    const char *name = "?";
    cuGetErrorName(result, &name);
    throw Failed{std::string(what) + " " + name};
}

struct Allocation {
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr address = 0; // 0: not mapped
    size_t size_bytes = 0;   // of the mapping
};

// ── lines and descriptors over sockets ──

bool read_line(int socket, std::string *line) {
    line->clear();
    for (char byte = 0;;) {
        const ssize_t got = read(socket, &byte, 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        if (byte == '\n')
            return true;
        line->push_back(byte);
    }
}

void write_line(int socket, const std::string &line) {
    const std::string whole = line + "\n";
    if (write(socket, whole.data(), whole.size()) != static_cast<ssize_t>(whole.size()))
        _exit(4);
}

void send_fd(int socket, int fd) {
    if (!descriptors::send(socket, fd))
        throw Failed{"sendmsg"};
}

int receive_fd(int socket) {
    const int fd = descriptors::receive(socket);
    if (fd < 0)
        throw Failed{"recvmsg"};
    return fd;
}

// ── a worker ──

class Worker {
  public:
    // `to[k]` sends to worker k, `from[k]` receives from it.
    Worker(std::vector<int> to, std::vector<int> from) : to_(std::move(to)), from_(std::move(from)) {
        CUcontext context = nullptr;
        must(cuInit(0), "cuInit");
        must(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
        must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    }

    std::string obey(const std::string &line) {
        try {
            std::istringstream words(line);
            std::string verb, name;
            words >> verb >> name;
            return do_it(verb, name, words);
        } catch (const Failed &failure) {
            return "error " + failure.what;
        }
    }

  private:
    std::string do_it(const std::string &verb, const std::string &name, std::istringstream &words) {
        if (verb == "pid")
            return std::to_string(getpid());
        if (verb == "io_uring") {
            char parameters[256] = {}; // struct io_uring_params has 120 bytes
            return syscall(425, 4, parameters) >= 0 ? "ok" : std::string("none: ") + std::strerror(errno);
        }
        if (verb == "make") {
            size_t mib = 0;
            std::string where;
            words >> mib >> where;
            CUmemAllocationProp properties{};
            properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
            properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            properties.location = {where == "host" ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE, 0};
            Allocation made;
            must(cuMemCreate(&made.handle, mib * kMib, &properties, 0), "cuMemCreate");
            known_[name] = made;
            return "ok";
        }
        if (verb == "register") {
            size_t mib = 0;
            words >> mib;
            Allocation made;
            made.size_bytes = mib * kMib;
            void *memory = mmap(nullptr, made.size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED)
                throw Failed{"mmap"};
            must(cuMemHostRegister(memory, made.size_bytes, CU_MEMHOSTREGISTER_DEVICEMAP), "cuMemHostRegister");
            must(cuMemHostGetDevicePointer(&made.address, memory, 0), "cuMemHostGetDevicePointer");
            known_[name] = made;
            return "ok";
        }
        if (verb == "alloc") {
            size_t kib = 0;
            words >> kib;
            Allocation made;
            made.size_bytes = kib * 1024;
            must(cuMemAlloc(&made.address, made.size_bytes), "cuMemAlloc");
            known_[name] = made;
            return "ok";
        }
        if (verb == "ipc_take") {
            size_t from = 0;
            words >> from;
            CUipcMemHandle handle;
            Allocation taken;
            if (read(from_.at(from), &handle, sizeof(handle)) != sizeof(handle))
                throw Failed{"read"};
            must(cuIpcOpenMemHandle(&taken.address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), "cuIpcOpenMemHandle");
            must(cuMemGetAddressRange(nullptr, &taken.size_bytes, taken.address), "cuMemGetAddressRange");
            known_[name] = taken;
            return "ok";
        }
        if (verb == "event") { // made, recorded twice, and passed on; its number is the name
            CUevent event = nullptr;
            CUipcEventHandle handle;
            must(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS), "cuEventCreate");
            must(cuEventRecord(event, nullptr), "cuEventRecord");
            must(cuIpcGetEventHandle(&handle, event), "cuIpcGetEventHandle");
            must(cuEventRecord(event, nullptr), "cuEventRecord");
            const CUresult over = cuEventQuery(event);
            must(over, "cuEventQuery");
            if (write(to_.at(std::stoul(name)), &handle, sizeof(handle)) != sizeof(handle))
                throw Failed{"write"};
            must(cuEventDestroy(event), "cuEventDestroy");
            return "ok";
        }
        if (verb == "wait") {
            CUevent event = nullptr;
            CUipcEventHandle handle;
            if (read(from_.at(std::stoul(name)), &handle, sizeof(handle)) != sizeof(handle))
                throw Failed{"read"};
            must(cuIpcOpenEventHandle(&event, handle), "cuIpcOpenEventHandle");
            must(cuStreamWaitEvent(nullptr, event, 0), "cuStreamWaitEvent");
            must(cuEventSynchronize(event), "cuEventSynchronize");
            must(cuEventDestroy(event), "cuEventDestroy");
            return "ok";
        }
        if (verb == "multicast") {
            CUmulticastObjectProp properties{};
            properties.numDevices = 1;
            properties.size = 2 * kMib;
            Allocation made;
            must(cuMulticastCreate(&made.handle, &properties), "cuMulticastCreate");
            known_[name] = made;
            return "ok";
        }
        if (verb == "take") {
            size_t from = 0;
            words >> from;
            const int fd = receive_fd(from_.at(from));
            Allocation taken;
            const CUresult result =
                cuMemImportFromShareableHandle(&taken.handle, reinterpret_cast<void *>(static_cast<intptr_t>(fd)),
                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
            close(fd);
            must(result, "cuMemImportFromShareableHandle");
            known_[name] = taken;
            return "ok";
        }
        const auto found = known_.find(name);
        if (found == known_.end())
            return "error no allocation " + name;
        return with(verb, found, words);
    }

    std::string with(const std::string &verb, std::map<std::string, Allocation>::iterator found,
                     std::istringstream &words) {
        Allocation &one = found->second;
        if (verb == "send" || verb == "keep") {
            size_t to = 0;
            words >> to;
            int fd = -1;
            must(cuMemExportToShareableHandle(&fd, one.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 "cuMemExportToShareableHandle");
            send_fd(to_.at(to), fd);
            if (verb == "send")
                close(fd);
        } else if (verb == "map") {
            size_t mib = 0;
            std::string how;
            words >> mib >> how;
            one.size_bytes = mib * kMib;
            must(cuMemAddressReserve(&one.address, one.size_bytes, 0, 0, 0), "cuMemAddressReserve");
            must(cuMemMap(one.address, one.size_bytes, 0, one.handle, 0), "cuMemMap");
            CUmemAccessDesc access[2]{};
            access[0].location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
            access[0].flags = how == "read" ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            access[1].location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
            access[1].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            must(cuMemSetAccess(one.address, one.size_bytes, access, how == "host" ? 2 : 1), "cuMemSetAccess");
        } else if (verb == "unmap") {
            must(cuMemUnmap(one.address, one.size_bytes), "cuMemUnmap");
            must(cuMemAddressFree(one.address, one.size_bytes), "cuMemAddressFree");
            one.address = 0;
        } else if (verb == "release") {
            must(cuMemRelease(one.handle), "cuMemRelease");
            if (one.address != 0) // mapped memory lives on
                must(cuMemUnmap(one.address, one.size_bytes), "cuMemUnmap");
            known_.erase(found);
        } else if (verb == "write") {
            unsigned value = 0;
            words >> value;
            must(cuMemsetD32(one.address, value, one.size_bytes / 4), "cuMemsetD32");
            must(cuCtxSynchronize(), "cuCtxSynchronize");
        } else if (verb == "check") {
            unsigned value = 0;
            words >> value;
            std::vector<unsigned> contents(one.size_bytes / 4);
            must(cuMemcpyDtoH(contents.data(), one.address, one.size_bytes), "cuMemcpyDtoH");
            for (const unsigned word : contents)
                if (word != value)
                    return std::to_string(word) + " instead of " + std::to_string(value);
        } else if (verb == "free") {
            must(cuMemFree(one.address), "cuMemFree");
            known_.erase(found);
        } else if (verb == "ipc_close") {
            must(cuIpcCloseMemHandle(one.address), "cuIpcCloseMemHandle");
            known_.erase(found);
        } else if (verb == "ipc_send") {
            size_t to = 0;
            words >> to;
            CUipcMemHandle handle;
            must(cuIpcGetMemHandle(&handle, one.address), "cuIpcGetMemHandle");
            if (write(to_.at(to), &handle, sizeof(handle)) != sizeof(handle))
                throw Failed{"write"};
        } else if (verb == "range") {
            CUdeviceptr base = 0;
            size_t size_bytes = 0;
            must(cuMemGetAddressRange(&base, &size_bytes, one.address + one.size_bytes / 2), "cuMemGetAddressRange");
            return std::to_string(one.address - base) + " " + std::to_string(size_bytes);
        } else if (verb == "poke") {
            unsigned value = 0;
            words >> value;
            *reinterpret_cast<volatile unsigned *>(one.address) = value;
        } else if (verb == "count") {
            auto *last = reinterpret_cast<volatile unsigned *>(one.address + one.size_bytes - 4);
            *last = 0;
            std::thread([this, last] {
                for (;;) {
                    *last = *last + 1;
                    counted_ = *last == counted_ + 1 ? *last : 0; // a word that was lost shows
                }
            }).detach();
        } else if (verb == "counted") {
            return std::to_string(counted_.load());
        } else if (verb == "address") {
            return std::to_string(one.address);
        } else {
            return "error no such order";
        }
        return "ok";
    }

    const std::vector<int> to_, from_;
    std::map<std::string, Allocation> known_;
    std::atomic<unsigned> counted_{0};
};

int work(int orders, const std::vector<int> &to, const std::vector<int> &from) {
    try {
        Worker worker(to, from);
        write_line(orders, "ready");
        std::string line;
        while (read_line(orders, &line))
            write_line(orders, worker.obey(line));
        return 0;
    } catch (const Failed &failure) {
        std::fprintf(stderr, "sharer: %s\n", failure.what.c_str());
        return 3;
    }
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    const size_t count = std::strtoul(argv[2], nullptr, 10);
    std::vector<int> orders(count);
    std::vector<pid_t> pids;
    const auto start = [&] {
        // sockets[i][j]: i writes to the first end, j reads from the second.
        std::vector<std::vector<std::pair<int, int>>> sockets(count, std::vector<std::pair<int, int>>(count));
        for (auto &row : sockets)
            for (auto &pair : row) {
                int ends[2];
                if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
                    return false;
                pair = {ends[0], ends[1]};
            }
        for (size_t i = 0; i < count; ++i) {
            int ends[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
                return false;
            const pid_t pid = fork();
            if (pid == 0) {
                close(ends[0]);
                for (size_t other = 0; other < i; ++other)
                    close(orders[other]);
                std::vector<int> to, from;
                for (size_t other = 0; other < count; ++other) {
                    to.push_back(sockets[i][other].first);
                    from.push_back(sockets[other][i].second);
                }
                _exit(work(ends[1], to, from));
            }
            close(ends[1]);
            orders[i] = ends[0];
            pids.push_back(pid);
        }
        for (auto &row : sockets)
            for (auto &pair : row) {
                close(pair.first);
                close(pair.second);
            }
        std::string line;
        for (const int worker : orders)
            if (!read_line(worker, &line))
                return false;
        return true;
    };
    const int status = orders::take(argv[1], start, [&](const std::string &line) {
        std::istringstream words(line);
        size_t number = 0;
        words >> number >> std::ws;
        std::string rest, answer;
        std::getline(words, rest);
        if (number >= count)
            return std::string("error no such worker");
        write_line(orders[number], rest);
        return read_line(orders[number], &answer) ? answer : std::string("error it has ended");
    });
    for (const int worker : orders)
        close(worker);
    int worst = status;
    for (const pid_t pid : pids) {
        int ended = 0;
        if (waitpid(pid, &ended, 0) != pid || ended != 0)
            worst = 5;
    }
    return worst;
}
