// Counts whatever can make the same launch mean something else: memory that comes or goes, code, a report of what was
// written, a gate that opens after a handover. A launch that was recorded under one count need not be recorded again
// while it lasts (shadow_recent.hpp).
//
// Whoever makes such a change counts it before the application can know of it, so a thread that uses what has changed
// reads the new count.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <utility>

namespace woodfrog::interpose {

namespace detail {
inline constinit std::atomic<uint64_t> g_changes{1};
} // namespace detail

inline void note_change() {
    detail::g_changes.fetch_add(1, std::memory_order_acq_rel);
}

inline uint64_t changes() {
    return detail::g_changes.load(std::memory_order_acquire);
}

// A map whose changes are counted. What is in an entry may be changed only with the gate closed.
template <typename Key, typename Value> class CountedMap : public std::map<Key, Value> {
    using Base = std::map<Key, Value>;

  public:
    template <typename... Arguments> auto emplace(Arguments &&...arguments) {
        note_change();
        return Base::emplace(std::forward<Arguments>(arguments)...);
    }
    template <typename... Arguments> auto erase(Arguments &&...arguments) {
        note_change();
        return Base::erase(std::forward<Arguments>(arguments)...);
    }
    Value &operator[](const Key &key) {
        note_change();
        return Base::operator[](key);
    }
    template <typename... Arguments> void insert(Arguments &&...) = delete;
    template <typename... Arguments> void insert_or_assign(Arguments &&...) = delete;
    template <typename... Arguments> void try_emplace(Arguments &&...) = delete;
    template <typename... Arguments> void extract(Arguments &&...) = delete;
    void clear() = delete;
};

} // namespace woodfrog::interpose
