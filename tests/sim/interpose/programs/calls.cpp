// Makes the driver calls that it reads from its input, one a line, and prints what an application can see of each: the
// result and everything about it that must not depend on who answers. The conformance test runs it with and without the
// interposer and compares.
//
// Slots are small numbers that the test chooses. Nothing is printed that may differ from run to run, such as an
// address.
#include <cuda.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

struct Slot {
    CUdeviceptr address = 0;
    size_t size_bytes = 0;
    bool live = false;
    uint64_t freed_at = 0; // value of `allocations` then
    CUcontext context = nullptr;
};

std::map<int, Slot> memory, reservations, ordered;
std::map<int, CUmemGenericAllocationHandle> handles;
std::map<int, std::pair<int, size_t>> mappings; // reservation → (handle, bytes)
std::map<int, CUcontext> contexts;
std::vector<CUcontext> replaced; // contexts whose slot was taken by another: they may still become current
std::map<int, void *> host;
std::set<int> released; // handles: a number that was given up may be given out again, or not
std::vector<CUmemGenericAllocationHandle> retained;
CUcontext primary[2];
size_t free_at_start[2];
uint64_t allocations = 0;

const char *name_of(CUresult result) {
    const char *name = nullptr;
    return cuGetErrorName(result, &name) == CUDA_SUCCESS ? name : "unnamed";
}

size_t free_bytes() {
    size_t free = 0, total = 0;
    return cuMemGetInfo(&free, &total) == CUDA_SUCCESS ? free : 0;
}

// Which slot an address is the start of; addresses themselves differ between runs.
std::string place(CUdeviceptr address) {
    for (const auto &[number, slot] : memory)
        if (slot.live && slot.address == address)
            return "slot " + std::to_string(number);
    return address == 0 ? "null" : "elsewhere";
}

std::string context_name(CUcontext context) {
    for (int device = 0; device < 2; ++device)
        if (context == primary[device])
            return "primary " + std::to_string(device);
    for (const auto &[number, known] : contexts)
        if (known == context)
            return "context " + std::to_string(number);
    return context == nullptr ? "none" : "unknown";
}

void attributes(CUdeviceptr address, const Slot &slot) {
    union Value {
        uint64_t word;
        CUcontext context;
        unsigned number;
        unsigned char boolean;
        CUmemoryPool pool;
    };
    static const CUpointer_attribute kAll[] = {CU_POINTER_ATTRIBUTE_CONTEXT,
                                               CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                               CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                               CU_POINTER_ATTRIBUTE_HOST_POINTER,
                                               CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                                               CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                               CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                               CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                               CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                               CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                               CU_POINTER_ATTRIBUTE_MAPPED,
                                               CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
                                               CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
                                               CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                                               CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE};
    const auto print = [&](CUpointer_attribute which, const Value &value) {
        switch (which) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            std::printf(" %s", context_name(value.context).c_str());
            break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            if (value.word == 0)
                std::printf(" null");
            else
                std::printf(" at %+" PRId64, static_cast<int64_t>(value.word - address));
            break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            std::printf(" start %s", slot.live && value.word == slot.address ? "same" : place(value.word).c_str());
            break;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        case CU_POINTER_ATTRIBUTE_MAPPED:
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
            std::printf(" %u", static_cast<unsigned>(value.boolean));
            break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
            std::printf(" %u", value.number);
            break;
        default:
            std::printf(" %" PRIu64, value.word);
        }
    };
    for (const CUpointer_attribute which : kAll) {
        Value value{};
        const CUresult result = cuPointerGetAttribute(&value, which, address);
        std::printf("; %d %s", static_cast<int>(which), name_of(result));
        if (result == CUDA_SUCCESS)
            print(which, value);
    }
    constexpr size_t kCount = std::size(kAll);
    Value values[kCount] = {};
    void *data[kCount];
    CUpointer_attribute which[kCount];
    for (size_t i = 0; i < kCount; ++i) {
        data[i] = &values[i];
        which[i] = kAll[i];
    }
    std::printf("; all %s", name_of(cuPointerGetAttributes(kCount, which, data, address)));
    for (size_t i = 0; i < kCount; ++i)
        print(which[i], values[i]);
}

