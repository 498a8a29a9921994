// The two directions of ring.hpp. One mutex guards the queues; it is never held during a copy, a hash or file I/O. A
// failure anywhere makes every thread stop after the chunk it is at, and the streams' destructors wait for the copies
// before anybody may touch the ring again.
#include "ring.hpp"

#include "parallel.hpp"
#include "streams.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace woodfrog::transfer {
namespace {

// 2 ms at 55 GB/s: enough to bridge the time until this thread is woken.
constexpr uint64_t in_flight_bytes = 128ull << 20;

struct Filled {
    size_t chunk;
    uint32_t slot;
};

// What the copying thread and the working threads share.
class Ring {
  public:
    Ring(const RingPart &part, uint64_t chunk_bytes, size_t chunk_count) : part_(part), slot_bytes_(chunk_bytes) {
        const uint64_t slots = std::min<uint64_t>(part.size / slot_bytes_, std::max<size_t>(chunk_count, 1));
        for (uint64_t slot = slots; slot > 0; slot--)
            free.push_back(static_cast<uint32_t>(slot - 1));
    }

    uint64_t slot_bytes() const { return slot_bytes_; }
    uint64_t arena_offset(uint32_t slot) const { return part_.offset + slot * slot_bytes_; }
    uint8_t *data(uint32_t slot) const { return part_.arena.data() + arena_offset(slot); }

    std::mutex mutex;
    std::condition_variable changed; // anything below changed that somebody may wait for
    std::vector<uint32_t> free;
    std::deque<Filled> ready;
    size_t next_chunk = 0;
    bool finished = false; // the copying thread is done, one way or the other
    Failure failure;

    void fail() {
        failure.capture();
        std::lock_guard lock(mutex);
        changed.notify_all();
    }

    void give_back(uint32_t slot) {
        std::lock_guard lock(mutex);
        free.push_back(slot);
        changed.notify_all();
    }

  private:
    const RingPart &part_;
    uint64_t slot_bytes_;
};

// Streams per GPU, made when the first chunk of it comes; batches finish in the order in which they were submitted on
// their GPU.
class RingCopies {
  public:
    RingCopies(const ChunkList &list, const RingPart &part, const Ring &ring, Direction direction)
        : list_(list), part_(part), ring_(ring), direction_(direction),
          most_in_flight_(std::clamp<uint64_t>(in_flight_bytes / ring.slot_bytes(), 4, 64)) {}

    bool has_room() const { return in_flight_.size() < most_in_flight_; }
    bool empty() const { return in_flight_.empty(); }

    void submit(const Filled &filled) {
        const Chunk &chunk = list_.chunks[filled.chunk];
        if (!streams_[chunk.context])
            streams_[chunk.context] = std::make_unique<Streams>(*list_.contexts[chunk.context], direction_);
        Streams &streams = *streams_[chunk.context];
        streams.submit(part_.arena, ring_.arena_offset(filled.slot), chunk.place, chunk.size);
        streams.end_batch(0);
        in_flight_.push_back(filled);
    }

    Filled finish_oldest() {
        const Filled oldest = in_flight_.front();
        streams_[list_.chunks[oldest.chunk].context]->finish_oldest();
        in_flight_.pop_front();
        return oldest;
    }

  private:
    const ChunkList &list_;
    const RingPart &part_;
    const Ring &ring_;
    Direction direction_;
    size_t most_in_flight_;
    std::map<uint32_t, std::unique_ptr<Streams>> streams_;
    std::deque<Filled> in_flight_;
};

// Runs `work` in `threads` threads beside `copy` in this one; all are joined before it returns or throws.
void run_beside(Ring &ring, unsigned threads, const std::function<void()> &work, const std::function<void()> &copy) {
    {
        std::vector<std::jthread> workers;
        try {
            workers.reserve(threads);
            for (unsigned i = 0; i < threads; i++)
                workers.emplace_back([&] {
                    try {
                        work();
                    } catch (...) {
                        ring.fail();
                    }
                });
        } catch (const std::system_error &) {
            if (workers.empty()) // the copying thread cannot do their part: nothing would ever be taken up
                ring.fail();
        }
        try {
            copy();
        } catch (...) {
            ring.fail();
        }
        std::lock_guard lock(ring.mutex);
        ring.finished = true;
        ring.changed.notify_all();
    }
    ring.failure.rethrow();
}

} // namespace

