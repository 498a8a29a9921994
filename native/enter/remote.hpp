// The memory and the tables of another process, by /proc and process_vm_*. Nothing here stops or changes it but
// `write_memory`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <sys/types.h>
#include <vector>

namespace woodfrog::enter {

// Bytes of the process's memory; false when any of them cannot be read or written.
bool read_memory(pid_t pid, std::uintptr_t address, void *into, std::size_t size);
bool write_memory(pid_t pid, std::uintptr_t address, const void *from, std::size_t size);

struct Mapping {
    std::uintptr_t begin = 0, end = 0;
    std::uint64_t offset = 0; // of its begin in the file
    bool readable = false, writable = false, executable = false, shared = false;
    std::string path;

    // Private memory that is no file's, and no stack or heap of the C library's.
    bool is_anonymous() const { return !shared && (path.empty() || path.starts_with("[anon:")); }
};

std::vector<Mapping> mappings(pid_t pid);

// How much of [begin, end) is in memory, and in huge pages, as far as whole mappings of the process lie in it. In
// bytes.
struct Resident {
    std::uint64_t bytes = 0, huge_bytes = 0;
};
Resident resident(pid_t pid, std::uintptr_t begin, std::uintptr_t end);

// A field of /proc/PID/status without white space around it; empty when it is not there.
std::string status_field(pid_t pid, const char *name);

// What a descriptor of the process is open on, e.g. "/dev/nvidiactl"; empty when that cannot be read.
std::string descriptor_path(pid_t pid, std::uint64_t fd);

// The numbers of the process's threads.
std::vector<pid_t> threads(pid_t pid);

// Whether a thread is one of the process's: not of another one, which may have the number by now, nor of a child that
// was not made by fork.
bool is_thread_of(pid_t pid, pid_t tid);

} // namespace woodfrog::enter