// Two allocations must not overlap, whatever their addresses are.
bool overlaps(int number) {
    const Slot &slot = memory[number];
    for (const auto &[other, known] : memory)
        if (other != number && known.live && known.address < slot.address + slot.size_bytes &&
            slot.address < known.address + known.size_bytes)
            return true;
    return false;
}

void allocated(int number, CUresult result, CUdeviceptr address, size_t size_bytes) {
    std::printf("%s", name_of(result));
    if (result != CUDA_SUCCESS)
        return;
    ++allocations;
    CUcontext context = nullptr;
    cuCtxGetCurrent(&context);
    memory[number] = {address, size_bytes, true, 0, context};
    std::printf(" aligned %s overlap %s", address % 256 == 0 ? "yes" : "NO", overlaps(number) ? "YES" : "no");
}

// Everything from earlier is given up, so that the next sequence starts in an equal process.
void reset() {
    CUcontext popped = nullptr;
    while (cuCtxPopCurrent(&popped) == CUDA_SUCCESS && popped != nullptr)
        ;
    for (auto &[number, pointer] : host)
        cuMemFreeHost(pointer);
    cuCtxSetCurrent(primary[0]);
    for (const auto &[number, mapping] : mappings)
        cuMemUnmap(reservations[number].address, mapping.second);
    for (const auto &[number, handle] : handles)
        retained.push_back(handle);
    for (const CUmemGenericAllocationHandle handle : retained)
        while (cuMemRelease(handle) == CUDA_SUCCESS)
            ;
    for (const auto &[number, slot] : reservations)
        cuMemAddressFree(slot.address, slot.size_bytes);
    for (const auto &[number, context] : contexts)
        cuCtxDestroy(context);
    for (const CUcontext context : replaced)
        cuCtxDestroy(context);
    cuCtxSetCurrent(nullptr);
    for (int device = 0; device < 2; ++device) {
        if (primary[device] != nullptr)
            cuDevicePrimaryCtxRelease(device); // the last reference: what was allocated in it goes
        cuDevicePrimaryCtxRetain(&primary[device], device);
    }
    memory.clear(), reservations.clear(), ordered.clear(), handles.clear(), mappings.clear(), contexts.clear();
    host.clear(), released.clear(), retained.clear(), replaced.clear();
    for (int device = 1; device >= 0; --device) {
        cuCtxSetCurrent(primary[device]);
        const size_t now = free_bytes();
        if (free_at_start[device] == 0)
            free_at_start[device] = now;
        std::printf("device %d leaks %" PRId64 " ", device, static_cast<int64_t>(free_at_start[device] - now));
    }
}

CUmemAllocationProp properties(int device, int types) {
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    wanted.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(types);
    return wanted;
}

// Replaces what the slot held, which is given up at the next reset.
void keep_handle(int number, CUmemGenericAllocationHandle handle) {
    if (const auto before = handles.find(number); before != handles.end())
        retained.push_back(before->second);
    handles[number] = handle;
    released.erase(number);
}

