// Knowing the contexts: creation, retaining, destruction; see contexts.hpp.
//
// Memory of a context dies with it. What we made for it is given back just before the driver destroys it, as a careful
// application would do.
#include "contexts.hpp"

#include "capture.hpp"
#include "debug.hpp"
#include "driver_memory.hpp"
#include "gate.hpp"
#include "memory.hpp"

#include <algorithm>

namespace woodfrog::interpose {
namespace {

// Counts changes of the set of contexts: what a thread remembers about its current context is good for one value.
constinit std::atomic<uint64_t> g_generation{1};

struct Remembered {
    CUcontext handle = nullptr;
    uint64_t generation = 0;
    Context *context = nullptr;
};
constinit thread_local Remembered t_current __attribute__((tls_model("initial-exec")));

Context *remember_context(CUcontext handle, CUdevice device, bool primary) {
    const DeviceFacts &facts = device_facts(device);
    std::lock_guard lock(memory().mutex);
    std::unique_ptr<Context> &entry = memory().contexts[handle];
    if (entry == nullptr) {
        entry = std::make_unique<Context>();
        entry->handle = handle;
        entry->device = device;
        entry->facts = &facts;
        g_generation.fetch_add(1, std::memory_order_acq_rel);
    }
    entry->primary = entry->primary || primary;
    return entry.get();
}

void remember_created(CUcontext handle) {
    CUdevice device = 0; // a new context is current
    if (WF_REAL(cuCtxGetDevice)(&device) == CUDA_SUCCESS)
        remember_context(handle, device, false);
}

Context *primary_of(CUdevice device) {
    std::lock_guard lock(memory().mutex);
    for (const auto &[handle, context] : memory().contexts)
        if (context->primary && context->device == device)
            return context.get();
    return nullptr;
}

Context *context_of(CUcontext handle) {
    std::lock_guard lock(memory().mutex);
    const auto found = memory().contexts.find(handle);
    return found == memory().contexts.end() ? nullptr : found->second.get();
}

// Everything that was allocated in the context, taken out of the tables.
std::vector<std::unique_ptr<Block>> take_blocks_of(Context *context) {
    Memory &all = memory();
    std::lock_guard lock(all.mutex);
    std::vector<std::unique_ptr<Block>> taken = all.take_spare(context, -1);
    std::erase_if(all.put_off, [&](const Allocation &freed) { return freed.block->owner == context; });
    std::erase_if(all.allocations, [&](const auto &entry) { return entry.second.block->owner == context; });
    for (auto *by_room : {&all.slabs_by_room, &all.pools_by_room})
        std::erase_if(*by_room, [&](const auto &entry) { return entry.second->owner == context; });
    for (auto entry = all.blocks.begin(); entry != all.blocks.end();) {
        if (entry->second->owner == context) {
            taken.push_back(std::move(entry->second));
            entry = all.blocks.erase(entry);
        } else {
            ++entry;
        }
    }
    return taken;
}

void free_memory_of(Context *context) {
    std::vector<std::unique_ptr<Block>> taken = take_blocks_of(context);
    if (taken.empty())
        return;
    CurrentScope current(context->handle);
    if (const CUresult result = WF_REAL(cuCtxSynchronize)(); result != CUDA_SUCCESS)
        debug("a context ends with an error pending: %d", result); // its work is over all the same
    for (auto &block : taken)
        destroy_block(std::move(block));
}

// With the lock held.
void clear_relations(Context *context) {
    context->free_streams.clear();
    context->blocking_streams.clear();
    context->readers.clear();
    for (const auto &[handle, other] : memory().contexts)
        std::erase(other->readers, context);
}

void clear_context(Context *context) {
    std::lock_guard lock(memory().mutex);
    clear_relations(context);
}

void forget_context(Context *context) {
    std::lock_guard lock(memory().mutex);
    clear_relations(context);
    const auto entry = memory().contexts.find(context->handle);
    if (entry != memory().contexts.end() && entry->second.get() == context) {
        memory().gone_contexts.push_back(std::move(entry->second)); // threads may still remember it
        memory().contexts.erase(entry);
    }
    g_generation.fetch_add(1, std::memory_order_acq_rel);
}

template <typename Destroy> CUresult destroy_context(CUcontext handle, Destroy destroy) {
    Context *context = driver_only() ? nullptr : context_of(handle);
    if (context == nullptr)
        return destroy();
    // A primary context is not destroyed by these calls: the driver refuses.
    if (!context->primary) {
        capture_context_gone(handle);
        free_memory_of(context);
    }
    const CUresult result = destroy();
    if (result == CUDA_SUCCESS)
        forget_context(context);
    return result;
}

template <typename Release> CUresult release_primary(CUdevice device, Release release) {
    Context *context = driver_only() ? nullptr : primary_of(device);
    if (context == nullptr)
        return release();
    bool last = false;
    {
        std::lock_guard lock(memory().mutex);
        last = context->retains == 1;
    }
    if (last) {
        capture_context_gone(context->handle);
        free_memory_of(context);
    }
    const CUresult result = release();
    if (result != CUDA_SUCCESS)
        return result;
    {
        std::lock_guard lock(memory().mutex);
        if (context->retains > 0)
            --context->retains;
    }
    unsigned flags = 0;
    int active = 1;
    if (WF_REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active == 0) {
        for (auto &block : take_blocks_of(context)) // only if someone retained it behind our back
            destroy_block(std::move(block));
        forget_context(context);
    }
    return result;
}

template <typename Reset> CUresult reset_primary(CUdevice device, Reset reset) {
    Context *context = driver_only() ? nullptr : primary_of(device);
    if (context == nullptr)
        return reset();
    capture_context_gone(context->handle);
    free_memory_of(context);
    const CUresult result = reset();
    if (result != CUDA_SUCCESS)
        return result;
    bool retained = false;
    {
        std::lock_guard lock(memory().mutex);
        retained = context->retains > 0;
    }
    if (retained)
        clear_context(context); // its handle stays good for those who hold it, and so do their references
    else
        forget_context(context);
    return result;
}

template <typename Create> CUresult create_context(CUcontext *created, Create create) {
    const CUresult result = create();
    if (result == CUDA_SUCCESS && created != nullptr && !driver_only())
        remember_created(*created);
    return result;
}

} // namespace

Context *current_context() {
    CUcontext handle = nullptr;
    if (WF_REAL(cuCtxGetCurrent)(&handle) != CUDA_SUCCESS || handle == nullptr)
        return nullptr;
    const uint64_t generation = g_generation.load(std::memory_order_acquire);
    if (t_current.handle == handle && t_current.generation == generation)
        return t_current.context;
    Context *context = context_of(handle);
    if (context == nullptr) {
        CUdevice device = 0;
        if (WF_REAL(cuCtxGetDevice)(&device) != CUDA_SUCCESS)
            return nullptr; // a context that was destroyed, or an error that the driver itself has to report
        CUcontext primary = nullptr;
        unsigned flags = 0;
        int active = 0;
        // Is it the primary one? Retaining an active primary context and releasing it again changes nothing.
        if (WF_REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active != 0 &&
            WF_REAL(cuDevicePrimaryCtxRetain)(&primary, device) == CUDA_SUCCESS)
            WF_REAL(cuDevicePrimaryCtxRelease_v2)(device);
        context = remember_context(handle, device, primary == handle);
    }
    t_current = {handle, g_generation.load(std::memory_order_acquire), context};
    return context;
}

std::vector<Context *> live_contexts() {
    std::lock_guard lock(memory().mutex);
    std::vector<Context *> contexts;
    for (const auto &[handle, context] : memory().contexts)
        contexts.push_back(context.get());
    return contexts;
}

CurrentScope::CurrentScope(CUcontext context) {
    CUcontext current = nullptr;
    result_ = WF_REAL(cuCtxGetCurrent)(&current);
    if (result_ != CUDA_SUCCESS || current == context)
        return;
    result_ = WF_REAL(cuCtxPushCurrent_v2)(context);
    pushed_ = result_ == CUDA_SUCCESS;
}

CurrentScope::~CurrentScope() {
    CUcontext popped = nullptr;
    if (pushed_)
        WF_REAL(cuCtxPopCurrent_v2)(&popped);
}

CUresult synchronize_context(CUcontext context) {
    CurrentScope current(context);
    return current.result() == CUDA_SUCCESS ? WF_REAL(cuCtxSynchronize)() : current.result();
}

std::vector<CUdevice> reader_devices(const Context &context) {
    std::vector<CUdevice> devices;
    for (const Context *reader : context.readers)
        if (reader->device != context.device &&
            std::find(devices.begin(), devices.end(), reader->device) == devices.end())
            devices.push_back(reader->device);
    return devices;
}

} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuCtxCreate, CUcontext *pctx, unsigned int flags, CUdevice dev) {
    GateScope scope(Symbol::cuCtxCreate);
    return create_context(pctx, [&] { return WF_REAL(cuCtxCreate)(pctx, flags, dev); });
}

