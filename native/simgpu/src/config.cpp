// Reading of the environment knobs; see config.hpp.
#include "config.hpp"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

namespace simgpu {
namespace {

// Caps keep a mistyped knob from exhausting the host: 64 devices is what CUDA itself can enumerate.
constexpr int kMaxDevices = 64;

std::optional<long> parse_integer(std::string_view text) {
    long value = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size())
        return std::nullopt;
    return value;
}

void complain(const char *name, const char *value) {
    std::fprintf(stderr, "simulated GPU: %s=\"%s\" is not understood; the default is used\n", name, value);
}

Config read_config() {
    Config c;
    if (const char *v = std::getenv("WOODFROG_SIMGPU_DEVICES")) {
        auto n = parse_integer(v);
        if (n && *n >= 0 && *n <= kMaxDevices) {
            c.device_count = static_cast<int>(*n);
        } else {
            complain("WOODFROG_SIMGPU_DEVICES", v);
        }
    }
    if (const char *v = std::getenv("WOODFROG_SIMGPU_MEMORY")) {
        auto n = parse_size_bytes(v);
        if (n && *n >= (size_t{4} << 20)) {
            c.memory_size_bytes = *n;
        } else {
            complain("WOODFROG_SIMGPU_MEMORY", v);
        }
    }
    if (const char *v = std::getenv("WOODFROG_SIMGPU_CONTROL_STATE")) {
        if (auto n = parse_size_bytes(v)) {
            c.control_state_bytes = *n;
        } else {
            complain("WOODFROG_SIMGPU_CONTROL_STATE", v);
        }
    }
    if (const char *v = std::getenv("WOODFROG_SIMGPU_ONE_MAPPING"))
        c.one_mapping = std::string_view(v) == "1";
    if (const char *v = std::getenv("WOODFROG_SIMGPU_SCRIBBLES"))
        c.scribbles = std::string_view(v) == "1";
    if (const char *v = std::getenv("WOODFROG_SIMGPU_HIDDEN_MAPS"))
        c.hidden_maps = std::string_view(v) == "1";
    if (const char *v = std::getenv("WOODFROG_SIMGPU_DRIVER_VERSION")) {
        auto n = parse_integer(v);
        if (n && *n >= 12000) {
            c.driver_version = static_cast<int>(*n);
        } else {
            complain("WOODFROG_SIMGPU_DRIVER_VERSION", v);
        }
    }
    if (const char *v = std::getenv("WOODFROG_SIMGPU_MACHINE")) {
        std::string name(v);
        // The name becomes part of a memfd name, which the kernel bounds at 249 bytes and which /proc shows verbatim.
        if (name.size() <= 64 && name.find_first_of("/ \n") == std::string::npos) {
            c.machine = name;
        } else {
            complain("WOODFROG_SIMGPU_MACHINE", v);
        }
    }
    if (const char *v = std::getenv("WOODFROG_SIMGPU_MULTICAST"))
        c.multicast = std::string_view(v) == "1";
    if (const char *v = std::getenv("CUDA_VISIBLE_DEVICES"))
        c.visible = v;
    if (const char *v = std::getenv("CUDA_DEVICE_ORDER"))
        c.pci_order = std::string_view(v) == "PCI_BUS_ID";
    if (const char *v = std::getenv("WOODFROG_SIMGPU_FASTEST"))
        c.last_is_fastest = std::string_view(v) == "last";
    if (const char *v = std::getenv("WOODFROG_SIMGPU_FAIL"))
        c.failures = v;
    if (const char *v = std::getenv("WOODFROG_SIMGPU_LATENCY_MS"))
        c.latencies = v;
    return c;
}

std::vector<std::string> split(const std::string &text, char separator) {
    std::vector<std::string> parts;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) {
        while (!part.empty() && (part.back() == '\n' || part.back() == ' '))
            part.pop_back();
        parts.push_back(part);
    }
    return parts;
}

} // namespace

const Config &config() {
    static const Config *instance = new Config(read_config());
    return *instance;
}

std::optional<size_t> parse_size_bytes(std::string_view text) {
    size_t digits = text.find_first_not_of("0123456789");
    if (digits == 0)
        return std::nullopt;
    std::string_view unit = digits == std::string_view::npos ? std::string_view{} : text.substr(digits);
    unsigned shift = 0;
    if (unit == "KiB") {
        shift = 10;
    } else if (unit == "MiB") {
        shift = 20;
    } else if (unit == "GiB") {
        shift = 30;
    } else if (!unit.empty()) {
        return std::nullopt;
    }
    auto number = parse_integer(text.substr(0, digits));
    if (!number || *number > (1L << 32 << (30 - shift)))
        return std::nullopt;
    return static_cast<size_t>(*number) << shift;
}

CUresult injected_failure(std::string_view action) {
    std::string spec = config().failures;
    if (spec.empty())
        return CUDA_SUCCESS;
    if (spec[0] == '@') {
        std::ifstream file(spec.substr(1));
        std::stringstream text;
        text << file.rdbuf();
        spec = text.str();
    }
    static std::mutex mutex;
    static std::map<std::string, long> &used = *new std::map<std::string, long>;
    for (const std::string &entry : split(spec, ',')) {
        auto fields = split(entry, ':');
        if (fields.size() < 2 || fields[0] != action)
            continue;
        auto code = parse_integer(fields[1]);
        if (!code) {
            complain("WOODFROG_SIMGPU_FAIL", entry.c_str());
            continue;
        }
        if (fields.size() > 2) {
            std::lock_guard lock(mutex);
            auto limit = parse_integer(fields[2]);
            if (!limit || used[entry] >= *limit)
                continue;
            ++used[entry];
        }
        return static_cast<CUresult>(*code);
    }
    return CUDA_SUCCESS;
}

void imitate_latency(std::string_view action) {
    if (config().latencies.empty())
        return;
    for (const std::string &entry : split(config().latencies, ',')) {
        auto fields = split(entry, ':');
        if (fields.size() != 2 || fields[0] != action)
            continue;
        if (auto duration_ms = parse_integer(fields[1])) {
            std::this_thread::sleep_for(std::chrono::milliseconds(*duration_ms));
        }
    }
}

} // namespace simgpu
