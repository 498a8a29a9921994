// Chooses a template instance by PTX type: `for_integer(type, []<class T>() { return &handler<T>; })`.
#pragma once

#include <cstdint>

#include "decode.hpp"
#include "lanes.hpp"

namespace simgpu::ptx {

/// Integer and untyped-bits types of 16 to 64 bits.
template <class Make> Handler for_integer(Type type, Make make) {
    switch (type) {
    case Type::b16:
    case Type::u16:
        return make.template operator()<std::uint16_t>();
    case Type::s16:
        return make.template operator()<std::int16_t>();
    case Type::b32:
    case Type::u32:
        return make.template operator()<std::uint32_t>();
    case Type::s32:
        return make.template operator()<std::int32_t>();
    case Type::b64:
    case Type::u64:
        return make.template operator()<std::uint64_t>();
    case Type::s64:
        return make.template operator()<std::int64_t>();
    default:
        throw Unsupported{"this type"};
    }
}

/// By width alone, unsigned.
template <class Make> Handler for_width(std::size_t bytes, Make make) {
    switch (bytes) {
    case 1:
        return make.template operator()<std::uint8_t>();
    case 2:
        return make.template operator()<std::uint16_t>();
    case 4:
        return make.template operator()<std::uint32_t>();
    case 8:
        return make.template operator()<std::uint64_t>();
    default:
        throw Unsupported{"operands of this width"};
    }
}

template <template <class> class F> Handler binary_handler(Type type) {
    return for_integer(type, []<class T>() -> Handler { return &binary_same<T, F<T>>; });
}
template <template <class> class F> Handler ternary_handler(Type type) {
    return for_integer(type, []<class T>() -> Handler { return &ternary_same<T, F<T>>; });
}
template <template <class> class F> Handler unary_handler(Type type) {
    return for_integer(type, []<class T>() -> Handler { return &unary_same<T, F<T>>; });
}

inline bool is_packed_integer(Type type) {
    return type == Type::u16x2 || type == Type::s16x2;
}

} // namespace simgpu::ptx
