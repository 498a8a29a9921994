// The operations that read packs: into GPU memory, the arena and files, or only to see whether all is there. Chunks are
// cut as everywhere: each piece or range starts one, its last may be short. All of them check everything first
// (plan.hpp) and compare every chunk with its digest before it goes on, unless told not to.
#pragma once
#include "file_pieces.hpp"
#include "records.hpp"
#include "transfer/ring.hpp"

#include <unordered_map>
#include <vector>

namespace woodfrog::packs {

// Digests and locations of the chunks, in order, and the descriptors of the packs by the locations' numbers. All are
// the caller's and must outlive the call.
struct Stored {
    const Packed<Digest> &digests;
    const Packed<Location> &locations;
    const std::unordered_map<uint32_t, int> &packs;
};

struct UnpackOptions {
    uint64_t chunk_bytes;
    unsigned threads;  // 0: see thread_count()
    bool check = true; // whether each chunk is compared with its digest; if not, whoever asks compares them
};

// Packs → ring → GPU. Zeros are set there.
void refill_from_packs(const std::vector<transfer::Piece> &pieces, const Stored &stored, const transfer::RingPart &ring,
                       const UnpackOptions &options, transfer::Progress &progress);

// Packs → arena.
void refill_arena_from_packs(transfer::Arena &arena, const std::vector<transfer::Range> &ranges, const Stored &stored,
                             const UnpackOptions &options, transfer::Progress &progress);

// Packs → files, which become long enough; zeros become holes. Through the page cache: whoever wants the files reads
// them next.
void extract_from_packs(const std::vector<FilePiece> &pieces, const Stored &stored, const UnpackOptions &options,
                        transfer::Progress &progress);

// The positions, ascending, of chunks that cannot be had.
std::vector<size_t> check_packs(const Stored &stored, unsigned threads, transfer::Progress &progress);

} // namespace woodfrog::packs
