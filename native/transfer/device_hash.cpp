// The three ways of device_hash.hpp, and which of them each GPU's pieces take.
#include "device_hash.hpp"

#include "digests.hpp"
#include "hash_kernel.hpp"
#include "kernel_memory.hpp"
#include "kernels/tables.hpp"
#include "parallel.hpp"
#include "ring.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <map>

namespace woodfrog::transfer {
namespace {

// Of the copies of the copying way: large enough for the speed of the bus, whatever the chunks' size.
constexpr uint64_t copy_unit_bytes = 4ull << 20;
constexpr uint64_t copy_ring_bytes = 64ull << 20;

using Parts = std::vector<HashPart>;

// The pieces by GPU, with the number of their first chunk.
std::map<std::shared_ptr<Context>, Parts> sort_out(const std::vector<Piece> &pieces, uint64_t chunk_bytes,
                                                   uint64_t &chunk_count) {
    std::map<std::shared_ptr<Context>, Parts> parts;
    chunk_count = 0;
    for (const Piece &piece : pieces) {
        if (piece.size == 0)
            continue;
        parts[piece.memory->context()].push_back({piece.memory->address() + piece.offset, piece.size, chunk_count});
        chunk_count += (piece.size - 1) / chunk_bytes + 1;
    }
    return parts;
}

// What one thread hashes, or one copy brings: whole chunks of one part.
ChunkList cut_units(const Parts &parts, uint64_t unit_bytes, std::vector<uint64_t> &first_chunks,
                    uint64_t chunk_bytes) {
    ChunkList list;
    for (const HashPart &part : parts)
        for (uint64_t done = 0; done < part.size; done += unit_bytes) {
            const auto here = static_cast<uint32_t>(std::min(unit_bytes, part.size - done));
            list.chunks.push_back({0, part.address + done, here, 0});
            list.size_bytes += here;
            first_chunks.push_back(part.first_chunk + done / chunk_bytes);
        }
    return list;
}

void hash_unit(const uint8_t *data, uint64_t size, uint64_t first_chunk, uint64_t chunk_bytes, DigestList &digests) {
    for (uint64_t done = 0; done < size; done += chunk_bytes)
        digests.set(first_chunk + done / chunk_bytes, data + done, std::min(chunk_bytes, size - done));
}

// On the simulated GPU a device address is the host address of the same number.
void hash_in_place(const Parts &parts, const HashOptions &options, DigestList &digests, Progress &progress) {
    std::vector<uint64_t> first_chunks;
    const ChunkList list =
        cut_units(parts, std::max<uint64_t>(options.chunk_bytes, 1 << 20), first_chunks, options.chunk_bytes);
    progress.begin(list.size_bytes);
    for_each_index(options.threads, list.chunks.size(), [&](size_t i) {
        progress.check();
        const Chunk &unit = list.chunks[i];
        hash_unit(reinterpret_cast<const uint8_t *>(unit.place), unit.size, first_chunks[i], options.chunk_bytes,
                  digests);
        progress.add(unit.size);
    });
}

void hash_copied(const std::shared_ptr<Context> &context, const Parts &parts, const HashOptions &options,
                 DigestList &digests, Progress &progress) {
    const uint64_t unit_bytes = std::max(options.chunk_bytes, copy_unit_bytes);
    std::vector<uint64_t> first_chunks;
    ChunkList list = cut_units(parts, unit_bytes, first_chunks, options.chunk_bytes);
    list.contexts = {context};
    const uint64_t ring_bytes =
        std::min<uint64_t>(std::max(copy_ring_bytes, 2 * unit_bytes), list.chunks.size() * unit_bytes);
    Arena arena(ring_bytes, -1, options.threads, -1);
    Progress unseen;
    arena.populate(0, ring_bytes, unseen);
    try {
        arena.register_pieces(context->ordinal());
    } catch (const TransferError &) {
        // A limit on locked memory, say. Copies are slower then, and as right.
    }
    Use arena_use = arena.use();
    drain_through(list, {arena, 0, ring_bytes}, unit_bytes, thread_count(options.threads), progress,
                  [&](size_t i, uint8_t *data) {
                      hash_unit(data, list.chunks[i].size, first_chunks[i], options.chunk_bytes, digests);
                  });
}

// False: nobody insists on a kernel, and the GPU is so full that not even its code can be loaded.
bool try_kernel(const Context &context, const HashVariant &variant, const Parts &parts, const HashOptions &options,
                DigestList &digests, Progress &progress) {
    try {
        hash_by_kernel(context, variant, parts, options.chunk_bytes, digests, progress);
        return true;
    } catch (const TransferError &error) {
        if (options.way || error.code != CUDA_ERROR_OUT_OF_MEMORY)
            throw;
        return false;
    }
}

const HashVariant &find_variant(const std::string &name) {
    if (name.empty())
        return hash_variants[0];
    for (const HashVariant &variant : hash_variants)
        if (name == variant.name)
            return variant;
    throw_invalid("hash_device", "there is no hash kernel '" + name + "'");
}

} // namespace

void check_store_chunk_bytes(const char *operation, uint64_t chunk_bytes) {
    if (!std::has_single_bit(chunk_bytes) || chunk_bytes < smallest_store_chunk_bytes ||
        chunk_bytes > largest_store_chunk_bytes)
        throw_invalid(operation, "the chunk size " + std::to_string(chunk_bytes) + " is not a power of two from " +
                                     std::to_string(smallest_store_chunk_bytes) + " to " +
                                     std::to_string(largest_store_chunk_bytes));
}

std::string hash_device(const std::vector<Piece> &pieces, const HashOptions &options, Progress &progress) {
    const std::vector<Use> uses = use_all(pieces);
    check_store_chunk_bytes("hash_device", options.chunk_bytes);
    check_pieces("hash_device", pieces);
    const HashVariant &variant = find_variant(options.variant);
    uint64_t chunk_count = 0;
    const auto parts = sort_out(pieces, options.chunk_bytes, chunk_count);
    std::vector<std::pair<const std::pair<const std::shared_ptr<Context>, Parts> *, HashWay>> work;
    for (const auto &one : parts) {
        const HashWay way = options.way.value_or(one.first->kernels().way());
        if (way == HashWay::cpu && !one.first->kernels().simulated())
            throw TransferError(-ENOTSUP, "hash_device", "the CPU cannot read the memory of this GPU in place");
        if (way == HashWay::gpu)
            one.first->kernels().function("woodfrog_join_tiles"); // throws before anything is hashed
        work.emplace_back(&one, way);
    }
    DigestList digests(chunk_count);
    std::atomic<size_t> next{0};
    if (!work.empty())
        run_parallel(static_cast<unsigned>(work.size()), [&](Failure &failure) {
            for (size_t i = next++; i < work.size() && !failure.happened(); i = next++) {
                const auto &[context, list] = *work[i].first;
                switch (work[i].second) {
                case HashWay::gpu:
                    if (!try_kernel(*context, variant, list, options, digests, progress))
                        hash_copied(context, list, options, digests, progress);
                    break;
                case HashWay::cpu:
                    hash_in_place(list, options, digests, progress);
                    break;
                case HashWay::copy:
                    hash_copied(context, list, options, digests, progress);
                    break;
                }
            }
        });
    return digests.take();
}

void read_device(const std::vector<Piece> &pieces, unsigned blocks_per_multiprocessor) {
    const std::vector<Use> uses = use_all(pieces);
    check_pieces("read_device", pieces);
    for (const Piece &piece : pieces)
        if (piece.offset % 16 != 0)
            throw_invalid("read_device", "a piece does not begin at a multiple of 16 bytes");
    if (blocks_per_multiprocessor > 64)
        throw_invalid("read_device", "more than 64 blocks a multiprocessor");
    std::map<std::shared_ptr<Context>, std::vector<const Piece *>> by_gpu;
    for (const Piece &piece : pieces)
        by_gpu[piece.memory->context()].push_back(&piece);
    for (const auto &[context, list] : by_gpu) {
        const CUfunction function = context->kernels().function("woodfrog_read");
        int multiprocessors = 0;
        WF_CUDA(cuDeviceGetAttribute, &multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, context->device());
        const unsigned blocks =
            static_cast<unsigned>(multiprocessors) * (blocks_per_multiprocessor ? blocks_per_multiprocessor : 4);
        KernelMemory sink(*context, 16, KernelMemory::Place::device);
        KernelStream stream(*context);
        for (const Piece *piece : list) {
            CUdeviceptr address = piece->memory->address() + piece->offset;
            uint64_t count = piece->size / 16;
            CUdeviceptr sink_address = sink.address();
            void *arguments[] = {&address, &count, &sink_address};
            stream.launch(function, blocks, 1, kernels::read_threads, arguments);
        }
        stream.synchronize();
    }
}

const char *to_string(HashWay way) {
    return way == HashWay::gpu ? "gpu" : way == HashWay::cpu ? "cpu" : "copy";
}

} // namespace woodfrog::transfer
