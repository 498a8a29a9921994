// What woodfrog-enter puts into a process so that threads help with its driver's copies: one mapping, at one address.
//
//     code (read, execute) │ control (read, write; zeros in a forked child) │ a stack for each helper
//
// Shared by the code that runs in there (copy.cpp, which has no C library) and by woodfrog-enter (copies.cpp), which
// reads all of it as the process's word: it may have been changed, or be of another version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace woodfrog::enter::blob {

// Always here, so that what a visitor left that was killed at any moment is found again: even an empty mapping. Nothing
// else is put here by the kernel, which gives addresses from the top down.
constexpr std::uint64_t place = 0x1f0d'f406'0000;
constexpr std::uint64_t magic = 0x3130'5950'4f43'4657; // "WFCOPY01"; the layout's version too

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t stack_bytes = 16384; // a helper uses a few hundred
constexpr unsigned most_helpers = 16;
constexpr unsigned most_drivers = 32;

// At the beginning of the code. The offsets are the linker's; the rest is written by woodfrog-enter before the page
// becomes code, and so is what a forked child still knows.
struct Header {
    std::uint64_t magic;
    std::uint32_t copy_at, help_at; // offsets of the two entries
    std::uint64_t code_bytes;       // whole pages; the control page follows
    std::uint64_t helpers;
    std::uint64_t slot;     // address of the driver's reference to memcpy
    std::uint64_t replaced; // what was in it
    std::uint64_t ticks_per_us;
};
static_assert(sizeof(Header) == 56);

enum Installed : std::uint32_t { not_yet = 0, installed = 1, not_writable = 2, not_as_expected = 3 };

// Bit of `woken` that sends the helpers home. It is in the word that they wait on, so that none can fall asleep after
// it.
constexpr std::uint32_t go_home = 0x8000'0000;

struct Control {
    std::uint64_t drivers[most_drivers]; // thread pointers of the driver's threads: copies on these are shared; 0: none
    // The copy that is shared. Written while no piece of it can be taken.
    std::uint64_t to, from, size;
    // Which copy (upper half), its pieces, and the next one that nobody has: one word, so that a piece is never taken
    // from a copy that is over.
    std::uint64_t pieces;
    std::uint32_t done;
    std::uint32_t busy;
    std::uint32_t woken; // counts the copies, for helpers that sleep
    std::uint32_t asleep;
    std::uint32_t helping; // threads that take pieces
    std::uint32_t slow;    // shared copies one after the other that took longer than alone
    std::uint32_t pause;   // copies that are not shared for that
    std::uint32_t within;  // threads inside the replacement for memcpy
    std::uint32_t installed;
    std::uint32_t unused;
    std::uint64_t copies, copied_bytes, slow_copies; // that were shared
};
static_assert(sizeof(Control) <= page_bytes);

constexpr std::uint64_t control_at(std::uint64_t code_bytes) {
    return place + code_bytes;
}
constexpr std::uint64_t stacks_at(std::uint64_t code_bytes) {
    return control_at(code_bytes) + page_bytes;
}
constexpr std::uint64_t all_bytes(std::uint64_t code_bytes, std::uint64_t helpers) {
    return code_bytes + page_bytes + helpers * stack_bytes;
}

// On top of a helper's stack: where the system call that made it returns to, and what it is to do.
struct StackTop {
    std::uint64_t entry;
    std::uint64_t leads; // it also leads the reference here
    std::uint64_t unused[2];
};

} // namespace woodfrog::enter::blob
