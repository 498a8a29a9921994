// Libraries and their kernels: code that is loaded once and becomes a module in every context that uses it.
#include <fstream>
#include <sstream>

#include <cuda.h>

#include "api.hpp"
#include "fatbin.hpp"
#include "module.hpp"

namespace simgpu {
namespace {

void load_library(CUlibrary *result, const void *image) {
    require(result != nullptr && image != nullptr);
    auto library = std::make_shared<Library>();
    library->program = parse_ptx(ptx_of_image(image));
    for (const std::string &name : library->program->kernel_names()) {
        auto kernel = std::make_shared<Kernel>();
        kernel->library = library;
        kernel->name = name;
        kernels().add(kernel);
        library->kernels[name] = kernel;
    }
    *result = reinterpret_cast<CUlibrary>(libraries().add(library));
}

std::shared_ptr<Library> library_of(const Kernel &kernel) {
    auto library = kernel.library.lock();
    require(library != nullptr, CUDA_ERROR_INVALID_HANDLE);
    return library;
}

// The kernel's function in the current context, or in the primary context of `device`.
std::shared_ptr<Function> function_on(Kernel &kernel, CUdevice device) {
    auto library = library_of(kernel);
    auto context = current_context();
    if (!context || context->device != device) {
        std::lock_guard lock(primary_mutex());
        context = primary_of(device).context;
    }
    require(context != nullptr && context->alive.load(), CUDA_ERROR_INVALID_CONTEXT);
    return module_in(*library, *context)->functions.at(kernel.name);
}

CUkernel handle_of(const std::shared_ptr<Kernel> &kernel) {
    return reinterpret_cast<CUkernel>(kernel.get());
}

} // namespace
} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuLibraryLoadData(CUlibrary *result, const void *image, CUjit_option *, void **, unsigned int,
                                   CUlibraryOption *, void **, unsigned int) {
    return call([&] { load_library(result, image); });
}

CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *result, const char *path, CUjit_option *, void **, unsigned int,
                                       CUlibraryOption *, void **, unsigned int) {
    return call([&] {
        require(path != nullptr);
        std::ifstream file(path, std::ios::binary);
        require(file.good(), CUDA_ERROR_FILE_NOT_FOUND);
        std::stringstream content;
        content << file.rdbuf();
        load_library(result, (content.str() + std::string(64, '\0')).c_str());
    });
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary handle) {
    return call([&] {
        auto library = libraries().remove(handle);
        require(library != nullptr, CUDA_ERROR_INVALID_HANDLE);
        std::lock_guard lock(library->mutex);
        for (const auto &[name, kernel] : library->kernels)
            kernels().remove(kernel.get());
        for (const auto &[id, module] : library->modules) {
            if (auto context = module->context.lock())
                context->synchronize();
            unload_module(module);
        }
        library->modules.clear();
    });
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel *result, CUlibrary handle, const char *name) {
    return call([&] {
        require(result != nullptr && name != nullptr);
        auto library = libraries().get(handle);
        auto it = library->kernels.find(std::string_view(name));
        require(it != library->kernels.end(), CUDA_ERROR_NOT_FOUND);
        *result = handle_of(it->second);
    });
}

CUresult CUDAAPI cuLibraryGetKernelCount(unsigned int *count, CUlibrary handle) {
    return call([&] {
        require(count != nullptr);
        *count = static_cast<unsigned>(libraries().get(handle)->kernels.size());
    });
}

CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *list, unsigned int count, CUlibrary handle) {
    return call([&] {
        auto library = libraries().get(handle);
        require(list != nullptr || count == 0);
        for (const auto &[name, kernel] : library->kernels) {
            if (count-- == 0)
                return;
            *list++ = handle_of(kernel);
        }
    });
}

CUresult CUDAAPI cuLibraryGetModule(CUmodule *result, CUlibrary handle) {
    return call_in_context([&](Context &context) {
        require(result != nullptr);
        *result = reinterpret_cast<CUmodule>(module_in(*libraries().get(handle), context).get());
    });
}

CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *address, size_t *size, CUlibrary handle, const char *name) {
    return call_in_context([&](Context &context) {
        require(name != nullptr);
        auto module = module_in(*libraries().get(handle), context);
        auto it = module->globals.find(std::string_view(name));
        require(it != module->globals.end(), CUDA_ERROR_NOT_FOUND);
        put(address, it->second.address);
        put(size, it->second.size_bytes);
    });
}

CUresult CUDAAPI cuLibraryGetManaged(CUdeviceptr *, size_t *, CUlibrary, const char *) {
    return CUDA_ERROR_NOT_FOUND;
}
CUresult CUDAAPI cuLibraryGetUnifiedFunction(void **, CUlibrary, const char *) {
    return CUDA_ERROR_NOT_FOUND;
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction *result, CUkernel handle) {
    return call_in_context([&](Context &context) {
        require(result != nullptr);
        *result = resolve_function(reinterpret_cast<CUfunction>(kernels().get(handle).get()), context)->handle();
    });
}

CUresult CUDAAPI cuKernelGetLibrary(CUlibrary *result, CUkernel handle) {
    return call([&] {
        require(result != nullptr);
        *result = reinterpret_cast<CUlibrary>(library_of(*kernels().get(handle)).get());
    });
}

CUresult CUDAAPI cuKernelGetName(const char **name, CUkernel handle) {
    return call([&] {
        require(name != nullptr);
        *name = kernels().get(handle)->name.c_str();
    });
}

CUresult CUDAAPI cuKernelGetParamInfo(CUkernel handle, size_t index, size_t *offset, size_t *size) {
    return call([&] {
        require(offset != nullptr);
        auto kernel = kernels().get(handle);
        auto code = library_of(*kernel)->program->kernel(kernel->name);
        require(index < code.parameters().size());
        *offset = code.parameters()[index].offset_bytes;
        put(size, code.parameters()[index].size_bytes);
    });
}

CUresult CUDAAPI cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel handle, CUdevice device) {
    return call([&] {
        require(value != nullptr);
        *value = function_attribute(*function_on(*kernels().get(handle), device), attribute);
    });
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice device) {
    return call([&] {
        auto kernel = kernels().get(handle);
        set_function_attribute(*function_on(*kernel, device), attribute, value);
        std::lock_guard lock(kernel->mutex);
        kernel->attributes[attribute] = value;
    });
}

CUresult CUDAAPI cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache, CUdevice) {
    return call([&] { kernels().get(handle); });
}

} // extern "C"
