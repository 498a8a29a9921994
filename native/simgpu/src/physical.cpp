// See physical.hpp.
#include "physical.hpp"

#include <cerrno>
#include <climits>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "accounting.hpp"
#include "config.hpp"
#include "device.hpp"
#include "error.hpp"
#include "owned_fds.hpp"

namespace simgpu {
namespace {

struct Registry {
    std::mutex mutex;
    std::vector<std::weak_ptr<Physical>> entries;
};

Registry &registry() {
    static Registry *instance = new Registry;
    return *instance;
}

void remember(const std::shared_ptr<Physical> &physical) {
    std::lock_guard lock(registry().mutex);
    auto &entries = registry().entries;
    // Swept only when full, so that a million allocations and frees cost a constant each.
    if (entries.size() == entries.capacity()) {
        std::erase_if(entries, [](const auto &entry) { return entry.expired(); });
        entries.reserve(entries.size() * 2 + 16);
    }
    entries.push_back(physical);
}

// Two thousand allocations are two thousand descriptors; a real driver has no such limit, so ours is lifted as far as
// the process is allowed to.
bool raise_descriptor_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max)
        return false;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

// The same memory through a new open file.
int reopen(int fd) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int copy = open(path, O_RDWR | O_CLOEXEC);
    if (copy < 0 && errno == EMFILE && raise_descriptor_limit())
        copy = open(path, O_RDWR | O_CLOEXEC);
    return copy;
}

// The device that the memfd's name tells, as an index of this process; kHostMemory, or nothing known: throws.
int device_of_memfd(int fd) {
    char path[64];
    char link[160];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, link, sizeof link - 1);
    require(length > 0);
    link[length] = '\0';
    const std::string host_link = "/memfd:" + memfd_name(kHostMemory) + " ";
    if (std::strncmp(link, host_link.c_str(), host_link.size()) == 0)
        return kHostMemory;
    for (int index = 0; index < config().device_count; ++index) {
        const std::string device_link = "/memfd:" + memfd_name(index) + " ";
        if (std::strncmp(link, device_link.c_str(), device_link.size()) == 0) {
            int device = device_with_index(index);
            require(device >= 0, CUDA_ERROR_INVALID_DEVICE);
            return device;
        }
    }
    throw Error{CUDA_ERROR_INVALID_VALUE};
}

} // namespace

void Physical::open_memfd() {
    int index = device_ == kHostMemory ? kHostMemory : devices()[static_cast<size_t>(device_)].index;
    const std::string name = memfd_name(index);
    int fd = memfd_create(name.c_str(), MFD_CLOEXEC);
    if (fd < 0 && errno == EMFILE && raise_descriptor_limit())
        fd = memfd_create(name.c_str(), MFD_CLOEXEC);
    require(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    // Only the owner may open it again through /proc.
    bool ok = fchmod(fd, 0600) == 0 && ftruncate(fd, static_cast<off_t>(size_bytes_)) == 0;
    if (ok && device_ != kHostMemory)
        ok = fits(index, size_bytes_);
    if (!ok) {
        close(fd);
        throw Error{CUDA_ERROR_OUT_OF_MEMORY};
    }
    OwnedFds::instance().add(fd);
    fd_ = fd;
}

std::shared_ptr<Physical> Physical::create(size_t size_bytes, int device, const CUmemAllocationProp &properties) {
    // Beyond this no device has memory, and sums of sizes cannot overflow.
    require(size_bytes <= (size_t{1} << 46), CUDA_ERROR_OUT_OF_MEMORY);
    std::shared_ptr<Physical> physical(new Physical);
    physical->size_bytes_ = size_bytes;
    physical->device_ = device;
    physical->properties_ = properties;
    physical->open_memfd();
    remember(physical);
    return physical;
}

std::shared_ptr<Physical> Physical::import(int fd) {
    struct stat status{};
    require(fd >= 0 && fstat(fd, &status) == 0);
    std::shared_ptr<Physical> physical(new Physical);
    physical->device_ = device_of_memfd(fd);
    physical->size_bytes_ = static_cast<size_t>(status.st_size);
    physical->imported_ = true;
    physical->properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    physical->properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (physical->device_ == kHostMemory) {
        physical->properties_.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    } else {
        physical->properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, physical->device_};
    }
    physical->fd_ = reopen(fd); // the handle is no copy of the descriptor that it was made from
    require(physical->fd_ >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    OwnedFds::instance().add(physical->fd_);
    remember(physical);
    return physical;
}

Physical::~Physical() {
    OwnedFds::instance().remove_and_close(fd_);
    if (owns_saved_)
        munmap(saved_, size_bytes_);
}

int Physical::duplicate_fd() const {
    int copy = reopen(fd_); // as the real driver: every export is an open file of its own
    require(copy >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    return copy;
}

void Physical::save(void *room) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = room != nullptr ? room : mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    require(memory != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    written_.clear();
    off_t end = static_cast<off_t>(size_bytes_);
    for (off_t start = lseek(fd_, 0, SEEK_DATA); start >= 0 && start < end; start = lseek(fd_, start, SEEK_DATA)) {
        off_t stop = lseek(fd_, start, SEEK_HOLE);
        if (stop < 0 || stop > end)
            stop = end;
        written_.emplace_back(static_cast<size_t>(start), static_cast<size_t>(stop - start));
        while (start < stop) {
            ssize_t count = pread(fd_, static_cast<char *>(memory) + start, static_cast<size_t>(stop - start), start);
            if (count < 0 && errno == EINTR)
                continue;
            if (count <= 0) {
                if (room == nullptr)
                    munmap(memory, size_bytes_);
                throw Error{CUDA_ERROR_OPERATING_SYSTEM};
            }
            start += count;
        }
    }
    saved_ = memory;
    owns_saved_ = room == nullptr;
}

void Physical::load() {
    open_memfd();
    for (auto [offset, size] : written_) {
        while (size > 0) {
            ssize_t count = pwrite(fd_, static_cast<const char *>(saved_) + offset, size, static_cast<off_t>(offset));
            if (count < 0 && errno == EINTR)
                continue;
            if (count <= 0) {
                unload();
                throw Error{CUDA_ERROR_OUT_OF_MEMORY};
            }
            offset += static_cast<size_t>(count);
            size -= static_cast<size_t>(count);
        }
    }
}

void Physical::unload() {
    if (fd_ < 0)
        return;
    OwnedFds::instance().remove_and_close(fd_);
    fd_ = -1;
}

void Physical::drop_saved() {
    if (owns_saved_)
        munmap(saved_, size_bytes_);
    saved_ = nullptr;
    owns_saved_ = false;
}

std::vector<std::shared_ptr<Physical>> Physical::all() {
    std::lock_guard lock(registry().mutex);
    std::vector<std::shared_ptr<Physical>> living;
    for (const auto &entry : registry().entries) {
        if (auto physical = entry.lock())
            living.push_back(physical);
    }
    return living;
}

} // namespace simgpu
