// Checks, cutting and joining; see chunks.hpp.
#include "chunks.hpp"

#include <algorithm>
#include <limits>
#include <map>

namespace woodfrog::transfer {
namespace {

void check_memory_range(const char *operation, const Memory &memory, uint64_t offset, uint64_t size) {
    if (offset > memory.size_bytes() || size > memory.size_bytes() - offset)
        throw_invalid(operation, std::string("[").append(std::to_string(offset)) + ", +" + std::to_string(size) +
                                     ") does not lie within the memory of " + std::to_string(memory.size_bytes()) +
                                     " bytes");
}

uint32_t context_number(ChunkList &list, const std::shared_ptr<Context> &context) {
    for (uint32_t i = 0; i < list.contexts.size(); i++)
        if (list.contexts[i] == context)
            return i;
    list.contexts.push_back(context);
    return static_cast<uint32_t>(list.contexts.size() - 1);
}

void append(const char *operation, ChunkList &list, uint64_t file_offset, uint64_t place, uint64_t size,
            uint32_t context, uint64_t chunk_bytes) {
    if (size > static_cast<uint64_t>(INT64_MAX) - file_offset - list.size_bytes)
        throw_invalid(operation, "the file would become larger than files can be");
    for (uint64_t done = 0; done < size; done += chunk_bytes) {
        const auto here = static_cast<uint32_t>(std::min(chunk_bytes, size - done));
        list.chunks.push_back({file_offset + list.size_bytes, place + done, here, context});
        list.size_bytes += here;
    }
}

void check_file_offset(const char *operation, uint64_t file_offset) {
    if (file_offset > static_cast<uint64_t>(INT64_MAX))
        throw_invalid(operation, "the file offset is larger than files can be");
}

// Both sides of a copy may be written only once, or the result would depend on the order.
void check_overlap(const char *operation, const std::vector<Copy> &by_arena) {
    for (size_t i = 1; i < by_arena.size(); i++)
        if (by_arena[i].arena_offset - by_arena[i - 1].arena_offset < by_arena[i - 1].size)
            throw_invalid(operation,
                          "two extents share the arena from offset " + std::to_string(by_arena[i].arena_offset));
    std::vector<Copy> by_device = by_arena;
    std::ranges::sort(by_device, {}, &Copy::device);
    for (size_t i = 1; i < by_device.size(); i++)
        if (by_device[i].device - by_device[i - 1].device < by_device[i - 1].size)
            throw_invalid(operation, "two extents share GPU memory");
}

} // namespace

void check_chunk_bytes(const char *operation, uint64_t chunk_bytes) {
    if (chunk_bytes == 0 || chunk_bytes % page_alignment != 0 || chunk_bytes > largest_chunk_bytes)
        throw_invalid(operation, "the chunk size " + std::to_string(chunk_bytes) + " is not a multiple of " +
                                     std::to_string(page_alignment) + " from " + std::to_string(page_alignment) +
                                     " to " + std::to_string(largest_chunk_bytes));
}

std::vector<Use> use_all(const std::vector<Piece> &pieces) {
    std::vector<Use> uses;
    uses.reserve(pieces.size());
    for (const Piece &piece : pieces)
        uses.push_back(piece.memory->use());
    return uses;
}

std::vector<Use> use_all(const std::vector<Extent> &extents) {
    std::vector<Use> uses;
    uses.reserve(extents.size());
    for (const Extent &extent : extents)
        uses.push_back(extent.memory->use());
    return uses;
}

void check_pieces(const char *operation, const std::vector<Piece> &pieces) {
    uint64_t total = 0;
    for (const Piece &piece : pieces) {
        check_memory_range(operation, *piece.memory, piece.offset, piece.size);
        if (piece.size > static_cast<uint64_t>(INT64_MAX) - total)
            throw_invalid(operation, "the pieces add up to more than an address space");
        total += piece.size;
    }
}

ChunkList cut(const char *operation, const std::vector<Piece> &pieces, uint64_t file_offset, uint64_t chunk_bytes) {
    check_chunk_bytes(operation, chunk_bytes);
    check_file_offset(operation, file_offset);
    ChunkList list;
    for (const Piece &piece : pieces) {
        check_memory_range(operation, *piece.memory, piece.offset, piece.size);
        append(operation, list, file_offset, piece.memory->address() + piece.offset, piece.size,
               context_number(list, piece.memory->context()), chunk_bytes);
    }
    return list;
}

ChunkList cut(const char *operation, const Arena &arena, const std::vector<Range> &ranges, uint64_t file_offset,
              uint64_t chunk_bytes) {
    check_chunk_bytes(operation, chunk_bytes);
    check_file_offset(operation, file_offset);
    ChunkList list;
    for (const Range &range : ranges) {
        arena.check_range(operation, range.offset, range.size);
        append(operation, list, file_offset, range.offset, range.size, 0, chunk_bytes);
    }
    return list;
}

std::vector<DeviceCopies> join(const char *operation, const Arena &arena, const std::vector<Extent> &extents) {
    std::map<Context *, DeviceCopies> devices;
    std::vector<Copy> all;
    for (const Extent &extent : extents) {
        arena.check_range(operation, extent.arena_offset, extent.size);
        check_memory_range(operation, *extent.memory, extent.memory_offset, extent.size);
        if (extent.size == 0)
            continue;
        DeviceCopies &device = devices[extent.memory->context().get()];
        device.context = extent.memory->context();
        device.copies.push_back({extent.arena_offset, extent.memory->address() + extent.memory_offset, extent.size});
        all.push_back(device.copies.back());
    }
    std::ranges::sort(all, {}, &Copy::arena_offset);
    check_overlap(operation, all); // device addresses are unique across the GPUs of a process (unified addressing)

    std::vector<DeviceCopies> result;
    for (auto &[_, device] : devices) {
        std::ranges::sort(device.copies, {}, &Copy::arena_offset);
        std::vector<Copy> joined;
        for (const Copy &copy : device.copies) {
            if (!joined.empty() && joined.back().arena_offset + joined.back().size == copy.arena_offset &&
                joined.back().device + joined.back().size == copy.device)
                joined.back().size += copy.size;
            else
                joined.push_back(copy);
        }
        device.copies = std::move(joined);
        result.push_back(std::move(device));
    }
    return result;
}

} // namespace woodfrog::transfer
