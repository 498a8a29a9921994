// See owned_fds.hpp.
#include "owned_fds.hpp"

#include <unistd.h>

namespace simgpu {

OwnedFds &OwnedFds::instance() {
    static OwnedFds *table = new OwnedFds;
    return *table;
}

void OwnedFds::add(int fd) {
    if (fd >= 0 && fd < kCapacity)
        bits_[fd / 64].fetch_or(std::uint64_t{1} << (fd % 64));
}

void OwnedFds::remove_and_close(int fd) {
    if (fd < 0)
        return;
    if (fd < kCapacity)
        bits_[fd / 64].fetch_and(~(std::uint64_t{1} << (fd % 64)));
    close(fd);
}

void OwnedFds::close_all() {
    for (int word = 0; word < kCapacity / 64; ++word) {
        std::uint64_t bits = bits_[word].exchange(0);
        while (bits != 0) {
            close(word * 64 + __builtin_ctzll(bits));
            bits &= bits - 1;
        }
    }
}

} // namespace simgpu
