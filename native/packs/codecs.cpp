// See codecs.hpp. The functions used are the stable part of both libraries' interfaces (LZ4 since 1.0, Zstandard since
// 1.0), declared here because their headers are seldom installed where the libraries are.
#include "codecs.hpp"

#include "byte_split.hpp"
#include "transfer/error.hpp"

#include <cerrno>
#include <dlfcn.h>
#include <mutex>

namespace woodfrog::packs {
namespace {

struct Lz4 {
    int (*compress)(const char *from, char *to, int size, int room);   // 0: it does not fit
    int (*decompress)(const char *from, char *to, int size, int room); // negative: malformed, or it does not fit
};

struct Zstd {
    void *(*create_compressor)();
    size_t (*free_compressor)(void *);
    size_t (*compress)(void *, void *to, size_t room, const void *from, size_t size, int level);
    void *(*create_decompressor)();
    size_t (*free_decompressor)(void *);
    size_t (*decompress)(void *, void *to, size_t room, const void *from, size_t size);
    unsigned (*is_error)(size_t);
};

struct Libraries {
    std::mutex mutex;
    bool searched = false;
    Lz4 lz4{};
    Zstd zstd{};
};

Libraries &libraries() {
    static Libraries found;
    return found;
}

// Neither is ever closed: threads may be inside.
void *open_library(const char *file) {
    // Lazily: the files inside Python packages refer to Python as well.
    return dlopen(file, RTLD_LAZY | RTLD_LOCAL);
}

template <typename Function> bool look_up(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

bool load(void *library, Lz4 &table) {
    Lz4 all{};
    if (!library || !look_up(library, "LZ4_compress_default", all.compress) ||
        !look_up(library, "LZ4_decompress_safe", all.decompress))
        return false;
    table = all;
    return true;
}

bool load(void *library, Zstd &table) {
    Zstd all{};
    if (!library || !look_up(library, "ZSTD_createCCtx", all.create_compressor) ||
        !look_up(library, "ZSTD_freeCCtx", all.free_compressor) ||
        !look_up(library, "ZSTD_compressCCtx", all.compress) ||
        !look_up(library, "ZSTD_createDCtx", all.create_decompressor) ||
        !look_up(library, "ZSTD_freeDCtx", all.free_decompressor) ||
        !look_up(library, "ZSTD_decompressDCtx", all.decompress) || !look_up(library, "ZSTD_isError", all.is_error))
        return false;
    table = all;
    return true;
}

template <typename Table> void find(const char *system_library, const std::vector<std::string> &files, Table &table) {
    if (load(open_library(system_library), table))
        return;
    for (const std::string &file : files)
        if (load(open_library(file.c_str()), table))
            return;
}

void *created(void *context) {
    if (!context)
        throw std::bad_alloc();
    return context;
}

} // namespace

void find_libraries(const std::vector<std::string> &lz4_files, const std::vector<std::string> &zstd_files) {
    Libraries &all = libraries();
    std::lock_guard lock(all.mutex);
    if (all.searched)
        return;
    find("liblz4.so.1", lz4_files, all.lz4);
    find("libzstd.so.1", zstd_files, all.zstd);
    all.searched = true;
}

bool is_available(Encoding encoding) {
    switch (encoding) {
    case Encoding::raw:
        return true;
    case Encoding::lz4:
        return libraries().lz4.compress != nullptr;
    default:
        return libraries().zstd.compress != nullptr;
    }
}

const char *name_of(Encoding encoding) {
    constexpr const char *names[encoding_count] = {"raw", "lz4", "zstd", "split-zstd"};
    return names[static_cast<uint32_t>(encoding)];
}

void require(const char *operation, Encoding encoding) {
    if (is_available(encoding))
        return;
    const bool lz4 = encoding == Encoding::lz4;
    throw transfer::TransferError(
        -ENOTSUP, operation,
        std::string("the encoding ") + name_of(encoding) + " needs " +
            (lz4 ? "liblz4.so.1 (package liblz4-1 or lz4-libs" : "libzstd.so.1 (package libzstd1 or libzstd") +
            "), or the Python package " + (lz4 ? "lz4" : "zstandard") + ", and neither is installed");
}

Coder::~Coder() {
    const Zstd &zstd = libraries().zstd;
    if (compressor_)
        zstd.free_compressor(compressor_);
    if (decompressor_)
        zstd.free_decompressor(decompressor_);
}

uint32_t Coder::encode(Encoding encoding, int level, const uint8_t *from, uint32_t size, uint8_t *to, uint32_t room) {
    if (encoding == Encoding::lz4)
        return static_cast<uint32_t>(libraries().lz4.compress(reinterpret_cast<const char *>(from),
                                                              reinterpret_cast<char *>(to), static_cast<int>(size),
                                                              static_cast<int>(room)));
    const Zstd &zstd = libraries().zstd;
    if (!compressor_)
        compressor_ = created(zstd.create_compressor());
    if (encoding == Encoding::split_zstd) {
        uint8_t *reordered = split_.at_least(size);
        split_bytes(from, size, reordered);
        from = reordered;
    }
    const size_t written = zstd.compress(compressor_, to, room, from, size, level);
    return zstd.is_error(written) ? 0 : static_cast<uint32_t>(written);
}

bool Coder::decode(Encoding encoding, const uint8_t *from, uint32_t stored, uint8_t *to, uint32_t raw) {
    switch (encoding) {
    case Encoding::raw:
        if (stored == raw)
            std::memcpy(to, from, raw);
        return stored == raw;
    case Encoding::lz4:
        return libraries().lz4.decompress(reinterpret_cast<const char *>(from), reinterpret_cast<char *>(to),
                                          static_cast<int>(stored), static_cast<int>(raw)) == static_cast<int>(raw);
    default:
        break;
    }
    const Zstd &zstd = libraries().zstd;
    if (!decompressor_)
        decompressor_ = created(zstd.create_decompressor());
    const bool split = encoding == Encoding::split_zstd;
    uint8_t *out = split ? split_.at_least(raw) : to;
    if (zstd.decompress(decompressor_, out, raw, from, stored) != raw) // an error is a number larger than any size
        return false;
    if (split)
        join_bytes(out, raw, to);
    return true;
}

} // namespace woodfrog::packs
