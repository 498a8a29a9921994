// Threads in the process that help with its driver's copies, for as long as an operation takes.
//
// The driver moves what it saves with the C library's memcpy, 2 MiB at a time, on one thread. Its reference to memcpy
// (library.hpp) is led to code of ours (blob/) that cuts a copy into pieces, which threads of ours take as well. All of
// it is one mapping at an address of its own, made by system calls of a thread that is traced (chain.hpp); the
// reference is exchanged by one of our threads, by one instruction. Whoever is killed at whatever moment, the process
// goes on rightly with what is there by then; the next visit finds it at its address and takes it out. x86-64 only.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "blob/layout.hpp"
#include "chain.hpp"

namespace woodfrog::enter {

#if defined(__x86_64__)

class Copies {
  public:
    // Makes a system call in a thread of the process that stands.
    using Caller = std::function<Outcome(long number, const Arguments &arguments)>;

    // With 0 threads only what an earlier visit left is taken out.
    Copies(pid_t pid, unsigned threads);

    // Whether `begin` is to be called as soon as a thread of the driver can make calls.
    bool waits() const { return state_ == State::waiting; }
    // Whether `end` must be called.
    bool is_in() const { return state_ == State::in; }

    // Takes out what was left, then, unless `only_clean`, starts the threads and leads the driver's copies to them. The
    // thread that makes the calls must not stand in the code (`contains`).
    void begin(const Caller &caller, bool only_clean);
    // The driver's copies are its own again, the threads have ended, and nothing of it is mapped. Every thread that is
    // traced must stand, outside of the code (`contains`).
    void end(const Caller &caller);
    // It cannot be done, with the reason as a sentence for people.
    void give_up(const std::string &reason);

    // Copies on a thread with this thread pointer are shared, or not any more.
    void add_driver(std::uint64_t thread_pointer);
    void drop_driver(std::uint64_t thread_pointer);

    // Whether a thread is one of those, which are traced but not stopped, and what waitpid told of it.
    bool owns(pid_t tid) const;
    void event(pid_t tid, int status);
    // Whether an address is in the code.
    bool contains(std::uintptr_t address) const;

    // One line, if there is anything to tell.
    void tell() const;

  private:
    enum class State { nothing, waiting, in, over };

    bool is_left() const;
    std::string clean(const Caller &caller);
    std::string come(const Caller &caller);
    std::string start_threads(const Caller &caller);
    std::string lead();
    std::string remove(const Caller &caller);
    std::string send_home();
    void find_threads();
    pid_t start(const Caller &caller, unsigned number, bool leads, int &error);
    void wait_for_end(pid_t tid);
    bool is_quiet() const;
    bool is_led_here() const;
    std::uintptr_t control(std::size_t member) const;

    const pid_t pid_;
    const unsigned wanted_;
    State state_;
    blob::Header header_{}; // of what is in the process, as far as it is
    std::vector<pid_t> helpers_;
    std::vector<std::uint64_t> drivers_;
    std::string reason_;
    std::size_t threads_ = 0;                                       // that helped
    std::uint64_t copies_ = 0, copied_bytes_ = 0, slow_copies_ = 0; // that were shared
    bool cleaned_ = false;                                          // something was left, and is gone
};

#else

class Copies {
  public:
    Copies(pid_t, unsigned) {}
    bool waits() const { return false; }
    bool is_in() const { return false; }
    void give_up(const std::string &) {}
    void add_driver(std::uint64_t) {}
    void drop_driver(std::uint64_t) {}
    bool owns(pid_t) const { return false; }
    bool contains(std::uintptr_t) const { return false; }
    void event(pid_t, int) {}
    void tell() const {}
};

#endif

} // namespace woodfrog::enter
