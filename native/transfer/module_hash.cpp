// The part of the Python module that hashes GPU memory and drains chunks of it. Same rules as in module.cpp.
#include "binding.hpp"
#include "chunk_capture.hpp"
#include "chunk_drain.hpp"
#include "device_hash.hpp"

using namespace nb::literals;

namespace woodfrog::transfer {
namespace {

std::optional<HashWay> to_way(const std::string &how) {
    if (how == "auto")
        return std::nullopt;
    for (const HashWay way : {HashWay::gpu, HashWay::cpu, HashWay::copy})
        if (how == to_string(way))
            return way;
    throw_invalid("hash_device", "'" + how + "' is none of auto, gpu, cpu, copy");
}

std::optional<bool> to_gather(const std::string &gather) {
    if (gather == "auto")
        return std::nullopt;
    if (gather != "kernel" && gather != "none")
        throw_invalid("drain_chunks", "'" + gather + "' is none of auto, kernel, none");
    return gather == "kernel";
}

} // namespace

void bind_hashing(nb::module_ &m) {
    m.def(
        "hash_device",
        [](const std::vector<PieceArgument> &pieces, uint64_t chunk_bytes, const std::string &how,
           const std::string &variant, unsigned threads, Progress *progress) {
            const std::vector<Piece> copied = to_pieces(pieces);
            const HashOptions options{chunk_bytes, to_way(how), variant, threads};
            return to_bytes(released(progress, [&](Progress &p) { return hash_device(copied, options, p); }));
        },
        "pieces"_a, nb::kw_only(), "chunk_bytes"_a, "how"_a = "auto", "variant"_a = "", "threads"_a = 0,
        "progress"_a = nb::none(), "The digests of all chunks of GPU memory, computed where it is.");
    m.def(
        "hash_variants",
        [] {
            std::vector<std::string> names;
            if (!kernel_images().empty())
                for (const HashVariant &variant : hash_variants)
                    names.emplace_back(variant.name);
            return names;
        },
        "The hash kernels, the one in use first; empty when this module was built without nvcc.");
    m.def(
        "read_device",
        [](const std::vector<PieceArgument> &pieces, unsigned blocks_per_multiprocessor) {
            const std::vector<Piece> copied = to_pieces(pieces);
            nb::gil_scoped_release release;
            read_device(copied, blocks_per_multiprocessor);
        },
        "pieces"_a, nb::kw_only(), "blocks_per_multiprocessor"_a = 0,
        "Reads GPU memory by a kernel, for measurements.");
    m.def(
        "drain_chunks",
        [](const std::vector<PieceArgument> &pieces, const nb::bytes &positions, Arena &arena,
           const std::vector<RangeArgument> &ranges, uint64_t chunk_bytes, const std::string &gather,
           uint64_t staging_bytes, bool background, uint64_t most_bytes_per_s, Progress *progress) {
            const std::vector<Piece> copied = to_pieces(pieces);
            const std::vector<Range> places = to_ranges(ranges);
            const ChunkDrainOptions options{chunk_bytes, to_gather(gather), staging_bytes, background,
                                            most_bytes_per_s};
            const std::string_view numbers(positions.c_str(), positions.size());
            return to_bytes(released(
                progress, [&](Progress &p) { return drain_chunks(copied, numbers, arena, places, options, p); }));
        },
        "pieces"_a, "positions"_a, "arena"_a, "ranges"_a, nb::kw_only(), "chunk_bytes"_a, "gather"_a = "auto",
        "staging_bytes"_a = default_staging_bytes, "background"_a = false, "most_bytes_per_s"_a = 0,
        "progress"_a = nb::none(), "Some chunks of GPU memory to the arena; returns the arena offset of each, as u64.");
    m.def(
        "capture_chunks",
        [](const std::vector<PieceArgument> &pieces, const nb::bytes &positions,
           const std::vector<PieceArgument> &slots, uint64_t chunk_bytes, const std::string &gather,
           Progress *progress) {
            const std::vector<Piece> from = to_pieces(pieces), to = to_pieces(slots);
            const ChunkCaptureOptions options{chunk_bytes, to_gather(gather)};
            const std::string_view numbers(positions.c_str(), positions.size());
            released(progress, [&](Progress &p) { capture_chunks(from, numbers, to, options, p); });
        },
        "pieces"_a, "positions"_a, "slots"_a, nb::kw_only(), "chunk_bytes"_a, "gather"_a = "auto",
        "progress"_a = nb::none(), "Some chunks of GPU memory to other memory of the same GPU.");
}

} // namespace woodfrog::transfer
