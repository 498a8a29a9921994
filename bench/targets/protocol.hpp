// What every benchmark target written in C++ has in common: its options, its log, its digest.
//
// A harness that knows nothing of a target but this protocol can start it, see how far it is, freeze it, thaw it, and
// compare it with an uninterrupted run (bench/targets/README.md describes the protocol; protocol.py is its Python
// half). Nothing here may touch the GPU, and no file stays open between two lines: a log held open while it grows
// would make the CPU side of a checkpoint refuse to restore it.
#pragma once

#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <string>
#include <unistd.h>

namespace target {

[[noreturn]] inline void fail(const std::string &message) {
    std::fprintf(stderr, "target: %s\n", message.c_str());
    std::exit(1);
}

// Options of the form `--name value`; only the names given to the constructor are accepted.
class Options {
  public:
    Options(int argc, char **argv, std::map<std::string, std::string> defaults) : values_(std::move(defaults)) {
        values_.insert({"log", ""});
        values_.insert({"pace-ms", "0"});
        values_.insert({"hold", ""});
        values_.insert({"seed", "1"});
        for (int i = 1; i < argc; i += 2) {
            const std::string name = argv[i];
            if (name.rfind("--", 0) != 0 || i + 1 >= argc || values_.count(name.substr(2)) == 0) {
                std::string known;
                for (const auto &[key, value] : values_)
                    known += " --" + key + " (" + (value.empty() ? "none" : value) + ")";
                std::fprintf(stderr, "unknown option or missing value: %s; options and defaults:%s\n", name.c_str(),
                             known.c_str());
                std::exit(2);
            }
            values_[name.substr(2)] = argv[i + 1];
        }
    }

    const std::string &text(const std::string &name) const { return values_.at(name); }
    double real(const std::string &name) const {
        const std::string &value = values_.at(name);
        char *end = nullptr;
        const double result = std::strtod(value.c_str(), &end);
        if (value.empty() || *end != '\0' || !(result >= 0.0))
            fail("--" + name + " wants a number that is not negative, not '" + value + "'");
        return result;
    }
    uint64_t count(const std::string &name) const { return static_cast<uint64_t>(real(name)); }

  private:
    std::map<std::string, std::string> values_;
};

// Seconds since 1970: the wall clock is the one that goes on while a process is frozen or in an image.
inline double wall_time_s() {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

inline std::string hex(uint64_t value) {
    char buffer[17];
    std::snprintf(buffer, sizeof buffer, "%016" PRIx64, value);
    return buffer;
}

inline std::string hex(double value) {
    uint64_t bits = 0;
    static_assert(sizeof bits == sizeof value);
    std::memcpy(&bits, &value, sizeof bits);
    return hex(bits);
}

// A 64-bit digest of a sequence of words (FNV-1a over 8-byte words with a final mix): order matters, every bit counts.
class Digest {
  public:
    void add(uint64_t word) {
        state_ ^= word;
        state_ *= 0x100000001b3ULL; // the FNV-1a prime for 64 bits
        state_ ^= state_ >> 32;
    }
    void add(double value) {
        uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        add(bits);
    }
    uint64_t value() const { return state_; }

  private:
    uint64_t state_ = 0xcbf29ce484222325ULL; // the FNV-1a offset basis
};

// Appends JSON lines to the file of `--log`, opened and closed for each line; without a file they go to stdout.
class Log {
  public:
    explicit Log(std::string path) : path_(std::move(path)) {}

    void line(const std::string &json) const {
        const std::string text = json + "\n";
        int file = STDOUT_FILENO;
        if (!path_.empty()) {
            file = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
            if (file < 0)
                fail("cannot open the log " + path_ + ": " + std::strerror(errno));
        }
        // One write: a line is either in the log as a whole or not at all, whatever happens to this process.
        const ssize_t written = write(file, text.data(), text.size());
        if (written != static_cast<ssize_t>(text.size()))
            fail("cannot write to the log " + path_ + ": " + std::strerror(errno));
        if (file != STDOUT_FILENO)
            close(file);
    }

    // `extra`: more JSON members, each with a leading comma.
    void start(const std::string &name, uint64_t state_bytes, const std::string &extra = "") const {
        line("{\"target\": \"" + name + "\", \"pid\": " + std::to_string(getpid()) +
             ", \"state_bytes\": " + std::to_string(state_bytes) + ", \"time_s\": " + time_text() + extra + "}");
    }
    void step(uint64_t number, const std::string &value, const std::string &extra = "") const {
        line("{\"step\": " + std::to_string(number) + ", \"time_s\": " + time_text() + ", \"value\": \"" + value +
             "\"" + extra + "}");
    }
    void done(uint64_t steps, uint64_t digest, const std::string &extra = "") const {
        line("{\"done\": true, \"steps\": " + std::to_string(steps) + ", \"digest\": \"" + hex(digest) +
             "\", \"time_s\": " + time_text() + extra + "}");
    }

  private:
    static std::string time_text() {
        char buffer[40];
        std::snprintf(buffer, sizeof buffer, "%.6f", wall_time_s());
        return buffer;
    }

    std::string path_;
};

// The pause between two steps that `--pace-ms` asks for.
inline void pace(double pace_ms) {
    if (pace_ms <= 0.0)
        return;
    timespec left{};
    left.tv_sec = static_cast<time_t>(pace_ms / 1000.0);
    left.tv_nsec = static_cast<long>((pace_ms - 1000.0 * static_cast<double>(left.tv_sec)) * 1e6);
    nanosleep(&left, nullptr); // a signal may end it early: the pace is a wish, not a promise
}

// Goes no further than the step whose number the file holds, if it is there (`--hold`).
inline void hold(const std::string &path, uint64_t step) {
    for (uint64_t last = 0; !path.empty() && std::ifstream(path) >> last && last != 0 && step >= last;) {
        const timespec look{0, 1'000'000};
        nanosleep(&look, nullptr);
    }
}

} // namespace target
