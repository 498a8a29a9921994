// Modules (code in one context), libraries (code that becomes a module in each context that uses it), and what they
// contain.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <cuda.h>

#include "handles.hpp"
#include "ptx/ptx.hpp"

namespace simgpu {

struct Context;
struct Module;
struct Library;

struct Global {
    CUdeviceptr address = 0;
    size_t size_bytes = 0;
};

// Settings that cuFuncSetAttribute and cuKernelSetAttribute change.
struct FunctionSettings {
    std::atomic<int> max_dynamic_shared_bytes{0};
    std::atomic<int> preferred_carveout{-1};
    std::atomic<int> required_cluster[3]{};
    std::atomic<int> non_portable_cluster{0};
};

struct Function {
    std::weak_ptr<Module> module;
    std::weak_ptr<Context> context;
    ptx::Kernel kernel;
    FunctionSettings settings;

    CUfunction handle() { return reinterpret_cast<CUfunction>(this); }
};

struct Module : std::enable_shared_from_this<Module> {
    std::weak_ptr<Context> context;
    std::shared_ptr<const ptx::Module> program;
    std::map<std::string, Global, std::less<>> globals;
    std::map<std::string, std::shared_ptr<Function>, std::less<>> functions;
    std::weak_ptr<Library> library;
};

struct Kernel {
    std::weak_ptr<Library> library;
    std::string name;
    std::mutex mutex;
    std::map<int, int> attributes; // set by cuKernelSetAttribute, applied to the functions of every context
};

struct Library : std::enable_shared_from_this<Library> {
    std::shared_ptr<const ptx::Module> program;
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Kernel>, std::less<>> kernels;
    std::map<unsigned long long, std::shared_ptr<Module>> modules; // by context id
};

HandleTable<Module> &modules();
HandleTable<Function> &functions();
HandleTable<Library> &libraries();
HandleTable<Kernel> &kernels();

// Throws CUDA_ERROR_INVALID_PTX after saying on stderr what is wrong.
std::shared_ptr<const ptx::Module> parse_ptx(const std::string &text);
// Places the globals and enters the module and its functions into the tables.
std::shared_ptr<Module> load_module(Context &context, std::shared_ptr<const ptx::Module> program);
void unload_module(const std::shared_ptr<Module> &module);
void unload_modules_of(Context &context);
// The module that the library is in this context, loading it if it is not there yet.
std::shared_ptr<Module> module_in(Library &library, Context &context);
// A CUfunction, or a CUkernel that was cast to one: its function in `context`.
std::shared_ptr<Function> resolve_function(CUfunction handle, Context &context);

int function_attribute(const Function &function, CUfunction_attribute attribute);
void set_function_attribute(Function &function, CUfunction_attribute attribute, int value);

} // namespace simgpu