void check_ring(const char *operation, const RingPart &part, uint64_t chunk_bytes) {
    check_chunk_bytes(operation, chunk_bytes);
    part.arena.check_range(operation, part.offset, part.size);
    if (part.offset % page_alignment != 0)
        throw_invalid(operation, "the ring's offset in the arena is not a multiple of a page");
    if (part.size < chunk_bytes)
        throw_invalid(operation, "the ring of " + std::to_string(part.size) + " bytes has no room for a chunk of " +
                                     std::to_string(chunk_bytes));
}

void drain_through(const ChunkList &list, const RingPart &part, uint64_t chunk_bytes, unsigned threads,
                   Progress &progress, const ChunkWork &consume) {
    Ring ring(part, chunk_bytes, list.chunks.size());
    progress.begin(list.size_bytes);

    auto work = [&] {
        for (;;) {
            Filled filled;
            {
                std::unique_lock lock(ring.mutex);
                ring.changed.wait(lock,
                                  [&] { return !ring.ready.empty() || ring.finished || ring.failure.happened(); });
                if (ring.ready.empty() || ring.failure.happened())
                    return;
                filled = ring.ready.front();
                ring.ready.pop_front();
            }
            progress.check();
            consume(filled.chunk, ring.data(filled.slot));
            progress.add(list.chunks[filled.chunk].size);
            ring.give_back(filled.slot);
        }
    };

    auto copy = [&] {
        RingCopies copies(list, part, ring, Direction::to_arena);
        while (ring.next_chunk < list.chunks.size() || !copies.empty()) {
            progress.check();
            while (ring.next_chunk < list.chunks.size() && copies.has_room()) {
                std::unique_lock lock(ring.mutex);
                if (ring.free.empty() && copies.empty()) // nothing of ours to wait for but the others
                    ring.changed.wait(lock, [&] { return !ring.free.empty() || ring.failure.happened(); });
                if (ring.failure.happened())
                    return;
                if (ring.free.empty())
                    break;
                const Filled next{ring.next_chunk++, ring.free.back()};
                ring.free.pop_back();
                lock.unlock();
                copies.submit(next);
            }
            if (copies.empty())
                continue;
            const Filled arrived = copies.finish_oldest();
            std::lock_guard lock(ring.mutex);
            ring.ready.push_back(arrived);
            ring.changed.notify_all();
        }
    };
    run_beside(ring, threads, work, copy);
}

void refill_through(const ChunkList &list, const RingPart &part, uint64_t chunk_bytes, unsigned threads,
                    Progress &progress, const ChunkWork &produce) {
    Ring ring(part, chunk_bytes, list.chunks.size());
    progress.begin(list.size_bytes);

    auto work = [&] {
        for (;;) {
            Filled next;
            {
                std::unique_lock lock(ring.mutex);
                ring.changed.wait(lock, [&] {
                    return !ring.free.empty() || ring.next_chunk == list.chunks.size() || ring.finished ||
                           ring.failure.happened();
                });
                if (ring.next_chunk == list.chunks.size() || ring.finished || ring.failure.happened())
                    return;
                next = {ring.next_chunk++, ring.free.back()};
                ring.free.pop_back();
            }
            progress.check();
            produce(next.chunk, ring.data(next.slot));
            std::lock_guard lock(ring.mutex);
            ring.ready.push_back(next);
            ring.changed.notify_all();
        }
    };

    auto copy = [&] {
        RingCopies copies(list, part, ring, Direction::to_device);
        size_t done = 0;
        while (done < list.chunks.size()) {
            progress.check();
            while (copies.has_room()) {
                std::unique_lock lock(ring.mutex);
                if (ring.ready.empty() && copies.empty())
                    ring.changed.wait(lock, [&] { return !ring.ready.empty() || ring.failure.happened(); });
                if (ring.failure.happened())
                    return;
                if (ring.ready.empty())
                    break;
                const Filled next = ring.ready.front();
                ring.ready.pop_front();
                lock.unlock();
                copies.submit(next);
            }
            if (copies.empty())
                continue;
            const Filled arrived = copies.finish_oldest();
            progress.add(list.chunks[arrived.chunk].size);
            done++;
            ring.give_back(arrived.slot);
        }
    };
    run_beside(ring, threads, work, copy);
}

} // namespace woodfrog::transfer
