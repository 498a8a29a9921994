// See output_files.hpp.
#include "output_files.hpp"

#include "transfer/error.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14; include/uapi/asm-generic/mman-common.h
#endif

namespace woodfrog::packs {
namespace {

using transfer::File;

constexpr uint64_t zeros_bytes = 1 << 20; // written at once where holes cannot be made
// Mapped, a byte costs 1.4 times the processor time; written, two fifths of that time are one thread's after another.
constexpr unsigned most_writing_threads = 4;

uint64_t length(int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0)
        transfer::throw_errno(errno, "fstat", "descriptor " + std::to_string(fd));
    return static_cast<uint64_t>(status.st_size);
}

} // namespace

OutputFiles::OutputFiles(const std::vector<FilePiece> &pieces, unsigned threads) {
    for (const FilePiece &piece : pieces) {
        if (piece.size == 0)
            continue;
        auto [at, is_new] = files_.try_emplace(piece.fd);
        Output &output = at->second;
        if (is_new) {
            output.file = std::make_unique<File>(piece.fd, File::Use::write_cached);
            output.length = length(piece.fd);
            output.first = piece.offset / page_bytes * page_bytes;
        }
        output.first = std::min(output.first, piece.offset / page_bytes * page_bytes);
        output.needed = std::max(output.needed, piece.offset + piece.size);
    }
    for (const auto &[fd, output] : files_) {
        if (output.needed > output.length && ftruncate(fd, static_cast<off_t>(output.needed)) != 0)
            transfer::throw_errno(errno, "ftruncate", std::to_string(output.needed) + " bytes");
    }
    for (auto &[fd, output] : files_) { // from here on nothing throws
        if (!output.file->is_in_memory() || threads <= most_writing_threads)
            continue;
        void *mapping = mmap(nullptr, output.needed - output.first, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                             static_cast<off_t>(output.first));
        if (mapping != MAP_FAILED) // open for writing only, sealed, no addresses: written
            output.mapping = static_cast<uint8_t *>(mapping);
    }
}

OutputFiles::~OutputFiles() {
    for (const auto &[fd, output] : files_)
        if (output.mapping)
            munmap(output.mapping, output.needed - output.first);
}

uint8_t *OutputFiles::claim(const FilePiece &piece, uint64_t offset, uint64_t size) {
    const Output &output = files_.at(piece.fd);
    // Touched without being populated, a page for which there is no room would be a SIGBUS instead of an error.
    if (!output.mapping || advise(output, offset, size, MADV_POPULATE_WRITE) != 0)
        return nullptr;
    return output.mapping + (offset - output.first);
}

void OutputFiles::release(const FilePiece &piece, uint64_t offset, uint64_t size) {
    // The pages stay in the file. Unmapped all at once, in the end, they would be on one thread.
    (void)advise(files_.at(piece.fd), offset, size, MADV_DONTNEED);
}

int OutputFiles::advise(const Output &output, uint64_t offset, uint64_t size, int advice) const {
    const uint64_t begin = (offset - output.first) / page_bytes * page_bytes;
    int result;
    do
        result = madvise(output.mapping + begin, offset - output.first + size - begin, advice);
    while (result != 0 && errno == EINTR);
    return result;
}

void OutputFiles::write(const FilePiece &piece, const uint8_t *data, uint64_t size, uint64_t offset) {
    files_.at(piece.fd).file->write(data, size, offset);
}

void OutputFiles::make_hole(const FilePiece &piece, uint64_t offset, uint64_t size) {
    const Output &output = files_.at(piece.fd);
    if (offset >= output.length) // it is one
        return;
    while (fallocate(piece.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(size)) != 0) {
        if (errno == EINTR)
            continue;
        if (errno != EOPNOTSUPP && errno != ENOSYS)
            transfer::throw_errno(errno, "fallocate", "a hole of " + std::to_string(size) + " bytes");
        const std::vector<uint8_t> zeros(std::min(size, zeros_bytes));
        for (uint64_t done = 0; done < size; done += zeros.size())
            output.file->write(zeros.data(), std::min<uint64_t>(zeros.size(), size - done), offset + done);
        return;
    }
}

} // namespace woodfrog::packs
