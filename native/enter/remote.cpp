// See remote.hpp.
#include "remote.hpp"

#include <cinttypes>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fstream>
#include <sys/uio.h>
#include <unistd.h>

namespace woodfrog::enter {
namespace {

std::string proc_path(pid_t pid, const char *entry) {
    return "/proc/" + std::to_string(pid) + "/" + entry;
}

// "Rss:   1234 kB" of smaps, in bytes, when the line has that name.
bool take_kib(const std::string &line, const char *name, std::uint64_t &bytes) {
    const std::size_t length = std::strlen(name);
    if (line.compare(0, length, name) != 0)
        return false;
    bytes += std::strtoull(line.c_str() + length, nullptr, 10) * 1024;
    return true;
}

bool parse_mapping(const std::string &line, Mapping &mapping) {
    char permissions[5] = "";
    int path_at = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s %" SCNx64 " %*s %*s %n", &mapping.begin, &mapping.end,
                    permissions, &mapping.offset, &path_at) < 4 ||
        std::strlen(permissions) != 4)
        return false;
    mapping.readable = permissions[0] == 'r';
    mapping.shared = permissions[3] == 's';
    mapping.writable = permissions[1] == 'w';
    mapping.executable = permissions[2] == 'x';
    mapping.path = path_at > 0 ? line.substr(static_cast<std::size_t>(path_at)) : "";
    return true;
}

} // namespace

bool read_memory(pid_t pid, std::uintptr_t address, void *into, std::size_t size) {
    const iovec local{into, size};
    const iovec remote{reinterpret_cast<void *>(address), size};
    return process_vm_readv(pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(size);
}

bool write_memory(pid_t pid, std::uintptr_t address, const void *from, std::size_t size) {
    const iovec local{const_cast<void *>(from), size};
    const iovec remote{reinterpret_cast<void *>(address), size};
    return process_vm_writev(pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(size);
}

std::vector<Mapping> mappings(pid_t pid) {
    std::vector<Mapping> found;
    std::ifstream maps(proc_path(pid, "maps"));
    for (std::string line; std::getline(maps, line);) {
        if (Mapping mapping; parse_mapping(line, mapping))
            found.push_back(std::move(mapping));
    }
    return found;
}

Resident resident(pid_t pid, std::uintptr_t begin, std::uintptr_t end) {
    Resident found;
    std::ifstream smaps(proc_path(pid, "smaps"));
    bool inside = false;
    for (std::string line; std::getline(smaps, line);) {
        // A heading has a dash after its first number; a field has a colon after its name.
        if (Mapping mapping; line.find(':') > line.find('-') && parse_mapping(line, mapping)) {
            inside = mapping.begin < end && mapping.end > begin;
        } else if (inside) {
            take_kib(line, "Rss:", found.bytes) || take_kib(line, "AnonHugePages:", found.huge_bytes);
        }
    }
    return found;
}

std::string status_field(pid_t pid, const char *name) {
    std::ifstream status(proc_path(pid, "status"));
    const std::string start = std::string(name) + ":";
    for (std::string line; std::getline(status, line);) {
        if (line.compare(0, start.size(), start) != 0)
            continue;
        const std::size_t from = line.find_first_not_of(" \t", start.size());
        const std::size_t to = line.find_last_not_of(" \t\n");
        return from == std::string::npos ? "" : line.substr(from, to - from + 1);
    }
    return "";
}

std::string descriptor_path(pid_t pid, std::uint64_t fd) {
    char target[PATH_MAX];
    const ssize_t length =
        readlink(proc_path(pid, ("fd/" + std::to_string(fd)).c_str()).c_str(), target, sizeof target);
    return length > 0 ? std::string(target, static_cast<std::size_t>(length)) : "";
}

std::vector<pid_t> threads(pid_t pid) {
    std::vector<pid_t> found;
    DIR *directory = opendir(proc_path(pid, "task").c_str());
    if (directory == nullptr)
        return found;
    while (const dirent *entry = readdir(directory)) {
        if (const int tid = std::atoi(entry->d_name); tid > 0)
            found.push_back(tid);
    }
    closedir(directory);
    return found;
}

bool is_thread_of(pid_t pid, pid_t tid) {
    return access(proc_path(pid, ("task/" + std::to_string(tid)).c_str()).c_str(), F_OK) == 0;
}

} // namespace woodfrog::enter
