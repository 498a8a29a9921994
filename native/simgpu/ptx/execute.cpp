// Runs a grid: checks the launch, keeps blocks resident, gives each its turn, and brings in a second host thread when
// the work is long enough and the order of blocks cannot show in the results.
#include <algorithm>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "program.hpp"
#include "warp.hpp"

namespace simgpu::ptx {

namespace {

// Operations a cluster may run before another gets its turn. In a cooperative launch blocks wait for each other, so
// turns are short; elsewhere a change only serves kernels whose blocks spin on each other without being cooperative.
constexpr std::int64_t cooperative_turn = 2'000;
constexpr std::int64_t ordinary_turn = 500'000;
// Bounds of the clusters that may be resident at once outside of cooperative launches: their number, as on a GPU with
// 132 multiprocessors of 8 blocks each, and the memory they take.
constexpr std::size_t most_resident = 132 * 8;
constexpr std::size_t fewest_resident = 8;
constexpr std::size_t most_resident_bytes = std::size_t{512} << 20;
// Threads of a cooperative launch that can be resident together: those of a large GPU (132 multiprocessors × 2048).
constexpr std::uint64_t most_cooperative_threads = 132ull * 2048;
// A thread costs some tens of microseconds, so a second one only helps launches that already ran longer than this.
constexpr auto worth_a_thread = std::chrono::microseconds(300);
// Grid-wide synchronisation needs 8 bytes (size and barrier word) and expects the size in the first word.
constexpr std::size_t workspace_bytes = 64;

/// How many helper threads exist, and whether new ones may be started.
struct Workers {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned running = 0;
    bool forbidden = false;

    bool begin() {
        const std::lock_guard lock(mutex);
        if (forbidden)
            return false;
        ++running;
        return true;
    }
    void end() {
        const std::lock_guard lock(mutex);
        --running;
        changed.notify_all();
    }
};
Workers &workers() {
    // Never destroyed: a driver's threads may still run kernels while the program exits.
    static Workers &instance = *new Workers();
    return instance;
}

/// The rounding direction and the flushing of subnormals are the caller's to choose for its own arithmetic, and a
/// thread inherits them. Kernels always compute in the default environment.
class DefaultFloats {
  public:
    DefaultFloats() noexcept {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&saved_); }
    DefaultFloats(const DefaultFloats &) = delete;
    DefaultFloats &operator=(const DefaultFloats &) = delete;

  private:
    std::fenv_t saved_;
};

[[noreturn]] void refuse(const Kernel &kernel, std::string reason) {
    throw Fault(Fault::Kind::invalid_launch, kernel.name(), 0, 0, {}, {}, std::move(reason));
}

void check(const Kernel &kernel, const Launch &launch) {
    const auto &block = launch.block;
    const auto &grid = launch.grid;
    const auto &cluster = launch.cluster;
    for (std::size_t k = 0; k < 3; ++k) {
        if (grid[k] == 0 || block[k] == 0 || cluster[k] == 0)
            refuse(kernel, "a dimension is 0");
        if (grid[k] % cluster[k] != 0)
            refuse(kernel, "the grid is no multiple of the cluster");
        if (kernel.required_block()[0] != 0 && kernel.required_block()[k] != block[k])
            refuse(kernel, "the block differs from .reqntid");
    }
    // Limits of every GPU since compute capability 3.0, and of clusters (with the non-portable size allowed).
    if (grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535)
        refuse(kernel, "the grid is too large");
    if (block[0] > 1024 || block[1] > 1024 || block[2] > 64)
        refuse(kernel, "the block is too large");
    if (std::uint64_t{cluster[0]} * cluster[1] * cluster[2] > 16)
        refuse(kernel, "the cluster has more than 16 blocks");
    const std::uint64_t threads = std::uint64_t{block[0]} * block[1] * block[2];
    if (threads > kernel.max_threads()) {
        refuse(kernel, "a block of " + std::to_string(threads) + " threads, but the kernel allows " +
                           std::to_string(kernel.max_threads()));
    }
    if (launch.parameters_bytes < kernel.parameters_bytes()) {
        refuse(kernel, std::to_string(launch.parameters_bytes) + " bytes of parameters, but the kernel takes " +
                           std::to_string(kernel.parameters_bytes()));
    }
    if (launch.cooperative && threads * grid[0] * grid[1] * grid[2] > most_cooperative_threads)
        refuse(kernel, "a cooperative launch of more threads than can be resident");
    if (kernel.static_shared_bytes() + launch.dynamic_shared_bytes > (1u << shared_rank_shift) - 1024)
        refuse(kernel, "more shared memory than a block can have");
}

class Grid {
  public:
    Grid(const Kernel &kernel, const Launch &launch, Memory &memory, Observer *observer,
         const std::atomic<bool> *cancel, std::string *printf_output)
        : kernel_(kernel), launch_(launch), memory_(memory), observer_(observer), cancel_(cancel),
          printf_output_(printf_output), program_(kernel.module()->program()), plan_(program_.plan(kernel.index())) {
        for (std::size_t k = 0; k < 3; ++k)
            clusters_[k] = launch.grid[k] / launch.cluster[k];
        count_ = std::uint64_t{clusters_[0]} * clusters_[1] * clusters_[2];
        workspace_[0] = static_cast<std::uint32_t>(workspace_bytes);
    }

