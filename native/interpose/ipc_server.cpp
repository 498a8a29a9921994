// The exporter's side of legacy IPC, and how an importer reaches it; see ipc.hpp.
#include "ipc.hpp"

#include "cow.hpp"
#include "debug.hpp"
#include "memory.hpp"
#include "thread.hpp"

#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
// An exporter that is being checkpointed answers when it is back; one that is stuck does not hold importers for ever.
constexpr timeval kAnswerTimeout{120, 0};
constexpr timeval kRequestTimeout{5, 0};

struct Server {
    std::mutex mutex; // of starting
    std::atomic<uint64_t> process{0};
    std::condition_variable back; // with memory().mutex
    KeptFd listener;
};

Server &server() {
    static Server *const instance = new Server;
    return *instance;
}

// One descriptor beside one byte.
struct Passed {
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    Passed() {
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
    }
};

socklen_t address_of(uint64_t process, sockaddr_un *address) {
    *address = {};
    address->sun_family = AF_UNIX; // a name that begins with a zero byte is no file
    const int length = snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "woodfrog-ipc-%016llx",
                                static_cast<unsigned long long>(process));
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
}

bool trusted(int socket) {
    ucred peer{};
    socklen_t size = sizeof(peer);
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
           (peer.uid == geteuid() || peer.uid == 0 || geteuid() == 0);
}

// A copy of the descriptor of the block that a handle names, or -1. Waits while the memory is with the daemon. Makes no
// call of the driver: it may be locked.
int descriptor_of(const IpcHandle &handle) {
    std::unique_lock lock(memory().mutex);
    for (;;) {
        const Physical *found = nullptr;
        for (const auto &[address, block] : memory().blocks)
            if (block->physical.id == handle.block && block->physical.by_ipc)
                found = &block->physical;
        if (found == nullptr)
            return -1;
        if (found->present) {
            int fd = -1;
            return fd_is_ours(found->kept) && physical_fd(*found, &fd) == CUDA_SUCCESS ? fd : -1;
        }
        server().back.wait(lock);
    }
}

void answer(int connection) {
    IpcHandle handle{};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &kRequestTimeout, sizeof(kRequestTimeout));
    if (!trusted(connection) || recv(connection, &handle, sizeof(handle), 0) != sizeof(handle) ||
        handle.process != server().process)
        return;
    const int fd = descriptor_of(handle);
    if (fd >= 0)
        cow::will_be_shared();
    Passed passed;
    passed.byte = fd >= 0 ? 1 : 0;
    if (fd >= 0) {
        cmsghdr *header = CMSG_FIRSTHDR(&passed.message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof(int));
    } else {
        passed.message.msg_controllen = 0;
    }
    if (sendmsg(connection, &passed.message, MSG_NOSIGNAL) != 1)
        debug("an importer of memory went away");
    if (fd >= 0)
        finish_fd(fd, false);
}

void *serve(void *) {
    const int listener = server().listener.fd;
    for (;;) {
        const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (connection >= 0) {
            answer(connection);
            close(connection);
        } else if (errno != EINTR && errno != ECONNABORTED && errno != EMFILE && errno != ENFILE) {
            debug("legacy IPC ends: the application has closed its socket (errno %d)", errno);
            return nullptr;
        }
    }
}

} // namespace

uint64_t serve_ipc() {
    std::lock_guard lock(server().mutex);
    if (const uint64_t process = server().process; process != 0)
        return process;
    uint64_t process = 0;
    if (getrandom(&process, sizeof(process), 0) != sizeof(process) || process == 0)
        return 0;
    const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (listener < 0)
        return 0;
    sockaddr_un address;
    const socklen_t size = address_of(process, &address);
    if (bind(listener, reinterpret_cast<const sockaddr *>(&address), size) != 0 || listen(listener, 128) != 0) {
        close(listener);
        return 0;
    }
    if (keep_fd(listener, &server().listener) != 0)
        return 0;
    server().process = process;
    if (start_thread("woodfrog-ipc", &serve, nullptr, kStackBytes) != 0) {
        close_kept(&server().listener);
        server().process = 0;
    }
    return server().process;
}

bool is_own_ipc(uint64_t process) {
    return process == server().process;
}

int ask_for_block(const IpcHandle &handle) {
    const int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connection < 0)
        return -1;
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &kAnswerTimeout, sizeof(kAnswerTimeout));
    sockaddr_un address;
    const socklen_t size = address_of(handle.process, &address);
    int fd = -1;
    if (connect(connection, reinterpret_cast<const sockaddr *>(&address), size) == 0 && trusted(connection) &&
        send(connection, &handle, sizeof(handle), MSG_NOSIGNAL) == sizeof(handle)) {
        Passed passed;
        ssize_t got = 0;
        do {
            got = recvmsg(connection, &passed.message, MSG_CMSG_CLOEXEC);
        } while (got < 0 && errno == EINTR);
        const cmsghdr *header = got == 1 ? CMSG_FIRSTHDR(&passed.message) : nullptr;
        if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
            memcpy(&fd, CMSG_DATA(header), sizeof(int));
            ForkPause pause;
            pause.announce(fd);
        }
    }
    close(connection);
    return fd;
}

void ipc_memory_is_back() {
    server().back.notify_all();
}

void ipc_in_forked_child() {
    server().process = 0; // its socket was closed with the other kept descriptors
    server().listener = KeptFd{};
}

} // namespace woodfrog::interpose
