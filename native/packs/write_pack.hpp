// Writes chunks into a pack: hashed, compared, encoded and laid out by several threads side by side, a segment at a
// time. It must never sync, and never write a chunk whose bytes are not what its digest says.
#pragma once
#include "choose.hpp"
#include "records.hpp"
#include "transfer/arena.hpp"
#include "transfer/progress.hpp"

#include <string>
#include <vector>

namespace woodfrog::packs {

// An arena, or (null) a file that the caller opened for reading.
struct Source {
    transfer::Arena *arena;
    int fd;
};

struct Written {
    std::string records; // one a chunk, in the order of the chunks
    Digest name;         // of the whole file as a pack
};

struct WriteOptions {
    Compression compression;
    bool cached;      // through the page cache: for a file that is read next and never made durable
    unsigned threads; // 0: see thread_count()
};

// Appends to `fd`, which is empty or holds a pack (then it must be open for reading as well). When it throws, the file
// is as long as it was; IntegrityError names the first chunk whose bytes differ.
Written write_pack(int fd, const Packed<SourceChunk> &chunks, const std::vector<Source> &sources,
                   const WriteOptions &options, transfer::Progress &progress);

} // namespace woodfrog::packs
