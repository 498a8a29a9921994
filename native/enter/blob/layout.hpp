// What woodfrog-enter puts into a process so that threads help with its driver's copies: one mapping, at one address.
//
//     code (read, execute) │ facts (read, write) │ control (read, write; zeros in a forked child) │ stacks of the
//     helpers
//
// Shared by the code that runs in there (copy.cpp, which has no C library) and by woodfrog-enter (copies.cpp), which
// reads all of it as the process's word: it may have been changed.
//
// Code, facts and control stay in the process once its driver was led there: a thread may have been interrupted by a
// signal on its way through, and come back at any time. So the next visit finds them, and they must fit: whoever
// changes what lies here, or what the code does, gives it another `magic` and another `place`, and adds a line to
// versions.txt, which a test demands (tests/unit/native/test_enter_blob.py). A process may then have both.
#pragma once

#include <cstddef>
#include <cstdint>

namespace woodfrog::enter::blob {

// Always here, so that what a visitor left that was killed at any moment is found again: even an empty mapping. Nothing
// else is put here by the kernel, which gives addresses from the top down.
constexpr std::uint64_t place = 0x1f0d'f416'0000;
constexpr std::uint64_t magic = 0x3230'5950'4f43'4657; // "WFCOPY02"; the layout's version too

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t code_bytes = page_bytes;
constexpr std::size_t stack_bytes = 16384; // a helper uses a few hundred
constexpr unsigned most_helpers = 16;
constexpr unsigned most_drivers = 32;
constexpr unsigned most_ranges = 8;

// At the beginning of the code, made by the linker.
struct Header {
    std::uint64_t magic;
    std::uint32_t copy_at, help_at; // offsets of the two entries
};
static_assert(sizeof(Header) == 16);

// Memory of the driver's: where it keeps what it saved. `begin` is written last: 0 means none.
struct Range {
    std::uint64_t begin, end;
};

// Written by woodfrog-enter while the driver's reference does not lead here; `ranges` also later. A forked child keeps
// them.
struct Facts {
    std::uint64_t slot;     // address of the driver's reference to memcpy
    std::uint64_t replaced; // what was in it: the C library's
    std::uint64_t ticks_per_us;
    std::uint64_t idle_s; // without a copy for so long a helper ends: whoever had called it is gone
    Range ranges[most_ranges];
};
static_assert(sizeof(Facts) <= page_bytes);

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
    std::uint32_t installed;
    std::uint64_t copies, copied_bytes, slow_copies; // that were shared
    // 1: a helper has this stack. Written from outside before the helper is made, and by the helper when it will not
    // touch it again: so a stack with 0 is nobody's, whatever became of the visitor.
    std::uint32_t stacks[most_helpers];
};
static_assert(sizeof(Control) <= page_bytes);

constexpr std::uint64_t facts_at = place + code_bytes;
constexpr std::uint64_t control_at = facts_at + page_bytes;
constexpr std::uint64_t stacks_at = control_at + page_bytes;
constexpr std::uint64_t kept_bytes = stacks_at - place;
constexpr std::uint64_t all_stacks_bytes = most_helpers * stack_bytes;

// On top of a helper's stack: where the system call that made it returns to, and what it is to do.
struct StackTop {
    std::uint64_t entry;
    std::uint64_t leads;  // it also leads the reference here
    std::uint64_t number; // of its stack
    std::uint64_t unused;
};

} // namespace woodfrog::enter::blob
