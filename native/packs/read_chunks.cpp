// See read_chunks.hpp.
#include "read_chunks.hpp"

#include <cerrno>

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
    if (!files_.contains(pack))
        files_.emplace(pack,
                       std::make_unique<File>(fds_.at(pack),
                                              files_.size() < most_direct ? File::Use::read : File::Use::read_cached));
}

void throw_damaged(size_t index, const std::string &reason) {
    throw transfer::IntegrityError(index, reason);
}

void ChunkReader::read(std::span<const Wanted> wanted, const Damaged &damaged) {
    for (size_t first = 0; first < wanted.size();) {
        size_t end = first + 1;
        while (end < wanted.size() && wanted[end].location.pack == wanted[first].location.pack &&
               wanted[end].location.offset >= end_of(wanted[end - 1]) &&
               wanted[end].location.offset - end_of(wanted[end - 1]) < page_bytes &&
               end_of(wanted[end]) - wanted[first].location.offset <= most_read_bytes)
            end++;
        read_run(wanted.subspan(first, end - first), false, damaged);
        first = end;
    }
}

// `exact`: not a byte more than the chunks have.
void ChunkReader::read_run(std::span<const Wanted> run, bool exact, const Damaged &damaged) {
    progress_.check();
    const bool in_place = is_in_place(run);
    try {
        read_bytes(run, in_place, exact);
    } catch (const TransferError &error) {
        if (error.code != -ENODATA && error.code != -EIO)
            throw;
        if (run.size() == 1 && (in_place || exact)) {
            damaged(run[0].index, error.what());
            return;
        }
        for (size_t i = 0; i < run.size(); i++) // something there cannot be read: is it any of these?
            read_run(run.subspan(i, 1), run.size() == 1, damaged);
        return;
    }
    for (const Wanted &chunk : run) {
        progress_.check();
        finish(chunk, in_place ? chunk.to : scratch_.data() + (chunk.location.offset - scratch_start_), damaged);
    }
}

void ChunkReader::read_bytes(std::span<const Wanted> run, bool in_place, bool exact) {
    const uint64_t start = run.front().location.offset, end = end_of(run.back());
    File &file = files_.file(run.front().location.pack);
    if (in_place) {
        file.read(run.front().to, end - start, start);
        return;
    }
    // Whole pages, so that the page cache can be passed by; a pack that was not cut is a whole number of pages long.
    scratch_start_ = exact ? start : start / page_bytes * page_bytes;
    const uint64_t size = exact ? end - start : round_up(end, page_bytes) - scratch_start_;
    file.read(scratch_.at_least(size), size, scratch_start_);
}

void ChunkReader::finish(const Wanted &chunk, const uint8_t *stored, const Damaged &damaged) {
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
