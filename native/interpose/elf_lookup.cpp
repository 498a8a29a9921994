// A symbol look-up in one loaded library by its GNU hash table, and one in its relocations; see elf_lookup.hpp.
//
// The first is used once, for the real dlvsym: every other way to it leads through a function that we have replaced.
// Reads only what the loader has mapped.
#include "elf_lookup.hpp"

#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <link.h>

namespace woodfrog::interpose {
namespace {

uint32_t gnu_hash(const char *name) {
    uint32_t hash = 5381; // the function of the GNU hash section, as the linker computes it
    for (const unsigned char *c = reinterpret_cast<const unsigned char *>(name); *c != 0; ++c)
        hash = hash * 33 + *c;
    return hash;
}

#ifdef __x86_64__
constexpr uint32_t kCallSlot = R_X86_64_JUMP_SLOT;
#else
constexpr uint32_t kCallSlot = R_AARCH64_JUMP_SLOT;
#endif

// glibc relocates these in place on the machines it writes the dynamic section on; elsewhere they are offsets.
ElfW(Addr) address_of(const link_map *map, const ElfW(Dyn) * entry) {
    const ElfW(Addr) address = entry->d_un.d_ptr;
    return address < map->l_addr ? address + map->l_addr : address;
}

// What a library's dynamic section tells; null where it does not.
struct Dynamic {
    const ElfW(Sym) *symbols = nullptr;
    const char *strings = nullptr;
    const uint32_t *hashes = nullptr;       // GNU's table
    const ElfW(Rela) *references = nullptr; // of calls
    size_t reference_bytes = 0;
};

Dynamic dynamic_of(const link_map *map) {
    Dynamic found;
    const void *references = nullptr;
    bool with_addends = true;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
        const ElfW(Addr) address = address_of(map, entry);
        if (entry->d_tag == DT_SYMTAB)
            found.symbols = reinterpret_cast<const ElfW(Sym) *>(address);
        else if (entry->d_tag == DT_STRTAB)
            found.strings = reinterpret_cast<const char *>(address);
        else if (entry->d_tag == DT_GNU_HASH)
            found.hashes = reinterpret_cast<const uint32_t *>(address);
        else if (entry->d_tag == DT_JMPREL)
            references = reinterpret_cast<const void *>(address);
        else if (entry->d_tag == DT_PLTRELSZ)
            found.reference_bytes = entry->d_un.d_val;
        else if (entry->d_tag == DT_PLTREL)
            with_addends = entry->d_un.d_val == DT_RELA;
    }
    found.references = with_addends ? static_cast<const ElfW(Rela) *>(references) : nullptr;
    return found;
}

// What the loader makes read-only once it is done.
struct ReadOnly {
    ElfW(Addr) base = 0;
    uintptr_t begin = 0, end = 0;
};

int find_read_only(dl_phdr_info *info, size_t, void *argument) {
    auto &found = *static_cast<ReadOnly *>(argument);
    if (info->dlpi_addr != found.base)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        if (info->dlpi_phdr[i].p_type != PT_GNU_RELRO)
            continue;
        found.begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        found.end = found.begin + info->dlpi_phdr[i].p_memsz;
    }
    return 1;
}

} // namespace

void *elf_lookup(const char *soname, const char *name) {
    void *handle = dlopen(soname, RTLD_NOLOAD | RTLD_LAZY);
    if (handle == nullptr)
        return nullptr;
    const link_map *map = static_cast<const link_map *>(handle); // glibc's handle is its link map
    const Dynamic dynamic = dynamic_of(map);
    void *found = nullptr;
    if (dynamic.symbols != nullptr && dynamic.strings != nullptr && dynamic.hashes != nullptr) {
        const uint32_t *table = dynamic.hashes;
        const uint32_t bucket_count = table[0], first = table[1], bloom_words = table[2];
        const uint32_t *buckets = table + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
        const uint32_t *chain = buckets + bucket_count;
        const uint32_t hash = gnu_hash(name);
        for (uint32_t i = bucket_count == 0 ? 0 : buckets[hash % bucket_count]; i >= first && i != 0; ++i) {
            const uint32_t link = chain[i - first];
            if ((link | 1) == (hash | 1) && dynamic.symbols[i].st_shndx != SHN_UNDEF &&
                strcmp(dynamic.strings + dynamic.symbols[i].st_name, name) == 0) {
                found = reinterpret_cast<void *>(map->l_addr + dynamic.symbols[i].st_value);
                break;
            }
            if (link & 1)
                break;
        }
    }
    dlclose(handle);
    return found;
}

void **elf_reference(const void *function, const char *name) {
    Dl_info info{};
    void *extra = nullptr;
    if (dladdr1(function, &info, &extra, RTLD_DL_LINKMAP) == 0 || extra == nullptr)
        return nullptr;
    const auto *map = static_cast<const link_map *>(extra);
    const Dynamic dynamic = dynamic_of(map);
    if (dynamic.symbols == nullptr || dynamic.strings == nullptr || dynamic.references == nullptr)
        return nullptr;
    for (size_t i = 0; i < dynamic.reference_bytes / sizeof(ElfW(Rela)); ++i) {
        const ElfW(Rela) &one = dynamic.references[i];
        if (ELF64_R_TYPE(one.r_info) != kCallSlot ||
            strcmp(dynamic.strings + dynamic.symbols[ELF64_R_SYM(one.r_info)].st_name, name) != 0)
            continue;
        const uintptr_t address = map->l_addr + one.r_offset;
        ReadOnly fixed{map->l_addr};
        dl_iterate_phdr(&find_read_only, &fixed);
        return address >= fixed.begin && address < fixed.end ? nullptr : reinterpret_cast<void **>(address);
    }
    return nullptr;
}

} // namespace woodfrog::interpose
