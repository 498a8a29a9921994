// Passing a file descriptor over a Unix socket, between the processes of a test target.
#pragma once

#include <cstring>

#include <sys/socket.h>
#include <sys/uio.h>

namespace descriptors {

// A message of one byte that has room for one descriptor.
struct Message {
    char byte = 'f';
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};

    Message() {
        header.msg_iov = &part;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = sizeof(control);
    }
    Message(const Message &) = delete;
    Message &operator=(const Message &) = delete;
};

// False, with errno, when it was not sent. The caller keeps `fd`.
inline bool send(int socket, int fd) {
    Message message;
    cmsghdr *control = CMSG_FIRSTHDR(&message.header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(control), &fd, sizeof(int));
    return sendmsg(socket, &message.header, 0) == 1;
}

// The descriptor, the caller's to close; -1 when none came.
inline int receive(int socket) {
    Message message;
    if (recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&message.header) == nullptr)
        return -1;
    int fd = -1;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message.header)), sizeof(int));
    return fd;
}

} // namespace descriptors
