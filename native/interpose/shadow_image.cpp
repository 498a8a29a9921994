// Lengths, keys and the folder; see shadow_image.hpp. The lengths of images come from their own headers, as the driver
// takes them: the application vouches for those.
#include "shadow_image.hpp"

#include "../transfer/blake3_core.hpp"
#include "debug.hpp"
#include "transport.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace woodfrog::interpose::shadow {
namespace {

// Analysing more PTX than this takes too long to be of use; machine code comes without PTX beside it.
constexpr size_t kLargestImage = size_t{64} << 20;
constexpr uint32_t kFatbinMagic = 0xba55ed50, kWrapperMagic = 0x466243b1;
constexpr uint16_t kPtxEntry = 1;
constexpr size_t kEntryHeader = 64; // the smallest

template <typename T> T field(const unsigned char *base, size_t offset) {
    T value;
    memcpy(&value, base + offset, sizeof(value));
    return value;
}

// The fatbin's length; 0 when it has no PTX.
size_t fatbin_bytes(const unsigned char *image) {
    const uint16_t header = field<uint16_t>(image, 6);
    const uint64_t body = field<uint64_t>(image, 8);
    if (header < 16 || body > kLargestImage)
        return 0;
    bool ptx = false;
    for (uint64_t at = 0; body - at >= kEntryHeader;) {
        const unsigned char *entry = image + header + at;
        const uint32_t entry_header = field<uint32_t>(entry, 4);
        const uint64_t payload = field<uint64_t>(entry, 8), left = body - at;
        if (entry_header < kEntryHeader || entry_header > left || payload > left - entry_header)
            return 0;
        ptx = ptx || field<uint16_t>(entry, 0) == kPtxEntry;
        at += entry_header + payload;
    }
    return ptx ? header + body : 0;
}

size_t elf_bytes(const unsigned char *image) {
    const Elf64_Ehdr header = field<Elf64_Ehdr>(image, 0);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shentsize != sizeof(Elf64_Shdr) ||
        header.e_shoff > kLargestImage)
        return 0;
    uint64_t end = header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize;
    for (unsigned i = 0; i < header.e_shnum; ++i) {
        const Elf64_Shdr section = field<Elf64_Shdr>(image, header.e_shoff + i * sizeof(Elf64_Shdr));
        if (section.sh_offset > kLargestImage || section.sh_size > kLargestImage)
            return 0;
        if (section.sh_type != SHT_NOBITS)
            end = std::max<uint64_t>(end, section.sh_offset + section.sh_size);
    }
    if (header.e_phoff < kLargestImage)
        end = std::max<uint64_t>(end, header.e_phoff + uint64_t{header.e_phnum} * header.e_phentsize);
    return end <= kLargestImage ? end : 0;
}

using Words = uint32_t[blake3::key_words];

void start_words(Words &words) {
    for (unsigned i = 0; i < blake3::key_words; ++i)
        words[i] = blake3::initial_value(i);
}

// One leaf of at most 1024 bytes; `root` when it is all there is.
void hash_leaf(const unsigned char *data, size_t size, uint64_t index, bool root, Words &out) {
    start_words(out);
    const size_t blocks = size == 0 ? 1 : (size + blake3::block_bytes - 1) / blake3::block_bytes;
    for (size_t i = 0; i < blocks; ++i) {
        uint32_t message[16] = {};
        const size_t length = std::min<size_t>(blake3::block_bytes, size - i * blake3::block_bytes);
        memcpy(message, data + i * blake3::block_bytes, length); // little-endian, as everything this runs on
        uint32_t flags = i == 0 ? blake3::flag_chunk_start : 0;
        if (i + 1 == blocks)
            flags |= blake3::flag_chunk_end | (root ? blake3::flag_root : 0);
        blake3::compress(out, message, static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                         static_cast<uint32_t>(length), flags);
    }
}

void hash_parent(const Words &left, const Words &right, bool root, Words &out) {
    uint32_t message[16];
    memcpy(message, left, sizeof(left));
    memcpy(message + 8, right, sizeof(right));
    start_words(out);
    blake3::compress<uint32_t>(out, message, 0, 0, blake3::block_bytes,
                               blake3::flag_parent | (root ? blake3::flag_root : 0));
}

// The subtree of `size` bytes beginning at leaf `index`: the left half is the largest power of two of leaves.
void hash_tree(const unsigned char *data, size_t size, uint64_t index, bool root, Words &out) {
    if (size <= blake3::leaf_bytes)
        return hash_leaf(data, size, index, root, out);
    size_t half = blake3::leaf_bytes;
    while (half * 2 < size)
        half *= 2;
    Words left, right;
    hash_tree(data, half, index, false, left);
    hash_tree(data + half, size - half, index + half / blake3::leaf_bytes, false, right);
    hash_parent(left, right, root, out);
}

