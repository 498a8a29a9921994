// From the addresses that lanes hold to host pointers, with every check: bounds, alignment, permission. All loads,
// stores and atomics go through here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lanes.hpp"

namespace simgpu::ptx {

enum class Access : std::uint8_t { load, store, atomic };

/// Host pointer of a generic address for one lane; faults with the lane's identity when it must not be used.
std::byte *resolve(Warp &warp, const Op &op, unsigned lane, std::uint64_t address, std::size_t bytes, Access access);

/// How an operation's address operand is to be read.
enum class AddressKind : std::uint8_t { generic, global, shared, local, parameter };

using Pointers = std::byte *[warp_size];

/// Fills `pointers` for the lanes in `mask` from the row op.a (+ op.immediate), whose values are `Word`s.
template <class Word, AddressKind kind>
void find_pointers(Warp &warp, const Op &op, Mask mask, std::size_t bytes, Access access, Pointers &pointers);

/// The same with the kind chosen at run time by an Op field, for operations that are not worth specialising.
void find_pointers(Warp &warp, const Op &op, Mask mask, AddressKind kind, bool is_wide, std::uint32_t address_row,
                   std::int64_t offset, std::size_t bytes, Access access, Pointers &pointers);

} // namespace simgpu::ptx
