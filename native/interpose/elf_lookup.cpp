// A symbol look-up in one loaded library by its GNU hash table; see elf_lookup.hpp.
//
// Used once, for the real dlvsym: every other way to it leads through a function that we have replaced. Reads only
// what the loader has mapped.
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

} // namespace

void *elf_lookup(const char *soname, const char *name) {
    void *handle = dlopen(soname, RTLD_NOLOAD | RTLD_LAZY);
    if (handle == nullptr)
        return nullptr;
    const link_map *map = static_cast<const link_map *>(handle); // glibc's handle is its link map
    const ElfW(Sym) *symbols = nullptr;
    const char *strings = nullptr;
    const uint32_t *table = nullptr;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
        // glibc relocates these in place on the machines it writes the dynamic section on; elsewhere they are offsets.
        ElfW(Addr) address = entry->d_un.d_ptr;
        if (address < map->l_addr)
            address += map->l_addr;
        if (entry->d_tag == DT_SYMTAB)
            symbols = reinterpret_cast<const ElfW(Sym) *>(address);
        else if (entry->d_tag == DT_STRTAB)
            strings = reinterpret_cast<const char *>(address);
        else if (entry->d_tag == DT_GNU_HASH)
            table = reinterpret_cast<const uint32_t *>(address);
    }
    void *found = nullptr;
    if (symbols != nullptr && strings != nullptr && table != nullptr) {
        const uint32_t bucket_count = table[0], first = table[1], bloom_words = table[2];
        const uint32_t *buckets = table + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
        const uint32_t *chain = buckets + bucket_count;
        const uint32_t hash = gnu_hash(name);
        for (uint32_t i = bucket_count == 0 ? 0 : buckets[hash % bucket_count]; i >= first && i != 0; ++i) {
            const uint32_t link = chain[i - first];
            if ((link | 1) == (hash | 1) && symbols[i].st_shndx != SHN_UNDEF &&
                strcmp(strings + symbols[i].st_name, name) == 0) {
                found = reinterpret_cast<void *>(map->l_addr + symbols[i].st_value);
                break;
            }
            if (link & 1)
                break;
        }
    }
    dlclose(handle);
    return found;
}

} // namespace woodfrog::interpose