WF_HOOK(cuCtxCreate_v2, CUcontext *pctx, unsigned int flags, CUdevice dev) {
    GateScope scope(Symbol::cuCtxCreate_v2);
    return create_context(pctx, [&] { return WF_REAL(cuCtxCreate_v2)(pctx, flags, dev); });
}

WF_HOOK(cuCtxCreate_v3, CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags,
        CUdevice dev) {
    GateScope scope(Symbol::cuCtxCreate_v3);
    return create_context(pctx, [&] { return WF_REAL(cuCtxCreate_v3)(pctx, paramsArray, numParams, flags, dev); });
}

#if CUDA_VERSION >= 12050
WF_HOOK(cuCtxCreate_v4, CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev) {
    GateScope scope(Symbol::cuCtxCreate_v4);
    return create_context(pctx, [&] { return WF_REAL(cuCtxCreate_v4)(pctx, ctxCreateParams, flags, dev); });
}
#endif

WF_HOOK(cuCtxDestroy, CUcontext ctx) {
    GateScope scope(Symbol::cuCtxDestroy);
    return destroy_context(ctx, [&] { return WF_REAL(cuCtxDestroy)(ctx); });
}

WF_HOOK(cuCtxDestroy_v2, CUcontext ctx) {
    GateScope scope(Symbol::cuCtxDestroy_v2);
    return destroy_context(ctx, [&] { return WF_REAL(cuCtxDestroy_v2)(ctx); });
}

