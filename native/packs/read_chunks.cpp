// See read_chunks.hpp.
#include "read_chunks.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>

namespace woodfrog::packs {
namespace {

using transfer::File;
using transfer::TransferError;

bool is_raw(const Wanted &chunk) {
    return chunk.location.encoding == static_cast<uint32_t>(Encoding::raw);
}

uint64_t end_of(const Wanted &chunk) {
    return chunk.location.offset + chunk.location.stored;
}

// Raw neighbours that are to be neighbours in memory, too: the read puts them where they belong.
bool is_in_place(std::span<const Wanted> run) {
    for (size_t i = 0; i < run.size(); i++) {
        if (!is_raw(run[i]))
            return false;
        if (i > 0 &&
            (run[i].location.offset != end_of(run[i - 1]) || run[i].to != run[i - 1].to + run[i - 1].location.stored))
            return false;
    }
    return true;
}

} // namespace

void PackFiles::open(uint32_t pack) {
    if (files_.contains(pack))
        return;
    const int fd = fds_.at(pack);
    const bool is_copy = (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
    const bool direct = !is_copy && files_.size() < most_direct;
    files_.emplace(pack, std::make_unique<File>(fd, direct ? File::Use::read : File::Use::read_cached));
}

void throw_damaged(size_t index, const std::string &reason) {
    throw transfer::IntegrityError(index, reason);
}

void ChunkReader::read(std::span<const Wanted> wanted, const Damaged &damaged) {
    begin(wanted);
    finish(damaged);
}

void ChunkReader::begin(std::span<const Wanted> wanted) {
    left_ = wanted;
    runs_.clear();
    if (queue_.is_asynchronous())
        begin_some();
}

void ChunkReader::finish(const Damaged &damaged) {
    while (!runs_.empty() || !left_.empty()) {
        for (Run &run : runs_)
            finish_run(run, damaged);
        runs_.clear();
        begin_some();
    }
}

// As many runs as may be in flight at once; one, if nothing ever is.
void ChunkReader::begin_some() {
    const size_t most = queue_.is_asynchronous() ? most_runs : 1;
    uint64_t scratch = 0;
    while (!left_.empty() && runs_.size() < most) {
        const bool in_memory = files_.file(left_[0].location.pack).is_in_memory();
        const uint64_t most_bytes = in_memory ? most_read_bytes_in_memory : most_read_bytes;
        size_t count = 1;
        while (count < left_.size() && left_[count].location.pack == left_[0].location.pack &&
               left_[count].location.offset >= end_of(left_[count - 1]) &&
               left_[count].location.offset - end_of(left_[count - 1]) < page_bytes &&
               end_of(left_[count]) - left_[0].location.offset <= most_bytes)
            count++;
        Run &run = runs_.emplace_back(queue_, left_.first(count));
        run.in_place = is_in_place(run.chunks);
        run.start = run.chunks.front().location.offset;
        if (!run.in_place) {
            // Whole pages, so that the page cache can be passed by; a pack that was not cut is whole pages long.
            run.start = run.start / page_bytes * page_bytes;
            const uint64_t size = round_up(end_of(run.chunks.back()), page_bytes) - run.start;
            if (scratch > 0 && scratch + size > most_read_bytes) {
                runs_.pop_back();
                break;
            }
            run.scratch = scratch;
            scratch += size;
        }
        left_ = left_.subspan(count);
    }
    uint8_t *room = scratch_.at_least(std::max<uint64_t>(scratch, page_bytes));
    for (Run &run : runs_) {
        progress_.check();
        File &file = files_.file(run.chunks.front().location.pack);
        const uint64_t end = end_of(run.chunks.back());
        if (run.in_place)
            run.reads.read(file, run.chunks.front().to, end - run.start, run.start);
        else
            run.reads.read(file, room + run.scratch, round_up(end, page_bytes) - run.start, run.start);
    }
}

void ChunkReader::finish_run(Run &run, const Damaged &damaged) {
    progress_.check();
    try {
        run.reads.wait();
    } catch (const TransferError &error) {
        if (error.code != -ENODATA && error.code != -EIO)
            throw;
        if (run.chunks.size() == 1 && run.in_place) {
            damaged(run.chunks[0].index, error.what());
            return;
        }
        for (const Wanted &chunk : run.chunks) // something there cannot be read: is it this one?
            read_again(chunk, run.chunks.size() == 1, damaged);
        return;
    }
    for (const Wanted &chunk : run.chunks) {
        progress_.check();
        const uint8_t *stored = scratch_.data() + run.scratch + (chunk.location.offset - run.start);
        deliver(chunk, run.in_place ? chunk.to : stored, damaged);
    }
}

// One chunk of a run that could not be read: `exact`, not a byte more than it has; else that comes second.
void ChunkReader::read_again(const Wanted &chunk, bool exact, const Damaged &damaged) {
    progress_.check();
    File &file = files_.file(chunk.location.pack);
    const bool in_place = is_raw(chunk);
    const uint64_t end = end_of(chunk);
    const uint64_t start = in_place || exact ? chunk.location.offset : chunk.location.offset / page_bytes * page_bytes;
    const uint64_t size = (in_place || exact ? end : round_up(end, page_bytes)) - start;
    uint8_t *to = in_place ? chunk.to : again_.at_least(size);
    try {
        file.read(to, size, start);
    } catch (const TransferError &error) {
        if (error.code != -ENODATA && error.code != -EIO)
            throw;
        if (in_place || exact)
            damaged(chunk.index, error.what());
        else
            read_again(chunk, true, damaged);
        return;
    }
    deliver(chunk, in_place ? chunk.to : to + (chunk.location.offset - start), damaged);
}

void ChunkReader::deliver(const Wanted &chunk, const uint8_t *stored, const Damaged &damaged) {
    const Location &location = chunk.location;
    if (stored != chunk.to &&
        !coder_.decode(static_cast<Encoding>(location.encoding), stored, location.stored, chunk.to, location.raw)) {
        damaged(chunk.index, "chunk " + std::to_string(chunk.index) + " is damaged: it cannot be decoded");
        return;
    }
    if (check_ && blake3::hash(chunk.to, location.raw) != chunk.digest)
        damaged(chunk.index, "chunk " + std::to_string(chunk.index) + " does not have the digest it was stored with");
}

} // namespace woodfrog::packs
