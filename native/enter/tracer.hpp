// The threads of one process under ptrace, for as long as its driver's checkpoint takes.
//
// Every system call of these threads is seen. The driver's large populated mapping is made without being populated and
// with huge pages (chain.hpp), and filled from outside (populate.hpp); threads that help with its copies may be put
// into the process (copies.hpp). Everything else passes unchanged. ptrace belongs to the thread that attached, so all
// members are for that one. No thread is ever left stopped: `run` lets every thread go before it returns, and the
// kernel does so when this process dies.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "chain.hpp"
#include "copies.hpp"
#include "populate.hpp"

namespace woodfrog::enter {

struct Options {
    pid_t pid = 0;
    std::vector<pid_t> threads;           // of the process; empty: all
    unsigned populate_threads = 0;        // 0: mappings are left as they are made
    unsigned copy_threads = 0;            // that help with the driver's copies; 0: none
    bool restores = false;                // whether the driver restores: then its state is where the last visit saw it
    std::uint64_t idle_s = 60;            // without a copy, until those threads end by themselves
    bool wait = false;                    // whether the thread waits until its mapping is populated
    bool record = false;                  // whether every system call is told in the end
    std::uint64_t least_bytes = 64 << 20; // of a mapping that is taken for the driver's
};

// One system call as it was seen, in seconds of CLOCK_MONOTONIC.
struct Call {
    double begun_s, took_s;
    pid_t thread;
    std::uint64_t number;
    std::uint64_t arguments[6];
    std::int64_t result;
    std::uint32_t path; // of its first argument as a descriptor, an index into `paths`; 0: none
};

class Tracer {
  public:
    explicit Tracer(Options options);

    // Attaches and tells so; false when that was refused, which was told as well. Nothing is attached then.
    bool attach();
    // Until the threads have ended or `end` was asked for by a signal (main.cpp). Then tells what was seen.
    void run();

  private:
    struct Thread {
        bool inside = false;  // between the entry and the exit of a system call
        bool started = false; // it has stopped once, and every system call since was seen
        double begun_s = 0;
        std::uint64_t number = 0;
        std::uint64_t arguments[6] = {};
        bool is_state = false;     // the call it is inside makes the mapping for what the driver saves
        bool ours = false;         // the call it is inside is a mapping that we changed
        bool held = false;         // it stands until what we put into the process is out again
        bool nudged = false;       // it was stopped in a call so that it could make calls for us
        bool elsewhere = false;    // it was not on its own stack, where it could have made calls for us
        std::uint64_t pointer = 0; // its thread pointer, if its copies are shared
    };

    bool take_events();
    void event(pid_t tid, int status);
    void stopped_at_call(pid_t tid, Thread &thread);
    void entered(pid_t tid, Thread &thread);
    void left(pid_t tid, Thread &thread, std::int64_t result);
    void advise(pid_t tid, std::uintptr_t address, std::size_t size);
    void became_another(pid_t tid);
    void go_on(pid_t tid, int signal);
    void stood(pid_t tid, int signal);
    void meet(pid_t tid, Thread &thread);
    void lost(pid_t tid, Waited waited, int status);
    void begin_copies(pid_t tid, bool interrupted);
    void hold(pid_t tid);
    void end_copies();
    bool sees_calls() const;
#if defined(__x86_64__)
    Copies::Caller caller(pid_t tid, const Context &context);
#endif
    bool refuse(int error, const std::string &reason);
    void end();
    void tell_started();
    void tell_populated();
    void tell_calls();
    bool is_control_state(const std::uint64_t (&arguments)[6]) const;
    std::uint32_t path_index(std::uint64_t number, std::uint64_t fd);

    Options options_;
    std::optional<Chain> chain_;
    Copies copies_;
    std::string why_not_;
    std::map<pid_t, Thread> threads_;
    std::vector<pid_t> parked_; // wait for their mapping to be populated
    std::vector<std::unique_ptr<Populator>> populators_;
    std::size_t told_populators_ = 0;
    bool started_ = false, ending_ = false;
    std::vector<Call> calls_;
    std::uint64_t unrecorded_ = 0;
    std::vector<std::string> paths_{""};
    std::map<std::uint64_t, std::uint32_t> path_of_fd_;
    double stops_s_ = 0; // that threads stood still for us
    std::uint64_t stops_ = 0;
};

} // namespace woodfrog::enter
