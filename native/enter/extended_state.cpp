// See extended_state.hpp. The kernel gives the state as XSAVE writes it: 512 bytes of FXSAVE, a header, the parts. In a
// signal's frame the same has a note in the 48 bytes of the FXSAVE part that are the software's, and a number behind
// it; without them the kernel takes the FXSAVE part alone, and everything else for unused
// (arch/x86/kernel/fpu/signal.c).
#include "extended_state.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <cpuid.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <elf.h>
#include <initializer_list>
#include <sys/ptrace.h>
#include <sys/uio.h>

namespace woodfrog::enter {
namespace {

// struct _fpx_sw_bytes of the kernel's uapi/asm/sigcontext.h.
struct Note {
    std::uint32_t magic, all_bytes;
    std::uint64_t features;
    std::uint32_t state_bytes, padding[7];
};
static_assert(sizeof(Note) == 48);
constexpr std::uint32_t first_magic = 0x46505853, last_magic = 0x46505845; // FP_XSTATE_MAGIC1, FP_XSTATE_MAGIC2
constexpr std::size_t note_at = 464, header_at = 512, header_end = 576;

constexpr std::size_t most_bytes = 32 << 10; // with all that a processor of 2026 has, AMX among it, 12 KiB
// AMX's tiles: a thread has room for them only once it has used them. `features` of the kernel that are like that:
// XFEATURE_MASK_USER_DYNAMIC.
constexpr std::uint64_t on_demand = std::uint64_t{1} << 18;

// Of the parts in `features`, laid out as XSAVE does without compaction (CPUID, leaf 0xD).
std::size_t size_of(std::uint64_t features) {
    std::size_t end = header_end;
    for (unsigned number = 2; number < 63; number++) {
        unsigned size = 0, at = 0, c = 0, d = 0;
        if ((features >> number & 1) != 0 && __get_cpuid_count(0xd, number, &size, &at, &c, &d) != 0)
            end = std::max<std::size_t>(end, std::size_t{at} + size);
    }
    return end;
}

} // namespace

std::vector<unsigned char> read_extended_state(pid_t tid) {
    std::vector<unsigned char> state(most_bytes);
    iovec told{state.data(), state.size()};
    if (ptrace(PTRACE_GETREGSET, tid, reinterpret_cast<void *>(NT_X86_XSTATE), &told) != 0 ||
        told.iov_len < header_end || told.iov_len == state.size())
        return {};
    std::uint64_t features, in_use;
    std::memcpy(&features, &state[note_at], sizeof features); // there by ptrace's convention
    std::memcpy(&in_use, &state[header_at], sizeof in_use);
    // What is given has room for everything; a frame must have the size of what the thread has room for. Parts on
    // demand that are not in use are left out: the thread may have room for them or not.
    const bool has_all = (in_use & on_demand) != 0;
    features = has_all ? features : features & ~on_demand;
    const std::size_t size = has_all ? told.iov_len : std::min(size_of(features), told.iov_len);
    // Kernels up to 6.13 look for the number where the note says that the state ends, later ones where the thread's
    // room ends.
    for (const std::size_t end : {size, told.iov_len})
        std::memcpy(&state[end], &last_magic, sizeof last_magic);
    const Note note{first_magic,
                    static_cast<std::uint32_t>(size + sizeof last_magic),
                    features,
                    static_cast<std::uint32_t>(size),
                    {}};
    std::memcpy(&state[note_at], &note, sizeof note);
    state.resize(told.iov_len + sizeof last_magic);
    return state;
}

} // namespace woodfrog::enter

#endif
