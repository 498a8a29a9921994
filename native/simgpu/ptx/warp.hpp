// The state of execution: contexts, blocks, warps and call frames, and how a warp's lanes are scheduled.
// Lanes of a warp that are at the same operation of the same frame run together; otherwise the deepest frame and then
// the lowest operation goes first, which brings diverged lanes together again. Nothing here knows what an operation
// does.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "code.hpp"
#include "ptx.hpp"

namespace simgpu::ptx {

class Program;
struct EntryPlan;
class Block;
struct Cluster;
struct Context;

// The windows of the generic address space, by the top byte of an address. Global memory is window 0.
constexpr unsigned window_shift = 56;
constexpr std::uint64_t window_shared = 1, window_local = 2, window_parameter = 3, window_function = 4,
                        window_workspace = 5;
constexpr std::uint64_t window_base(std::uint64_t window) {
    return window << window_shift;
}
// A shared address has 24 bits of offset; bits 24–31 are 0 for the own block, else 1 + the rank within the cluster.
constexpr unsigned shared_rank_shift = 24;
constexpr std::uint64_t shared_offset_mask = (1u << shared_rank_shift) - 1;
// Shared memory that the system keeps for itself, behind the kernel's; cooperative groups put their barriers there.
constexpr std::size_t reserved_shared_bytes = 1024;

struct AlignedFree {
    void operator()(std::byte *memory) const noexcept { ::operator delete[](memory, std::align_val_t{64}); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;
AlignedBytes allocate_aligned(std::size_t bytes);

struct Linked;

/// One activation of a function by a group of lanes.
struct Frame {
    Linked *linked = nullptr;
    Frame *parent = nullptr;
    const Op *return_to = nullptr;
    const CallSite *site = nullptr;
    std::uint32_t depth = 0;
    Mask lanes = 0; ///< lanes whose activation this is, whether they are in it or in a callee
    AlignedBytes rows;
    std::array<std::uint32_t, warp_size> local_base{}; ///< of a lane's local memory for this frame
};

/// A function with its addresses for one launch, and its unused frames.
struct Linked {
    const Function *function = nullptr;
    std::vector<std::uint64_t> symbol_values; ///< as Function::symbols
    std::vector<std::unique_ptr<Frame>> frames;
    std::vector<Frame *> unused;
};

class Warp {
  public:
    // What handlers read and write. `next` and `limit` steer the inner loop: it leaves when next >= limit.
    std::byte *rows = nullptr;
    const Op *next = nullptr;
    const Op *limit = nullptr;
    Mask mask = 0;
    bool regrouped = false; ///< the handler has stored the lanes' positions itself
    Frame *frame = nullptr;
    Context *context = nullptr;
    Block *block = nullptr;
    unsigned index = 0; ///< of the warp within its block
    Mask live = 0;
    Mask ready = 0;
    Mask at_barrier = 0;
    Mask at_sync = 0;
    Mask at_cluster = 0;
    std::array<const Op *, warp_size> position{};
    std::array<Frame *, warp_size> lane_frame{};
    std::array<Mask, warp_size> sync_mask{}; ///< member mask that a lane waits for
    std::array<std::uint8_t, warp_size> barrier_id{};
    std::array<std::uint32_t, warp_size> cluster_phase{}; ///< of the cluster barrier when the lane arrived there
    std::array<std::uint32_t, warp_size> local_top{};     ///< bytes of a lane's local memory in use
    std::uint64_t clock = 0;

    void start(Block &owner, unsigned warp_index, Mask lanes, Linked &entry);

    enum class Outcome : std::uint8_t { blocked, exhausted, done };
    /// Runs until no lane is ready, `budget` operations are spent, or all have exited.
    Outcome run(std::int64_t &budget);

    /// Called by handlers whose lanes do not all go on at `next`: the caller has set `position` of the lanes that go
    /// elsewhere; the others of the group (`stay`) continue at `next`.
    void regroup(Mask stay);
    /// Makes the inner loop leave after the current operation, so that another warp or block gets a turn.
    void yield();
    void exit_lanes(Mask lanes);
    /// A new frame for these lanes, which become ready at its first operation. Their old positions must be set already.
    Frame *enter(Linked &callee, Mask lanes, const Op *return_to, const CallSite *site, const Op &op);
    /// These lanes go back to the caller's frame.
    void leave(Mask lanes);
    /// Lets lanes go on that waited for others to arrive at a warp-wide operation, if they all have.
    void release_sync();

    std::byte *local_memory(unsigned lane) noexcept { return local_.get() + std::size_t{lane} * local_stride_; }
    std::size_t local_stride() const noexcept { return local_stride_; }
    void reserve_local(std::size_t bytes, const Op &op);
    std::array<unsigned, 3> thread_of(unsigned lane) const;

    [[noreturn]] void fault(Fault::Kind kind, const Op &op, unsigned lane, std::uint64_t address,
                            std::string text = {}) const;

  private:
    bool pick();
    void fill_specials(Frame &into);
    void recycle(Frame *unused_frame);

    AlignedBytes local_;
    std::size_t local_stride_ = 0;
    std::int64_t slice_ = 0;       ///< operations that the group may run before the next choice
    std::int64_t waited_ = 0;      ///< operations run since ready lanes began to wait for others
    std::int64_t favour_left_ = 0; ///< operations that the favoured lanes may still run
    Mask favoured_ = 0;            ///< lanes that go first whatever their position
    unsigned last_favoured_ = 0;
    bool yielded_ = false;
};

struct Barrier {
    std::uint32_t arrived = 0;
    std::uint32_t expected = 0; ///< 0: all live threads
    Mask all = all_lanes;       ///< bar.red.and over what has arrived (0 or all ones)
    Mask any = 0;
    std::uint32_t count = 0;
};

class Block {
  public:
    static constexpr unsigned barrier_count = 16;

    Context *context = nullptr;
    Cluster *cluster = nullptr;
    unsigned rank = 0; ///< within the cluster
    std::array<unsigned, 3> id{};
    unsigned thread_count = 0;
    unsigned live_threads = 0;
    AlignedBytes shared;
    std::size_t shared_bytes = 0;    ///< the reserved part included
    std::size_t reserved_offset = 0; ///< of the reserved part; shared_bytes when the kernel does not use it
    std::vector<std::unique_ptr<Warp>> warps;
    std::array<Barrier, barrier_count> barriers{};

    void start(const std::array<unsigned, 3> &block_id, Linked &entry);
    enum class Outcome : std::uint8_t { blocked, exhausted, done };
    Outcome run(std::int64_t budget);
    void release_if_complete(unsigned barrier);
    void threads_exited(unsigned count);
};

/// The blocks that are resident together because they may share memory and barriers: one, unless the launch has
/// clusters.
struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    std::uint32_t arrived = 0;
    std::uint32_t phase = 0;
    void release_if_complete();
};

/// Everything a host thread needs to run blocks of a launch. One for each worker.
struct Context {
    Context(const Kernel &launched_kernel, const Launch &launch_data, Program &decoded, const EntryPlan &entry_plan,
            Memory &device_memory);

    const Kernel &kernel;
    const Launch &launch;
    Program &program;
    Memory &memory;
    const EntryPlan &plan;
    Observer *observer = nullptr;
    std::string *printf_output = nullptr;
    std::vector<std::byte> parameters;
    std::vector<std::unique_ptr<Linked>> linked; ///< by function index
    std::byte *workspace = nullptr;              ///< of the whole launch, for grid-wide synchronisation
    std::size_t workspace_bytes = 0;

    // The pieces of global memory used last.
    static constexpr unsigned cached_ranges = 4;
    std::array<Memory::Range, cached_ranges> read_ranges{}, write_ranges{};
    unsigned read_victim = 0, write_victim = 0;
    std::uint64_t operations = 0; ///< run so far
    std::uint64_t stores = 0;     ///< store operations so far; blocks that spin on others execute none

    Linked &link(std::uint32_t function_index);
    std::unique_ptr<Frame> make_frame(Linked &owner);
    std::uint64_t symbol_value(const SymbolRow &symbol);
};

} // namespace simgpu::ptx
