// Modules, and the functions and globals in them.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

#include <cuda.h>

#include "api.hpp"
#include "capture.hpp"
#include "fatbin.hpp"
#include "module.hpp"

namespace simgpu {
namespace {

constexpr std::streamoff kLargestFile = std::streamoff{1} << 30;

std::string read_file(const char *path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    require(file.good(), CUDA_ERROR_FILE_NOT_FOUND);
    require(file.tellg() <= kLargestFile, CUDA_ERROR_INVALID_IMAGE);
    file.seekg(0);
    std::stringstream content;
    content << file.rdbuf();
    return content.str() + std::string(64, '\0'); // a final NUL for PTX, and room for any header
}

void load(CUmodule *result, Context &context, const void *image) {
    require(result != nullptr && image != nullptr);
    forbid_during_capture();
    auto module = load_module(context, parse_ptx(ptx_of_image(image)));
    *result = reinterpret_cast<CUmodule>(module.get());
}

Function *function_at(const Module &module, const char *name) {
    require(name != nullptr);
    auto it = module.functions.find(std::string_view(name));
    require(it != module.functions.end(), CUDA_ERROR_NOT_FOUND);
    return it->second.get();
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuModuleLoad(CUmodule *result, const char *path) {
    return call_in_context([&](Context &context) {
        require(path != nullptr);
        load(result, context, read_file(path).c_str());
    });
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *result, const void *image) {
    return call_in_context([&](Context &context) { load(result, context, image); });
}

// The options steer an assembler that the simulated driver does not have. Log buffers are left empty.
CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *result, const void *image, unsigned int count, CUjit_option *options,
                                    void **values) {
    return call_in_context([&](Context &context) {
        require(count == 0 || (options != nullptr && values != nullptr));
        for (unsigned i = 0; i < count; ++i) {
            bool log_size =
                options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES || options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES;
            if (log_size)
                values[i] = nullptr;
        }
        load(result, context, image);
    });
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *result, const void *image) {
    return call_in_context([&](Context &context) { load(result, context, image); });
}

CUresult CUDAAPI cuModuleUnload(CUmodule handle) {
    return call_in_context([&](Context &) {
        auto module = modules().get(handle);
        require(module->library.expired(), CUDA_ERROR_NOT_PERMITTED);
        forbid_during_capture();
        if (auto context = module->context.lock())
            context->synchronize();
        unload_module(module);
    });
}

CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    return call([&] {
        require(mode != nullptr);
        *mode = CU_MODULE_EAGER_LOADING;
    });
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *result, CUmodule handle, const char *name) {
    return call_in_context([&](Context &) {
        require(result != nullptr);
        *result = function_at(*modules().get(handle), name)->handle();
    });
}

CUresult CUDAAPI cuModuleGetFunctionCount(unsigned int *count, CUmodule handle) {
    return call([&] {
        require(count != nullptr);
        *count = static_cast<unsigned>(modules().get(handle)->functions.size());
    });
}

CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction *list, unsigned int count, CUmodule handle) {
    return call([&] {
        auto module = modules().get(handle);
        require(list != nullptr || count == 0);
        for (const auto &[name, function] : module->functions) {
            if (count-- == 0)
                return;
            *list++ = function->handle();
        }
    });
}

CUresult CUDAAPI cuModuleGetGlobal(CUdeviceptr *address, size_t *size, CUmodule handle, const char *name) {
    return call_in_context([&](Context &) {
        require(name != nullptr);
        auto module = modules().get(handle);
        auto it = module->globals.find(std::string_view(name));
        require(it != module->globals.end(), CUDA_ERROR_NOT_FOUND);
        put(address, it->second.address);
        put(size, it->second.size_bytes);
    });
}

// Linking: one PTX input is passed through; there is no linker that could join several.
CUresult CUDAAPI cuLinkCreate(unsigned int, CUjit_option *, void **, CUlinkState *state) {
    return call_in_context([&](Context &) {
        require(state != nullptr);
        *state = reinterpret_cast<CUlinkState>(new std::string);
    });
}

CUresult CUDAAPI cuLinkAddData(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *,
                               unsigned int, CUjit_option *, void **) {
    return call([&] {
        require(state != nullptr && data != nullptr);
        auto *text = reinterpret_cast<std::string *>(state);
        require((type == CU_JIT_INPUT_PTX || type == CU_JIT_INPUT_FATBINARY) && text->empty(),
                CUDA_ERROR_NOT_SUPPORTED);
        if (type == CU_JIT_INPUT_PTX) {
            *text = std::string(static_cast<const char *>(data), strnlen(static_cast<const char *>(data), size));
        } else {
            *text = ptx_of_image(data);
        }
    });
}

CUresult CUDAAPI cuLinkAddFile(CUlinkState state, CUjitInputType type, const char *path, unsigned int count,
                               CUjit_option *options, void **values) {
    return call([&] {
        require(path != nullptr);
        std::string content = read_file(path);
        CUresult code = cuLinkAddData(state, type, content.data(), content.size(), path, count, options, values);
        require(code == CUDA_SUCCESS, code);
    });
}

CUresult CUDAAPI cuLinkComplete(CUlinkState state, void **image, size_t *size) {
    return call([&] {
        require(state != nullptr && image != nullptr);
        auto *text = reinterpret_cast<std::string *>(state);
        require(!text->empty(), CUDA_ERROR_INVALID_VALUE);
        parse_ptx(*text);
        *image = text->data();
        put(size, text->size() + 1);
    });
}

CUresult CUDAAPI cuLinkDestroy(CUlinkState state) {
    return call([&] {
        require(state != nullptr);
        delete reinterpret_cast<std::string *>(state);
    });
}

} // extern "C"
