// What woodfrog-enter tells: one JSON object a line on standard output, written at once. The keys are in README.md.
// A reader that is gone is no failure: the threads that are traced must be let go all the same.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace woodfrog::enter {

// Seconds of CLOCK_MONOTONIC, which every process of the machine shares.
double now_s();

// The text as a JSON string, quotes included.
std::string quoted(std::string_view text);

// "what: what that error means", of -errno.
std::string cannot(const char *what, std::int64_t error);

// Builds one line: Line("mapping").add("bytes", size).send().
class Line {
  public:
    explicit Line(const char *event);
    Line &add(const char *key, std::string_view text);
    Line &add(const char *key, double value);
    Line &add(const char *key, std::int64_t value);
    Line &add(const char *key, std::uint64_t value);
    Line &add(const char *key, int value) { return add(key, static_cast<std::int64_t>(value)); }
    Line &add_raw(const char *key, std::string_view json);
    void send();

  private:
    std::string text_;
};

// Kills this process here, or the one that WOODFROG_ENTER_FAULT_VICTIM names, if WOODFROG_ENTER_FAULT names the point:
// for tests.
void fault_point(const char *name);

} // namespace woodfrog::enter
