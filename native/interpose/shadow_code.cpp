// Handles, images and kernels; see shadow_code.hpp.
//
// A handle may be given again by the driver after its owner is gone, so what leaves is forgotten before the driver
// hears of it, and handles that came in a way which does not tell their name are forgotten too and asked for when
// launched.
#include "shadow_code.hpp"

#include "capture.hpp"
#include "changes.hpp"
#include "shadow_dirty.hpp"
#include "shadow_image.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace woodfrog::interpose::shadow {
namespace {

struct Loaded {
    std::string image;
    CUlibrary library = nullptr; // whose module it is
    CUcontext context = nullptr; // that it was loaded in
    CUdevice device = -1;
};

struct Code {
    std::shared_mutex mutex;
    std::unordered_map<CUmodule, Loaded> modules;
    std::unordered_map<CUlibrary, std::string> libraries;
    std::unordered_map<CUfunction, Kernel *> functions;
    std::unordered_map<CUkernel, Kernel *> kernels;
    std::vector<Kernel *> all;
    // Of has_template and lay_out: what they find out once is found out by one thread.
    std::mutex slow;
    std::map<std::string, Catalogue *> catalogues; // by key
};

Code &code() {
    static Code *const instance = new Code;
    return *instance;
}

Kernel *new_kernel(std::string name, std::string image, CUmodule module, CUlibrary library) { // with the lock held
    Kernel *kernel = new Kernel;
    kernel->name = std::move(name);
    kernel->image = std::move(image);
    kernel->module = module;
    kernel->library = library;
    code().all.push_back(kernel);
    return kernel;
}

// Held by whoever changes which kernel a handle is.
struct Changing {
    std::unique_lock<std::shared_mutex> lock{code().mutex};
    Changing() { note_change(); }
};

template <typename Predicate> void forget_kernels(Predicate gone) { // with the lock held
    std::erase_if(code().functions, [&](const auto &entry) { return gone(*entry.second); });
    std::erase_if(code().kernels, [&](const auto &entry) { return gone(*entry.second); });
}

void loaded_module(CUmodule module, std::string image, CUlibrary library = nullptr) {
    Loaded loaded{std::move(image), library, nullptr, -1};
    if (WF_DRIVER(cuCtxGetCurrent)(&loaded.context) != CUDA_SUCCESS ||
        WF_DRIVER(cuCtxGetDevice)(&loaded.device) != CUDA_SUCCESS)
        loaded = {{}, library, nullptr, -1}; // whose end would not be seen: as if it had no PTX
    const Changing changing;
    Loaded &known = code().modules[module];
    if (known.library == nullptr || known.library != library) // a library's module may be asked for again and again
        forget_kernels([&](const Kernel &kernel) { return kernel.module == module; });
    known = std::move(loaded);
}

void loaded_library(CUlibrary library, std::string image) {
    const Changing changing;
    forget_kernels([&](const Kernel &kernel) { return kernel.library == library; });
    code().libraries[library] = std::move(image);
}

void module_leaves(CUmodule module) {
    const Changing changing;
    code().modules.erase(module);
    forget_kernels([&](const Kernel &kernel) { return kernel.module == module; });
}

void library_leaves(CUlibrary library) {
    const Changing changing;
    code().libraries.erase(library);
    std::erase_if(code().modules, [&](const auto &entry) { return entry.second.library == library; });
    forget_kernels([&](const Kernel &kernel) { return kernel.library == library; });
}

// Modules end with their context.
template <typename Predicate> void contexts_leave(Predicate gone) {
    const Changing changing;
    forget_kernels([&](const Kernel &kernel) {
        if (kernel.module == nullptr)
            return false;
        const auto found = code().modules.find(kernel.module);
        return found == code().modules.end() || gone(found->second);
    });
    std::erase_if(code().modules, [&](const auto &entry) { return gone(entry.second); });
    // A library's function in that context: which context it is of is not kept.
    std::erase_if(code().functions, [](const auto &entry) { return entry.second->library != nullptr; });
}

void context_leaves(CUcontext context) {
    contexts_leave([&](const Loaded &module) { return module.context == context; });
}

void primary_context_may_have_left(CUdevice device) {
    unsigned flags = 0;
    int active = 0;
    if (WF_DRIVER(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active != 0)
        return;
    contexts_leave([&](const Loaded &module) { return module.device == device; });
}

void add_function(CUfunction function, CUmodule module, const char *name) {
    std::unique_lock lock(code().mutex);
    const auto found = code().modules.find(module);
    if (found == code().modules.end() || name == nullptr) {
        note_change();
        code().functions.erase(function);
        return;
    }
    // Asked for again, perhaps before each launch: it is the same one as long as its module is there.
    if (const auto known = code().functions.find(function);
        known != code().functions.end() && known->second->module == module && known->second->name == name)
        return;
    note_change();
    code().functions[function] = new_kernel(name, found->second.image, module, found->second.library);
}

void add_kernel(CUkernel kernel, CUlibrary library, const char *name) {
    std::unique_lock lock(code().mutex);
    const auto found = code().libraries.find(library);
    if (found == code().libraries.end() || name == nullptr) {
        note_change();
        code().kernels.erase(kernel);
        return;
    }
    if (const auto known = code().kernels.find(kernel);
        known != code().kernels.end() && known->second->library == library && known->second->name == name)
        return;
    note_change();
    code().kernels[kernel] = new_kernel(name, found->second, nullptr, library);
}

Kernel *look_up(CUfunction function) {
    std::shared_lock lock(code().mutex);
    if (const auto found = code().functions.find(function); found != code().functions.end())
        return found->second;
    const auto found = code().kernels.find(reinterpret_cast<CUkernel>(function));
    return found == code().kernels.end() ? nullptr : found->second;
}

bool is_library_kernel(CUfunction function) {
    std::shared_lock lock(code().mutex);
    return !code().functions.contains(function) && code().kernels.contains(reinterpret_cast<CUkernel>(function));
}

// Which virtual architecture the code was compiled for, whatever the driver chose out of a fatbin; 0: it does not say.
int ptx_version(CUfunction function) {
    int version = 0;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (is_library_kernel(function)) {
        CUdevice device = 0;
        if (WF_DRIVER(cuCtxGetDevice)(&device) == CUDA_SUCCESS)
            result = WF_DRIVER(cuKernelGetAttribute)(&version, CU_FUNC_ATTRIBUTE_PTX_VERSION,
                                                     reinterpret_cast<CUkernel>(function), device);
    } else {
        result = WF_DRIVER(cuFuncGetAttribute)(&version, CU_FUNC_ATTRIBUTE_PTX_VERSION, function);
    }
    return result == CUDA_SUCCESS ? version : 0;
}

// A kernel of a library is one handle on all devices; with devices of several kinds it may be several codes.
bool devices_are_alike() {
    int count = 0;
    if (WF_DRIVER(cuDeviceGetCount)(&count) != CUDA_SUCCESS)
        return false;
    int first[2] = {};
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        CUdevice device = 0;
        int capability[2] = {};
        if (WF_DRIVER(cuDeviceGet)(&device, ordinal) != CUDA_SUCCESS ||
            WF_DRIVER(cuDeviceGetAttribute)(&capability[0], CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) !=
                CUDA_SUCCESS ||
            WF_DRIVER(cuDeviceGetAttribute)(&capability[1], CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device) !=
                CUDA_SUCCESS)
            return false;
        if (ordinal == 0)
            std::copy(std::begin(capability), std::end(capability), std::begin(first));
        else if (!std::equal(std::begin(capability), std::end(capability), std::begin(first)))
            return false;
    }
    return true;
}

// Null or why it has no template. With `slow` held.
const char *take_template(Kernel *kernel, CUfunction function) {
    if (kernel->image.empty())
        return "machine code without PTX";
    Catalogue *&catalogue = code().catalogues[kernel->image];
    if (catalogue == nullptr)
        catalogue = find_catalogue(kernel->image);
    if (catalogue == nullptr)
        return "its templates are not made yet";
    const int version = ptx_version(function);
    const CatalogueKernel *found = nullptr;
    const auto [first, last] = catalogue->kernels.equal_range(kernel->name);
    for (auto at = first; at != last; ++at)
        if (at->second.ptx_version == 0 || (version != 0 && at->second.ptx_version == version))
            found = &at->second;
    if (found == nullptr)
        return "no PTX of what the driver runs";
    if (!found->bounded)
        return "its template has writes that may be anywhere";
    if (kernel->library != nullptr && (!found->symbols.empty() || !devices_are_alike()))
        return "a library's kernel that differs between devices";
    if (!kernel->laid_out.load(std::memory_order_relaxed)) {
        kernel->parameters = found->parameters;
        kernel->parameters_bytes = found->parameters_bytes;
        kernel->laid_out.store(true, std::memory_order_release);
    }
    if (kernel->parameters_bytes < found->parameters_bytes)
        return "its parameters are not those of its template";
    const RelaxedScope relaxed;
    for (const std::string &symbol : found->symbols) {
        CUdeviceptr address = 0;
        size_t size_bytes = 0;
        if (WF_DRIVER(cuModuleGetGlobal_v2)(&address, &size_bytes, kernel->module, symbol.c_str()) != CUDA_SUCCESS) {
            kernel->symbols.clear();
            kernel->symbol_allocations.clear();
            return "a variable of its module cannot be found";
        }
        kernel->symbols.push_back(address);
        kernel->symbol_allocations.push_back({address, size_bytes});
    }
    kernel->catalogue = catalogue;
    kernel->number = found->number;
    return nullptr;
}

} // namespace

