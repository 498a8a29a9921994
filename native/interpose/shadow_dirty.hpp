// What may have been written since the last checkpoint: a bit for each kGrain bytes of each piece of physical memory.
//
// Two sets are kept. `current` is written to; `pending` was told to the daemon for an image that is not known to be
// committed yet. Until it is, both count: the last committed image, the `baseline`, is what ranges are told against.
#pragma once

#include "driver.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace woodfrog::interpose::shadow {

inline constexpr size_t kGrain = size_t{16} << 10;
// More ranges than this are not told one by one: gaps between them are filled, the smallest first.
inline constexpr size_t kMostRanges = size_t{1} << 15;

// A piece of owned memory where an address finds it.
struct Region {
    CUdeviceptr address = 0;
    size_t size_bytes = 0;
    uint64_t id = 0; // of the physical memory
    size_t offset_bytes = 0;
    bool is_virtual = false; // the application's own mapping
    bool operator==(const Region &) const = default;
};

// Everything owned now, by address. Takes memory().mutex.
std::vector<Region> owned_regions();

struct DirtyRange {
    uint64_t id;
    uint64_t offset_bytes, size_bytes;
};

struct DirtyReport {
    uint64_t baseline = 0; // operation of the last committed image, 0: none
    bool everything = true;
    std::string why; // it is everything
    std::vector<DirtyRange> ranges;
};

// Marks what [address, address + size_bytes) covers of `regions` (sorted by address).
void mark_range(const std::vector<Region> &regions, uint64_t address, uint64_t size_bytes);
void mark_whole(uint64_t id, size_t size_bytes);
void mark_everything(const char *why, const char *kernel);
void mark_everything_for_good(const char *why);
// Forgets pieces of memory that are gone, once there are many more marked ones than `regions` has.
void forget_gone(const std::vector<Region> &regions);
// One load: everything is marked already, nothing more can be learnt until the next report.
bool everything_marked();

// What to tell for the image of `operation`; from here on writes count for the image after it.
DirtyReport report_dirty(uint64_t operation, const std::vector<Region> &regions);
// The image of `operation` is committed: what was reported for it need not be told again. Another number is ignored.
void dirty_committed(uint64_t operation);
// Counts reports; catalogues are looked for once in each of these.
uint32_t dirty_epoch();

} // namespace woodfrog::interpose::shadow
