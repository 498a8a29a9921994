// See fatbin.hpp. The layout was read off the output of nvcc 13.0.
#include "fatbin.hpp"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <optional>
#include <vector>

#include "error.hpp"

namespace simgpu {
namespace {

constexpr std::uint32_t kWrapperMagic = 0x466243B1;
constexpr std::uint32_t kContainerMagic = 0xBA55ED50;
constexpr std::uint16_t kKindPtx = 1;
constexpr std::uint64_t kFlagLz4 = 0x2000;
constexpr std::uint64_t kFlagZstd = 0x8000;
constexpr std::uint32_t kDeviceArch = 90;
constexpr size_t kLargestText = size_t{256} << 20; // no compiler emits more; bounds what a broken header can ask for
constexpr size_t kSmallestEntryHeader = 64;

[[noreturn]] void refuse(CUresult code, const char *reason) {
    std::fprintf(stderr, "simulated GPU: module not loaded: %s\n", reason);
    throw Error{code};
}

template <class T> T field(const unsigned char *base, size_t offset) {
    T value;
    std::memcpy(&value, base + offset, sizeof value);
    return value;
}

std::string decompress(const unsigned char *payload, size_t compressed_bytes, size_t text_bytes, bool zstd) {
    std::string text(text_bytes, '\0');
    const char *library = zstd ? "libzstd.so.1" : "liblz4.so.1";
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        std::fprintf(stderr,
                     "simulated GPU: %s is needed to read compressed PTX and is not installed; install it or "
                     "compile with nvcc --no-compress\n",
                     library);
        throw Error{CUDA_ERROR_NO_BINARY_FOR_GPU};
    }
    if (zstd) {
        using Decompress = size_t (*)(void *, size_t, const void *, size_t);
        auto function = reinterpret_cast<Decompress>(dlsym(handle, "ZSTD_decompress"));
        if (function != nullptr && function(text.data(), text_bytes, payload, compressed_bytes) == text_bytes)
            return text;
    } else {
        using Decompress = int (*)(const char *, char *, int, int);
        auto function = reinterpret_cast<Decompress>(dlsym(handle, "LZ4_decompress_safe"));
        if (function != nullptr &&
            function(reinterpret_cast<const char *>(payload), text.data(), static_cast<int>(compressed_bytes),
                     static_cast<int>(text_bytes)) == static_cast<int>(text_bytes)) {
            return text;
        }
    }
    refuse(CUDA_ERROR_INVALID_IMAGE, "the compressed PTX in the fatbin cannot be unpacked");
}

struct Entry {
    const unsigned char *header = nullptr;
    std::uint32_t arch = 0;
};

// The newest PTX that this device may compile.
Entry best_ptx(const unsigned char *container, bool *has_code) {
    std::uint16_t header_bytes = field<std::uint16_t>(container, 6);
    std::uint64_t body_bytes = field<std::uint64_t>(container, 8);
    if (header_bytes < 16 || body_bytes > (std::uint64_t{4} << 30)) {
        refuse(CUDA_ERROR_INVALID_IMAGE, "the header of the fatbin is damaged");
    }
    Entry best;
    const unsigned char *position = container + header_bytes;
    const unsigned char *end = position + body_bytes;
    while (static_cast<size_t>(end - position) >= kSmallestEntryHeader) {
        std::uint32_t entry_header = field<std::uint32_t>(position, 4);
        std::uint64_t payload = field<std::uint64_t>(position, 8);
        std::uint64_t left = static_cast<std::uint64_t>(end - position);
        if (entry_header < kSmallestEntryHeader || entry_header > left || payload > left - entry_header) {
            refuse(CUDA_ERROR_INVALID_IMAGE, "an entry of the fatbin reaches beyond its end");
        }
        std::uint32_t arch = field<std::uint32_t>(position, 28);
        if (field<std::uint16_t>(position, 0) != kKindPtx) {
            *has_code = true;
        } else if (arch <= kDeviceArch && (best.header == nullptr || arch > best.arch)) {
            best = {position, arch};
        }
        position += entry_header + payload;
    }
    return best;
}

std::string ptx_of_container(const unsigned char *container) {
    bool has_code = false;
    Entry entry = best_ptx(container, &has_code);
    if (entry.header == nullptr) {
        refuse(CUDA_ERROR_NO_BINARY_FOR_GPU,
               has_code ? "the fatbin holds machine code only, no PTX for compute capability 9.0 or lower; compile "
                          "with -gencode arch=compute_90,code=compute_90 (and without -rdc=true)"
                        : "the fatbin holds no PTX for compute capability 9.0 or lower");
    }
    const unsigned char *payload = entry.header + field<std::uint32_t>(entry.header, 4);
    std::uint64_t payload_bytes = field<std::uint64_t>(entry.header, 8);
    std::uint64_t flags = field<std::uint64_t>(entry.header, 40);
    if ((flags & (kFlagLz4 | kFlagZstd)) == 0) {
        const auto *text = reinterpret_cast<const char *>(payload);
        return {text, strnlen(text, payload_bytes)};
    }
    std::uint64_t compressed_bytes = field<std::uint32_t>(entry.header, 16);
    std::uint64_t text_bytes = field<std::uint64_t>(entry.header, 56);
    if (compressed_bytes > payload_bytes || text_bytes > kLargestText) {
        refuse(CUDA_ERROR_INVALID_IMAGE, "the sizes of the PTX in the fatbin are impossible");
    }
    return decompress(payload, compressed_bytes, text_bytes, (flags & kFlagZstd) != 0);
}

} // namespace

std::string ptx_of_image(const void *image) {
    const auto *bytes = static_cast<const unsigned char *>(image);
    // Four bytes are there in any image: the shortest text is "." and NUL, and no allocator ends a page after it.
    if (std::memcmp(bytes, "\177ELF", 4) == 0) {
        refuse(CUDA_ERROR_NO_BINARY_FOR_GPU, "it is machine code (a cubin); the simulated GPU runs PTX only");
    }
    auto magic = field<std::uint32_t>(bytes, 0);
    if (magic == kWrapperMagic) {
        const void *data = field<const void *>(bytes, 8);
        require(data != nullptr, CUDA_ERROR_INVALID_IMAGE);
        return ptx_of_image(data);
    }
    if (magic == kContainerMagic)
        return ptx_of_container(bytes);
    std::string text(reinterpret_cast<const char *>(bytes));
    if (text.find(".version") == std::string::npos) {
        refuse(CUDA_ERROR_INVALID_IMAGE, "it is neither PTX text nor a fatbin");
    }
    return text;
}

} // namespace simgpu
