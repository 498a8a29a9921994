// A minimal device for tests: memory on the host heap, one module, launches with typed arguments. It does what the
// simulated driver does for the interpreter, without any of the driver's behaviour.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "ptx.hpp"

namespace test {

namespace ptx = simgpu::ptx;

class HostMemory final : public ptx::Memory {
  public:
    std::uint64_t allocate(std::size_t bytes) {
        const std::size_t size = std::max<std::size_t>(bytes, 1);
        Piece piece{
            std::unique_ptr<std::byte[], Free>(static_cast<std::byte *>(::operator new[](size, std::align_val_t{256}))),
            size};
        std::memset(piece.bytes.get(), 0, size);
        const auto address = reinterpret_cast<std::uint64_t>(piece.bytes.get());
        pieces_[address] = std::move(piece);
        return address;
    }
    bool release(std::uint64_t address) { return pieces_.erase(address) == 1; }

    std::byte *translate(std::uint64_t address, std::size_t bytes, bool) noexcept override {
        const Range found = find(address);
        if (found.host == nullptr || found.end - address < bytes)
            return nullptr;
        return found.host + (address - found.begin);
    }
    Range range(std::uint64_t address, bool) noexcept override { return use_ranges ? find(address) : Range{}; }
    std::uint64_t symbol_address(const ptx::Module &, std::string_view name) override {
        const auto found = symbols.find(std::string(name));
        return found == symbols.end() ? 0 : found->second;
    }
    std::uint64_t heap_allocate(std::size_t bytes) noexcept override {
        if (bytes > (1u << 20))
            return 0;
        const std::uint64_t address = allocate(bytes);
        heap_.push_back(address);
        return address;
    }
    bool heap_free(std::uint64_t address) noexcept override {
        const auto found = std::find(heap_.begin(), heap_.end(), address);
        if (found == heap_.end())
            return false;
        heap_.erase(found);
        return release(address);
    }
    std::size_t heap_blocks() const { return heap_.size(); }

    std::map<std::string, std::uint64_t> symbols;
    bool use_ranges = true;

  private:
    struct Free {
        void operator()(std::byte *memory) const noexcept { ::operator delete[](memory, std::align_val_t{256}); }
    };
    struct Piece {
        std::unique_ptr<std::byte[], Free> bytes;
        std::size_t size = 0;
    };
    Range find(std::uint64_t address) const noexcept {
        auto after = pieces_.upper_bound(address);
        if (after == pieces_.begin())
            return {};
        const auto &[begin, piece] = *--after;
        if (address >= begin + piece.size)
            return {};
        return {begin, begin + piece.size, piece.bytes.get()};
    }
    std::map<std::uint64_t, Piece> pieces_;
    std::vector<std::uint64_t> heap_;
};

struct Shape {
    std::array<unsigned, 3> grid{1, 1, 1};
    std::array<unsigned, 3> block{1, 1, 1};
    std::size_t shared_bytes = 0;
    std::array<unsigned, 3> cluster{1, 1, 1};
    bool cooperative = false;
};

/// A typed array in device memory.
template <class T> struct Array {
    std::uint64_t address = 0;
    std::size_t count = 0;
};

class Device {
  public:
    explicit Device(std::string_view text) : module(ptx::Module::parse(text)) {
        for (const auto &variable : module->globals()) {
            if (variable.size_bytes > (1u << 26))
                throw Failure("the variable is too large for a test");
            memory.symbols[variable.name] = memory.allocate(variable.size_bytes);
        }
        for (const auto &variable : module->globals()) {
            auto *place = reinterpret_cast<std::byte *>(memory.symbols[variable.name]);
            if (!variable.initial.empty())
                std::memcpy(place, variable.initial.data(), variable.initial.size());
            for (const auto &relocation : variable.relocations) {
                const std::uint64_t value =
                    memory.symbols.at(relocation.symbol) + static_cast<std::uint64_t>(relocation.addend);
                std::memcpy(place + relocation.offset_bytes, &value, relocation.size_bytes);
            }
        }
    }

    template <class T> Array<T> make(const std::vector<T> &values) {
        const Array<T> array{memory.allocate(values.size() * sizeof(T)), values.size()};
        if (!values.empty())
            std::memcpy(reinterpret_cast<void *>(array.address), values.data(), values.size() * sizeof(T));
        return array;
    }
    template <class T> Array<T> make(std::size_t count) { return {memory.allocate(count * sizeof(T)), count}; }
    template <class T> std::vector<T> read(const Array<T> &array) const {
        std::vector<T> values(array.count);
        if (array.count != 0)
            std::memcpy(values.data(), reinterpret_cast<const void *>(array.address), array.count * sizeof(T));
        return values;
    }

    template <class... Arguments>
    void launch(const std::string &name, const Shape &shape, const Arguments &...arguments) {
        const ptx::Kernel kernel = module->kernel(name);
        std::vector<std::byte> block(kernel.parameters_bytes());
        std::size_t index = 0;
        (put(kernel, block, index, arguments), ...);
        equal(index, kernel.parameters().size(), "number of arguments", __FILE__, __LINE__);
        ptx::Launch launch;
        launch.grid = shape.grid;
        launch.block = shape.block;
        launch.cluster = shape.cluster;
        launch.cooperative = shape.cooperative;
        launch.dynamic_shared_bytes = shape.shared_bytes;
        launch.parameters = block.data();
        launch.parameters_bytes = block.size();
        launch.max_workers = max_workers;
        ptx::execute(kernel, launch, memory, observer, cancel, &printed);
    }

    std::shared_ptr<const ptx::Module> module;
    HostMemory memory;
    std::string printed;
    ptx::Observer *observer = nullptr;
    const std::atomic<bool> *cancel = nullptr;
    unsigned max_workers = 2;

  private:
    template <class T>
    static void put(const ptx::Kernel &kernel, std::vector<std::byte> &block, std::size_t &index, const T &value) {
        const auto &parameter = kernel.parameters().at(index++);
        equal(sizeof(T), parameter.size_bytes, "size of an argument", __FILE__, __LINE__);
        std::memcpy(block.data() + parameter.offset_bytes, &value, sizeof value);
    }
    template <class T>
    static void put(const ptx::Kernel &kernel, std::vector<std::byte> &block, std::size_t &index,
                    const Array<T> &array) {
        put(kernel, block, index, array.address);
    }
};

/// A fresh device with the kernels of kernels/ as the compiler variant under test has made them.
Device make_device();
/// "sm_90" or "sm_80", and whether the optimiser was off.
const std::string &target();

} // namespace test
