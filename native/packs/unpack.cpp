// See unpack.hpp.
#include "unpack.hpp"

#include "fills.hpp"
#include "output_files.hpp"
#include "plan.hpp"
#include "transfer/zero.hpp"
#include "workers.hpp"
#include "zero_digests.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

namespace woodfrog::packs {
namespace {

using transfer::ChunkList;
using transfer::Progress;

constexpr uint64_t task_bytes = 4ull << 20; // read, and copied to the GPU, at once

// Shorter runs of zeros cross the bus (5 µs) rather than cost a call to the driver and a copy more each.
constexpr uint64_t inline_zero_bytes = 256 << 10;

// So that every thread fills a slot while another of its is being copied.
uint64_t slot_bytes(const transfer::RingPart &ring, const UnpackOptions &options) {
    const uint64_t fair = ring.size / (2 * transfer::thread_count(options.threads));
    const uint64_t chunks = std::min(task_bytes, fair) / options.chunk_bytes;
    return std::max<uint64_t>(chunks, 1) * options.chunk_bytes;
}

// A thread's own.
struct QueuedReader {
    QueuedReader(const PackFiles &files, Progress &progress, bool check = true)
        : reader(files, queue, progress, check) {}

    transfer::FileQueue queue;
    ChunkReader reader;
};

// One thread's tasks into the arena: while one is compared with its digests, the next is on its way.
class ArenaFiller {
  public:
    ArenaFiller(transfer::Arena &arena, const Plan &plan, const std::vector<Task> &tasks, const PackFiles &files,
                Progress &progress)
        : arena_(arena), plan_(plan), tasks_(tasks), progress_(progress) {
        for (int i = 0; i < (queue_.is_asynchronous() ? 2 : 1); i++)
            reading_.push_back(std::make_unique<Reading>(files, queue_, progress));
    }

    void operator()(size_t number) {
        progress_.check();
        const Task &task = tasks_[number];
        uint8_t *to = arena_.data() + plan_.chunk(task.first).place;
        if (task.zero) {
            transfer::write_zeros(to, task.size_bytes);
            progress_.add(task.size_bytes);
            return;
        }
        Reading &next = *reading_.back(); // finished
        next.wanted = plan_.prepare(task, to);
        next.size_bytes = task.size_bytes;
        next.reader.begin(next.wanted);
        std::rotate(reading_.begin(), reading_.begin() + 1, reading_.end());
        finish(*reading_.back()); // the one before, or with nothing in flight this one
    }

    void finish() {
        for (const auto &reading : reading_)
            finish(*reading);
    }

  private:
    struct Reading {
        Reading(const PackFiles &files, transfer::FileQueue &queue, Progress &progress)
            : reader(files, queue, progress) {}

        std::vector<Wanted> wanted;
        uint64_t size_bytes = 0;
        ChunkReader reader;
    };

    void finish(Reading &reading) {
        reading.reader.finish(throw_damaged);
        progress_.add(std::exchange(reading.size_bytes, 0));
    }

