// Reads chunks from packs into memory: neighbours in one read, decoded, and compared with their digests. Nothing that a
// pack or an index says is believed: what comes out has the digest that was asked for, or does not come out.
#pragma once
#include "codecs.hpp"
#include "records.hpp"
#include "transfer/file_queue.hpp"
#include "transfer/progress.hpp"

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

namespace woodfrog::packs {

// The packs of one operation, by the caller's numbers; the descriptors stay the caller's. They are read past the page
// cache, but for those that are open for writing as well: such a one is a copy that has just been fetched from
// elsewhere and is in the cache; reading past it would wait until it had gone to the disk.
class PackFiles {
  public:
    PackFiles(const std::unordered_map<uint32_t, int> &fds) : fds_(fds) {}

    bool has(uint32_t pack) const { return fds_.contains(pack); }

    // To be called for every pack that is needed, before threads share this.
    void open(uint32_t pack);
    transfer::File &file(uint32_t pack) const { return *files_.at(pack); }

  private:
    // Past the cache costs a descriptor more each; a process has 1024 unless it asks for more.
    static constexpr size_t most_direct = 256;

    const std::unordered_map<uint32_t, int> &fds_;
    std::unordered_map<uint32_t, std::unique_ptr<transfer::File>> files_;
};

// A chunk to be read: location.raw bytes to `to`. The location is plausible, and its pack is open.
struct Wanted {
    size_t index; // the caller's, for errors
    Digest digest;
    Location location;
    uint8_t *to;
};

// Told of a chunk that cannot be had: its index and the reason.
using Damaged = std::function<void(size_t index, const std::string &reason)>;

// The Damaged that throws IntegrityError.
void throw_damaged(size_t index, const std::string &reason);

// One thread's at a time.
class ChunkReader {
  public:
    // Without `check`, decoded chunks are as they came: their digests are compared elsewhere. The queue outlives this.
    ChunkReader(const PackFiles &files, transfer::FileQueue &queue, transfer::Progress &progress, bool check = true)
        : files_(files), queue_(queue), progress_(progress), check_(check) {}

    // In the order given; neighbours in the list that are neighbours in a pack are read together. A chunk with no bytes
    // in the file, or bytes that the disk cannot read, is damaged like one with wrong bytes. Other failures throw.
    void read(std::span<const Wanted> wanted, const Damaged &damaged);

    // The same in two steps: between them the reads of the first few MiB are in flight, if the queue can do that.
    // `wanted` must stay, and `begin` may come again only after `finish`.
    void begin(std::span<const Wanted> wanted);
    void finish(const Damaged &damaged);

  private:
    static constexpr uint64_t most_read_bytes = 8ull << 20;          // at once: more does not make a disk faster
    static constexpr uint64_t most_read_bytes_in_memory = 256 << 10; // what is hashed next is in a core's own cache
    static constexpr size_t most_runs = 256;                         // begun, and not yet finished

    // Neighbours, on their way.
    struct Run {
        Run(transfer::FileQueue &queue, std::span<const Wanted> wanted) : chunks(wanted), reads(queue) {}

        std::span<const Wanted> chunks;
        bool in_place = false;
        uint64_t start = 0; // of what is read, in the pack
        uint64_t scratch = 0;
        transfer::FileBatch reads;
    };

    void begin_some();
    void finish_run(Run &run, const Damaged &damaged);
    void read_again(const Wanted &chunk, bool exact, const Damaged &damaged);
    void deliver(const Wanted &chunk, const uint8_t *stored, const Damaged &damaged);

    const PackFiles &files_;
    transfer::FileQueue &queue_;
    transfer::Progress &progress_;
    const bool check_;
    Coder coder_;
    Buffer scratch_, again_;
    std::span<const Wanted> left_; // not begun
    std::deque<Run> runs_;         // last: what they read into goes after them
};

} // namespace woodfrog::packs
