// What the types of PTX are called, how large they are, and what kind of numbers they hold.
#include "syntax.hpp"

#include <utility>

namespace simgpu::ptx {

Type type_named(std::string_view text) noexcept {
    // A plain table: nothing to destroy, so threads that still run while the program exits can use it.
    static constexpr std::pair<std::string_view, Type> types[] = {
        {".pred", Type::pred},     {".b8", Type::b8},         {".b16", Type::b16},
        {".b32", Type::b32},       {".b64", Type::b64},       {".b128", Type::b128},
        {".u8", Type::u8},         {".u16", Type::u16},       {".u32", Type::u32},
        {".u64", Type::u64},       {".s8", Type::s8},         {".s16", Type::s16},
        {".s32", Type::s32},       {".s64", Type::s64},       {".f16", Type::f16},
        {".f16x2", Type::f16x2},   {".bf16", Type::bf16},     {".bf16x2", Type::bf16x2},
        {".tf32", Type::tf32},     {".f32", Type::f32},       {".f64", Type::f64},
        {".u16x2", Type::u16x2},   {".s16x2", Type::s16x2},   {".e4m3x2", Type::e4m3x2},
        {".e5m2x2", Type::e5m2x2}, {".texref", Type::opaque}, {".samplerref", Type::opaque},
        {".surfref", Type::opaque}};
    for (const auto &[name, type] : types)
        if (name == text)
            return type;
    return Type::none;
}

std::size_t size_of(Type type) noexcept {
    switch (type) {
    case Type::pred:
    case Type::b8:
    case Type::u8:
    case Type::s8:
        return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
    case Type::e4m3x2:
    case Type::e5m2x2:
        return 2;
    case Type::b32:
    case Type::u32:
    case Type::s32:
    case Type::f32:
    case Type::tf32:
    case Type::f16x2:
    case Type::bf16x2:
    case Type::u16x2:
    case Type::s16x2:
        return 4;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
    case Type::opaque:
        return 8;
    case Type::b128:
        return 16;
    case Type::none:
        return 0;
    }
    return 0;
}

bool is_float(Type type) noexcept {
    switch (type) {
    case Type::f16:
    case Type::f16x2:
    case Type::bf16:
    case Type::bf16x2:
    case Type::tf32:
    case Type::f32:
    case Type::f64:
        return true;
    default:
        return false;
    }
}

bool is_signed(Type type) noexcept {
    return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64;
}

} // namespace simgpu::ptx
