// See checkpoint_service.hpp.
#include "checkpoint_service.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

#include "checkpoint.hpp"
#include "error.hpp"
#include "owned_fds.hpp"
#include "process.hpp"

namespace simgpu {
namespace {

constexpr int kBacklog = 16;
// A client sends its request at once; one that was stopped in between must not keep a descriptor open for ever.
constexpr timeval kRequestTimeout{10, 0};

bool admitted(int connection) {
    ucred peer{};
    socklen_t length = sizeof peer;
    if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
        return false;
    if (peer.uid != geteuid() && peer.uid != 0)
        return false;
    return setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &kRequestTimeout, sizeof kRequestTimeout) == 0;
}

bool receive_all(int connection, void *buffer, size_t size_bytes) {
    auto *position = static_cast<char *>(buffer);
    while (size_bytes > 0) {
        ssize_t count = recv(connection, position, size_bytes, 0);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return false;
        position += count;
        size_bytes -= static_cast<size_t>(count);
    }
    return true;
}

CUresult perform(const CheckpointRequest &request) {
    static std::mutex &one_at_a_time = *new std::mutex;
    if (request.action == CheckpointAction::kGetState)
        return CUDA_SUCCESS;
    std::lock_guard lock(one_at_a_time);
    switch (request.action) {
    case CheckpointAction::kLock:
        return checkpoint_lock(request.timeout_ms);
    case CheckpointAction::kCheckpoint:
        return checkpoint_save();
    case CheckpointAction::kRestore: {
        GpuPairs pairs;
        for (unsigned i = 0; i < request.pair_count; ++i) {
            pairs.emplace_back(request.pairs[i].oldUuid, request.pairs[i].newUuid);
        }
        return checkpoint_load(pairs);
    }
    case CheckpointAction::kUnlock:
        return checkpoint_unlock();
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

void serve(int connection) {
    CheckpointRequest request;
    CheckpointReply reply;
    if (admitted(connection) && receive_all(connection, &request, sizeof request)) {
        bool sane = request.magic == kServiceMagic && request.pair_count <= kMaxGpuPairs;
        try {
            reply.result = sane ? perform(request) : CUDA_ERROR_INVALID_VALUE;
        } catch (const Error &error) { // the address space could not be put back: nothing can be saved any more
            reply.result = error.code;
        }
        reply.state = static_cast<std::uint32_t>(checkpoint_state());
        // A client that is gone does not matter: the state machine has moved all the same.
        (void)send(connection, &reply, sizeof reply, MSG_NOSIGNAL);
    }
    OwnedFds::instance().remove_and_close(connection);
}

// A thread for each connection, so that the state can be asked for while a lock waits.
void start_thread(const char *name, void (*body)(int), int fd) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    std::thread([name, body, fd] {
        pthread_setname_np(pthread_self(), name);
        mark_internal_thread();
        body(fd);
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void accept_loop(int listener) {
    for (;;) {
        int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (connection < 0) {
            // CRIU interrupts the call when it restores the process; the others say that a client has gone again or
            // that there is no descriptor left for it.
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
                std::fprintf(stderr, "simulated GPU: a checkpoint request waits: %s\n", std::strerror(errno));
                sleep(1);
                continue;
            }
            std::fprintf(stderr, "simulated GPU: this process can no longer be checkpointed: %s\n",
                         std::strerror(errno));
            return;
        }
        OwnedFds::instance().add(connection);
        try {
            start_thread("simgpu-request", serve, connection);
        } catch (const std::system_error &) { // no thread to be had: the request is served here
            serve(connection);
        }
    }
}

} // namespace

void start_checkpoint_service() {
    std::uint64_t random = 0;
    require(getrandom(&random, sizeof random, 0) == sizeof random, CUDA_ERROR_OPERATING_SYSTEM);
    char name[96];
    int length = std::snprintf(name, sizeof name, "%s%d-%016llx", kSocketPrefix, static_cast<int>(getpid()),
                               static_cast<unsigned long long>(random));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name, static_cast<size_t>(length));
    auto address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    require(listener >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    if (bind(listener, reinterpret_cast<sockaddr *>(&address), address_bytes) != 0 || listen(listener, kBacklog) != 0) {
        close(listener);
        throw Error{CUDA_ERROR_OPERATING_SYSTEM};
    }
    OwnedFds::instance().add(listener);
    start_thread(kServiceThreadName, accept_loop, listener);
}

} // namespace simgpu
