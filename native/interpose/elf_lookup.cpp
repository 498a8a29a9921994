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

constexpr size_t kPageBytes = 4096; // the least that is mapped of a library, and where its program headers are

// glibc relocates these in place on the machines it writes the dynamic section on; elsewhere they are offsets.
ElfW(Addr) address_of(ElfW(Addr) base, const ElfW(Dyn) * entry) {
    const ElfW(Addr) address = entry->d_un.d_ptr;
    return address < base ? address + base : address;
}

// What a library's dynamic section tells; null where it does not.
struct Dynamic {
    const ElfW(Sym) *symbols = nullptr;
    const char *strings = nullptr;
    const uint32_t *hashes = nullptr;       // GNU's table
    const ElfW(Rela) *references = nullptr; // of calls
    size_t reference_bytes = 0;
};

Dynamic dynamic_of(ElfW(Addr) base, const ElfW(Dyn) * entry) {
    Dynamic found;
    const void *references = nullptr;
    bool with_addends = true;
    for (; entry->d_tag != DT_NULL; ++entry) {
        const ElfW(Addr) address = address_of(base, entry);
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

// What a library's program headers tell.
struct Loaded {
    ElfW(Addr) base = 0;
    const ElfW(Dyn) *dynamic = nullptr;
    const void *code = nullptr;
    uintptr_t fixed_begin = 0, fixed_end = 0; // what the loader makes read-only once it is done
};

Loaded loaded_at(const void *library) {
    Loaded found;
    const auto *header = static_cast<const ElfW(Ehdr) *>(library);
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_phentsize != sizeof(ElfW(Phdr)) ||
        header->e_phoff + header->e_phnum * sizeof(ElfW(Phdr)) > kPageBytes)
        return found;
    const auto *programs = reinterpret_cast<const ElfW(Phdr) *>(static_cast<const char *>(library) + header->e_phoff);
    bool first = true;
    for (int i = 0; i < header->e_phnum; ++i) {
        const ElfW(Phdr) &one = programs[i];
        if (one.p_type == PT_LOAD && first) {
            found.base = reinterpret_cast<ElfW(Addr)>(library) - (one.p_vaddr - one.p_offset);
            first = false;
        }
        if (one.p_type == PT_LOAD && (one.p_flags & PF_X) != 0 && found.code == nullptr) {
            found.code = reinterpret_cast<const void *>(found.base + one.p_vaddr);
        } else if (one.p_type == PT_DYNAMIC) {
            found.dynamic = reinterpret_cast<const ElfW(Dyn) *>(found.base + one.p_vaddr);
        } else if (one.p_type == PT_GNU_RELRO) {
            found.fixed_begin = found.base + one.p_vaddr;
            found.fixed_end = found.fixed_begin + one.p_memsz;
        }
    }
    return found;
}

} // namespace

void *elf_lookup(const char *soname, const char *name) {
    void *handle = dlopen(soname, RTLD_NOLOAD | RTLD_LAZY);
    if (handle == nullptr)
        return nullptr;
    const link_map *map = static_cast<const link_map *>(handle); // glibc's handle is its link map
    const Dynamic dynamic = dynamic_of(map->l_addr, map->l_ld);
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
    return dladdr(function, &info) == 0 ? nullptr : elf_reference_in(info.dli_fbase, name);
}

void **elf_reference_in(const void *library, const char *name) {
    const Loaded loaded = loaded_at(library);
    if (loaded.dynamic == nullptr)
        return nullptr;
    const Dynamic dynamic = dynamic_of(loaded.base, loaded.dynamic);
    if (dynamic.symbols == nullptr || dynamic.strings == nullptr || dynamic.references == nullptr)
        return nullptr;
    for (size_t i = 0; i < dynamic.reference_bytes / sizeof(ElfW(Rela)); ++i) {
        const ElfW(Rela) &one = dynamic.references[i];
        if (ELF64_R_TYPE(one.r_info) != kCallSlot ||
            strcmp(dynamic.strings + dynamic.symbols[ELF64_R_SYM(one.r_info)].st_name, name) != 0)
            continue;
        const uintptr_t address = loaded.base + one.r_offset;
        const bool fixed = address >= loaded.fixed_begin && address < loaded.fixed_end;
        return fixed ? nullptr : reinterpret_cast<void **>(address);
    }
    return nullptr;
}

const void *elf_code_in(const void *library) {
    return loaded_at(library).code;
}

} // namespace woodfrog::interpose
