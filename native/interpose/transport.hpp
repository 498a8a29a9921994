// Packets between the agent and the node daemon. It checks sizes and counts before it believes a packet, and owns every
// descriptor that arrives until the caller takes it.
#pragma once

#include "kept_fd.hpp"
#include "wire.h"

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

namespace woodfrog::interpose {

// File descriptors on their way (announced, see kept_fd.hpp) that are closed unless taken.
class FdList {
  public:
    FdList() = default;
    ~FdList() { clear(); }
    FdList(const FdList &) = delete;
    FdList &operator=(const FdList &) = delete;
    void add(int fd) { fds_.push_back(fd); }
    int take(size_t index); // the caller owns it; it still is announced
    size_t size() const { return fds_.size(); }
    const int *data() const { return fds_.data(); }
    void clear();

  private:
    std::vector<int> fds_;
};

// A text of a message: as much of `from` (may be null) as fits, zeros behind it.
template <size_t N> void copy_text(char (&to)[N], const char *from) {
    memset(to, 0, N);
    if (from != nullptr)
        memcpy(to, from, strnlen(from, N - 1));
}

struct Packet {
    wire::Header header;
    std::vector<unsigned char> payload; // body and entries
    FdList fds;
};

class Connection {
  public:
    // Connects to $WOODFROG_RUNTIME_DIR/agent.sock. False when nobody is there, or not the same user or root.
    bool open(const std::string &path);
    void close();
    bool is_open() const { return socket_.fd >= 0; }

    // False when the daemon is gone. `entries` has `count` entries; `fds` may be null.
    bool send(wire::Type type, uint64_t sequence, wire::Status status, uint32_t flags, const void *body,
              size_t body_bytes, const void *entries, size_t entry_bytes, uint32_t count, const FdList *fds);
    enum class Received { packet, closed, malformed };
    Received receive(Packet *packet, std::string *why);

  private:
    KeptFd socket_;
};

// The path of the daemon's socket, from the environment, as ARCHITECTURE.md defines it.
std::string agent_socket_path();

} // namespace woodfrog::interpose
