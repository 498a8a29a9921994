// cuCheckpointProcess*: the calls that another process (the daemon) makes about a target. They find the target's
// service through /proc, so that they work after a restore into another PID namespace as well, and need no cuInit.
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <optional>
#include <poll.h>
#include <string>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <cuda.h>

#include "checkpoint_service.hpp"
#include "custom_storage.hpp"
#include "error.hpp"
#include "process.hpp"

namespace simgpu {
namespace {

// Closes the descriptor at the end of the scope.
struct Descriptor {
    int fd = -1;
    explicit Descriptor(int value) : fd(value) {}
    Descriptor(const Descriptor &) = delete;
    Descriptor &operator=(const Descriptor &) = delete;
    ~Descriptor() {
        if (fd >= 0)
            close(fd);
    }
};

std::string proc_path(int pid, const char *entry) {
    return "/proc/" + std::to_string(pid) + "/" + entry;
}

// The write end of the process's pipe for calls. A thread id works as well as a process id. Throws when the process has
// none, or is somebody else's.
int open_service(int pid) {
    const std::string directory_path = proc_path(pid, "fd");
    DIR *directory = opendir(directory_path.c_str());
    if (directory == nullptr)
        throw Error{errno == EACCES || errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_INVALID_VALUE};
    const std::string wanted = std::string("/memfd:") + kServiceFile + " ";
    std::string found;
    char link[64];
    while (dirent *entry = readdir(directory)) {
        const ssize_t length = readlinkat(dirfd(directory), entry->d_name, link, sizeof link);
        if (length >= static_cast<ssize_t>(wanted.size()) && std::memcmp(link, wanted.data(), wanted.size()) == 0)
            found = entry->d_name;
    }
    closedir(directory);
    require(!found.empty(), CUDA_ERROR_NOT_INITIALIZED);
    Descriptor file{open((directory_path + "/" + found).c_str(), O_RDONLY | O_CLOEXEC)};
    std::uint32_t number = 0;
    require(file.fd >= 0 && pread(file.fd, &number, sizeof number, 0) == sizeof number, CUDA_ERROR_NOT_INITIALIZED);
    // Nobody reads a file that is no pipe, and a pipe that is full is not waited for.
    const int pipe_end =
        open((directory_path + "/" + std::to_string(number)).c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    struct stat status{};
    if (pipe_end < 0 || fstat(pipe_end, &status) != 0 || !S_ISFIFO(status.st_mode)) {
        close(pipe_end);
        throw Error{CUDA_ERROR_NOT_INITIALIZED};
    }
    return pipe_end;
}

// A socket that listens under a name of the kernel's choice, and the call that says which.
int listen_for(ServiceCall &call) {
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    require(listener >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t length = sizeof address;
    constexpr socklen_t kPrefix = offsetof(sockaddr_un, sun_path) + 1;
    if (bind(listener, reinterpret_cast<sockaddr *>(&address), sizeof address.sun_family) != 0 ||
        listen(listener, 1) != 0 || getsockname(listener, reinterpret_cast<sockaddr *>(&address), &length) != 0 ||
        length <= kPrefix || length - kPrefix > sizeof call.name) {
        close(listener);
        throw Error{CUDA_ERROR_OPERATING_SYSTEM};
    }
    call.length = length - kPrefix;
    std::memcpy(call.name, address.sun_path + 1, call.length);
    return listener;
}

// A connection to the service of that process, which connects to us. One that ends meanwhile closes its pipe.
int connect_to(int pid) {
    const Descriptor pipe_end{open_service(pid)};
    ServiceCall call;
    const Descriptor listener{listen_for(call)};
    require(write(pipe_end.fd, &call, sizeof call) == sizeof call, CUDA_ERROR_OPERATING_SYSTEM);
    struct stat owner{};
    require(stat(proc_path(pid, "").c_str(), &owner) == 0);
    for (;;) {
        pollfd waited[2] = {{listener.fd, POLLIN, 0}, {pipe_end.fd, 0, 0}};
        if (poll(waited, 2, -1) < 0) {
            require(errno == EINTR, CUDA_ERROR_OPERATING_SYSTEM);
            continue;
        }
        if (waited[0].revents == 0)
            throw Error{CUDA_ERROR_OPERATING_SYSTEM};
        const int connection = accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC);
        if (connection < 0)
            continue;
        ucred peer{};
        socklen_t length = sizeof peer;
        if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == owner.st_uid)
            return connection;
        close(connection); // somebody who tries names
    }
}

// A connection to the service of another process, with the request sent.
int send_to(int pid, const CheckpointRequest &request) {
    require(!Process::instance().forked.load(), CUDA_ERROR_NOT_INITIALIZED);
    require(pid > 0);
    Descriptor connection{connect_to(pid)};
    require(send(connection.fd, &request, sizeof request, MSG_NOSIGNAL) == sizeof request, CUDA_ERROR_OPERATING_SYSTEM);
    return std::exchange(connection.fd, -1);
}

} // namespace

int hold_loan(int pid) {
    Descriptor connection{send_to(pid, CheckpointRequest{.action = CheckpointAction::kHold})};
    CheckpointReply reply;
    require(recv(connection.fd, &reply, sizeof reply, MSG_WAITALL) == sizeof reply && reply.result == CUDA_SUCCESS,
            CUDA_ERROR_OPERATING_SYSTEM);
    return std::exchange(connection.fd, -1);
}

CheckpointReply ask(int pid, const CheckpointRequest &request, std::vector<int> *descriptors) {
    Descriptor connection{send_to(pid, request)};
    CheckpointReply reply;
    size_t received = 0;
    std::vector<int> lent;
    // Read up to the end of the stream: only then has the target closed its side, and CRIU finds no connection there.
    for (;;) {
        char surplus;
        bool full = received == sizeof reply;
        iovec data{full ? static_cast<void *>(&surplus) : reinterpret_cast<char *>(&reply) + received,
                   full ? 1 : sizeof reply - received};
        alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
        msghdr message{};
        message.msg_iov = &data;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        ssize_t count = recvmsg(connection.fd, &message, MSG_CMSG_CLOEXEC);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            break;
        for (cmsghdr *header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
            if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
                continue;
            const size_t old_size = lent.size(), bytes = header->cmsg_len - CMSG_LEN(0);
            lent.resize(old_size + bytes / sizeof(int));
            std::memcpy(lent.data() + old_size, CMSG_DATA(header), bytes);
        }
        if (!full)
            received += static_cast<size_t>(count);
    }
    const bool whole = received == sizeof reply && reply.magic == kServiceMagic &&
                       reply.descriptor_count == lent.size() && (lent.empty() || descriptors != nullptr);
    if (whole && descriptors != nullptr) {
        *descriptors = std::move(lent);
    } else {
        for (int fd : lent)
            close(fd);
    }
    // A target that was killed meanwhile, or does not admit us, closes without an answer.
    require(whole, CUDA_ERROR_OPERATING_SYSTEM);
    return reply;
}

namespace {

template <class Body> CUresult checkpoint_call(Body &&body) noexcept {
    try {
        return body();
    } catch (const Error &error) {
        return error.code;
    } catch (const std::bad_alloc &) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
}

CUresult act(int pid, const CheckpointRequest &request) {
    return static_cast<CUresult>(ask(pid, request).result);
}

std::optional<int> thread_named(int pid, const char *wanted) {
    DIR *directory = opendir(proc_path(pid, "task").c_str());
    require(directory != nullptr);
    std::optional<int> found;
    while (dirent *entry = readdir(directory)) {
        std::ifstream file(proc_path(pid, "task/") + entry->d_name + "/comm");
        std::string name;
        if (std::getline(file, name) && name == wanted)
            found = std::atoi(entry->d_name);
    }
    closedir(directory);
    return found;
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    return checkpoint_call([&] {
        require(tid != nullptr);
        ask(pid, {});
        auto thread = thread_named(pid, kServiceThreadName);
        require(thread.has_value(), CUDA_ERROR_NOT_INITIALIZED);
        *tid = *thread;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuCheckpointProcessGetState(int pid, CUprocessState *state) {
    return checkpoint_call([&] {
        require(state != nullptr);
        *state = static_cast<CUprocessState>(ask(pid, {}).state);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
    return checkpoint_call([&] {
        CheckpointRequest request;
        request.action = CheckpointAction::kLock;
        if (args != nullptr)
            request.timeout_ms = args->timeoutMs;
        return act(pid, request);
    });
}

CUresult CUDAAPI cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
    return checkpoint_call([&] {
        if (CustomStorageInfo **storage = storage_of(args); storage != nullptr)
            return lend(pid, CheckpointRequest{.action = CheckpointAction::kLend}, storage);
        CheckpointRequest request;
        request.action = CheckpointAction::kCheckpoint;
        return act(pid, request);
    });
}

CUresult CUDAAPI cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    return checkpoint_call([&] {
        CheckpointRequest request;
        request.action = CheckpointAction::kRestore;
        if (args != nullptr) {
            require(args->gpuPairsCount <= kMaxGpuPairs && (args->gpuPairs != nullptr || args->gpuPairsCount == 0));
            request.pair_count = args->gpuPairsCount;
            for (unsigned i = 0; i < args->gpuPairsCount; ++i)
                request.pairs[i] = args->gpuPairs[i];
        }
        if (CustomStorageInfo **storage = storage_of(args); storage != nullptr) {
            request.action = CheckpointAction::kLendBack;
            return lend(pid, request, storage);
        }
        return act(pid, request);
    });
}

CUresult CUDAAPI cuCheckpointOperationComplete(void *handle) {
    return checkpoint_call([&] { return complete(handle); });
}

CUresult CUDAAPI cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *) {
    return checkpoint_call([&] {
        CheckpointRequest request;
        request.action = CheckpointAction::kUnlock;
        return act(pid, request);
    });
}

} // extern "C"
