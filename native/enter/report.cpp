// See report.hpp.
#include "report.hpp"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unistd.h>

namespace woodfrog::enter {

double now_s() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::string quoted(std::string_view text) {
    std::string result = "\"";
    for (const char one : text) {
        if (one == '"' || one == '\\') {
            result += '\\';
            result += one;
        } else if (static_cast<unsigned char>(one) < 0x20) {
            char code[8];
            std::snprintf(code, sizeof code, "\\u%04x", one);
            result += code;
        } else {
            result += one;
        }
    }
    return result + '"';
}

std::string cannot(const char *what, std::int64_t error) {
    return std::string(what) + ": " + std::strerror(static_cast<int>(-error));
}

Line::Line(const char *event) : text_("{\"event\":" + quoted(event)) {}

Line &Line::add_raw(const char *key, std::string_view json) {
    text_ += ",\"";
    text_ += key;
    text_ += "\":";
    text_ += json;
    return *this;
}

Line &Line::add(const char *key, std::string_view text) {
    return add_raw(key, quoted(text));
}

Line &Line::add(const char *key, double value) {
    char number[40];
    std::snprintf(number, sizeof number, "%.7f", value);
    return add_raw(key, number);
}

Line &Line::add(const char *key, std::int64_t value) {
    return add_raw(key, std::to_string(value));
}

Line &Line::add(const char *key, std::uint64_t value) {
    return add_raw(key, std::to_string(value));
}

void Line::send() {
    text_ += "}\n";
    std::string_view rest = text_;
    while (!rest.empty()) {
        const ssize_t written = write(STDOUT_FILENO, rest.data(), rest.size());
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return;
        rest.remove_prefix(static_cast<std::size_t>(written));
    }
}

void fault_point(const char *name) {
    static const char *const wanted = std::getenv("WOODFROG_ENTER_FAULT");
    static const char *const victim = std::getenv("WOODFROG_ENTER_FAULT_VICTIM");
    if (wanted != nullptr && std::strcmp(wanted, name) == 0)
        kill(victim != nullptr ? std::atoi(victim) : getpid(), SIGKILL);
}

} // namespace woodfrog::enter
