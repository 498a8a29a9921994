// Several threads that have another process's memory put in place before the process comes to it.
//
// A page is asked for with process_vm_writev from memory that cannot be read: the kernel first makes the page of the
// other process present for writing, then fails to read ours (EFAULT). So nothing is ever written, and the process may
// go on and fill the same memory meanwhile. A kernel that were to look at our side first would populate nothing, and
// the process would find its pages as late as without us: time, never data. `resident` (remote.hpp) tells what became
// of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <sys/types.h>
#include <thread>
#include <vector>

namespace woodfrog::enter {

class Populator {
  public:
    // Begins at once with `threads` of them. `done` is called on the last of them to end.
    Populator(pid_t pid, std::uintptr_t address, std::size_t size, unsigned threads, std::function<void()> done);
    // Stops, and waits for the threads: a call into the kernel takes less than a millisecond.
    ~Populator();
    Populator(const Populator &) = delete;
    Populator &operator=(const Populator &) = delete;

    void stop() { stopping_.store(true); }
    bool ended() const { return ended_s_.load() != 0; }
    bool overlaps(std::uintptr_t address, std::size_t size) const {
        return address < address_ + size_ && address + size > address_;
    }
    std::uintptr_t address() const { return address_; }
    std::size_t size() const { return size_; }
    double begun_s() const { return begun_s_; }
    double ended_s() const { return ended_s_.load(); }

  private:
    void work();

    const pid_t pid_;
    const std::uintptr_t address_;
    const std::size_t size_;
    const double begun_s_;
    const std::function<void()> done_;
    std::atomic<std::size_t> next_{0};
    std::atomic<bool> stopping_{false};
    std::atomic<unsigned> running_{0};
    std::atomic<double> ended_s_{0};
    std::vector<std::thread> threads_;
};

} // namespace woodfrog::enter
