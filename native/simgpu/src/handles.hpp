// Handles that applications hold (streams, events, modules …), checked on every use.
//
// A handle is the address of its object. A table keeps the objects alive and knows which handles are valid, so a
// stale or made-up handle is answered with CUDA_ERROR_INVALID_HANDLE and never dereferenced.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "error.hpp"

namespace simgpu {

template <class T> class HandleTable {
  public:
    // Shares ownership of `object`; returns the handle.
    T *add(std::shared_ptr<T> object) {
        std::lock_guard lock(mutex_);
        T *raw = object.get();
        objects_[raw] = std::move(object);
        return raw;
    }

    // Null when `handle` is not valid.
    std::shared_ptr<T> find(const void *handle) const {
        std::lock_guard lock(mutex_);
        auto it = objects_.find(handle);
        return it == objects_.end() ? nullptr : it->second;
    }

    std::shared_ptr<T> get(const void *handle, CUresult otherwise = CUDA_ERROR_INVALID_HANDLE) const {
        auto object = find(handle);
        require(object != nullptr, otherwise);
        return object;
    }

    // Invalidates the handle and gives up the table's share; null when it was not valid.
    std::shared_ptr<T> remove(const void *handle) {
        std::lock_guard lock(mutex_);
        auto it = objects_.find(handle);
        if (it == objects_.end())
            return nullptr;
        auto object = std::move(it->second);
        objects_.erase(it);
        return object;
    }

    template <class Predicate> std::vector<std::shared_ptr<T>> select(Predicate &&predicate) const {
        std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<T>> chosen;
        for (const auto &[handle, object] : objects_) {
            if (predicate(*object))
                chosen.push_back(object);
        }
        return chosen;
    }

  private:
    mutable std::mutex mutex_;
    std::unordered_map<const void *, std::shared_ptr<T>> objects_;
};

} // namespace simgpu