Kernel *kernel_of(CUfunction function) {
    if (Kernel *known = look_up(function); known != nullptr)
        return known;
    CUmodule module = nullptr;
    const char *name = nullptr;
    if (WF_DRIVER(cuFuncGetModule)(&module, function) != CUDA_SUCCESS ||
        WF_DRIVER(cuFuncGetName)(&name, function) != CUDA_SUCCESS)
        return nullptr;
    add_function(function, module, name);
    return look_up(function);
}

bool lay_out(Kernel *kernel, CUfunction function) {
    if (kernel->laid_out.load(std::memory_order_acquire))
        return true;
    std::lock_guard lock(code().slow);
    if (kernel->laid_out.load(std::memory_order_relaxed))
        return true;
    std::vector<ParameterPlace> found;
    size_t bytes = 0;
    const bool library_kernel = is_library_kernel(function);
    for (size_t index = 0;; ++index) {
        ParameterPlace place{};
        const CUresult result =
            library_kernel ? WF_DRIVER(cuKernelGetParamInfo)(reinterpret_cast<CUkernel>(function), index,
                                                             &place.offset_bytes, &place.size_bytes)
                           : WF_DRIVER(cuFuncGetParamInfo)(function, index, &place.offset_bytes, &place.size_bytes);
        if (result == CUDA_ERROR_INVALID_VALUE)
            break; // that was the last one
        if (result != CUDA_SUCCESS)
            return false;
        found.push_back(place);
        bytes = std::max(bytes, place.offset_bytes + place.size_bytes);
    }
    kernel->parameters = std::move(found);
    kernel->parameters_bytes = bytes;
    kernel->laid_out.store(true, std::memory_order_release);
    return true;
}

