// A child forked after cuInit inherits descriptors of the GPU's device files. It cannot use CUDA, but CRIU cannot save
// a process that has them open: without this, an ordinary DataLoader with forked workers could not be checkpointed.
//
// The numbers stay taken (by /dev/null), so that nothing else gets a number that a library of the child still
// remembers. It must never touch a descriptor that is not a /dev/nvidia* file.
#include "inherited.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

// As the kernel lays out an entry of getdents64.
struct DirectoryEntry {
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

int number_of(const char *name) {
    int number = 0;
    if (*name == '\0')
        return -1;
    for (; *name != '\0'; ++name) {
        if (*name < '0' || *name > '9')
            return -1;
        number = number * 10 + (*name - '0');
    }
    return number;
}

bool is_gpu_file(int directory, const char *name) {
    static constexpr char kPrefix[] = "/dev/nvidia";
    char path[sizeof(kPrefix)] = {};
    const ssize_t length = readlinkat(directory, name, path, sizeof(path));
    return length >= static_cast<ssize_t>(sizeof(kPrefix) - 1) && memcmp(path, kPrefix, sizeof(kPrefix) - 1) == 0;
}

} // namespace

void inherited_files_after_fork_in_child() {
    const int directory = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (directory >= 0 && nothing >= 0) {
        alignas(DirectoryEntry) char entries[4096];
        long bytes = 0;
        while ((bytes = syscall(SYS_getdents64, directory, entries, sizeof(entries))) > 0) {
            for (long position = 0; position < bytes;) {
                const DirectoryEntry *entry = reinterpret_cast<const DirectoryEntry *>(entries + position);
                position += entry->length;
                const int number = number_of(entry->name);
                if (number >= 0 && number != directory && number != nothing && is_gpu_file(directory, entry->name))
                    dup3(nothing, number, O_CLOEXEC);
            }
        }
    }
    if (directory >= 0)
        close(directory);
    if (nothing >= 0)
        close(nothing);
}

} // namespace woodfrog::interpose
