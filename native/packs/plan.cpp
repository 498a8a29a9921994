// See plan.hpp.
#include "plan.hpp"

#include "zero_digests.hpp"

#include <cerrno>

namespace woodfrog::packs {

using transfer::Chunk;
using transfer::IntegrityError;
using transfer::TransferError;

Plan::Plan(const char *operation, const transfer::ChunkList &list, const Packed<Digest> &digests,
           const Packed<Location> &locations, PackFiles &files)
    : list_(list), digests_(digests), locations_(locations) {
    const size_t count = list.chunks.size();
    if (digests.size() != count || locations.size() != count)
        transfer::throw_invalid(operation, "there are " + std::to_string(digests.size()) + " digests and " +
                                               std::to_string(locations.size()) + " locations for " +
                                               std::to_string(count) + " chunks");
    ZeroDigests zeros;
    for (size_t i = 0; i < count; i++) {
        if (!is_zero(i))
            check(operation, i, files);
        else if (list.chunks[i].size > largest_raw_bytes || digests[i] != zeros.of(list.chunks[i].size))
            throw IntegrityError(i, "chunk " + std::to_string(i) + " is said to be zeros, and its digest is another");
    }
}

void Plan::check(const char *operation, size_t i, PackFiles &files) const {
    const Location location = locations_[i];
    if (location.pack == pack_absent)
        throw TransferError(-ENOENT, operation, "chunk " + std::to_string(i) + " is in no pack");
    if (!files.has(location.pack))
        transfer::throw_invalid(operation, "chunk " + std::to_string(i) + " is in pack " +
                                               std::to_string(location.pack) + ", which is not given");
    if (!is_plausible(location.stored, location.raw, location.encoding) || location.raw != list_.chunks[i].size ||
        location.offset > static_cast<uint64_t>(INT64_MAX) - largest_raw_bytes)
        throw IntegrityError(i, "the location of chunk " + std::to_string(i) + " is not that of a chunk of " +
                                    std::to_string(list_.chunks[i].size) + " bytes");
    require(operation, static_cast<Encoding>(location.encoding));
    files.open(location.pack);
}

// Whether chunk i lies directly behind the one before it.
bool Plan::continues(size_t i) const {
    const Chunk &before = list_.chunks[i - 1], &here = list_.chunks[i];
    return here.context == before.context && here.place == before.place + before.size;
}

std::vector<Task> Plan::group(uint64_t task_bytes, uint64_t inline_zero_bytes) const {
    std::vector<Task> tasks;
    for (size_t i = 0; i < list_.chunks.size();) {
        size_t end = i + 1; // of a run of zeros; of data, one chunk
        uint64_t size = list_.chunks[i].size;
        if (is_zero(i))
            for (; end < list_.chunks.size() && is_zero(end) && continues(end); end++)
                size += list_.chunks[end].size;
        const bool zero = is_zero(i) && size >= inline_zero_bytes;
        for (; i < end; i++) {
            const uint64_t here = list_.chunks[i].size;
            const bool joins = !tasks.empty() && continues(i) && tasks.back().zero == zero &&
                               (zero || tasks.back().size_bytes + here <= task_bytes);
            if (!joins)
                tasks.push_back({i, 0, 0, zero});
            tasks.back().count++;
            tasks.back().size_bytes += here;
        }
    }
    return tasks;
}

void Plan::fill(const Task &task, uint8_t *to, ChunkReader &reader) const {
    reader.read(prepare(task, to), throw_damaged);
}

std::vector<Wanted> Plan::prepare(const Task &task, uint8_t *to) const {
    std::vector<Wanted> wanted;
    wanted.reserve(task.count);
    for (size_t i = task.first; i < task.first + task.count; i++) {
        if (is_zero(i))
            std::memset(to, 0, list_.chunks[i].size);
        else
            wanted.push_back({i, digests_[i], locations_[i], to});
        to += list_.chunks[i].size;
    }
    return wanted;
}

} // namespace woodfrog::packs
