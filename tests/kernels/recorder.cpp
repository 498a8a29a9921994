// Runs kernels of one PTX file on the simulated GPU's interpreter and reports every byte they touched.
//
// A test program: it reads requests from stdin and writes answers to stdout, both little-endian. It owns the memory
// that kernels see; an access outside it is answered as a fault, never made.
//   start:   u32 variables, then for each: u32 name bytes, name, u64 address, u64 size
//   'M':     u32 pieces, then for each: u64 address, u64 size, bytes           replaces all memory but module variables
//   'L':     u32 name bytes, name, u32 grid[3], u32 block[3], u32 shared bytes, u32 parameter bytes, parameters
//   answer:  u32 status (0: ran), u32 text bytes, text, then for load, store, atomic: u32 ranges, (u64 address, u64
//   size)…
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ptx.hpp"

namespace {

using namespace simgpu::ptx;
using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>; // begin, end

constexpr std::uint64_t kVariables = 0x7e0000000000; // where module variables begin; tests place nothing there
constexpr std::uint64_t kAlignment = 256;            // of a module variable, as cuModuleGetGlobal's addresses are
constexpr std::uint32_t kLargestRequest = 1u << 28;

void read_exactly(void *to, std::size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes)
        std::exit(3);
}

template <class T> T read() {
    T value;
    read_exactly(&value, sizeof value);
    return value;
}

std::string read_text() {
    auto bytes = read<std::uint32_t>();
    if (bytes > kLargestRequest)
        std::exit(4);
    std::string text(bytes, '\0');
    read_exactly(text.data(), bytes);
    return text;
}

template <class T> void write(const T &value) {
    std::fwrite(&value, sizeof value, 1, stdout);
}

void write_text(const std::string &text) {
    write(static_cast<std::uint32_t>(text.size()));
    std::fwrite(text.data(), 1, text.size(), stdout);
}

class TestMemory : public Memory {
  public:
    std::byte *translate(std::uint64_t address, std::size_t bytes, bool) noexcept override {
        auto next = pieces_.upper_bound(address);
        if (next == pieces_.begin())
            return nullptr;
        auto &[start, content] = *std::prev(next);
        std::uint64_t offset = address - start;
        if (offset > content.size() || bytes > content.size() - offset)
            return nullptr;
        return content.data() + offset;
    }
    std::uint64_t symbol_address(const Module &, std::string_view name) override {
        auto found = symbols_.find(std::string(name));
        return found == symbols_.end() ? 0 : found->second;
    }
    std::uint64_t heap_allocate(std::size_t) noexcept override { return 0; }

    void place(const Variable &variable) {
        auto size = std::max<std::size_t>(variable.size_bytes, 1);
        std::vector<std::byte> content(size);
        std::copy(variable.initial.begin(), variable.initial.end(), content.begin());
        symbols_[variable.name] = next_;
        pieces_[next_] = std::move(content);
        next_ += (size + 2 * kAlignment - 1) / kAlignment * kAlignment;
    }
    void replace() {
        std::erase_if(pieces_, [](const auto &piece) {
            return piece.first < kVariables || piece.first >= kVariables + (1ull << 32);
        });
        auto count = read<std::uint32_t>();
        for (std::uint32_t i = 0; i < count; ++i) {
            auto address = read<std::uint64_t>();
            auto bytes = read<std::uint64_t>();
            if (bytes > kLargestRequest)
                std::exit(4);
            std::vector<std::byte> content(bytes);
            read_exactly(content.data(), bytes);
            pieces_[address] = std::move(content);
        }
    }
    std::uint64_t address_of(const std::string &name) const { return symbols_.at(name); }

  private:
    std::map<std::uint64_t, std::vector<std::byte>> pieces_;
    std::map<std::string, std::uint64_t> symbols_;
    std::uint64_t next_ = kVariables;
};

class Recorder : public Observer {
  public:
    void access(std::uint64_t address, std::uint32_t bytes, Kind kind) override {
        auto &ranges = ranges_[static_cast<std::size_t>(kind)];
        if (!ranges.empty() && ranges.back().second == address)
            ranges.back().second += bytes;
        else
            ranges.emplace_back(address, address + bytes);
        if (ranges.size() > (1u << 20))
            join(ranges);
    }
    void write_all() {
        for (auto &ranges : ranges_) {
            join(ranges);
            write(static_cast<std::uint32_t>(ranges.size()));
            for (auto &[begin, end] : ranges) {
                write(begin);
                write(end - begin);
            }
        }
    }

  private:
    static void join(Ranges &ranges) {
        std::sort(ranges.begin(), ranges.end());
        Ranges joined;
        for (auto &range : ranges) {
            if (!joined.empty() && range.first <= joined.back().second)
                joined.back().second = std::max(joined.back().second, range.second);
            else
                joined.push_back(range);
        }
        ranges = std::move(joined);
    }
    std::array<Ranges, 3> ranges_;
};

void launch(const Module &module, TestMemory &memory) {
    std::string name = read_text();
    Launch launch;
    for (auto *dimensions : {&launch.grid, &launch.block})
        for (auto &extent : *dimensions)
            extent = read<std::uint32_t>();
    launch.dynamic_shared_bytes = read<std::uint32_t>();
    std::string parameters = read_text();
    launch.parameters = reinterpret_cast<const std::byte *>(parameters.data());
    launch.parameters_bytes = parameters.size();
    launch.max_workers = 1;
    Recorder recorder;
    std::uint32_t status = 0;
    std::string text;
    try {
        execute(module.kernel(name), launch, memory, &recorder, nullptr, &text);
    } catch (const std::exception &error) {
        status = 1;
        text = error.what();
    }
    write(status);
    write_text(text);
    recorder.write_all();
    std::fflush(stdout);
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: recorder FILE.ptx\n");
        return 2;
    }
    std::ifstream file(argv[1], std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    try {
        auto module = Module::parse(text);
        TestMemory memory;
        write(static_cast<std::uint32_t>(module->globals().size()));
        for (const auto &variable : module->globals()) {
            memory.place(variable);
            write_text(variable.name);
            write(memory.address_of(variable.name));
            write(static_cast<std::uint64_t>(variable.size_bytes));
        }
        std::fflush(stdout);
        for (int request = std::getchar(); request != EOF; request = std::getchar()) {
            if (request == 'M')
                memory.replace();
            else if (request == 'L')
                launch(*module, memory);
            else
                return 5;
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "recorder: %s\n", error.what());
        return 1;
    }
    return 0;
}
