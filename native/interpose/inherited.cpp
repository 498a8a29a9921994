// A child forked after cuInit inherits descriptors of the GPU's device files. It cannot use CUDA, but CRIU cannot save
// a process that has them open: without this, an ordinary DataLoader with forked workers could not be checkpointed.
//
// The numbers stay taken (by /dev/null), so that nothing else gets a number that a library of the child still
// remembers, and so do the addresses that they were mapped at (by empty memory), which an exit handler of the driver
// may still look at. It must never touch a descriptor or a mapping that is not of a /dev/nvidia* file, and it calls
// only what is safe between fork and exec.
#include "inherited.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
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

constexpr char kPrefix[] = "/dev/nvidia";
constexpr size_t kPrefixLength = sizeof(kPrefix) - 1;

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
    char path[sizeof(kPrefix)] = {};
    const ssize_t length = readlinkat(directory, name, path, sizeof(path));
    return length >= static_cast<ssize_t>(kPrefixLength) && memcmp(path, kPrefix, kPrefixLength) == 0;
}

void replace_descriptors() {
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

uintptr_t hexadecimal(const char **text) {
    uintptr_t value = 0;
    for (;; ++*text) {
        const char c = **text;
        if (c >= '0' && c <= '9')
            value = value * 16 + static_cast<uintptr_t>(c - '0');
        else if (c >= 'a' && c <= 'f')
            value = value * 16 + static_cast<uintptr_t>(c - 'a' + 10);
        else
            return value;
    }
}

// One line of /proc/self/maps: "begin-end rwxp offset device inode   path".
void replace_mapping(const char *line) {
    const char *path = strchr(line, '/');
    if (path == nullptr || strncmp(path, kPrefix, kPrefixLength) != 0)
        return;
    const uintptr_t begin = hexadecimal(&line);
    if (*line++ != '-')
        return;
    const uintptr_t end = hexadecimal(&line);
    if (end > begin)
        mmap(reinterpret_cast<void *>(begin), end - begin, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void replace_mappings() {
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0)
        return;
    char text[8192]; // a line has at most a path's 4096 bytes and some numbers
    size_t filled = 0;
    ssize_t bytes = 0;
    while ((bytes = read(maps, text + filled, sizeof(text) - 1 - filled)) > 0) {
        filled += static_cast<size_t>(bytes);
        text[filled] = '\0';
        char *line = text;
        for (char *end = strchr(line, '\n'); end != nullptr; end = strchr(line, '\n')) {
            *end = '\0';
            replace_mapping(line);
            line = end + 1;
        }
        filled = static_cast<size_t>(text + filled - line);
        memmove(text, line, filled);
        if (filled == sizeof(text) - 1)
            break; // not a line of maps
    }
    close(maps);
}

} // namespace

void inherited_files_after_fork_in_child() {
    replace_descriptors();
    replace_mappings();
}

} // namespace woodfrog::interpose