void virtual_memory(const std::string &verb, std::istringstream &in) {
    int a = 0, b = 0;
    size_t size = 0;
    in >> a;
    if (verb == "reserve") {
        in >> size;
        if (reservations.count(a) != 0)
            return; // one at a time, so that nothing is lost
        Slot slot{0, size, true};
        const CUresult result = cuMemAddressReserve(&slot.address, size, 0, 0, 0);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            reservations[a] = slot;
    } else if (verb == "unreserve") {
        const CUresult result = cuMemAddressFree(reservations[a].address, reservations[a].size_bytes);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            reservations.erase(a);
    } else if (verb == "create") {
        int device = 0;
        in >> device >> b >> size;
        const CUmemAllocationProp wanted = properties(device, b);
        CUmemGenericAllocationHandle handle = 0;
        const CUresult result = cuMemCreate(&handle, size, &wanted, 0);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            keep_handle(a, handle);
    } else if (verb == "release") {
        std::printf("%s", name_of(cuMemRelease(handles[a])));
        released.insert(a);
    } else if (verb == "map") {
        in >> b >> size;
        const CUresult result = cuMemMap(reservations[a].address, size, 0, handles[b], 0);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            mappings[a] = {b, size};
    } else if (verb == "unmap") {
        const CUresult result = cuMemUnmap(reservations[a].address, mappings[a].second);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            mappings.erase(a);
    } else if (verb == "access") {
        int device = 0;
        in >> device >> b;
        const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, static_cast<CUmemAccess_flags>(b)};
        std::printf("%s", name_of(cuMemSetAccess(reservations[a].address, mappings[a].second, &access, 1)));
        unsigned long long flags = 99;
        const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, device};
        const CUresult result = cuMemGetAccess(&flags, &location, reservations[a].address);
        std::printf(" get %s %llu", name_of(result), flags);
    } else if (verb == "properties") {
        CUmemAllocationProp found{};
        const CUresult result = cuMemGetAllocationPropertiesFromHandle(&found, handles[a]);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            std::printf(" type %d handles %d at %d %d", found.type, found.requestedHandleTypes, found.location.type,
                        found.location.id);
    } else if (verb == "retain") {
        CUmemGenericAllocationHandle handle = 0;
        const CUresult result =
            cuMemRetainAllocationHandle(&handle, reinterpret_cast<void *>(reservations[a].address + 5));
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS && mappings.count(a) != 0 && released.count(mappings[a].first) == 0)
            std::printf(" same %d", handle == handles[mappings[a].first]);
        if (result == CUDA_SUCCESS)
            retained.push_back(handle);
    } else if (verb == "retain_plain") {
        CUmemGenericAllocationHandle handle = 0;
        std::printf("%s", name_of(cuMemRetainAllocationHandle(&handle, reinterpret_cast<void *>(memory[a].address))));
    } else if (verb == "share") { // export and import in one process
        int fd = -1;
        CUresult result = cuMemExportToShareableHandle(&fd, handles[a], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        std::printf("export %s", name_of(result));
        if (result == CUDA_SUCCESS) {
            in >> b;
            CUmemGenericAllocationHandle handle = 0;
            result = cuMemImportFromShareableHandle(&handle, reinterpret_cast<void *>(static_cast<intptr_t>(fd)),
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
            close(fd);
            std::printf(" import %s", name_of(result));
            if (result == CUDA_SUCCESS)
                keep_handle(b, handle);
        }
    } else if (verb == "fill_mapped") {
        in >> b;
        CUresult result = cuMemsetD8(reservations[a].address, static_cast<unsigned char>(b), mappings[a].second);
        unsigned char byte = 0;
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            result = cuMemcpyDtoH(&byte, reservations[a].address + mappings[a].second / 2, 1);
        std::printf(" %s %d", name_of(result), byte);
    } else if (verb == "attributes_mapped") {
        attributes(reservations[a].address + 3, reservations[a]);
    }
}

// What was allocated in a context is gone with it.
void gone(CUcontext context) {
    for (auto &[number, slot] : memory)
        if (slot.context == context)
            slot.live = false, slot.freed_at = UINT64_MAX;
}

void contexts_and_peers(const std::string &verb, std::istringstream &in) {
    int a = 0, device = 0;
    in >> a;
    if (verb == "context") {
        in >> device;
        CUcontext context = nullptr;
        const CUresult result = cuCtxCreate(&context, nullptr, 0, device);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS) {
            if (const auto before = contexts.find(a); before != contexts.end())
                replaced.push_back(before->second);
            contexts[a] = context;
        }
    } else if (verb == "use") {
        std::printf("%s", name_of(cuCtxSetCurrent(a < 0 ? primary[-1 - a] : contexts[a])));
    } else if (verb == "no_context") {
        std::printf("%s", name_of(cuCtxSetCurrent(nullptr)));
    } else if (verb == "destroy") {
        const CUresult result = cuCtxDestroy(contexts[a]);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS) {
            gone(contexts[a]);
            contexts.erase(a);
        }
    } else if (verb == "reset_primary") {
        const CUresult result = cuDevicePrimaryCtxReset(a);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            gone(primary[a]);
    } else if (verb == "peer") {
        std::printf("%s", name_of(cuCtxEnablePeerAccess(a < 0 ? primary[-1 - a] : contexts[a], 0)));
    } else if (verb == "no_peer") {
        std::printf("%s", name_of(cuCtxDisablePeerAccess(a < 0 ? primary[-1 - a] : contexts[a])));
    }
}

