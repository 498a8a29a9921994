// Threads in the process that help with its driver's copies, for as long as an operation takes.
//
// The driver moves what it saves with the C library's memcpy, 2 MiB at a time, on one thread. Its reference to memcpy
// (library.hpp) is led to code of ours (blob/) that cuts a copy into pieces, which threads of ours take as well; only
// copies that go to or come from the memory where the driver keeps what it saved. All of it lies at an address of its
// own, made by system calls of a thread that is traced (chain.hpp); the reference is exchanged by one of our threads,
// by one instruction. Whoever is killed at whatever moment, the process goes on rightly with what is there by then; the
// next visit finds it and ends it. Code that the driver was led to is never unmapped. x86-64 only.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "blob/layout.hpp"
#include "chain.hpp"
#include "filter.hpp"

namespace woodfrog::enter {

#if defined(__x86_64__)

class Copies {
  public:
    // Makes a system call in a thread of the process that stands.
    using Caller = std::function<Outcome(long number, const Arguments &arguments)>;
    // What the filters of the process say to a call of its; behind which instruction is told only if it is the code's.
    using Filters = std::function<Filtered(std::uintptr_t behind, long number, const Arguments &arguments)>;

    // With 0 threads only what an earlier visit left at work is ended. `restores`: what the driver saved lies where the
    // last visit saw it. `idle_s`: see blob::Facts.
    Copies(pid_t pid, unsigned threads, bool restores, std::uint64_t idle_s);

    // Whether `begin` is to be called as soon as a thread of the driver can make calls.
    bool waits() const { return state_ == State::waiting; }
    // Whether `end` must be called.
    bool is_in() const { return state_ == State::in; }

    // Ends what was left at work, then, unless `only_clean`, starts the threads and leads the driver's copies to them.
    // The thread that makes the calls must not stand in the code (`contains`).
    void begin(const Caller &caller, const Filters &filters, bool only_clean);
    // The driver's copies are its own again, the threads have ended, and their stacks are unmapped. Every thread that
    // is traced must stand, outside of the code (`contains`).
    void end(const Caller &caller);
    // It cannot be done, with the reason as a sentence for people.
    void give_up(const std::string &reason);
    // Everything is gone with the program that it was in.
    void abandon(const std::string &reason);

    // Copies on a thread with this thread pointer are shared, or not any more.
    void add_driver(std::uint64_t thread_pointer);
    void drop_driver(std::uint64_t thread_pointer);

    // The driver keeps what it saves in this memory, or does not any more.
    void add_memory(std::uint64_t begin, std::uint64_t size);
    void drop_memory(std::uint64_t begin, std::uint64_t size);
    // Whether calls of the driver's threads must be seen for that.
    bool looks_for_memory() const { return wanted_ > 0 && !restores_; }

    // Whether a thread is one of those, which are traced but not stopped, and what waitpid told of it.
    bool owns(pid_t tid) const;
    void event(pid_t tid, int status);
    // Whether an address is in the code.
    bool contains(std::uintptr_t address) const;

    // One line, if there is anything to tell.
    void tell() const;

  private:
    enum class State { nothing, waiting, in, over };
    // What lies at our address: code that was put there but not finished, code as it is to be, code of a version that
    // lies there as well (none should), or what is none of ours.
    enum class Place { empty, unfinished, ready, other_version, foreign };

    Place look();
    bool is_at_work();
    std::string clean(const Caller &caller, Place found);
    std::string come(const Caller &caller, const Filters &filters, bool ready);
    static std::string forbidden(const Filters &filters);
    std::string put_code(const Caller &caller);
    std::string set_up(const Caller &caller);
    std::string start_threads(const Caller &caller);
    std::string lead();
    std::string remove(const Caller &caller);
    std::string map_stacks(const Caller &caller);
    std::string send_home();
    void find_threads();
    void find_memory();
    pid_t start(const Caller &caller, bool leads, int &error);
    void wait_for_end(pid_t tid);
    bool wait_for_ends() const;
    std::size_t threads_at_work() const;
    bool is_led_here() const;
    std::string led_elsewhere() const;
    bool write_control(std::size_t member, const void *from, std::size_t size) const;
    void write_range(std::size_t number) const;

    const pid_t pid_;
    const unsigned wanted_;
    const bool restores_;
    State state_;
    blob::Header header_{};                      // of the code that is in the process, once it is ready
    blob::Facts facts_{};                        // as they are there
    blob::Range memory_[blob::most_ranges] = {}; // of the driver's, as far as it was seen in this visit
    bool stacks_mapped_ = false;                 // as `look` found it
    std::vector<pid_t> helpers_;
    std::vector<std::uint64_t> drivers_;
    std::size_t ranges_ = 0; // of `memory_` that were used
    std::string reason_;
    std::string fewer_;                                             // why not all threads could be started
    std::size_t threads_ = 0;                                       // that helped
    std::uint64_t copies_ = 0, copied_bytes_ = 0, slow_copies_ = 0; // that were shared
    bool cleaned_ = false;                                          // something was left at work, and is not any more
};

#else

class Copies {
  public:
    Copies(pid_t, unsigned, bool, std::uint64_t) {}
    bool waits() const { return false; }
    bool is_in() const { return false; }
    void give_up(const std::string &) {}
    void abandon(const std::string &) {}
    void add_driver(std::uint64_t) {}
    void drop_driver(std::uint64_t) {}
    void add_memory(std::uint64_t, std::uint64_t) {}
    void drop_memory(std::uint64_t, std::uint64_t) {}
    bool looks_for_memory() const { return false; }
    bool owns(pid_t) const { return false; }
    bool contains(std::uintptr_t) const { return false; }
    void event(pid_t, int) {}
    void tell() const {}
};

#endif

} // namespace woodfrog::enter
