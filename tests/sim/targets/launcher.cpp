// A target for the tests that launches what it is told to: kernels, copies, fills and graphs on GPU memory.
//
//     launcher COMMANDS
//
// Orders and answers are those of the scribbler (scribbler.cpp): lines appended to the file COMMANDS, SIGUSR1, one line
// of answer each. Addresses are hexadecimal.
//
//     alloc SIZE | free ADDRESS | write ADDRESS SIZE SEED | put ADDRESS HEX | get ADDRESS SIZE
//     set WIDTH ADDRESS COUNT VALUE             cuMemsetD8, 16 or 32, in stream order
//     box ADDRESS PITCH WIDTH HEIGHT VALUE      cuMemsetD2D8
//     copy HOW TO FROM SIZE                     HOW: plain, async, peer, 2d, 3d
//     load FILE HOW                             a module's number; HOW: module or library
//     launch MODULE KERNEL HOW GRID3 BLOCK3 SHARED HEX    HOW: params, extra, ex, cooperative; HEX: the parameter block
//     burst MODULE KERNEL COUNT HEX             as many captured launches, each with the count added to the block's
//     last
//                                               word; they are never run
//     capture | captured                        orders in between go into a graph; the number of the executable
//     again NUMBER                              launches it
//     update NUMBER                             ends a capture, and updates the executable with the graph
//     map SIZE | move ADDRESS | unmap ADDRESS   the application's own virtual memory; move: to another address
//     value ADDRESS VALUE                       cuStreamWriteValue32
//     fork                                      a child that calls the driver and ends
//     end                                       exits 0
#include "orders.hpp"

#include <cuda.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

CUstream stream = nullptr;
bool capturing = false;

struct Code {
    CUmodule module = nullptr;
    CUlibrary library = nullptr;
};
std::vector<Code> codes;
std::vector<CUgraphExec> executables;
std::vector<CUgraph> graphs; // kept: an executable's nodes are named by them

struct Mapped {
    CUmemGenericAllocationHandle handle;
    size_t size;
};
std::map<CUdeviceptr, Mapped> mappings;

std::vector<uint8_t> bytes_of(uint64_t seed, size_t size) { // as the scribbler's
    constexpr size_t period = 8191;
    std::vector<uint8_t> bytes(size);
    uint64_t state = seed;
    for (size_t at = 0; at < size; ++at) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        bytes[at] = at < period ? static_cast<uint8_t>(state >> 56) : bytes[at - period];
    }
    return bytes;
}

std::vector<uint8_t> unhex(const std::string &text) {
    std::vector<uint8_t> bytes;
    for (size_t at = 0; at + 1 < text.size(); at += 2)
        bytes.push_back(static_cast<uint8_t>(std::stoul(text.substr(at, 2), nullptr, 16)));
    return bytes;
}

std::string hex(CUdeviceptr value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%llx", value);
    return text;
}

std::string told(CUresult result, const std::string &answer = "ok") {
    if (result == CUDA_SUCCESS)
        return answer;
    const char *name = "?";
    cuGetErrorName(result, &name);
    return std::string("error ") + name;
}

CUresult settle(CUresult result) {
    return result == CUDA_SUCCESS && !capturing ? cuStreamSynchronize(stream) : result;
}

CUresult function_of(size_t number, const std::string &name, CUfunction *function) {
    const Code &code = codes.at(number);
    if (code.library == nullptr)
        return cuModuleGetFunction(function, code.module, name.c_str());
    return cuLibraryGetKernel(reinterpret_cast<CUkernel *>(function), code.library, name.c_str());
}

CUresult parameter_place(size_t number, CUfunction function, size_t index, size_t *offset, size_t *size) {
    return codes.at(number).library == nullptr
               ? cuFuncGetParamInfo(function, index, offset, size)
               : cuKernelGetParamInfo(reinterpret_cast<CUkernel>(function), index, offset, size);
}

CUresult launch(size_t number, CUfunction function, const std::string &how, const unsigned (&grid)[3],
                const unsigned (&block)[3], unsigned shared, std::vector<uint8_t> &bytes) {
    size_t size = bytes.size();
    if (how == "extra") {
        void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, bytes.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                         CU_LAUNCH_PARAM_END};
        return cuLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, stream,
                              nullptr, extra);
    }
    std::vector<void *> parameters;
    size_t offset = 0, length = 0;
    for (size_t index = 0; parameter_place(number, function, index, &offset, &length) == CUDA_SUCCESS; ++index) {
        if (bytes.size() < offset + length)
            bytes.resize(offset + length);
        parameters.push_back(nullptr);
    }
    for (size_t index = 0; index < parameters.size(); ++index) {
        parameter_place(number, function, index, &offset, &length);
        parameters[index] = bytes.data() + offset;
    }
    if (how == "cooperative")
        return cuLaunchCooperativeKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared,
                                         stream, parameters.data());
    if (how == "ex") {
        CUlaunchConfig config{};
        config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
        config.blockDimX = block[0], config.blockDimY = block[1], config.blockDimZ = block[2];
        config.sharedMemBytes = shared;
        config.hStream = stream;
        return cuLaunchKernelEx(&config, function, parameters.data(), nullptr);
    }
    return cuLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, stream,
                          parameters.data(), nullptr);
}

