// Where the agent's time goes while the process stands still, by command and by what it was spent on (wire.h's
// WF_SPENDINGS). Kept by the agent's thread alone: in any other a scope costs the load of a thread-local pointer.
#pragma once

#include "wire.h"

#include <ctime>
#include <vector>

namespace woodfrog::interpose::spent {

using What = wire::Spending;

struct Row {
    uint64_t ns[static_cast<size_t>(What::registering) + 1] = {};
    uint32_t count[static_cast<size_t>(What::registering) + 1] = {};
};

namespace detail {
extern constinit thread_local Row *t_row;
inline uint64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}
} // namespace detail

// The agent has read a packet of that command: its row begins, unless it goes on; nothing for commands that none stands
// still for. A quiesce begins all rows anew.
void begin(wire::Type command);
// The command is answered.
void end();
// What all rows hold.
std::vector<wire::Spent> all();

// Adds its lifetime to the row of the command that is being obeyed. Scopes must not lie in one another.
class Scope {
  public:
    explicit Scope(What what)
        : row_(detail::t_row), what_(static_cast<size_t>(what)), begun_ns_(row_ == nullptr ? 0 : detail::now_ns()) {}
    ~Scope() {
        if (row_ == nullptr)
            return;
        row_->ns[what_] += detail::now_ns() - begun_ns_;
        ++row_->count[what_];
    }
    Scope(const Scope &) = delete;
    Scope &operator=(const Scope &) = delete;

  private:
    Row *const row_;
    const size_t what_;
    const uint64_t begun_ns_;
};

// What `call` returns, its time counted.
template <typename Call> auto timed(What what, const Call &call) {
    const Scope scope(what);
    return call();
}

} // namespace woodfrog::interpose::spent
