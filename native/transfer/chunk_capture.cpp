// See chunk_capture.hpp. One thread submits, alternately on two streams, so that the end of one batch overlaps with the
// beginning of the next:
//
//     short runs ─gather kernel─▶ slots        up to 16 Ki chunks a launch
//     long runs  ══════copy═════▶ slots
#include "chunk_capture.hpp"

#include "chunk_runs.hpp"
#include "device_hash.hpp"
#include "kernel_memory.hpp"
#include "kernels/tables.hpp"

#include <algorithm>
#include <memory>

namespace woodfrog::transfer {
namespace {

constexpr uint64_t most_rows = 16384;             // of a launch; a gigabyte of 64 KiB chunks, half a millisecond
constexpr uint64_t copy_batch_bytes = 1ull << 30; // between two looks at whether somebody cancelled

// A stream, the table of the launch that is under way on it, and what its batch moves.
struct Lane {
    Lane(const Context &context, uint64_t row_count) : stream(context) {
        if (row_count > 0)
            rows = std::make_unique<KernelMemory>(context, row_count * sizeof(kernels::GatherRow),
                                                  KernelMemory::Place::host);
    }
    std::unique_ptr<KernelMemory> rows; // read across the bus by the kernel, once a block
    KernelStream stream;                // after the table: its destructor waits
    uint64_t size = 0;                  // of what is submitted and not yet waited for
};

class Capture {
  public:
    Capture(const DeviceChunks &device, const ChunkCaptureOptions &options, bool gather, Progress &progress)
        : device_(device), chunk_bytes_(options.chunk_bytes), progress_(progress) {
        uint64_t rows = 0;
        for (const ChunkRun &run : device.runs)
            if (!run.direct)
                rows = std::max<uint64_t>(rows, std::min<uint64_t>(run.count, most_rows));
        for (auto &lane : lanes_)
            lane = std::make_unique<Lane>(*device.context, rows);
        if (gather)
            gather_ = device.context->kernels().function("woodfrog_gather");
    }

    void run() {
        for (const ChunkRun &run : device_.runs) {
            progress_.check();
            if (run.direct)
                copy(run);
            else
                gather(run);
        }
        for (auto &lane : lanes_)
            finish(*lane);
    }

  private:
    void copy(const ChunkRun &run) {
        const PlacedChunk &chunk = device_.chunks[run.first];
        for (uint64_t done = 0; done < run.size;) {
            const uint64_t here = std::min(copy_batch_bytes - filled_, run.size - done);
            CUstream stream = lanes_[current_]->stream.stream();
            Current current(*device_.context);
            WF_CUDA(cuMemcpyDtoDAsync, chunk.place + done, chunk.address + done, size_t{here}, stream);
            done += here;
            add(here);
        }
        if (const uint64_t rest = run.count * chunk_bytes_ - run.size; rest > 0) { // a short chunk ends its run
            Current current(*device_.context);
            WF_CUDA(cuMemsetD8Async, chunk.place + run.size, static_cast<unsigned char>(0), size_t{rest},
                    lanes_[current_]->stream.stream());
        }
    }

    void gather(const ChunkRun &run) {
        for (size_t done = 0; done < run.count;) {
            next_lane(); // a table serves one launch
            Lane &lane = *lanes_[current_];
            const size_t count = std::min<size_t>(most_rows, run.count - done);
            auto *rows = reinterpret_cast<kernels::GatherRow *>(lane.rows->data());
            uint64_t size = 0;
            for (size_t i = 0; i < count; i++) {
                const PlacedChunk &chunk = device_.chunks[run.first + done + i];
                rows[i] = {chunk.address, chunk.size};
                size += chunk.size;
            }
            CUdeviceptr table = lane.rows->address(), to = device_.chunks[run.first + done].place;
            uint64_t slot_bytes = chunk_bytes_;
            void *arguments[] = {&table, &slot_bytes, &to};
            const uint64_t slices = (chunk_bytes_ - 1) / kernels::gather_slice_bytes + 1;
            lane.stream.launch(gather_, static_cast<unsigned>(slices), static_cast<unsigned>(count),
                               kernels::gather_threads, arguments);
            lane.size += size;
            next_lane();
            done += count;
        }
    }

    void add(uint64_t size) {
        lanes_[current_]->size += size;
        filled_ += size;
        if (filled_ >= copy_batch_bytes)
            next_lane();
    }

    // The other stream becomes the one that is submitted to, once what it was given before is done.
    void next_lane() {
        filled_ = 0;
        current_ ^= 1;
        finish(*lanes_[current_]);
        progress_.check();
    }

    void finish(Lane &lane) {
        if (lane.size == 0)
            return;
        lane.stream.synchronize();
        progress_.add(lane.size);
        lane.size = 0;
    }

    const DeviceChunks &device_;
    uint64_t chunk_bytes_;
    Progress &progress_;
    CUfunction gather_ = nullptr;
    std::unique_ptr<Lane> lanes_[2];
    unsigned current_ = 0;
    uint64_t filled_ = 0; // of the batch that is being submitted
};

std::vector<Range> ranges_of(const std::vector<Piece> &slots, uint64_t chunk_bytes) {
    std::vector<Range> ranges;
    for (const Piece &piece : slots) {
        const CUdeviceptr address = piece.memory->address() + piece.offset;
        if (address % 16 != 0)
            throw_invalid("capture_chunks", "a range of slots does not begin at a multiple of 16 bytes");
        ranges.push_back({address, piece.size / chunk_bytes * chunk_bytes});
    }
    return ranges;
}

void check_apart(const std::vector<Piece> &pieces, const std::vector<Piece> &slots) {
    for (const Piece &piece : pieces)
        for (const Piece &slot : slots)
            if (piece.memory == slot.memory)
                throw_invalid("capture_chunks", "chunks of a memory cannot be captured into the same memory");
}

} // namespace

void capture_chunks(const std::vector<Piece> &pieces, std::string_view positions, const std::vector<Piece> &slots,
                    const ChunkCaptureOptions &options, Progress &progress) {
    const std::vector<Use> uses = use_all(pieces), slot_uses = use_all(slots);
    check_store_chunk_bytes("capture_chunks", options.chunk_bytes);
    check_pieces("capture_chunks", slots);
    check_apart(pieces, slots);
    ChunkPlan plan =
        plan_chunks("capture_chunks", pieces, positions, ranges_of(slots, options.chunk_bytes), options.chunk_bytes);
    progress.begin(plan.size_bytes);
    if (plan.devices.empty())
        return;
    DeviceChunks &device = plan.devices.front();
    for (const Piece &slot : slots)
        if (plan.devices.size() > 1 || slot.memory->context() != device.context)
            throw_invalid("capture_chunks", "the chunks and their slots are not on one GPU");
    const Kernels &kernels = device.context->kernels();
    const bool gather = options.gather.value_or(kernels.way() == HashWay::gpu);
    if (gather)
        kernels.function("woodfrog_gather"); // throws before anything moves
    find_runs(device, options.chunk_bytes, gather);
    Capture(device, options, gather, progress).run();
}

} // namespace woodfrog::transfer
