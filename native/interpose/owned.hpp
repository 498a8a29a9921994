// Everything that is handed over, as a list: the pieces of physical memory of this process, and where each is mapped.
//
// For the agent, with the gate closed: the tables do not change then, so what is listed here stays.
#pragma once

#include "memory.hpp"
#include "wire.h"

#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace woodfrog::interpose {

// A piece of physical memory: behind a block of ours, or behind a handle of the application's.
struct Owned {
    Physical *physical = nullptr;
    Block *block = nullptr;
    VirtualHandle *handle = nullptr;
    std::span<VirtualMapping *const> mappings; // of `handle`
    wire::Kind kind() const;
};

wire::Kind kind_of(const VirtualHandle &handle);

// All of it, those of one device together.
class Inventory {
  public:
    Inventory(); // takes memory().mutex
    Inventory(const Inventory &) = delete;
    Inventory &operator=(const Inventory &) = delete;
    const std::vector<Owned> &all() const { return all_; }
    const Owned *find(uint64_t id) const;

  private:
    std::vector<VirtualMapping *> mappings_; // in groups, one for each handle
    std::vector<Owned> all_;
    std::unordered_map<uint64_t, size_t> by_id_;
};

// Makes a context of one device after the other current on this thread: importing and mapping are calls about one.
class DeviceScope {
  public:
    void enter(CUdevice device); // with memory().mutex held

  private:
    std::optional<CurrentScope> scope_;
    CUdevice device_ = -1;
};

} // namespace woodfrog::interpose