    transfer::Arena &arena_;
    const Plan &plan_;
    const std::vector<Task> &tasks_;
    Progress &progress_;
    transfer::FileQueue queue_;
    std::vector<std::unique_ptr<Reading>> reading_;
};

// Sets the tasks of zeros in GPU memory.
void set_zeros(const ChunkList &list, const Plan &plan, const std::vector<Task> &tasks, Progress &progress) {
    for (size_t number = 0; number < list.contexts.size(); number++) {
        uint64_t size = 0;
        std::unique_ptr<Fills> fills;
        for (const Task &task : tasks) {
            const transfer::Chunk &chunk = plan.chunk(task.first);
            if (!task.zero || chunk.context != number)
                continue;
            progress.check();
            if (!fills)
                fills = std::make_unique<Fills>(*list.contexts[number]);
            fills->zero(chunk.place, task.size_bytes);
            size += task.size_bytes;
        }
        if (!fills)
            continue;
        progress.begin(size);
        fills->finish();
        progress.add(size);
    }
}

} // namespace

void refill_from_packs(const std::vector<transfer::Piece> &pieces, const Stored &stored, const transfer::RingPart &ring,
                       const UnpackOptions &options, Progress &progress) {
    constexpr const char *operation = "refill_from_packs";
    const transfer::Use arena_use = ring.arena.use();
    const std::vector<transfer::Use> uses = transfer::use_all(pieces);
    transfer::check_ring(operation, ring, options.chunk_bytes);
    const ChunkList list = transfer::cut(operation, pieces, 0, options.chunk_bytes);
    PackFiles files(stored.packs);
    const Plan plan(operation, list, stored.digests, stored.locations, files);
    const uint64_t slot = slot_bytes(ring, options);
    const std::vector<Task> tasks = plan.group(slot, inline_zero_bytes);
    set_zeros(list, plan, tasks, progress);

    ChunkList copies; // what the ring moves: a task of data each
    copies.contexts = list.contexts;
    std::vector<const Task *> data;
    for (const Task &task : tasks) {
        if (task.zero)
            continue;
        const transfer::Chunk &chunk = plan.chunk(task.first);
        copies.chunks.push_back({0, chunk.place, static_cast<uint32_t>(task.size_bytes), chunk.context});
        copies.size_bytes += task.size_bytes;
        data.push_back(&task);
    }
    Pool<QueuedReader> readers;
    transfer::refill_through(
        copies, ring, slot, transfer::thread_count(options.threads), progress, [&](size_t i, uint8_t *to) {
            readers.with([&] { return std::make_unique<QueuedReader>(files, progress, options.check); },
                         [&](QueuedReader &queued) { plan.fill(*data[i], to, queued.reader); });
        });
}

void refill_arena_from_packs(transfer::Arena &arena, const std::vector<transfer::Range> &ranges, const Stored &stored,
                             const UnpackOptions &options, Progress &progress) {
    constexpr const char *operation = "refill_arena_from_packs";
    const transfer::Use use = arena.use();
    const ChunkList list = transfer::cut(operation, arena, ranges, 0, options.chunk_bytes);
    PackFiles files(stored.packs);
    const Plan plan(operation, list, stored.digests, stored.locations, files);
    const std::vector<Task> tasks = plan.group(task_bytes, 0);
    progress.begin(list.size_bytes);
    for_each_with(options.threads, tasks.size(), [&] { return ArenaFiller(arena, plan, tasks, files, progress); });
}

void extract_from_packs(const std::vector<FilePiece> &pieces, const Cutting &cutting, const Stored &stored,
                        unsigned threads, Progress &progress) {
    constexpr const char *operation = "extract_from_packs";
    const ChunkList list = cut(operation, pieces, cutting);
    PackFiles files(stored.packs);
    const Plan plan(operation, list, stored.digests, stored.locations, files);
    const std::vector<Task> tasks = plan.group(task_bytes, 0);
    OutputFiles outputs(pieces, transfer::thread_count(threads));
    progress.begin(list.size_bytes);
    for_each_with(threads, tasks.size(), [&] {
        return [&, queued = std::make_unique<QueuedReader>(files, progress), buffer = Buffer()](size_t number) mutable {
            progress.check();
            const Task &task = tasks[number];
            const transfer::Chunk &chunk = plan.chunk(task.first);
            const FilePiece &piece = pieces[chunk.context];
            if (task.zero) {
                outputs.make_hole(piece, chunk.place, task.size_bytes);
            } else if (uint8_t *to = outputs.claim(piece, chunk.place, task.size_bytes)) {
                try {
                    plan.fill(task, to, queued->reader);
                } catch (...) {
                    std::memset(to, 0, task.size_bytes); // nothing that has not been compared stays in a file
                    throw;
                }
                outputs.release(piece, chunk.place, task.size_bytes);
            } else {
                uint8_t *data = buffer.at_least(task.size_bytes);
                plan.fill(task, data, queued->reader);
                outputs.write(piece, data, task.size_bytes, chunk.place);
            }
            progress.add(task.size_bytes);
        };
    });
}

std::vector<size_t> check_packs(const Stored &stored, unsigned threads, Progress &progress) {
    constexpr const char *operation = "check_packs";
    const size_t count = stored.digests.size();
    if (stored.locations.size() != count)
        transfer::throw_invalid(operation, "there are " + std::to_string(stored.locations.size()) + " locations for " +
                                               std::to_string(count) + " digests");
    PackFiles files(stored.packs);
    ZeroDigests zeros;
    std::vector<size_t> bad, readable;
    for (size_t i = 0; i < count; i++) {
        const Location location = stored.locations[i];
        if (location.pack == pack_zero && location.raw > 0 && location.raw <= largest_raw_bytes &&
            stored.digests[i] == zeros.of(location.raw))
            continue;
        if (location.pack >= pack_zero || !files.has(location.pack) ||
            !is_plausible(location.stored, location.raw, location.encoding) ||
            location.offset > static_cast<uint64_t>(INT64_MAX) - largest_raw_bytes) {
            bad.push_back(i);
            continue;
        }
        require(operation, static_cast<Encoding>(location.encoding));
        files.open(location.pack);
        readable.push_back(i);
        progress.begin(location.raw);
    }
    // In the order of the disk.
    std::ranges::sort(readable, {}, [&](size_t i) {
        const Location location = stored.locations[i];
        return std::pair(location.pack, location.offset);
    });
    std::vector<size_t> starts{0}; // of the tasks, within `readable`
    uint64_t size = 0;
    for (size_t i = 0; i < readable.size(); i++) {
        size += stored.locations[readable[i]].raw;
        if (size > task_bytes && i > starts.back()) {
            starts.push_back(i);
            size = stored.locations[readable[i]].raw;
        }
    }
    starts.push_back(readable.size());

    std::mutex mutex;
    for_each_with(threads, starts.size() - 1, [&] {
        return [&, queued = std::make_unique<QueuedReader>(files, progress), buffer = Buffer()](size_t number) mutable {
            std::vector<Wanted> wanted;
            uint64_t raw = 0;
            for (size_t i = starts[number]; i < starts[number + 1]; i++)
                raw += round_up(stored.locations[readable[i]].raw, page_bytes);
            uint8_t *to = buffer.at_least(raw);
            for (size_t i = starts[number]; i < starts[number + 1]; i++) {
                const size_t position = readable[i];
                wanted.push_back({position, stored.digests[position], stored.locations[position], to});
                to += round_up(wanted.back().location.raw, page_bytes);
            }
            queued->reader.read(wanted, [&](size_t position, const std::string &) {
                std::lock_guard lock(mutex);
                bad.push_back(position);
            });
            for (const Wanted &chunk : wanted)
                progress.add(chunk.location.raw);
        };
    });
    std::ranges::sort(bad);
    return bad;
}

} // namespace woodfrog::packs