CUresult copy(const std::string &how, CUdeviceptr to, CUdeviceptr from, size_t size) {
    CUcontext context = nullptr;
    cuCtxGetCurrent(&context);
    if (how == "plain")
        return cuMemcpyDtoD(to, from, size);
    if (how == "peer")
        return cuMemcpyPeerAsync(to, context, from, context, size, stream);
    if (how == "2d") { // rows of 16 bytes in lines of 32
        CUDA_MEMCPY2D box{};
        box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        box.srcDevice = from, box.dstDevice = to;
        box.srcPitch = box.dstPitch = 32;
        box.dstXInBytes = 8, box.dstY = size >= 128 ? 1 : 0;
        box.WidthInBytes = 16, box.Height = size / 32 - box.dstY;
        return cuMemcpy2DAsync(&box, stream);
    }
    if (how == "3d") { // boxes of 4 lines of 16
        CUDA_MEMCPY3D box{};
        box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        box.srcDevice = from, box.dstDevice = to;
        box.srcPitch = box.dstPitch = 16;
        box.srcHeight = box.dstHeight = 4;
        box.WidthInBytes = 12, box.Height = 3, box.Depth = size / 64;
        return cuMemcpy3DAsync(&box, stream);
    }
    return cuMemcpyDtoDAsync(to, from, size, stream);
}

CUresult map(CUmemGenericAllocationHandle handle, size_t size, CUdeviceptr *address) {
    CUresult result = cuMemAddressReserve(address, size, 0, 0, 0);
    if (result == CUDA_SUCCESS)
        result = cuMemMap(*address, size, 0, handle, 0);
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (result == CUDA_SUCCESS)
        result = cuMemSetAccess(*address, size, &access, 1);
    if (result == CUDA_SUCCESS)
        mappings[*address] = {handle, size};
    return result;
}

std::string virtual_memory(const std::string &verb, std::istringstream &words) {
    CUdeviceptr address = 0;
    if (verb == "map") {
        size_t size = 0;
        words >> size;
        CUmemAllocationProp wanted{};
        wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
        CUmemGenericAllocationHandle handle = 0;
        CUresult result = cuMemCreate(&handle, size, &wanted, 0);
        if (result == CUDA_SUCCESS)
            result = map(handle, size, &address);
        return told(result, hex(address));
    }
    words >> std::hex >> address;
    const Mapped mapped = mappings.at(address);
    CUresult result = cuMemUnmap(address, mapped.size);
    if (result == CUDA_SUCCESS)
        result = cuMemAddressFree(address, mapped.size);
    mappings.erase(address);
    if (verb == "unmap")
        return told(result == CUDA_SUCCESS ? cuMemRelease(mapped.handle) : result);
    CUdeviceptr there = 0;
    if (result == CUDA_SUCCESS)
        result = map(mapped.handle, mapped.size, &there);
    return told(result, hex(there));
}

std::string code(std::istringstream &words) {
    std::string path, how;
    words >> path >> how;
    std::ifstream file(path);
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    Code loaded;
    const CUresult result =
        how == "library" ? cuLibraryLoadData(&loaded.library, text.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0)
                         : cuModuleLoadData(&loaded.module, text.c_str());
    codes.push_back(loaded);
    return told(result, std::to_string(codes.size() - 1));
}

std::string launches(const std::string &verb, std::istringstream &words) {
    size_t number = 0;
    std::string name, how = "extra", text;
    unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, shared = 0, count = 1;
    words >> number >> name;
    if (verb == "burst")
        words >> count >> text;
    else
        words >> how >> grid[0] >> grid[1] >> grid[2] >> block[0] >> block[1] >> block[2] >> shared >> text;
    std::vector<uint8_t> bytes = unhex(text);
    CUfunction function = nullptr;
    CUresult result = function_of(number, name, &function);
    if (verb == "launch")
        return told(result == CUDA_SUCCESS ? settle(launch(number, function, how, grid, block, shared, bytes))
                                           : result);
    if (result == CUDA_SUCCESS)
        result = cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < count; ++i) {
        std::memcpy(bytes.data() + bytes.size() - 4, &i, 4);
        result = launch(number, function, how, grid, block, shared, bytes);
    }
    CUgraph graph = nullptr;
    const CUresult ended = cuStreamEndCapture(stream, &graph);
    if (graph != nullptr)
        cuGraphDestroy(graph);
    return told(result == CUDA_SUCCESS ? ended : result);
}

