// Encoding and decoding of single chunks: LZ4 blocks, Zstandard frames, and the byte split in front of the latter. The
// two libraries are found at run time, so that the module needs neither to be built nor to be imported. No other file
// may look up their symbols.
#pragma once
#include "buffer.hpp"
#include "records.hpp"

#include <string>
#include <vector>

namespace woodfrog::packs {

// Looks for the libraries: liblz4.so.1 and libzstd.so.1 of the system, then files that hold the same functions. Called
// once, before anything below; a library that is not found makes its encodings unavailable.
void find_libraries(const std::vector<std::string> &lz4_files, const std::vector<std::string> &zstd_files);

bool is_available(Encoding encoding);
const char *name_of(Encoding encoding);

// TransferError(-ENOTSUP, operation) naming the library to install, unless it is available.
void require(const char *operation, Encoding encoding);

// One thread's contexts and scratch memory.
class Coder {
  public:
    Coder() = default;
    Coder(const Coder &) = delete;
    Coder &operator=(const Coder &) = delete;
    ~Coder();

    // Encodes [from, +size) into at most `room` bytes at `to`. 0: it does not fit. `level` is Zstandard's.
    uint32_t encode(Encoding encoding, int level, const uint8_t *from, uint32_t size, uint8_t *to, uint32_t room);

    // Decodes exactly `raw` bytes to `to`. False: the stored bytes are not that.
    bool decode(Encoding encoding, const uint8_t *from, uint32_t stored, uint8_t *to, uint32_t raw);

  private:
    void *compressor_ = nullptr;
    void *decompressor_ = nullptr;
    Buffer split_;
};

} // namespace woodfrog::packs
