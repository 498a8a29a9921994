// See chunk_drain.hpp. One thread a GPU submits:
//
//     short runs ─gather kernel─▶ staging 0 ═copy═▶ arena        while one buffer is copied to the arena,
//                ─gather kernel─▶ staging 1 ═copy═▶ arena        the other one is gathered
//     long runs ═══════════════════════════copy═══▶ arena
#include "chunk_drain.hpp"

#include "chunk_runs.hpp"
#include "device_hash.hpp"
#include "kernel_memory.hpp"
#include "kernels/tables.hpp"
#include "parallel.hpp"
#include "streams.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <thread>

namespace woodfrog::transfer {
namespace {

// How much is under way at once. A copy of another process waits for what the engine has been given already, and no
// stream priority is below that of an application's streams (cuCtxGetStreamPriorityRange: 0 is the least).
struct Pace {
    uint64_t batch_bytes;
    size_t batches; // in flight
};
constexpr Pace at_once{16ull << 20, Streams::most_batches}; // the H200's bus needs no larger batches for its speed
constexpr Pace in_background{4ull << 20, 3};                // 0.2 ms at 55 GB/s
constexpr uint64_t most_staging_bytes = 1ull << 30;
constexpr uint64_t most_slots = 65535; // of a launch: the second dimension of a grid
constexpr size_t fewest_gathered = 32; // of fewer chunks, copying each costs less than allocating the buffers
constexpr unsigned buffer_count = 2;
constexpr unsigned no_buffer = buffer_count;

// A staging buffer, and the stream on which it is filled.
struct Staging {
    Staging(const Context &context, uint64_t slots, uint64_t chunk_bytes)
        : memory(context, slots * chunk_bytes, KernelMemory::Place::device),
          rows(context, slots * sizeof(kernels::GatherRow), KernelMemory::Place::host), stream(context) {}
    KernelMemory memory;
    KernelMemory rows; // read across the bus by the kernel, once a block
    KernelStream stream;
    bool busy = false;
};

// So many bytes a second: what comes next waits until what came before has had its time.
class RateLimit {
  public:
    explicit RateLimit(uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}

    // Returns when these bytes may follow those before; early when another GPU's thread has failed.
    void await(uint64_t bytes, const Progress &progress, const Failure &failure) {
        if (bytes_per_s_ == 0)
            return;
        using namespace std::chrono;
        constexpr auto longest_wait = milliseconds(10); // a drain that is cancelled is to end soon
        for (auto now = steady_clock::now(); now < next_ && !failure.happened(); now = steady_clock::now()) {
            progress.check();
            std::this_thread::sleep_for(std::min<steady_clock::duration>(next_ - now, longest_wait));
        }
        const auto takes = duration_cast<steady_clock::duration>(
            duration<double>(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_)));
        next_ = std::max(next_, steady_clock::now()) + takes;
    }

  private:
    uint64_t bytes_per_s_;
    std::chrono::steady_clock::time_point next_{};
};

class DeviceDrain {
  public:
    DeviceDrain(const DeviceChunks &device, Arena &arena, const ChunkDrainOptions &options, Progress &progress,
                std::vector<std::unique_ptr<Staging>> staging, uint64_t slots)
        : device_(device), arena_(arena), chunk_bytes_(options.chunk_bytes),
          pace_(options.background ? in_background : at_once), limit_(options.most_bytes_per_s), progress_(progress),
          staging_(std::move(staging)), slots_(slots), streams_(*device.context, Direction::to_arena) {
        if (!staging_.empty())
            gather_ = device.context->kernels().function("woodfrog_gather");
    }

    void run(const Failure &failure) {
        for (const ChunkRun &run : device_.runs) {
            if (run.direct)
                copy(run, failure);
            else
                gather(run, failure);
            if (failure.happened())
                return;
        }
        end_batch(no_buffer);
        while (streams_.batches() > 0) {
            progress_.check();
            finish_oldest();
        }
        limit_.await(0, progress_, failure); // what follows this drain comes after the time that it may take
    }

  private:
    void copy(const ChunkRun &run, const Failure &failure) {
        const PlacedChunk &chunk = device_.chunks[run.first];
        for (uint64_t done = 0; done < run.size && !failure.happened();) {
            progress_.check();
            const uint64_t here = std::min(pace_.batch_bytes - filled_, run.size - done);
            limit_.await(here, progress_, failure);
            streams_.submit(arena_, chunk.place + done, chunk.address + done, here);
            done += here;
            filled_ += here;
            if (filled_ == pace_.batch_bytes)
                end_batch(no_buffer);
        }
    }

    void gather(const ChunkRun &run, const Failure &failure) {
        end_batch(no_buffer);
        for (size_t done = 0; done < run.count && !failure.happened();) {
            progress_.check();
            const unsigned number = free_buffer();
            Staging &buffer = *staging_[number];
            const size_t count = std::min<size_t>(slots_, run.count - done);
            auto *rows = reinterpret_cast<kernels::GatherRow *>(buffer.rows.data());
            uint64_t size = 0;
            for (size_t i = 0; i < count; i++) {
                const PlacedChunk &chunk = device_.chunks[run.first + done + i];
                rows[i] = {chunk.address, chunk.size};
                size += chunk.size;
            }
            CUdeviceptr table = buffer.rows.address(), to = buffer.memory.address();
            uint64_t slot_bytes = chunk_bytes_;
            void *arguments[] = {&table, &slot_bytes, &to};
            const uint64_t slices = (chunk_bytes_ - 1) / kernels::gather_slice_bytes + 1;
            limit_.await(size, progress_, failure);
            buffer.busy = true;
            buffer.stream.launch(gather_, static_cast<unsigned>(slices), static_cast<unsigned>(count),
                                 kernels::gather_threads, arguments);
            buffer.stream.record();
            streams_.wait_for(buffer.stream.event());
            // To the last byte of the last chunk: what lies behind it in its slot is not this call's to write.
            const PlacedChunk &last = device_.chunks[run.first + done + count - 1];
            streams_.submit(arena_, device_.chunks[run.first + done].place, to, (count - 1) * chunk_bytes_ + last.size);
            filled_ += size;
            end_batch(number);
            done += count;
        }
    }

