// Switches a running program between calling the driver through woodfrog's interposer and calling it directly.
//
// A program comes to the driver through addresses that it has looked up once: tables of the CUDA runtime (one in each
// library that is linked with it), of PyTorch, of Triton, and the linkers' own. driver_calls_find looks for all of them
// in the process's private data; driver_calls_use then writes the driver's own addresses there, or the interposer's
// again. So what the interposer costs can be measured within one process, where two processes that are equal in
// everything differ by more. Look-ups stay the interposer's: what is looked up later goes through it.
//
// Nothing may be inside the driver while addresses are written. For benchmarks only; no part of the product.
#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#include "../../native/interpose/elf_lookup.hpp"

namespace {

constexpr char kInterposer[] = "libwoodfrog_interpose.so";
constexpr char kDriver[] = "libcuda.so.1";
constexpr size_t kPieceBytes = 1 << 20;
constexpr uint64_t kLargestBytes = 1ULL << 30; // of an anonymous mapping: larger ones are tensors, not tables

// Addresses are kept inverted, or these very tables would be found.
struct Place {
    uint64_t where, inverted_ours, inverted_direct;
};
std::vector<Place> g_places;
int g_memory = -1;

struct Range {
    uint64_t begin, end;
};

// Calls `each` with name and address of every function that a loaded library exports by its GNU hash table.
template <typename Each> void exported(const link_map *map, const Each &each) {
    const ElfW(Sym) *symbols = nullptr;
    const char *strings = nullptr;
    const uint32_t *table = nullptr;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
        if (entry->d_tag == DT_SYMTAB)
            symbols = reinterpret_cast<const ElfW(Sym) *>(entry->d_un.d_ptr);
        else if (entry->d_tag == DT_STRTAB)
            strings = reinterpret_cast<const char *>(entry->d_un.d_ptr);
        else if (entry->d_tag == DT_GNU_HASH)
            table = reinterpret_cast<const uint32_t *>(entry->d_un.d_ptr);
    }
    if (symbols == nullptr || strings == nullptr || table == nullptr)
        return;
    const uint32_t *buckets = table + 4 + table[2] * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = buckets + table[0];
    for (uint32_t bucket = 0; bucket < table[0]; ++bucket) {
        uint32_t i = buckets[bucket];
        if (i < table[1])
            continue;
        for (bool last = false; !last; ++i) {
            last = (chain[i - table[1]] & 1) != 0;
            if (ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC)
                each(strings + symbols[i].st_name, map->l_addr + symbols[i].st_value);
        }
    }
}

Range extent_of(const link_map *map) {
    struct Search {
        uint64_t base;
        Range range;
    } search{map->l_addr, {0, 0}};
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *data) {
            auto *wanted = static_cast<Search *>(data);
            if (info->dlpi_addr != wanted->base)
                return 0;
            for (int i = 0; i < info->dlpi_phnum; ++i)
                if (info->dlpi_phdr[i].p_type == PT_LOAD)
                    wanted->range.end = std::max<uint64_t>(
                        wanted->range.end, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
            wanted->range.begin = info->dlpi_addr;
            return 1;
        },
        &search);
    return search.range;
}

// Private mappings that hold data: of libraries, and what is anonymous.
std::vector<Range> data_ranges(const Range &except) {
    std::vector<Range> ranges;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == nullptr)
        return ranges;
    char *line = nullptr;
    size_t room = 0;
    while (getline(&line, &room, maps) > 0) {
        uint64_t begin = 0, end = 0;
        char permissions[5] = {}, path[512] = {};
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %*s %*s %*s %511[^\n]", &begin, &end, permissions, path) < 3)
            continue;
        const bool named = path[0] == '/';
        const bool special = path[0] == '[' && strcmp(path, "[heap]") != 0 && strncmp(path, "[anon", 5) != 0;
        if (permissions[0] != 'r' || permissions[2] == 'x' || permissions[3] != 'p' || special ||
            (!named && end - begin > kLargestBytes) || (begin < except.end && except.begin < end))
            continue;
        ranges.push_back({begin, end});
    }
    free(line);
    fclose(maps);
    return ranges;
}

} // namespace

// How many addresses were found; -1 when the interposer or the driver is not there.
extern "C" long driver_calls_find() {
    void *interposer = dlopen(kInterposer, RTLD_NOLOAD | RTLD_LAZY);
    void *driver = dlopen(kDriver, RTLD_NOLOAD | RTLD_LAZY);
    if (interposer == nullptr || driver == nullptr || (g_memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC)) < 0)
        return -1;
    const auto *map = static_cast<const link_map *>(interposer);
    std::unordered_map<uint64_t, uint64_t> direct; // inverted ours → inverted driver's
    exported(map, [&](const char *name, uint64_t ours) {
        if (strncmp(name, "cu", 2) != 0 || strncmp(name, "cuGetProcAddress", 16) == 0)
            return;
        if (void *real = woodfrog::interpose::elf_lookup(kDriver, name); real != nullptr)
            direct.emplace(~ours, ~reinterpret_cast<uint64_t>(real));
    });
    const Range own = extent_of(map);
    std::vector<uint64_t> piece(kPieceBytes / sizeof(uint64_t));
    for (const Range &range : data_ranges(own)) {
        for (uint64_t at = range.begin; at < range.end; at += kPieceBytes) {
            const ssize_t got =
                pread(g_memory, piece.data(), std::min<uint64_t>(kPieceBytes, range.end - at), static_cast<off_t>(at));
            for (size_t i = 0; got > 0 && i < static_cast<size_t>(got) / sizeof(uint64_t); ++i) {
                if (piece[i] < own.begin || piece[i] >= own.end)
                    continue;
                const uint64_t where = at + i * sizeof(uint64_t);
                const auto *begin = reinterpret_cast<const char *>(piece.data());
                if (where >= reinterpret_cast<uint64_t>(begin) &&
                    where < reinterpret_cast<uint64_t>(begin) + kPieceBytes)
                    continue; // the copy that is being looked through
                if (const auto found = direct.find(~piece[i]); found != direct.end())
                    g_places.push_back({where, found->first, found->second});
            }
        }
    }
    return static_cast<long>(g_places.size());
}

// Writes the driver's addresses (direct) or the interposer's; how many could not be written.
extern "C" long driver_calls_use(int direct) {
    long failed = 0;
    for (const Place &place : g_places) {
        const uint64_t address = ~(direct != 0 ? place.inverted_direct : place.inverted_ours);
        failed += pwrite(g_memory, &address, sizeof address, static_cast<off_t>(place.where)) != sizeof address;
    }
    return failed;
}
