// Sending and receiving packets; see transport.hpp.
#include "transport.hpp"

#include "debug.hpp"
#include "spent.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

constexpr size_t kMaxFds = 253; // the kernel's SCM_MAX_FD
// A daemon that does not read for this long is as good as gone.
constexpr timeval kSendTimeout{30, 0};

bool trusted(int socket) {
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
        return false;
    return peer.uid == geteuid() || peer.uid == 0;
}

} // namespace

int FdList::take(size_t index) {
    const int fd = fds_[index];
    fds_[index] = -1;
    return fd;
}

void FdList::clear() {
    const spent::Scope scope(spent::What::descriptors);
    for (const int fd : fds_)
        if (fd >= 0)
            finish_fd(fd, false);
    fds_.clear();
}

std::string agent_socket_path() {
    std::string directory;
    if (const char *set = getenv("WOODFROG_RUNTIME_DIR"); set != nullptr && *set != '\0')
        directory = set;
    else if (const char *xdg = getenv("XDG_RUNTIME_DIR"); xdg != nullptr && *xdg != '\0')
        directory = std::string(xdg) + "/woodfrog";
    else if (geteuid() == 0)
        directory = "/run/woodfrog";
    else
        directory = "/tmp/woodfrog-" + std::to_string(geteuid());
    return directory + "/agent.sock";
}

bool Connection::open(const std::string &path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
        debug("the socket path is too long: %s", path.c_str());
        return false;
    }
    memcpy(address.sun_path, path.c_str(), path.size() + 1);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kSendTimeout, sizeof(kSendTimeout));
    if (connect(fd, reinterpret_cast<const sockaddr *>(&address), sizeof(address)) != 0) {
        debug("no daemon at %s (errno %d)", path.c_str(), errno);
        ::close(fd);
        return false;
    }
    if (!trusted(fd)) {
        debug("the daemon at %s belongs to another user", path.c_str());
        ::close(fd);
        return false;
    }
    return keep_fd(fd, &socket_) == 0;
}

void Connection::close() {
    close_kept(&socket_);
}

bool Connection::send(wire::Type type, uint64_t sequence, wire::Status status, uint32_t flags, const void *body,
                      size_t body_bytes, const void *entries, size_t entry_bytes, uint32_t count, const FdList *fds) {
    if (!fd_is_ours(socket_))
        return false;
    wire::Header header{};
    header.magic = WF_WIRE_MAGIC;
    header.version = WF_WIRE_VERSION;
    header.type = static_cast<uint16_t>(type);
    header.sequence = sequence;
    header.count = count;
    header.fd_count = fds == nullptr ? 0 : static_cast<uint32_t>(fds->size());
    header.status = static_cast<int32_t>(status);
    header.flags = flags;
    iovec parts[3] = {{&header, sizeof(header)},
                      {const_cast<void *>(body), body_bytes},
                      {const_cast<void *>(entries), entry_bytes * count}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 3;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
    if (header.fd_count > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * header.fd_count);
        cmsghdr *part = CMSG_FIRSTHDR(&message);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sizeof(int) * header.fd_count);
        memcpy(CMSG_DATA(part), fds->data(), sizeof(int) * header.fd_count);
    }
    ssize_t sent = 0;
    const spent::Scope scope(spent::What::sending);
    do {
        sent = sendmsg(socket_.fd, &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent >= 0;
}

Connection::Received Connection::receive(Packet *packet, std::string *why) {
    packet->fds.clear();
    packet->payload.resize(WF_MAX_MESSAGE);
    iovec parts[2] = {{&packet->header, sizeof(packet->header)},
                      {packet->payload.data(), packet->payload.size() - sizeof(packet->header)}};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    if (!fd_is_ours(socket_))
        return Received::closed;
    // Waiting comes first, without the pause: an application must be able to fork while nothing arrives.
    pollfd waiting{socket_.fd, POLLIN, 0};
    while (poll(&waiting, 1, -1) < 0 && errno == EINTR)
        ;
    ForkPause pause;
    const ssize_t received = recvmsg(socket_.fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received <= 0)
        return Received::closed;
    for (cmsghdr *part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; ++i) {
            int fd = -1;
            memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
            packet->fds.add(fd);
            pause.announce(fd);
        }
    }
    const wire::Header &header = packet->header;
    if (static_cast<size_t>(received) < sizeof(header) || header.magic != WF_WIRE_MAGIC ||
        header.version != WF_WIRE_VERSION) {
        *why = "not a packet of this version of woodfrog";
        return Received::malformed;
    }
    packet->payload.resize(static_cast<size_t>(received) - sizeof(header));
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        *why = message.msg_flags & MSG_CTRUNC ? "descriptors were lost: the target is at its limit of open files"
                                              : "the packet is too long";
        return Received::malformed;
    }
    if (header.count > WF_MAX_ENTRIES || header.fd_count != packet->fds.size()) {
        *why = "the packet's counts do not agree with what it carries";
        return Received::malformed;
    }
    return Received::packet;
}

} // namespace woodfrog::interpose