WF_HOOK(cuDevicePrimaryCtxRetain, CUcontext *pctx, CUdevice dev) {
    GateScope scope(Symbol::cuDevicePrimaryCtxRetain);
    const CUresult result = WF_REAL(cuDevicePrimaryCtxRetain)(pctx, dev);
    if (result == CUDA_SUCCESS && pctx != nullptr && !driver_only()) {
        Context *context = remember_context(*pctx, dev, true);
        std::lock_guard lock(memory().mutex);
        ++context->retains;
    }
    return result;
}

WF_HOOK(cuDevicePrimaryCtxRelease, CUdevice dev) {
    GateScope scope(Symbol::cuDevicePrimaryCtxRelease);
    return release_primary(dev, [&] { return WF_REAL(cuDevicePrimaryCtxRelease)(dev); });
}

WF_HOOK(cuDevicePrimaryCtxRelease_v2, CUdevice dev) {
    GateScope scope(Symbol::cuDevicePrimaryCtxRelease_v2);
    return release_primary(dev, [&] { return WF_REAL(cuDevicePrimaryCtxRelease_v2)(dev); });
}

WF_HOOK(cuDevicePrimaryCtxReset, CUdevice dev) {
    GateScope scope(Symbol::cuDevicePrimaryCtxReset);
    return reset_primary(dev, [&] { return WF_REAL(cuDevicePrimaryCtxReset)(dev); });
}

WF_HOOK(cuDevicePrimaryCtxReset_v2, CUdevice dev) {
    GateScope scope(Symbol::cuDevicePrimaryCtxReset_v2);
    return reset_primary(dev, [&] { return WF_REAL(cuDevicePrimaryCtxReset_v2)(dev); });
}

#if CUDA_VERSION >= 12040
WF_HOOK(cuCtxFromGreenCtx, CUcontext *pContext, CUgreenCtx hCtx) {
    GateScope scope(Symbol::cuCtxFromGreenCtx);
    const CUresult result = WF_REAL(cuCtxFromGreenCtx)(pContext, hCtx);
    if (result != CUDA_SUCCESS || driver_only())
        return result;
    CurrentScope current(*pContext);
    CUdevice device = 0;
    if (current.result() == CUDA_SUCCESS && WF_REAL(cuCtxGetDevice)(&device) == CUDA_SUCCESS) {
        Context *context = remember_context(*pContext, device, false);
        std::lock_guard lock(memory().mutex);
        context->green = true;
    }
    return result;
}

WF_HOOK(cuGreenCtxDestroy, CUgreenCtx hCtx) {
    GateScope scope(Symbol::cuGreenCtxDestroy);
    CUcontext handle = nullptr;
    Context *context = nullptr;
    if (!driver_only() && WF_REAL(cuCtxFromGreenCtx)(&handle, hCtx) == CUDA_SUCCESS)
        context = context_of(handle);
    const CUresult result = WF_REAL(cuGreenCtxDestroy)(hCtx);
    if (result == CUDA_SUCCESS && context != nullptr)
        forget_context(context);
    return result;
}
#endif