    void run() {
        if (plan_.unsupported_line != 0) {
            throw Fault(Fault::Kind::unsupported, kernel_.name(), plan_.unsupported_line, 0, {}, {},
                        plan_.unsupported_text);
        }
        const bool may_share = !plan_.must_run_in_order && observer_ == nullptr && launch_.max_workers > 1 &&
                               !launch_.cooperative && count_ > 1;
        try {
            work(may_share ? &Grid::consider_helper : nullptr);
        } catch (...) {
            stop_.store(true, std::memory_order_relaxed);
            join();
            throw;
        }
        join();
        if (helper_error_)
            std::rethrow_exception(helper_error_);
    }

  private:
    using Consider = void (Grid::*)();

    void join() {
        if (!helper_.joinable())
            return;
        helper_.join();
        workers().end();
    }

    /// Starts the helper once the launch has run long enough and blocks are left.
    void consider_helper() {
        if (helper_.joinable() || next_.load(std::memory_order_relaxed) + 1 >= count_)
            return;
        if (std::chrono::steady_clock::now() - begin_ < worth_a_thread || !workers().begin())
            return;
        try {
            helper_ = std::thread([this] {
                try {
                    work(nullptr);
                } catch (...) {
                    helper_error_ = std::current_exception();
                    stop_.store(true, std::memory_order_relaxed);
                }
            });
        } catch (const std::system_error &) {
            // The host allows no more threads. One does the work as well.
            workers().end();
        }
    }

    bool cancelled() const { return cancel_ != nullptr && cancel_->load(std::memory_order_relaxed); }

    [[noreturn]] void give_up(const Cluster &cluster, const char *reason) const {
        throw Fault(Fault::Kind::launch_timeout, kernel_.name(), 0, 0, cluster.blocks.front()->id, {}, reason);
    }

    std::unique_ptr<Cluster> make_cluster(Context &context) const {
        auto cluster = std::make_unique<Cluster>();
        const unsigned blocks = launch_.cluster[0] * launch_.cluster[1] * launch_.cluster[2];
        std::size_t kernels_own = plan_.static_shared_bytes;
        // The dynamic part begins at the alignment of whatever variable names it: 128 bytes at most.
        if (launch_.dynamic_shared_bytes != 0)
            kernels_own = plan_.dynamic_offset(128) + launch_.dynamic_shared_bytes;
        const std::size_t reserved = plan_.uses_reserved_shared ? (kernels_own + 127) & ~std::size_t{127} : kernels_own;
        const std::size_t shared = plan_.uses_reserved_shared ? reserved + reserved_shared_bytes : reserved;
        for (unsigned rank = 0; rank < blocks; ++rank) {
            auto block = std::make_unique<Block>();
            block->context = &context;
            block->cluster = cluster.get();
            block->rank = rank;
            block->shared_bytes = shared;
            block->reserved_offset = reserved;
            block->shared = allocate_aligned(shared);
            cluster->blocks.push_back(std::move(block));
        }
        return cluster;
    }

    void start(Cluster &cluster, std::uint64_t index, Linked &entry) const {
        cluster.arrived = cluster.phase = 0;
        const std::array<unsigned, 3> at{static_cast<unsigned>(index % clusters_[0]),
                                         static_cast<unsigned>(index / clusters_[0] % clusters_[1]),
                                         static_cast<unsigned>(index / clusters_[0] / clusters_[1])};
        const auto &size = launch_.cluster;
        for (auto &block : cluster.blocks) {
            const unsigned rank = block->rank;
            block->start({at[0] * size[0] + rank % size[0], at[1] * size[1] + rank / size[0] % size[1],
                          at[2] * size[2] + rank / size[0] / size[1]},
                         entry);
        }
    }

    /// Runs a cluster for a turn. True when all its blocks have ended.
    bool turn(Cluster &cluster, std::int64_t budget) const {
        bool done = true;
        bool progress = false;
        for (auto &block : cluster.blocks) {
            if (block->live_threads == 0)
                continue;
            const Block::Outcome outcome = block->run(budget);
            done = done && outcome == Block::Outcome::done;
            progress = progress || outcome != Block::Outcome::blocked;
        }
        if (!done && !progress) {
            // Blocks earlier in the list may have been released by later ones.
            for (auto &block : cluster.blocks)
                for (auto &warp : block->warps)
                    progress = progress || warp->ready != 0;
            if (!progress)
                give_up(cluster, "every thread of the block waits at a barrier that the others never reach");
        }
        return done;
    }

