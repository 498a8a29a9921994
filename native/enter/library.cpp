// See library.hpp. The same look-up within a process: native/interpose/elf_lookup.cpp.
#include "library.hpp"

#include <algorithm>
#include <cstring>
#include <elf.h>
#include <string_view>
#include <vector>

#include "remote.hpp"

namespace woodfrog::enter {
namespace {

// Of what is read at once; libcuda 580 has 15 segments, 30 entries, 30 KB of names and 30 KB of references.
constexpr std::size_t most_segments = 64;
constexpr std::size_t most_dynamic_bytes = 64 << 10;
constexpr std::size_t most_name_bytes = 16 << 20;
constexpr std::size_t most_reference_bytes = 8 << 20;

#if defined(__x86_64__)
constexpr Elf64_Half machine = EM_X86_64;
constexpr std::uint32_t call_slot = R_X86_64_JUMP_SLOT;
#else
constexpr Elf64_Half machine = EM_AARCH64;
constexpr std::uint32_t call_slot = R_AARCH64_JUMP_SLOT;
#endif

struct Library {
    std::uintptr_t bias = 0; // added to the addresses in its file
    std::uintptr_t dynamic = 0;
    std::size_t dynamic_bytes = 0;
};

// What its dynamic section tells.
struct Tables {
    std::uintptr_t symbols = 0, names = 0, references = 0;
    std::size_t name_bytes = 0, reference_bytes = 0;
    bool with_addends = true;
};

template <class Value> bool read_value(pid_t pid, std::uintptr_t address, Value &value) {
    return read_memory(pid, address, &value, sizeof value);
}

std::optional<Library> read_library(pid_t pid, std::uintptr_t begin) {
    Elf64_Ehdr head;
    if (!read_value(pid, begin, head) || std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 ||
        head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_ident[EI_DATA] != ELFDATA2LSB || head.e_machine != machine ||
        head.e_phentsize != sizeof(Elf64_Phdr) || head.e_phnum == 0 || head.e_phnum > most_segments)
        return std::nullopt;
    std::vector<Elf64_Phdr> segments(head.e_phnum);
    if (!read_memory(pid, begin + head.e_phoff, segments.data(), segments.size() * sizeof(Elf64_Phdr)))
        return std::nullopt;
    const auto first =
        std::find_if(segments.begin(), segments.end(), [](const Elf64_Phdr &one) { return one.p_type == PT_LOAD; });
    const auto dynamic =
        std::find_if(segments.begin(), segments.end(), [](const Elf64_Phdr &one) { return one.p_type == PT_DYNAMIC; });
    if (first == segments.end() || dynamic == segments.end() || dynamic->p_memsz > most_dynamic_bytes)
        return std::nullopt;
    Library found;
    found.bias = begin - (first->p_vaddr - first->p_offset);
    found.dynamic = found.bias + dynamic->p_vaddr;
    found.dynamic_bytes = dynamic->p_memsz;
    return found;
}

std::optional<Tables> read_tables(pid_t pid, const Library &library) {
    std::vector<Elf64_Dyn> entries(library.dynamic_bytes / sizeof(Elf64_Dyn));
    if (!read_memory(pid, library.dynamic, entries.data(), entries.size() * sizeof(Elf64_Dyn)))
        return std::nullopt;
    // The C library of the machines that it can write the section on has made addresses of them; others leave offsets.
    const auto address = [&library](const Elf64_Dyn &entry) {
        return entry.d_un.d_ptr < library.bias ? entry.d_un.d_ptr + library.bias : entry.d_un.d_ptr;
    };
    Tables found;
    for (const Elf64_Dyn &entry : entries) {
        if (entry.d_tag == DT_NULL)
            break;
        if (entry.d_tag == DT_SYMTAB)
            found.symbols = address(entry);
        else if (entry.d_tag == DT_STRTAB)
            found.names = address(entry);
        else if (entry.d_tag == DT_STRSZ)
            found.name_bytes = entry.d_un.d_val;
        else if (entry.d_tag == DT_JMPREL)
            found.references = address(entry);
        else if (entry.d_tag == DT_PLTRELSZ)
            found.reference_bytes = entry.d_un.d_val;
        else if (entry.d_tag == DT_PLTREL)
            found.with_addends = entry.d_un.d_val == DT_RELA;
    }
    if (found.symbols == 0 || found.names == 0 || found.references == 0 || !found.with_addends ||
        found.name_bytes > most_name_bytes || found.reference_bytes > most_reference_bytes)
        return std::nullopt;
    return found;
}

std::optional<std::uintptr_t> find_slot(pid_t pid, const Library &library, const std::string &function) {
    const auto tables = read_tables(pid, library);
    if (!tables)
        return std::nullopt;
    std::vector<char> names(tables->name_bytes);
    std::vector<Elf64_Rela> references(tables->reference_bytes / sizeof(Elf64_Rela));
    if (!read_memory(pid, tables->names, names.data(), names.size()) ||
        !read_memory(pid, tables->references, references.data(), references.size() * sizeof(Elf64_Rela)))
        return std::nullopt;
    for (const Elf64_Rela &one : references) {
        Elf64_Sym symbol;
        if (ELF64_R_TYPE(one.r_info) != call_slot ||
            !read_value(pid, tables->symbols + ELF64_R_SYM(one.r_info) * sizeof symbol, symbol) ||
            symbol.st_name >= names.size())
            continue;
        const std::string_view rest(names.data() + symbol.st_name, names.size() - symbol.st_name);
        if (rest.substr(0, rest.find('\0')) == function)
            return library.bias + one.r_offset;
    }
    return std::nullopt;
}

bool is_drivers(const Mapping &one) {
    return one.path.substr(one.path.rfind('/') + 1).starts_with("libcuda.so");
}

} // namespace

std::optional<std::uintptr_t> driver_reference(pid_t pid, const std::string &function, std::string &why_not) {
    const auto maps = mappings(pid);
    const auto begin =
        std::find_if(maps.begin(), maps.end(), [](const Mapping &one) { return one.offset == 0 && is_drivers(one); });
    if (begin == maps.end()) {
        why_not = "it has no libcuda.so";
        return std::nullopt;
    }
    const auto library = read_library(pid, begin->begin);
    const auto slot = library ? find_slot(pid, *library, function) : std::nullopt;
    if (!slot || *slot % sizeof(std::uint64_t) != 0) {
        why_not = "its driver does not call " + function + " in a way that woodfrog knows";
        return std::nullopt;
    }
    const bool writable = std::any_of(maps.begin(), maps.end(), [slot](const Mapping &one) {
        return one.writable && *slot >= one.begin && *slot + sizeof(std::uint64_t) <= one.end;
    });
    if (!writable) {
        why_not = "its driver's reference to " + function + " is read-only";
        return std::nullopt;
    }
    return slot;
}

bool is_resolved(pid_t pid, std::uintptr_t value) {
    const auto maps = mappings(pid);
    return std::any_of(maps.begin(), maps.end(), [value](const Mapping &one) {
        return one.executable && !is_drivers(one) && value >= one.begin && value < one.end;
    });
}

} // namespace woodfrog::enter
