// Reads packs without an index: their segments, and what can be saved of damaged ones. Every header is hostile until it
// has been checked (segment.hpp).
#pragma once
#include "buffer.hpp"
#include "segment.hpp"
#include "transfer/file.hpp"
#include "transfer/progress.hpp"

#include <optional>
#include <string>

namespace woodfrog::packs {

// The length of a file or block device in bytes.
uint64_t length_of(int fd);

// Reads and checks headers. One thread's.
class HeaderReader {
  public:
    HeaderReader(transfer::File &file, uint64_t length) : file_(file), length_(length) {}

    // The segment whose header is at `offset`, which is below the length. Returns what is wrong with it, or null. A
    // payload that ends behind the file is not looked at here.
    const char *read(uint64_t offset, Segment &segment);

  private:
    transfer::File &file_;
    uint64_t length_;
    Buffer buffer_;
};

// The header digests of all segments of a pack of which nothing may be damaged, in order. IntegrityError.
std::vector<Digest> header_digests(transfer::File &file, uint64_t length);

// A pack's name.
Digest name_of(const std::vector<Digest> &header_digests);

struct ScanOptions {
    bool salvage;
    bool contents;
    unsigned threads;
};

struct Scanned {
    std::string records;
    Digest name;
};

// IntegrityError for the first damage, unless it is to be salvaged.
Scanned scan_pack(int fd, const ScanOptions &options, transfer::Progress &progress);

} // namespace woodfrog::packs
