// cuCheckpointProcess*: the calls that another process (the daemon) makes about a target. They find the target's
// service through /proc, so that they work after a restore into another PID namespace as well, and need no cuInit.
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fstream>
#include <optional>
#include <set>
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
struct Socket {
    int fd = -1;
    ~Socket() {
        if (fd >= 0)
            close(fd);
    }
};

std::string proc_path(int pid, const char *entry) {
    return "/proc/" + std::to_string(pid) + "/" + entry;
}

// Inodes of the sockets that the process has open. A thread id works as well as a process id.
std::set<std::string> socket_inodes(int pid) {
    std::set<std::string> inodes;
    DIR *directory = opendir(proc_path(pid, "fd").c_str());
    if (directory == nullptr) {
        throw Error{errno == EACCES || errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_INVALID_VALUE};
    }
    char link[64];
    while (dirent *entry = readdir(directory)) {
        ssize_t length = readlinkat(dirfd(directory), entry->d_name, link, sizeof link - 1);
        if (length <= 0)
            continue;
        link[length] = '\0';
        if (std::strncmp(link, "socket:[", 8) == 0)
            inodes.insert({link + 8, static_cast<size_t>(length) - 9});
    }
    closedir(directory);
    return inodes;
}

// The name of the service's socket, without the leading NUL; empty when the process has none.
std::string service_name(int pid) {
    auto inodes = socket_inodes(pid);
    std::ifstream table(proc_path(pid, "net/unix"));
    const std::string marker = std::string("@") + kSocketPrefix;
    for (std::string line; std::getline(table, line);) {
        size_t name = line.rfind(marker);
        if (name == std::string::npos || name == 0)
            continue;
        // "… INODE @name"
        size_t end = line.find_last_not_of(' ', name - 1);
        size_t start = line.rfind(' ', end);
        if (end == std::string::npos || start == std::string::npos)
            continue;
        if (inodes.contains(line.substr(start + 1, end - start)))
            return line.substr(name + 1);
    }
    return {};
}

// A connection to the service of another process, with the request sent.
int send_to(int pid, const CheckpointRequest &request) {
    require(!Process::instance().forked.load(), CUDA_ERROR_NOT_INITIALIZED);
    require(pid > 0);
    std::string name = service_name(pid);
    require(!name.empty(), CUDA_ERROR_NOT_INITIALIZED);
    sockaddr_un address{};
    require(name.size() < sizeof address.sun_path - 1, CUDA_ERROR_NOT_INITIALIZED);
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    auto address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    Socket connection{socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    require(connection.fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    while (connect(connection.fd, reinterpret_cast<sockaddr *>(&address), address_bytes) != 0) {
        require(errno == EINTR, CUDA_ERROR_OPERATING_SYSTEM);
    }
    require(send(connection.fd, &request, sizeof request, MSG_NOSIGNAL) == sizeof request, CUDA_ERROR_OPERATING_SYSTEM);
    return std::exchange(connection.fd, -1);
}

} // namespace

int hold_loan(int pid) {
    Socket connection{send_to(pid, CheckpointRequest{.action = CheckpointAction::kHold})};
    CheckpointReply reply;
    require(recv(connection.fd, &reply, sizeof reply, MSG_WAITALL) == sizeof reply && reply.result == CUDA_SUCCESS,
            CUDA_ERROR_OPERATING_SYSTEM);
    return std::exchange(connection.fd, -1);
}

CheckpointReply ask(int pid, const CheckpointRequest &request, std::vector<int> *descriptors) {
    Socket connection{send_to(pid, request)};
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
