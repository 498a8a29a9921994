// See module.hpp.
#include "module.hpp"

#include <cstdio>
#include <cstring>

#include "address_space.hpp"
#include "context.hpp"
#include "device.hpp"
#include "error.hpp"

namespace simgpu {
namespace {

void place_globals(Module &module, Context &context) {
    for (const ptx::Variable &variable : module.program->globals()) {
        if (variable.is_extern && variable.size_bytes == 0)
            continue;
        Global global;
        global.size_bytes = variable.size_bytes;
        global.address = context.heap.allocate(std::max<size_t>(variable.size_bytes, 1));
        auto *memory = reinterpret_cast<std::byte *>(global.address);
        std::memcpy(memory, variable.initial.data(), variable.initial.size());
        std::memset(memory + variable.initial.size(), 0, variable.size_bytes - variable.initial.size());
        module.globals[variable.name] = global;
        Allocation allocation;
        allocation.base = global.address;
        allocation.size_bytes = std::max<size_t>(variable.size_bytes, 1);
        allocation.kind = AllocationKind::kGlobal;
        allocation.context = context.weak_from_this();
        allocation.device = context.device;
        AddressSpace::instance().add_allocation(std::move(allocation));
    }
    for (const ptx::Variable &variable : module.program->globals()) {
        for (const ptx::Relocation &relocation : variable.relocations) {
            auto symbol = module.globals.find(relocation.symbol);
            require(symbol != module.globals.end(), CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND);
            std::uint64_t value = symbol->second.address + static_cast<std::uint64_t>(relocation.addend);
            auto *slot = reinterpret_cast<std::byte *>(module.globals[variable.name].address) + relocation.offset_bytes;
            std::memcpy(slot, &value, std::min<size_t>(relocation.size_bytes, sizeof value));
        }
    }
}

} // namespace

HandleTable<Module> &modules() {
    static auto *table = new HandleTable<Module>;
    return *table;
}

HandleTable<Function> &functions() {
    static auto *table = new HandleTable<Function>;
    return *table;
}

HandleTable<Library> &libraries() {
    static auto *table = new HandleTable<Library>;
    return *table;
}

HandleTable<Kernel> &kernels() {
    static auto *table = new HandleTable<Kernel>;
    return *table;
}

std::shared_ptr<const ptx::Module> parse_ptx(const std::string &text) {
    try {
        return ptx::Module::parse(text);
    } catch (const ptx::ParseError &error) {
        std::fprintf(stderr, "simulated GPU: PTX not understood: %s\n", error.what());
        throw Error{CUDA_ERROR_INVALID_PTX};
    }
}

std::shared_ptr<Module> load_module(Context &context, std::shared_ptr<const ptx::Module> program) {
    auto module = std::make_shared<Module>();
    module->context = context.weak_from_this();
    module->program = std::move(program);
    try {
        place_globals(*module, context);
    } catch (const Error &) {
        for (const auto &[name, global] : module->globals) {
            AddressSpace::instance().remove_allocation(global.address);
            context.heap.free(global.address);
        }
        throw;
    }
    for (const std::string &name : module->program->kernel_names()) {
        auto function = std::make_shared<Function>();
        function->module = module;
        function->context = module->context;
        function->kernel = module->program->kernel(name);
        int unreserved = kSharedPerBlock - static_cast<int>(function->kernel.static_shared_bytes());
        function->settings.max_dynamic_shared_bytes = std::max(0, unreserved);
        functions().add(function);
        module->functions[name] = function;
    }
    modules().add(module);
    return module;
}

void unload_module(const std::shared_ptr<Module> &module) {
    modules().remove(module.get());
    for (const auto &[name, function] : module->functions)
        functions().remove(function.get());
    auto context = module->context.lock();
    if (!context)
        return;
    for (const auto &[name, global] : module->globals) {
        AddressSpace::instance().remove_allocation(global.address);
        context->heap.free(global.address);
    }
    module->globals.clear();
}

void unload_modules_of(Context &context) {
    for (const auto &library : libraries().select([](const Library &) { return true; })) {
        std::lock_guard lock(library->mutex);
        library->modules.erase(context.id);
    }
    for (const auto &module : modules().select([&](const Module &m) { return m.context.lock().get() == &context; })) {
        unload_module(module);
    }
}

std::shared_ptr<Module> module_in(Library &library, Context &context) {
    std::lock_guard lock(library.mutex);
    auto &module = library.modules[context.id];
    if (!module) {
        module = load_module(context, library.program);
        module->library = library.weak_from_this();
        for (const auto &[name, kernel] : library.kernels) {
            std::lock_guard kernel_lock(kernel->mutex);
            for (auto [attribute, value] : kernel->attributes) {
                set_function_attribute(*module->functions[name], static_cast<CUfunction_attribute>(attribute), value);
            }
        }
    }
    return module;
}

std::shared_ptr<Function> resolve_function(CUfunction handle, Context &context) {
    if (auto function = functions().find(handle))
        return function;
    auto kernel = kernels().get(handle);
    auto library = kernel->library.lock();
    require(library != nullptr, CUDA_ERROR_INVALID_HANDLE);
    auto module = module_in(*library, context);
    auto it = module->functions.find(kernel->name);
    require(it != module->functions.end(), CUDA_ERROR_NOT_FOUND);
    return it->second;
}

int function_attribute(const Function &function, CUfunction_attribute attribute) {
    const ptx::Kernel &kernel = function.kernel;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return static_cast<int>(std::min<unsigned>(kernel.max_threads(), kMaxThreadsPerBlock));
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        return static_cast<int>(kernel.static_shared_bytes());
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
        return 0;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        return static_cast<int>(kernel.local_bytes());
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        return static_cast<int>(kernel.registers());
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        return 90;
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
        return 0;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        return function.settings.max_dynamic_shared_bytes;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        return function.settings.preferred_carveout;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
        return 0;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
        return static_cast<int>(kernel.required_cluster()[0]);
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
        return static_cast<int>(kernel.required_cluster()[1]);
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
        return static_cast<int>(kernel.required_cluster()[2]);
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
        return function.settings.non_portable_cluster;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        return 0;
    default:
        throw Error{CUDA_ERROR_INVALID_VALUE};
    }
}

void set_function_attribute(Function &function, CUfunction_attribute attribute, int value) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        require(value >= 0 && value + static_cast<int>(function.kernel.static_shared_bytes()) <= kSharedPerBlockOptin);
        function.settings.max_dynamic_shared_bytes = value;
        return;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        require(value >= -1 && value <= 100);
        function.settings.preferred_carveout = value;
        return;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
        function.settings.non_portable_cluster = value;
        return;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        return;
    default:
        throw Error{CUDA_ERROR_INVALID_VALUE};
    }
}

} // namespace simgpu
