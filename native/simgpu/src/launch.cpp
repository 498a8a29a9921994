// See launch.hpp. Kernels run through the PTX interpreter, which sees memory as DeviceMemory shows it.
#include "launch.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "address_space.hpp"
#include "context.hpp"
#include "device.hpp"
#include "error.hpp"

namespace simgpu {
namespace {

// The mappings as one launch sees them. Memory mapped while the kernel runs becomes visible at the first access that
// would miss it; tables seen before stay alive, since other threads of the launch may be reading them.
class DeviceMemory : public ptx::Memory {
  public:
    DeviceMemory(const Module &module, Context &context) : module_(module), context_(context) { refresh(); }

    std::byte *translate(std::uint64_t address, std::size_t bytes, bool write) noexcept override {
        auto *host = reinterpret_cast<std::byte *>(address);
        if (accessible(*current_.load(), address, bytes, context_.device, write))
            return host;
        if (AddressSpace::instance().generation() == generation_.load())
            return nullptr;
        refresh();
        return accessible(*current_.load(), address, bytes, context_.device, write) ? host : nullptr;
    }

    Range range(std::uint64_t address, bool write) noexcept override {
        const Span *span = span_at(*current_.load(), address);
        if (span == nullptr)
            return {};
        std::uint64_t bit = std::uint64_t{1} << context_.device;
        if (((write ? span->writable_by : span->readable_by) & bit) == 0)
            return {};
        return {span->begin, span->end, reinterpret_cast<std::byte *>(span->begin)};
    }

    std::uint64_t symbol_address(const ptx::Module &, std::string_view name) override {
        auto it = module_.globals.find(name);
        return it == module_.globals.end() ? 0 : it->second.address;
    }

    std::uint64_t heap_allocate(std::size_t bytes) noexcept override {
        try {
            return context_.heap.allocate(std::max<std::size_t>(bytes, 1));
        } catch (const Error &) {
            return 0;
        }
    }

    bool heap_free(std::uint64_t address) noexcept override {
        try {
            context_.heap.free(address);
            return true;
        } catch (const Error &) {
            return false;
        }
    }

  private:
    void refresh() noexcept {
        std::lock_guard lock(mutex_);
        generation_.store(AddressSpace::instance().generation());
        kept_.push_back(AddressSpace::instance().spans());
        current_.store(kept_.back().get());
    }

    const Module &module_;
    Context &context_;
    std::mutex mutex_;
    std::vector<std::shared_ptr<const Spans>> kept_;
    std::atomic<const Spans *> current_{nullptr};
    std::atomic<std::uint64_t> generation_{0};
};

std::atomic<std::uint64_t> next_grid_id{1};

void copy_parameters(KernelWork &work, void **parameters, void **extra) {
    const ptx::Kernel &kernel = work.function->kernel;
    work.parameters.resize(kernel.parameters_bytes());
    for (const ptx::Parameter &parameter : kernel.parameters()) {
        work.parameter_slots.push_back(work.parameters.data() + parameter.offset_bytes);
    }
    if (extra != nullptr) {
        const void *buffer = nullptr;
        size_t buffer_bytes = 0;
        for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
            if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
                buffer = extra[i + 1];
            } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
                buffer_bytes = *static_cast<size_t *>(extra[i + 1]);
            } else {
                throw Error{CUDA_ERROR_INVALID_VALUE};
            }
        }
        require(buffer_bytes >= work.parameters.size() || work.parameters.empty());
        require(buffer != nullptr || work.parameters.empty());
        if (!work.parameters.empty())
            std::memcpy(work.parameters.data(), buffer, work.parameters.size());
        return;
    }
    require(parameters != nullptr || kernel.parameters().empty());
    for (size_t i = 0; i < kernel.parameters().size(); ++i) {
        require(parameters[i] != nullptr);
        std::memcpy(work.parameter_slots[i], parameters[i], kernel.parameters()[i].size_bytes);
    }
}

} // namespace

std::shared_ptr<KernelWork> make_kernel_work(std::shared_ptr<Function> function, const unsigned grid[3],
                                             const unsigned block[3], unsigned dynamic_shared_bytes, void **parameters,
                                             void **extra) {
    static constexpr unsigned kBlockLimits[3] = {1024, 1024, 64};
    static constexpr unsigned kGridLimits[3] = {2147483647, 65535, 65535};
    auto work = std::make_shared<KernelWork>();
    std::uint64_t threads = 1;
    for (int i = 0; i < 3; ++i) {
        require(grid[i] > 0 && grid[i] <= kGridLimits[i] && block[i] > 0 && block[i] <= kBlockLimits[i]);
        work->grid[i] = grid[i];
        work->block[i] = block[i];
        threads *= block[i];
    }
    require(threads <= kMaxThreadsPerBlock);
    require(threads <= function->kernel.max_threads(), CUDA_ERROR_INVALID_VALUE);
    const auto &wanted = function->kernel.required_block();
    if (wanted[0] != 0)
        require(std::equal(block, block + 3, wanted.begin()));
    require(static_cast<std::uint64_t>(dynamic_shared_bytes) <=
            static_cast<std::uint64_t>(function->settings.max_dynamic_shared_bytes.load()));
    const auto &cluster = function->kernel.required_cluster();
    for (int i = 0; i < 3; ++i)
        work->cluster[i] = std::max(1u, cluster[static_cast<size_t>(i)]);
    work->dynamic_shared_bytes = dynamic_shared_bytes;
    work->function = std::move(function);
    copy_parameters(*work, parameters, extra);
    return work;
}

int active_blocks(const Function &function, int block_threads, size_t dynamic_shared_bytes) {
    require(block_threads > 0);
    if (block_threads > kMaxThreadsPerBlock)
        return 0;
    size_t shared = function.kernel.static_shared_bytes() + dynamic_shared_bytes + 1024; // 1 KiB is the system's
    int warps = (block_threads + 31) / 32;
    int by_threads = kMaxThreadsPerMultiprocessor / (warps * 32);
    int by_shared = static_cast<int>(kSharedPerMultiprocessor / shared);
    int by_registers = static_cast<int>(65536u / (std::max(1u, function.kernel.registers()) * 32u)) / warps;
    return std::max(0, std::min({by_threads, by_shared, by_registers, kMaxBlocksPerMultiprocessor}));
}

void check_cooperative(const KernelWork &work) {
    std::uint64_t blocks = std::uint64_t{work.grid[0]} * work.grid[1] * work.grid[2];
    int threads = static_cast<int>(work.block[0] * work.block[1] * work.block[2]);
    std::uint64_t fitting =
        static_cast<std::uint64_t>(active_blocks(*work.function, threads, work.dynamic_shared_bytes));
    require(blocks <= fitting * kMultiprocessors, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
}

void KernelWork::run(Context &) {
    auto module = function->module.lock();
    auto context = function->context.lock();
    require(module && context, CUDA_ERROR_INVALID_HANDLE);
    DeviceMemory memory(*module, *context);
    ptx::Launch launch;
    std::copy(grid, grid + 3, launch.grid.begin());
    std::copy(block, block + 3, launch.block.begin());
    std::copy(cluster, cluster + 3, launch.cluster.begin());
    launch.dynamic_shared_bytes = dynamic_shared_bytes;
    launch.parameters = parameters.data();
    launch.parameters_bytes = parameters.size();
    launch.cooperative = cooperative;
    launch.grid_id = next_grid_id.fetch_add(1);
    launch.multiprocessor_count = kMultiprocessors;
    ptx::execute(function->kernel, launch, memory);
}

} // namespace simgpu
