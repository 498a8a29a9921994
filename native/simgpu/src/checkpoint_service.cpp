// See checkpoint_service.hpp.
#include "checkpoint_service.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "checkpoint.hpp"
#include "error.hpp"
#include "owned_fds.hpp"
#include "process.hpp"

namespace simgpu {
namespace {

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

GpuPairs pairs_of(const CheckpointRequest &request) {
    GpuPairs pairs;
    for (unsigned i = 0; i < request.pair_count; ++i)
        pairs.emplace_back(request.pairs[i].oldUuid, request.pairs[i].newUuid);
    return pairs;
}

// Sends copies of descriptors, and closes them.
void pass_on(int connection, const std::vector<int> &descriptors) {
    for (std::size_t first = 0; first < descriptors.size(); first += kMaxDescriptors) {
        const std::size_t count = std::min<std::size_t>(kMaxDescriptors, descriptors.size() - first);
        alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
        char byte = 0;
        iovec data{&byte, 1};
        msghdr message{};
        message.msg_iov = &data;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(count * sizeof(int));
        std::memcpy(CMSG_DATA(header), descriptors.data() + first, count * sizeof(int));
        (void)sendmsg(connection, &message, MSG_NOSIGNAL);
    }
    for (const int descriptor : descriptors)
        close(descriptor);
}

std::mutex &one_at_a_time = *new std::mutex;

// Until the borrower's end of the connection is closed. What the real driver does when a borrower dies is not known;
// this one takes back what it has lent, so that the target is as before.
void hold(int connection) {
    const unsigned number = checkpoint_loan();
    CheckpointReply reply;
    reply.result = CUDA_SUCCESS;
    (void)send(connection, &reply, sizeof reply, MSG_NOSIGNAL);
    char byte;
    while (recv(connection, &byte, 1, 0) < 0 && (errno == EINTR || errno == EAGAIN))
        ;
    std::lock_guard lock(one_at_a_time);
    if (checkpoint_loan() == number)
        (void)checkpoint_abandon(); // refused when nothing is lent any more
}

CUresult perform(const CheckpointRequest &request, std::vector<int> &descriptors) {
    if (request.action == CheckpointAction::kGetState)
        return CUDA_SUCCESS;
    std::lock_guard lock(one_at_a_time);
    switch (request.action) {
    case CheckpointAction::kLock:
        return checkpoint_lock(request.timeout_ms);
    case CheckpointAction::kCheckpoint:
        return checkpoint_save();
    case CheckpointAction::kRestore:
        return checkpoint_load(pairs_of(request));
    case CheckpointAction::kLend:
        return checkpoint_lend(descriptors);
    case CheckpointAction::kLendBack:
        return checkpoint_lend_back(pairs_of(request), descriptors);
    case CheckpointAction::kComplete:
        return checkpoint_complete();
    case CheckpointAction::kAbandon:
        return checkpoint_abandon();
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
        if (sane && request.action == CheckpointAction::kHold) {
            try {
                hold(connection);
            } catch (const Error &) { // the address space could not be put back: nothing can be saved any more
            }
            OwnedFds::instance().remove_and_close(connection);
            return;
        }
        std::vector<int> descriptors;
        try {
            reply.result = sane ? perform(request, descriptors) : CUDA_ERROR_INVALID_VALUE;
        } catch (const Error &error) { // the address space could not be put back: nothing can be saved any more
            reply.result = error.code;
        }
        reply.state = static_cast<std::uint32_t>(checkpoint_state());
        // A client that is gone does not matter: the state machine has moved all the same.
        reply.descriptor_count = static_cast<std::uint32_t>(descriptors.size());
        (void)send(connection, &reply, sizeof reply, MSG_NOSIGNAL);
        pass_on(connection, descriptors);
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

// A connection to whoever called, -1 when there is nobody any more.
int connect_to(const ServiceCall &call) {
    if (call.magic != kServiceMagic || call.length == 0 || call.length > sizeof call.name)
        return -1;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, call.name, call.length);
    const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection < 0) {
        std::fprintf(stderr, "simulated GPU: a checkpoint request is lost: %s\n", std::strerror(errno));
        return -1;
    }
    const auto address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + call.length);
    int result;
    do {
        result = connect(connection, reinterpret_cast<sockaddr *>(&address), address_bytes);
    } while (result != 0 && errno == EINTR);
    if (result != 0) {
        close(connection);
        return -1;
    }
    return connection;
}

void read_loop(int pipe_end) {
    for (;;) {
        ServiceCall call;
        const ssize_t count = read(pipe_end, &call, sizeof call);
        if (count < 0 && errno == EINTR) // CRIU interrupts the call when it restores the process
            continue;
        if (count <= 0) {
            std::fprintf(stderr, "simulated GPU: this process can no longer be checkpointed: %s\n",
                         count == 0 ? "its pipe was closed" : std::strerror(errno));
            return;
        }
        const int connection = count == sizeof call ? connect_to(call) : -1;
        if (connection < 0)
            continue;
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
    int ends[2];
    require(pipe2(ends, O_CLOEXEC) == 0, CUDA_ERROR_OPERATING_SYSTEM);
    const int file = memfd_create(kServiceFile, MFD_CLOEXEC);
    const auto number = static_cast<std::uint32_t>(ends[0]);
    if (file < 0 || write(file, &number, sizeof number) != sizeof number) {
        for (const int fd : {ends[0], ends[1], file})
            close(fd);
        throw Error{CUDA_ERROR_OPERATING_SYSTEM};
    }
    for (const int fd : {ends[0], ends[1], file})
        OwnedFds::instance().add(fd);
    start_thread(kServiceThreadName, read_loop, ends[0]);
}

} // namespace simgpu