bool has_template(Kernel *kernel, CUfunction function) {
    const auto is_loaded = [&] { return kernel->catalogue->evaluate.load(std::memory_order_acquire) != nullptr; };
    if (kernel->ready.load(std::memory_order_acquire) && is_loaded())
        return true;
    const uint32_t epoch = dirty_epoch();
    if (kernel->tried.load(std::memory_order_acquire) == epoch)
        return false;
    std::lock_guard lock(code().slow);
    const bool ready = kernel->ready.load(std::memory_order_relaxed);
    if (ready && is_loaded())
        return true;
    const char *why = ready ? nullptr : take_template(kernel, function);
    if (why == nullptr && !load_catalogue(kernel->catalogue)) // unloaded for a process image, or not yet loaded
        why = "its templates cannot be loaded";
    if (why == nullptr) {
        kernel->ready.store(true, std::memory_order_release);
        return true;
    }
    kernel->why.store(why, std::memory_order_relaxed);
    kernel->tried.store(epoch, std::memory_order_release);
    return false;
}

bool is_unbounded(const Kernel &kernel) {
    return kernel.unbounded.load(std::memory_order_relaxed) == dirty_epoch();
}

std::vector<KernelUse> take_kernel_uses(size_t most) {
    std::vector<KernelUse> uses;
    {
        std::shared_lock lock(code().mutex);
        for (Kernel *kernel : code().all)
            if (const uint64_t launches = kernel->launches.exchange(0, std::memory_order_relaxed); launches != 0)
                uses.push_back(
                    {kernel->name, launches, kernel->ready.load(std::memory_order_relaxed) && !is_unbounded(*kernel)});
    }
    std::sort(uses.begin(), uses.end(),
              [](const KernelUse &one, const KernelUse &other) { return one.launches > other.launches; });
    if (uses.size() > most)
        uses.resize(most);
    return uses;
}

