// The files that chunks are extracted into. Many threads map a file in memory: write() holds its inode's lock, so that
// they would be no faster than one, while page faults of one file run side by side. Few threads write, which costs each
// byte less processor time (README.md).
#pragma once
#include "file_pieces.hpp"
#include "transfer/file.hpp"

#include <map>
#include <memory>

namespace woodfrog::packs {

// By descriptor; each is made long enough for its pieces. Threads may call it side by side.
class OutputFiles {
  public:
    OutputFiles(const std::vector<FilePiece> &pieces, unsigned threads);
    OutputFiles(const OutputFiles &) = delete;
    OutputFiles &operator=(const OutputFiles &) = delete;
    ~OutputFiles();

    // Where bytes [offset, +size) of the file can be put, with memory behind all of them; to be given back by
    // `release`. Null: they have to be written (few threads, a file elsewhere, an older kernel), which also tells of a
    // full file system.
    uint8_t *claim(const FilePiece &piece, uint64_t offset, uint64_t size);
    void release(const FilePiece &piece, uint64_t offset, uint64_t size);

    void write(const FilePiece &piece, const uint8_t *data, uint64_t size, uint64_t offset);
    void make_hole(const FilePiece &piece, uint64_t offset, uint64_t size);

  private:
    struct Output {
        std::unique_ptr<transfer::File> file;
        uint64_t length = 0; // when the operation began
        uint64_t first = 0;  // byte of the mapping, a multiple of a page
        uint64_t needed = 0;
        uint8_t *mapping = nullptr; // of [first, needed)
    };

    int advise(const Output &output, uint64_t offset, uint64_t size, int advice) const;

    std::map<int, Output> files_;
};

} // namespace woodfrog::packs
