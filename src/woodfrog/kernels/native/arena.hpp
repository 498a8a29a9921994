// Memory of one evaluation: taken in pieces from a few chunks, given back all at once. What lives in it is never
// destroyed, so it holds plain values only.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

namespace access_templates {

class Arena {
  public:
    Arena() = default;
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;
    ~Arena() {
        while (last_ != nullptr) {
            Chunk *before = last_->before;
            std::free(last_);
            last_ = before;
        }
    }
    /// `count` values, not initialised. Throws std::bad_alloc.
    template <class T> T *take(std::size_t count) {
        static_assert(std::is_trivially_destructible_v<T>);
        std::size_t bytes = (count * sizeof(T) + kAlignment - 1) & ~(kAlignment - 1);
        if (bytes > static_cast<std::size_t>(end_ - next_))
            grow(bytes);
        char *taken = next_;
        next_ += bytes;
        return reinterpret_cast<T *>(taken);
    }

    struct Mark {
        void *last;
        char *next;
    };
    Mark mark() const { return {last_, next_}; }
    /// Everything taken since `mark` is given back.
    void release(const Mark &mark) {
        while (last_ != mark.last && last_->before != nullptr) {
            Chunk *before = last_->before;
            std::free(last_);
            last_ = before;
        }
        if (last_ == nullptr)
            return;
        next_ = last_ == mark.last ? mark.next : reinterpret_cast<char *>(last_ + 1);
        end_ = reinterpret_cast<char *>(last_) + last_->size;
    }

  private:
    struct alignas(16) Chunk {
        Chunk *before;
        std::size_t size;
    };
    static constexpr std::size_t kAlignment = 16, kFirstBytes = 48 << 10, kChunkBytes = 1 << 20;

    void grow(std::size_t bytes) {
        std::size_t usual = last_ == nullptr ? kFirstBytes : kChunkBytes;
        std::size_t size = sizeof(Chunk) + (bytes > usual ? bytes : usual);
        auto *chunk = static_cast<Chunk *>(std::malloc(size));
        if (chunk == nullptr)
            throw std::bad_alloc();
        chunk->before = last_;
        chunk->size = size;
        last_ = chunk;
        next_ = reinterpret_cast<char *>(chunk + 1);
        end_ = reinterpret_cast<char *>(chunk) + size;
    }

    Chunk *last_ = nullptr;
    char *next_ = nullptr, *end_ = nullptr;
};

/// A growing array in an arena. Copies share their items; see copy().
template <class T> class Row {
  public:
    T *begin() { return items_; }
    T *end() { return items_ + size_; }
    const T *begin() const { return items_; }
    const T *end() const { return items_ + size_; }
    std::size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    T &operator[](std::size_t i) { return items_[i]; }
    const T &operator[](std::size_t i) const { return items_[i]; }
    T &back() { return items_[size_ - 1]; }
    void clear() { size_ = 0; }
    void resize(std::size_t smaller) { size_ = smaller; }
    T pop_back() { return items_[--size_]; }

    void push_back(Arena &arena, const T &item) {
        if (size_ == capacity_)
            grow(arena, capacity_ == 0 ? 8 : 2 * capacity_);
        items_[size_++] = item;
    }
    void append(Arena &arena, const T *items, std::size_t count) {
        if (count == 0)
            return;
        if (size_ + count > capacity_)
            grow(arena, 2 * (size_ + count));
        std::memcpy(items_ + size_, items, count * sizeof(T));
        size_ += count;
    }
    void reserve(Arena &arena, std::size_t capacity) {
        if (capacity > capacity_)
            grow(arena, capacity);
    }
    /// Items of its own, with room for a few more.
    Row copy(Arena &arena) const {
        Row result;
        if (size_ != 0) {
            result.grow(arena, size_ + 6);
            std::memcpy(result.items_, items_, size_ * sizeof(T));
            result.size_ = size_;
        }
        return result;
    }

  private:
    static_assert(std::is_trivially_copyable_v<T>);

    void grow(Arena &arena, std::size_t capacity) {
        T *items = arena.take<T>(capacity);
        if (size_ != 0)
            std::memcpy(items, items_, size_ * sizeof(T));
        items_ = items;
        capacity_ = capacity;
    }

    T *items_ = nullptr;
    std::size_t size_ = 0, capacity_ = 0;
};

} // namespace access_templates
