// The gate that every call of the driver API passes. The checkpoint machine closes it: calls that are inside
// finish, new ones wait until it opens. It must never be held across a CRIU dump by one of our own threads.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace simgpu {

using Deadline = std::optional<std::chrono::steady_clock::time_point>; // none: wait for ever

class Gate {
  public:
    // Waits while the gate is closed.
    void enter() {
        for (;;) {
            inside_.fetch_add(1);
            if (!closed_.load())
                return;
            leave();
            std::unique_lock lock(mutex_);
            opened_.wait(lock, [this] { return !closed_.load(); });
        }
    }

    void leave() {
        if (inside_.fetch_sub(1) == 1 && closed_.load()) {
            std::lock_guard lock(mutex_);
            emptied_.notify_all();
        }
    }

    // Stops new calls and waits for those inside. False at the deadline; the gate then stays closed until open().
    bool close(Deadline deadline) {
        std::unique_lock lock(mutex_);
        closed_.store(true);
        auto empty = [this] { return inside_.load() == 0; };
        if (deadline)
            return emptied_.wait_until(lock, *deadline, empty);
        emptied_.wait(lock, empty);
        return true;
    }

    void open() {
        std::lock_guard lock(mutex_);
        closed_.store(false);
        opened_.notify_all();
    }

  private:
    std::atomic<int> inside_{0};
    std::atomic<bool> closed_{false};
    std::mutex mutex_;
    std::condition_variable opened_;
    std::condition_variable emptied_;
};

} // namespace simgpu