void unload_all_catalogues() {
    std::lock_guard lock(code().slow);
    for (const auto &[key, catalogue] : code().catalogues)
        if (catalogue != nullptr)
            unload_catalogue(catalogue);
}

namespace {

constexpr auto kModuleFromFile = [](CUmodule *module, const char *path) { loaded_module(*module, submit_file(path)); };
constexpr auto kModuleFromData = [](CUmodule *module, const void *image, auto...) {
    loaded_module(*module, submit_image(image));
};
constexpr auto kModuleLeaves = [](CUmodule module) { module_leaves(module); };
constexpr auto kFunction = [](CUfunction *function, CUmodule module, const char *name) {
    add_function(*function, module, name);
};
constexpr auto kFunctions = [](CUfunction *functions, unsigned count, CUmodule) {
    const Changing changing;
    for (unsigned i = 0; i < count; ++i)
        code().functions.erase(functions[i]);
};
constexpr auto kLibraryFromFile = [](CUlibrary *library, const char *path, auto...) {
    loaded_library(*library, submit_file(path));
};
constexpr auto kLibraryFromData = [](CUlibrary *library, const void *image, auto...) {
    loaded_library(*library, submit_image(image));
};
constexpr auto kLibraryLeaves = [](CUlibrary library) { library_leaves(library); };
constexpr auto kLibraryModule = [](CUmodule *module, CUlibrary library) {
    std::string image;
    {
        std::shared_lock lock(code().mutex);
        if (const auto found = code().libraries.find(library); found != code().libraries.end())
            image = found->second;
    }
    loaded_module(*module, image, library);
};
constexpr auto kLibraryKernel = [](CUkernel *kernel, CUlibrary library, const char *name) {
    add_kernel(*kernel, library, name);
};
constexpr auto kLibraryKernels = [](CUkernel *kernels, unsigned count, CUlibrary library) {
    for (unsigned i = 0; i < count; ++i) {
        const char *name = nullptr;
        if (kernels[i] != nullptr && WF_DRIVER(cuKernelGetName)(&name, kernels[i]) != CUDA_SUCCESS)
            name = nullptr;
        add_kernel(kernels[i], library, name);
    }
};
constexpr auto kKernelFunction = [](CUfunction *function, CUkernel kernel) {
    const Changing changing;
    const auto found = code().kernels.find(kernel);
    if (found == code().kernels.end())
        code().functions.erase(*function);
    else
        code().functions[*function] = found->second;
};
constexpr auto kContextLeaves = [](CUcontext context) { context_leaves(context); };
constexpr auto kPrimaryContext = [](CUdevice device) { primary_context_may_have_left(device); };

} // namespace

Overrides code_overrides() {
    return {
        WF_AFTER(cuModuleLoad, kModuleFromFile),
        WF_AFTER(cuModuleLoadData, kModuleFromData),
        WF_AFTER(cuModuleLoadDataEx, kModuleFromData),
        WF_AFTER(cuModuleLoadFatBinary, kModuleFromData),
        WF_BEFORE(cuModuleUnload, kModuleLeaves),
        WF_AFTER(cuModuleGetFunction, kFunction),
        WF_AFTER(cuModuleEnumerateFunctions, kFunctions),
        WF_AFTER(cuLibraryLoadFromFile, kLibraryFromFile),
        WF_AFTER(cuLibraryLoadData, kLibraryFromData),
        WF_BEFORE(cuLibraryUnload, kLibraryLeaves),
        WF_AFTER(cuLibraryGetModule, kLibraryModule),
        WF_AFTER(cuLibraryGetKernel, kLibraryKernel),
        WF_AFTER(cuLibraryEnumerateKernels, kLibraryKernels),
        WF_AFTER(cuKernelGetFunction, kKernelFunction),
        WF_BEFORE(cuCtxDestroy, kContextLeaves),
        WF_BEFORE(cuCtxDestroy_v2, kContextLeaves),
        WF_AFTER(cuDevicePrimaryCtxReset, kPrimaryContext),
        WF_AFTER(cuDevicePrimaryCtxReset_v2, kPrimaryContext),
        WF_AFTER(cuDevicePrimaryCtxRelease, kPrimaryContext),
        WF_AFTER(cuDevicePrimaryCtxRelease_v2, kPrimaryContext),
    };
}

} // namespace woodfrog::interpose::shadow