    // Waits for copies until a staging buffer has been emptied.
    unsigned free_buffer() {
        for (;;) {
            for (unsigned i = 0; i < staging_.size(); i++)
                if (!staging_[i]->busy)
                    return i;
            finish_oldest();
        }
    }

    void end_batch(unsigned buffer) {
        if (filled_ == 0)
            return;
        if (streams_.batches() >= pace_.batches)
            finish_oldest();
        streams_.end_batch(filled_ * (buffer_count + 1) + buffer);
        filled_ = 0;
    }

    void finish_oldest() {
        const uint64_t tag = streams_.finish_oldest();
        if (const auto buffer = tag % (buffer_count + 1); buffer != no_buffer)
            staging_[buffer]->busy = false;
        progress_.add(tag / (buffer_count + 1));
    }

    const DeviceChunks &device_;
    Arena &arena_;
    uint64_t chunk_bytes_;
    Pace pace_;
    RateLimit limit_;
    Progress &progress_;
    std::vector<std::unique_ptr<Staging>> staging_;
    uint64_t slots_; // of a staging buffer
    CUfunction gather_ = nullptr;
    Streams streams_;     // last: its copies are waited for before the staging memory goes
    uint64_t filled_ = 0; // of the batch that is being submitted
};

// As many buffers as there is room for, none if there is none.
std::vector<std::unique_ptr<Staging>> allocate_staging(const Context &context, unsigned count, uint64_t slots,
                                                       uint64_t chunk_bytes) {
    std::vector<std::unique_ptr<Staging>> staging;
    try {
        while (staging.size() < count)
            staging.push_back(std::make_unique<Staging>(context, slots, chunk_bytes));
    } catch (const TransferError &error) {
        if (error.code != CUDA_ERROR_OUT_OF_MEMORY)
            throw; // a full GPU is no obstacle: direct copies need no memory
    }
    return staging;
}

void drain_device(DeviceChunks &device, Arena &arena, const ChunkDrainOptions &options, bool gather, Progress &progress,
                  const Failure &failure) {
    find_runs(device, options.chunk_bytes, gather);
    size_t most = 0, gathered = 0;
    for (const ChunkRun &run : device.runs)
        if (!run.direct) {
            most = std::max(most, run.count);
            gathered += run.count;
        }
    if (gathered < fewest_gathered && !options.gather.value_or(false)) {
        find_runs(device, options.chunk_bytes, false);
        most = 0;
    }
    std::vector<std::unique_ptr<Staging>> staging;
    const uint64_t slots =
        std::min({uint64_t{most}, std::max<uint64_t>(options.staging_bytes / options.chunk_bytes, 1), most_slots});
    if (most > 0) {
        const unsigned count = gathered > slots ? buffer_count : 1;
        staging = allocate_staging(*device.context, count, slots, options.chunk_bytes);
        if (staging.empty())
            find_runs(device, options.chunk_bytes, false);
    }
    DeviceDrain(device, arena, options, progress, std::move(staging), slots).run(failure);
}

} // namespace

std::string drain_chunks(const std::vector<Piece> &pieces, std::string_view positions, Arena &arena,
                         const std::vector<Range> &ranges, const ChunkDrainOptions &options, Progress &progress) {
    Use arena_use = arena.use();
    const std::vector<Use> uses = use_all(pieces);
    check_store_chunk_bytes("drain_chunks", options.chunk_bytes);
    if (options.staging_bytes > most_staging_bytes)
        throw_invalid("drain_chunks", "staging buffers of more than 1 GiB");
    for (const Range &range : ranges) {
        arena.check_range("drain_chunks", range.offset, range.size);
        if (range.offset % page_alignment != 0)
            throw_invalid("drain_chunks",
                          "the arena offset " + std::to_string(range.offset) + " is not a multiple of a page");
    }
    ChunkPlan plan = plan_chunks("drain_chunks", pieces, positions, ranges, options.chunk_bytes);
    std::vector<bool> gather;
    for (const DeviceChunks &device : plan.devices) {
        const Kernels &kernels = device.context->kernels();
        gather.push_back(options.gather.value_or(kernels.way() == HashWay::gpu));
        if (gather.back())
            kernels.function("woodfrog_gather"); // throws before anything moves
    }
    progress.begin(plan.size_bytes);
    std::atomic<size_t> next{0};
    if (!plan.devices.empty())
        run_parallel(static_cast<unsigned>(plan.devices.size()), [&](Failure &failure) {
            for (size_t i = next++; i < plan.devices.size() && !failure.happened(); i = next++)
                drain_device(plan.devices[i], arena, options, gather[i], progress, failure);
        });
    return std::move(plan.places);
}

} // namespace woodfrog::transfer