std::string key_of(const unsigned char *data, size_t size) {
    Words words;
    hash_tree(data, size, 0, true, words);
    std::string key;
    char text[4];
    for (const uint32_t word : words)
        for (unsigned byte = 0; byte < 4; ++byte) {
            snprintf(text, sizeof(text), "%02x", word >> (8 * byte) & 0xff);
            key += text;
        }
    return key;
}

bool write_all(int fd, const unsigned char *data, size_t size) {
    while (size > 0) {
        const ssize_t done = write(fd, data, size);
        if (done <= 0)
            return false;
        data += done;
        size -= static_cast<size_t>(done);
    }
    return true;
}

// Puts a file into the folder, whole or not at all.
bool place(int folder, const std::string &name, const unsigned char *data, size_t size) {
    static constinit std::atomic<unsigned> number{0};
    char unfinished[64];
    snprintf(unfinished, sizeof(unfinished), "new.%d.%u", getpid(), number.fetch_add(1, std::memory_order_relaxed));
    const int fd = openat(folder, unfinished, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return false;
    const bool written = write_all(fd, data, size);
    close(fd);
    if (written && renameat(folder, unfinished, folder, name.c_str()) == 0)
        return true;
    unlinkat(folder, unfinished, 0);
    return false;
}

// Passes the image on, with the name of the file that it was loaded from. Failure costs no more than the templates.
void pass_on(const std::string &key, const unsigned char *data, size_t size, const char *path) {
    const int folder = open_catalogue_folder();
    if (folder < 0)
        return;
    const std::string image = key + ".image";
    if (faccessat(folder, (key + ".kernels").c_str(), F_OK, 0) != 0 && faccessat(folder, image.c_str(), F_OK, 0) != 0) {
        if (path != nullptr && path[0] == '/')
            place(folder, key + ".origin", reinterpret_cast<const unsigned char *>(path), strlen(path));
        place(folder, image, data, size);
    }
    close(folder);
}

} // namespace

std::string submit_image(const void *image, const char *path) {
    const auto *bytes = static_cast<const unsigned char *>(image);
    if (bytes == nullptr)
        return {};
    // An image has at least four bytes: "." and a final NUL is the shortest text, and it is checked byte by byte.
    size_t size = 0;
    if (memcmp(bytes, ELFMAG, SELFMAG) == 0) {
        size = elf_bytes(bytes);
    } else if (field<uint32_t>(bytes, 0) == kWrapperMagic) {
        bytes = field<const unsigned char *>(bytes, 8);
        if (bytes == nullptr || field<uint32_t>(bytes, 0) != kFatbinMagic)
            return {};
        size = fatbin_bytes(bytes);
    } else if (field<uint32_t>(bytes, 0) == kFatbinMagic) {
        size = fatbin_bytes(bytes);
    } else {
        size = strnlen(reinterpret_cast<const char *>(bytes), kLargestImage);
    }
    if (size == 0 || size >= kLargestImage)
        return {};
    std::string key = key_of(bytes, size);
    pass_on(key, bytes, size, path);
    return key;
}

std::string submit_file(const char *path) {
    const int fd = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return {};
    struct stat status{};
    std::vector<unsigned char> content;
    if (fstat(fd, &status) == 0 && status.st_size > 0 && static_cast<size_t>(status.st_size) < kLargestImage) {
        content.resize(static_cast<size_t>(status.st_size) + 64); // a final NUL for text, and room for any header
        for (size_t at = 0; at < static_cast<size_t>(status.st_size);) {
            const ssize_t got = read(fd, content.data() + at, static_cast<size_t>(status.st_size) - at);
            if (got <= 0) {
                content.clear();
                break;
            }
            at += static_cast<size_t>(got);
        }
    }
    close(fd);
    return content.empty() ? std::string() : submit_image(content.data(), path);
}

std::string catalogue_folder() {
    std::string path = agent_socket_path();
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? std::string() : path.substr(0, slash) + "/kernels";
}

bool is_private(int fd, bool folder) {
    struct stat status{};
    return fstat(fd, &status) == 0 && status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0 &&
           (folder ? S_ISDIR(status.st_mode) : S_ISREG(status.st_mode));
}

int open_catalogue_folder() {
    const int fd = open(catalogue_folder().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd >= 0 && !is_private(fd, true)) {
        debug("%s is not this user's alone: no templates are taken from it", catalogue_folder().c_str());
        close(fd);
        return -1;
    }
    return fd;
}

} // namespace woodfrog::interpose::shadow