// Captures of one stream; whether an allocation is refused while one is active depends on both modes.
void captures(const std::string &verb, std::istringstream &in) {
    static CUstream stream = nullptr;
    static CUcontext owner = nullptr;
    int mode = 0;
    in >> mode;
    if (verb == "capture") {
        if (stream != nullptr)
            return;
        cuCtxGetCurrent(&owner);
        std::printf("%s", name_of(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)));
        if (stream != nullptr)
            std::printf(" %s", name_of(cuStreamBeginCapture(stream, static_cast<CUstreamCaptureMode>(mode))));
    } else if (verb == "end_capture") {
        if (stream == nullptr)
            return;
        CUgraph graph = nullptr;
        cuCtxSetCurrent(owner);
        const CUresult result = cuStreamEndCapture(stream, &graph);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS && graph != nullptr)
            std::printf(" %s", name_of(cuGraphDestroy(graph)));
        std::printf(" %s", name_of(cuStreamDestroy(stream)));
        stream = nullptr;
    } else if (verb == "exchange") {
        CUstreamCaptureMode exchanged = static_cast<CUstreamCaptureMode>(mode);
        std::printf("%s was %d", name_of(cuThreadExchangeStreamCaptureMode(&exchanged)), exchanged);
    }
}

void plain_memory(const std::string &verb, std::istringstream &in) {
    int a = 0, b = 0;
    size_t size = 0, offset = 0;
    CUdeviceptr address = 0;
    in >> a;
    if (verb == "alloc") {
        in >> size;
        const CUresult result = cuMemAlloc(&address, size);
        allocated(a, result, address, size);
    } else if (verb == "pitch") {
        size_t width = 0, height = 0, pitch = 0;
        unsigned element = 0;
        in >> width >> height >> element;
        const CUresult result = cuMemAllocPitch(&address, &pitch, width, height, element);
        allocated(a, result, address, result == CUDA_SUCCESS ? pitch * height : 0);
        if (result == CUDA_SUCCESS)
            std::printf(" pitch %zu", pitch);
    } else if (verb == "free" || verb == "free_inside" || verb == "free_ordered") {
        in >> offset;
        Slot &slot = memory[a];
        if (!slot.live && slot.freed_at != allocations)
            return; // its address may be another allocation's by now, or not: that is the driver's choice
        const CUdeviceptr where = slot.address + (slot.size_bytes == 0 ? 0 : offset % slot.size_bytes);
        const CUresult result = verb == "free_ordered" ? cuMemFreeAsync(slot.address, nullptr) : cuMemFree(where);
        std::printf("%s", name_of(result));
        if (verb == "free_ordered")
            cuStreamSynchronize(nullptr); // the order is a promise, the moment is not
        if (result == CUDA_SUCCESS)
            slot.live = false, slot.freed_at = allocations;
    } else if (verb == "range") {
        in >> offset;
        size_t found = 0;
        if (memory[a].live ? offset >= memory[a].size_bytes : memory[a].freed_at != allocations)
            return; // what lies beside an allocation is the driver's choice
        const CUresult result = cuMemGetAddressRange(&address, &found, memory[a].address + offset);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            std::printf(" %s %zu", place(address).c_str(), found);
    } else if (verb == "attributes") {
        in >> offset;
        if (memory[a].live)
            attributes(memory[a].address + offset % memory[a].size_bytes, memory[a]);
    } else if (verb == "fill") {
        in >> b;
        if (memory[a].live)
            std::printf("%s",
                        name_of(cuMemsetD8(memory[a].address, static_cast<unsigned char>(b), memory[a].size_bytes)));
    } else if (verb == "sum") {
        if (!memory[a].live)
            return;
        std::vector<unsigned char> bytes(memory[a].size_bytes);
        const CUresult result = cuMemcpyDtoH(bytes.data(), memory[a].address, bytes.size());
        uint64_t sum = 0;
        for (const unsigned char byte : bytes)
            sum = sum * 31 + byte;
        std::printf("%s", name_of(result));
        // What fresh memory holds is nobody's promise; only what was filled is compared (the test fills first).
        if (result == CUDA_SUCCESS)
            std::printf(" %016" PRIx64, sum);
    } else if (verb == "copy") {
        in >> b;
        const size_t bytes = std::min(memory[a].size_bytes, memory[b].size_bytes);
        if (memory[a].live && memory[b].live)
            std::printf("%s", name_of(cuMemcpyDtoD(memory[a].address, memory[b].address, bytes)));
    } else if (verb == "info") {
        CUdevice device = 0;
        size_t free = 0, total = 0;
        const CUresult result = cuMemGetInfo(&free, &total);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS && cuCtxGetDevice(&device) == CUDA_SUCCESS)
            std::printf(" total %zu used %" PRId64, total, static_cast<int64_t>(free_at_start[device] - free));
    } else if (verb == "managed") {
        in >> size;
        const CUresult result = cuMemAllocManaged(&address, size, CU_MEM_ATTACH_GLOBAL);
        allocated(a, result, address, size);
    } else if (verb == "alloc_ordered") {
        in >> size;
        const CUresult result = cuMemAllocAsync(&address, size, nullptr);
        allocated(a, result, address, size);
    } else if (verb == "host") {
        in >> size;
        void *pointer = nullptr;
        const CUresult result = cuMemAllocHost(&pointer, size);
        std::printf("%s", name_of(result));
        if (result == CUDA_SUCCESS)
            host[100 + static_cast<int>(host.size())] = pointer;
    }
}

} // namespace

int main() {
    if (const CUresult result = cuInit(0); result != CUDA_SUCCESS) {
        std::fprintf(stderr, "cuInit: %s\n", name_of(result));
        return 1;
    }
    static const std::set<std::string> kVirtual = {
        "reserve", "unreserve",   "create",           "release", "map",
        "unmap",   "access",      "properties",       "retain",  "retain_plain",
        "share",   "fill_mapped", "attributes_mapped"};
    static const std::set<std::string> kContexts = {"context",       "use",  "no_context", "destroy",
                                                    "reset_primary", "peer", "no_peer"};
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream in(line);
        std::string verb;
        in >> verb;
        std::printf("%s: ", line.c_str());
        if (verb == "reset")
            reset();
        else if (kVirtual.count(verb) != 0)
            virtual_memory(verb, in);
        else if (verb == "capture" || verb == "end_capture" || verb == "exchange")
            captures(verb, in);
        else if (kContexts.count(verb) != 0)
            contexts_and_peers(verb, in);
        else
            plain_memory(verb, in);
        std::printf("\n");
        std::fflush(stdout);
    }
    return 0;
}
