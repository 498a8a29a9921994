// See custom_storage.hpp. Everything is done with the driver's own public calls, as a program would.
#include "custom_storage.hpp"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.hpp"
#include "error.hpp"

namespace simgpu {
namespace {

constexpr int kFirstVersion = 13040;
constexpr size_t kRestoreArgsOffset = 16; // behind the pairs, their count and padding

void check(CUresult code) {
    require(code == CUDA_SUCCESS, code);
}

struct Piece {
    CUmemGenericAllocationHandle handle;
    size_t size_bytes;
};

// The lent memory of one device.
class Range {
  public:
    Range(int device, std::vector<Piece> pieces) : device_(device), pieces_(std::move(pieces)) {
        for (const Piece &piece : pieces_)
            info_.size_bytes += piece.size_bytes;
    }
    Range(const Range &) = delete;
    Range &operator=(const Range &) = delete;
    ~Range() {
        if (info_.stream != nullptr)
            cuStreamDestroy(info_.stream);
        if (mapped_bytes_ > 0)
            cuMemUnmap(info_.address, mapped_bytes_);
        if (info_.address != 0)
            cuMemAddressFree(info_.address, info_.size_bytes);
        for (const Piece &piece : pieces_)
            cuMemRelease(piece.handle);
        if (retained_)
            cuDevicePrimaryCtxRelease(device_);
    }
    void map() {
        CUcontext context = nullptr;
        check(cuDevicePrimaryCtxRetain(&context, device_));
        retained_ = true;
        check(cuMemAddressReserve(&info_.address, info_.size_bytes, 0, 0, 0));
        for (const Piece &piece : pieces_) {
            check(cuMemMap(info_.address + mapped_bytes_, piece.size_bytes, 0, piece.handle, 0));
            mapped_bytes_ += piece.size_bytes;
        }
        CUmemAccessDesc access{};
        access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        check(cuMemSetAccess(info_.address, info_.size_bytes, &access, 1));
        check(cuCtxPushCurrent(context));
        const CUresult made = cuStreamCreate(&info_.stream, CU_STREAM_NON_BLOCKING);
        cuCtxPopCurrent(nullptr);
        check(made);
    }
    const CustomStorageDevice &info() const { return info_; }

  private:
    int device_;
    std::vector<Piece> pieces_;
    CustomStorageDevice info_{};
    size_t mapped_bytes_ = 0;
    bool retained_ = false;
};

struct Operation {
    ~Operation() {
        if (leash < 0)
            return;
        // Until the target has closed its end: CRIU is to find no connection there.
        char byte;
        shutdown(leash, SHUT_WR);
        while (recv(leash, &byte, 1, 0) > 0)
            ;
        close(leash);
    }
    int pid = 0;
    int leash = -1; // tells the target that its borrower lives
    std::vector<std::unique_ptr<Range>> ranges;
    std::vector<CustomStorageDevice> devices;
    CustomStorageInfo info{};
};

std::mutex operations_mutex;
std::set<Operation *> &operations() {
    static auto *const living = new std::set<Operation *>;
    return *living;
}

std::map<int, std::vector<Piece>> import_all(const std::vector<int> &descriptors) {
    std::map<int, std::vector<Piece>> found;
    for (const int fd : descriptors) {
        struct stat status{};
        require(fstat(fd, &status) == 0, CUDA_ERROR_OPERATING_SYSTEM);
        Piece piece{0, static_cast<size_t>(status.st_size)};
        check(cuMemImportFromShareableHandle(&piece.handle, reinterpret_cast<void *>(static_cast<intptr_t>(fd)),
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        CUmemAllocationProp properties{};
        check(cuMemGetAllocationPropertiesFromHandle(&properties, piece.handle));
        found[properties.location.id].push_back(piece);
    }
    return found;
}

CustomStorageInfo **storage_at(const void *args, size_t offset) {
    if (args == nullptr)
        return nullptr;
    CustomStorageInfo **storage;
    std::memcpy(&storage, static_cast<const char *>(args) + offset, sizeof storage);
    require(storage == nullptr || config().driver_version >= kFirstVersion);
    return storage;
}

} // namespace

CustomStorageInfo **storage_of(const CUcheckpointCheckpointArgs *args) {
    return storage_at(args, 0);
}

CustomStorageInfo **storage_of(const CUcheckpointRestoreArgs *args) {
    return storage_at(args, kRestoreArgsOffset);
}

CUresult lend(int pid, const CheckpointRequest &request, CustomStorageInfo **into) {
    std::vector<int> descriptors;
    if (const auto code = static_cast<CUresult>(ask(pid, request, &descriptors).result); code != CUDA_SUCCESS)
        return code;
    auto operation = std::make_unique<Operation>();
    operation->pid = pid;
    CUresult result = CUDA_SUCCESS;
    try {
        operation->leash = hold_loan(pid);
        for (auto &[device, pieces] : import_all(descriptors)) {
            operation->ranges.push_back(std::make_unique<Range>(device, std::move(pieces)));
            operation->ranges.back()->map();
            operation->devices.push_back(operation->ranges.back()->info());
        }
    } catch (const Error &error) {
        result = error.code;
    }
    for (const int fd : descriptors)
        close(fd);
    if (result != CUDA_SUCCESS) {
        operation.reset();
        ask(pid, CheckpointRequest{.action = CheckpointAction::kAbandon});
        return result;
    }
    operation->info = {operation.get(), operation->devices.data(), static_cast<unsigned>(operation->devices.size())};
    *into = &operation->info;
    std::lock_guard lock(operations_mutex);
    operations().insert(operation.release());
    return CUDA_SUCCESS;
}

CUresult complete(void *handle) {
    std::unique_ptr<Operation> operation;
    {
        std::lock_guard lock(operations_mutex);
        require(operations().erase(static_cast<Operation *>(handle)) == 1);
        operation.reset(static_cast<Operation *>(handle));
    }
    for (const CustomStorageDevice &device : operation->devices)
        check(cuStreamSynchronize(device.stream));
    operation->ranges.clear();
    return static_cast<CUresult>(ask(operation->pid, CheckpointRequest{.action = CheckpointAction::kComplete}).result);
}

} // namespace simgpu