    std::size_t resident_limit() const {
        const std::size_t threads = std::size_t{launch_.block[0]} * launch_.block[1] * launch_.block[2];
        const std::size_t warps = (threads + warp_size - 1) / warp_size;
        const std::size_t blocks = std::size_t{launch_.cluster[0]} * launch_.cluster[1] * launch_.cluster[2];
        const std::size_t bytes = blocks * (warps * (plan_.frame_bytes + sizeof(Warp)) + plan_.static_shared_bytes +
                                            launch_.dynamic_shared_bytes);
        return std::clamp(most_resident_bytes / std::max<std::size_t>(bytes, 1), fewest_resident, most_resident);
    }

    void work(Consider consider) {
        const DefaultFloats default_floats;
        Context context(kernel_, launch_, program_, plan_, memory_);
        context.observer = observer_;
        context.printf_output = printf_output_;
        context.workspace = reinterpret_cast<std::byte *>(workspace_.data());
        context.workspace_bytes = launch_.cooperative ? workspace_bytes : 0;
        Linked &entry = context.link(plan_.entry);

        std::deque<std::unique_ptr<Cluster>> resident;
        std::vector<std::unique_ptr<Cluster>> unused;
        const std::size_t most = launch_.cooperative ? count_ : resident_limit();
        std::int64_t budget = launch_.cooperative ? cooperative_turn : ordinary_turn;
        if (launch_.max_operations != 0 && launch_.max_operations < static_cast<std::uint64_t>(budget))
            budget = static_cast<std::int64_t>(launch_.max_operations);
        bool more = true;
        std::size_t idle = 0; // turns in a row in which no cluster stored anything
        const auto take_next = [&] {
            const std::uint64_t index = next_.fetch_add(1, std::memory_order_relaxed);
            if (index >= count_) {
                more = false;
                return;
            }
            if (unused.empty())
                unused.push_back(make_cluster(context));
            start(*unused.back(), index, entry);
            resident.push_back(std::move(unused.back()));
            unused.pop_back();
        };
        if (launch_.cooperative)
            while (more)
                take_next();
        for (;;) {
            if (stop_.load(std::memory_order_relaxed))
                return;
            // While blocks make progress, the next one waits for its predecessors to end. Only when all that are
            // resident seem to spin is another one brought in: it may be the one they wait for.
            if (more && resident.size() < most && idle >= resident.size()) {
                take_next();
                idle = 0;
            }
            if (resident.empty())
                return;
            std::unique_ptr<Cluster> cluster = std::move(resident.front());
            resident.pop_front();
            if (cancelled())
                give_up(*cluster, "the launch was cancelled");
            if (launch_.max_operations != 0 && context.operations > launch_.max_operations)
                give_up(*cluster, "the launch ran longer than its bound");
            const std::uint64_t stores_before = context.stores;
            if (turn(*cluster, budget)) {
                unused.push_back(std::move(cluster));
                idle = resident.size();
            } else {
                resident.push_back(std::move(cluster));
                idle = context.stores == stores_before ? idle + 1 : 0;
            }
            if (consider != nullptr)
                (this->*consider)();
        }
    }

    const Kernel &kernel_;
    const Launch &launch_;
    Memory &memory_;
    Observer *observer_;
    const std::atomic<bool> *cancel_;
    std::string *printf_output_;
    Program &program_;
    const EntryPlan &plan_;
    std::array<unsigned, 3> clusters_{};
    std::uint64_t count_ = 0;
    std::atomic<std::uint64_t> next_{0};
    std::atomic<bool> stop_{false};
    alignas(64) std::array<std::uint32_t, workspace_bytes / 4> workspace_{};
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
    std::thread helper_;
    std::exception_ptr helper_error_;
};

} // namespace

void execute(const Kernel &kernel, const Launch &launch, Memory &memory, Observer *observer,
             const std::atomic<bool> *cancel, std::string *printf_output) {
    check(kernel, launch);
    try {
        Grid(kernel, launch, memory, observer, cancel, printf_output).run();
    } catch (const std::bad_alloc &) {
        throw Fault(Fault::Kind::out_of_memory, kernel.name(), 0, 0, {}, {}, "the host has no memory for this launch");
    }
}

void shutdown_workers() noexcept {
    Workers &all = workers();
    std::unique_lock lock(all.mutex);
    all.forbidden = true;
    all.changed.wait(lock, [&] { return all.running == 0; });
}

void resume_workers() noexcept {
    const std::lock_guard lock(workers().mutex);
    workers().forbidden = false;
}

} // namespace simgpu::ptx
