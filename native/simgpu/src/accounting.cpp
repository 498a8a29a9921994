// See accounting.hpp.
#include "accounting.hpp"

#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "config.hpp"

namespace simgpu {
namespace {

// Adds the memory that one process holds. A process that ends meanwhile, or belongs to somebody else, adds nothing.
void scan_process(const char *pid, const std::string &link_prefix, std::set<std::pair<dev_t, ino_t>> &seen,
                  size_t &total_bytes) {
    std::string path = std::string("/proc/") + pid + "/fd";
    DIR *directory = opendir(path.c_str());
    if (directory == nullptr)
        return;
    int directory_fd = dirfd(directory);
    char link[128];
    while (dirent *entry = readdir(directory)) {
        if (!std::isdigit(static_cast<unsigned char>(entry->d_name[0])))
            continue;
        ssize_t length = readlinkat(directory_fd, entry->d_name, link, sizeof link);
        if (length < static_cast<ssize_t>(link_prefix.size()))
            continue;
        if (std::memcmp(link, link_prefix.data(), link_prefix.size()) != 0)
            continue;
        struct stat status{};
        if (fstatat(directory_fd, entry->d_name, &status, 0) != 0)
            continue;
        if (seen.insert({status.st_dev, status.st_ino}).second)
            total_bytes += static_cast<size_t>(status.st_size);
    }
    closedir(directory);
}

struct LastScan {
    std::chrono::steady_clock::time_point when;
    size_t free_bytes = 0;
};

} // namespace

std::string memfd_name(int device_index) {
    const std::string &machine = config().machine;
    const std::string prefix = "simgpu-" + (machine.empty() ? "" : machine + "-");
    return device_index < 0 ? prefix + "host" : prefix + "dev" + std::to_string(device_index);
}

size_t used_bytes(int device_index) {
    // The link of a memfd reads "/memfd:NAME (deleted)"; the blank keeps dev1 apart from dev10.
    const std::string prefix = "/memfd:" + memfd_name(device_index) + " ";
    std::set<std::pair<dev_t, ino_t>> seen;
    size_t total_bytes = 0;
    DIR *directory = opendir("/proc");
    if (directory == nullptr)
        return 0;
    while (dirent *entry = readdir(directory)) {
        if (std::isdigit(static_cast<unsigned char>(entry->d_name[0]))) {
            scan_process(entry->d_name, prefix, seen, total_bytes);
        }
    }
    closedir(directory);
    return total_bytes;
}

bool fits(int device_index, size_t size_bytes) {
    // A walk of /proc costs milliseconds. It is spared where one made in the last 100 ms left so much room that a
    // small allocation cannot matter: the count is exact whenever the device is nearly full.
    constexpr auto kTrusted = std::chrono::milliseconds(100);
    constexpr size_t kSmallPart = 32;
    static std::mutex mutex;
    static std::map<int, LastScan> &scans = *new std::map<int, LastScan>;

    std::lock_guard lock(mutex);
    auto now = std::chrono::steady_clock::now();
    LastScan &last = scans[device_index];
    if (now - last.when < kTrusted && size_bytes < last.free_bytes / kSmallPart) {
        last.free_bytes -= size_bytes;
        return true;
    }
    size_t used = used_bytes(device_index);
    size_t total = config().memory_size_bytes;
    last = {now, used < total ? total - used : 0};
    return used <= total;
}

} // namespace simgpu
