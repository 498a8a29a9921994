// Copies, fills and values written by a stream (copy_writes.hpp), noted. What is not listed there counts as a write of
// everything.
#include "copy_writes.hpp"

namespace woodfrog::interpose::shadow {

std::optional<Span> span_of_box(CUdeviceptr base, size_t x_bytes, size_t y, size_t z, size_t pitch, size_t rows,
                                size_t width_bytes, size_t height, size_t depth) {
    if (width_bytes == 0 || height == 0 || depth == 0)
        return Span{};
    // A pitch or height of 0 stands for the least there can be; the range then begins where any meaning of it does.
    const bool said = pitch >= x_bytes + width_bytes && (depth == 1 || rows >= y + height);
    pitch = std::max(pitch, x_bytes + width_bytes);
    rows = std::max(rows, y + height);
    size_t row = 0, last = 0, end = 0, first = 0;
    if (__builtin_mul_overflow(z + depth - 1, rows, &row) ||
        __builtin_mul_overflow(row + y + height - 1, pitch, &last) ||
        __builtin_add_overflow(last, x_bytes + width_bytes, &end))
        return std::nullopt;
    if (said && z == 0)
        first = y * pitch + x_bytes;
    return Span{base + first, end - first};
}

namespace {

struct Sink {
    static void range(CUdeviceptr address, size_t size_bytes) { wrote(address, size_bytes); }
    static void impossible() { wrote_everything("a copy of impossible size"); }
};

} // namespace

Overrides copy_overrides() {
    return copy_table<Sink, Before>();
}

} // namespace woodfrog::interpose::shadow