std::string graph(const std::string &verb, std::istringstream &words) {
    size_t number = 0;
    if (verb == "capture") {
        capturing = true;
        return told(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    }
    words >> number;
    if (verb == "again")
        return told(settle(cuGraphLaunch(executables.at(number), stream)));
    capturing = false;
    CUgraph captured = nullptr;
    CUresult result = cuStreamEndCapture(stream, &captured);
    graphs.push_back(captured);
    if (verb == "update") {
        CUgraphExecUpdateResultInfo info{};
        return told(result == CUDA_SUCCESS ? cuGraphExecUpdate(executables.at(number), captured, &info) : result);
    }
    executables.push_back(nullptr);
    if (result == CUDA_SUCCESS)
        result = cuGraphInstantiate(&executables.back(), captured, 0);
    return told(result, std::to_string(executables.size() - 1));
}

std::string fork_child() {
    const pid_t child = fork();
    if (child == 0) {
        CUdeviceptr address = 0;
        // The driver refuses everything in a forked child; nothing of ours may hang or crash before it does.
        _exit(cuMemAlloc(&address, 64) != CUDA_SUCCESS && cuMemsetD8(address, 0, 64) != CUDA_SUCCESS ? 0 : 1);
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0 ? "ok" : "error in the child";
}

std::string obey(const std::string &line) {
    std::istringstream words(line);
    std::string verb, text;
    words >> verb;
    CUdeviceptr address = 0, from = 0;
    size_t size = 0, pitch = 0, height = 0;
    uint64_t value = 0;
    if (verb == "alloc") {
        words >> size;
        const CUresult result = cuMemAlloc(&address, size);
        return told(result, hex(address));
    }
    if (verb == "load")
        return code(words);
    if (verb == "launch" || verb == "burst")
        return launches(verb, words);
    if (verb == "capture" || verb == "captured" || verb == "again" || verb == "update")
        return graph(verb, words);
    if (verb == "map" || verb == "unmap" || verb == "move")
        return virtual_memory(verb, words);
    if (verb == "fork")
        return fork_child();
    if (verb == "copy") {
        words >> text >> std::hex >> address >> from >> std::dec >> size;
        return told(settle(copy(text, address, from, size)));
    }
    if (verb == "set") {
        unsigned width = 0;
        words >> width >> std::hex >> address >> std::dec >> size >> value;
        return told(settle(width == 8    ? cuMemsetD8Async(address, static_cast<unsigned char>(value), size, stream)
                           : width == 16 ? cuMemsetD16Async(address, static_cast<unsigned short>(value), size, stream)
                                         : cuMemsetD32Async(address, static_cast<unsigned>(value), size, stream)));
    }
    words >> std::hex >> address >> std::dec;
    if (verb == "free")
        return told(cuMemFree(address));
    if (verb == "encode") {
        CUtensorMap map;
        const cuuint64_t extent = 64;
        const cuuint32_t box = 64, stride = 1;
        const CUresult result =
            cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 1, reinterpret_cast<void *>(address), &extent,
                                   nullptr, &box, &stride, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                   CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        return told(result, hex(map.opaque[0]));
    }
    if (verb == "value") {
        words >> value;
        return told(settle(cuStreamWriteValue32(stream, address, static_cast<uint32_t>(value), 0)));
    }
    if (verb == "put") {
        words >> text;
        const std::vector<uint8_t> bytes = unhex(text);
        return told(cuMemcpyHtoD(address, bytes.data(), bytes.size()));
    }
    if (verb == "box") {
        words >> pitch >> size >> height >> value;
        return told(settle(cuMemsetD2D8Async(address, pitch, static_cast<unsigned char>(value), size, height, stream)));
    }
    words >> size;
    if (verb == "write") {
        words >> value;
        return told(cuMemcpyHtoD(address, bytes_of(value, size).data(), size));
    }
    if (verb == "get") {
        std::vector<uint8_t> bytes(size);
        const CUresult result = cuMemcpyDtoH(bytes.data(), address, size);
        std::string answer;
        char two[3];
        for (const uint8_t byte : bytes) {
            std::snprintf(two, sizeof(two), "%02x", byte);
            answer += two;
        }
        return told(result, answer);
    }
    return "error unknown order";
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2)
        return 2;
    const auto prepare = [] {
        CUdevice device = 0;
        CUcontext context = nullptr;
        return cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS &&
               cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS && cuCtxSetCurrent(context) == CUDA_SUCCESS &&
               cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
    };
    return orders::take(argv[1], prepare, obey);
}
