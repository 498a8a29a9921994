// See copies.hpp.
#include "copies.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "remote.hpp"
#include "report.hpp"

namespace woodfrog::enter {
namespace {

constexpr const char *thread_name = "woodfrog-copy";
constexpr double end_wait_s = 1.0;
constexpr const char *no_thread = "no thread of the driver stood where it could make calls for it";

// "WFCOPY02" of such a magic number, whatever version's; empty of another one.
std::string version_of(std::uint64_t magic) {
    std::string text(sizeof magic, '\0');
    std::memcpy(text.data(), &magic, sizeof magic);
    const auto is_digit = [](char one) { return one >= '0' && one <= '9'; };
    return text.starts_with("WFCOPY") && is_digit(text[6]) && is_digit(text[7]) ? text : "";
}

std::string of_another_version(const std::string &version) {
    return "code of another version of woodfrog (" + version + ") is in it: its driver copies alone";
}

} // namespace

Copies::Copies(pid_t pid, unsigned threads, bool restores, std::uint64_t idle_s)
    : pid_(pid), wanted_(std::min(threads, blob::most_helpers)), restores_(restores), state_(State::waiting) {
    facts_.idle_s = idle_s;
    if (wanted_ == 0 && !is_at_work())
        state_ = State::nothing;
}

void Copies::give_up(const std::string &reason) {
    state_ = State::over;
    reason_ = reason;
}

void Copies::abandon(const std::string &reason) {
    if (state_ != State::nothing)
        give_up(reason);
    helpers_.clear();
}

// What is at our address is the process's word: it may be anything, and is used only if it is as we would have left it.
Copies::Place Copies::look() {
    constexpr std::uint64_t end = blob::stacks_at + blob::all_stacks_bytes;
    auto maps = mappings(pid_);
    std::erase_if(maps, [](const Mapping &one) { return one.begin >= end || one.end <= blob::place; });
    stacks_mapped_ = false;
    if (maps.empty())
        return Place::empty;
    const Mapping &code = maps.front();
    if (code.begin != blob::place || maps.back().end > end ||
        !std::all_of(maps.begin(), maps.end(), [](const Mapping &one) { return one.is_anonymous(); }))
        return Place::foreign;
    if (code.writable && !code.executable && code.end == blob::stacks_at)
        return Place::unfinished;
    std::uint64_t reached = blob::facts_at;
    for (const Mapping &one : maps) {
        if (one.begin == blob::place)
            continue;
        if (one.begin != reached || !one.writable || one.executable)
            return Place::foreign;
        reached = one.end;
    }
    stacks_mapped_ = reached == end;
    blob::Facts found{};
    if (code.end != blob::facts_at || code.writable || !code.executable ||
        (reached != blob::stacks_at && reached != end) || !read_memory(pid_, blob::place, &header_, sizeof header_))
        return Place::foreign;
    if (header_.magic != blob::magic && !version_of(header_.magic).empty())
        return Place::other_version;
    if (header_.magic != blob::magic || header_.copy_at >= blob::code_bytes || header_.help_at >= blob::code_bytes ||
        !read_memory(pid_, blob::facts_at, &found, sizeof found))
        return Place::foreign;
    found.idle_s = facts_.idle_s;
    facts_ = found;
    return Place::ready;
}

// Whether there is anything to end: code that waits for nobody is no such thing.
bool Copies::is_at_work() {
    const Place found = look();
    return found == Place::unfinished || (found == Place::ready && (stacks_mapped_ || is_led_here()));
}

void Copies::begin(const Caller &caller, const Filters &filters, bool only_clean) {
    state_ = State::over;
    if (only_clean)
        reason_ = no_thread;
    const Place found = look();
    if (const std::string reason = clean(caller, found); !reason.empty()) {
        reason_ = reason;
        return;
    }
    if (wanted_ == 0)
        reason_.clear();
    if (wanted_ == 0 || only_clean)
        return;
    reason_ = come(caller, filters, found == Place::ready);
    if (reason_.empty())
        state_ = State::in;
}

void Copies::end(const Caller &caller) {
    state_ = State::over;
    threads_ = helpers_.size();
    if (restores_) { // the driver has let go of it
        constexpr blob::Range none[blob::most_ranges] = {};
        write_memory(pid_, blob::facts_at + offsetof(blob::Facts, ranges), none, sizeof none);
    }
    reason_ = remove(caller);
    if (reason_.empty())
        reason_ = fewer_;
}

// What an earlier visit left. Only the process itself can have changed it, and only it would suffer.
std::string Copies::clean(const Caller &caller, Place found) {
    if (found == Place::foreign)
        return "something of its own lies where woodfrog would put its code, or what an earlier visit left is damaged";
    if (found == Place::other_version)
        return of_another_version(version_of(header_.magic));
    if (found == Place::unfinished) { // it was no code yet, so nobody is in it
        const std::int64_t result = caller(SYS_munmap, {blob::place, blob::kept_bytes}).value();
        cleaned_ = result >= 0;
        return result < 0 ? cannot("what an earlier visit left in it cannot be unmapped", result) : "";
    }
    if (found == Place::ready && (stacks_mapped_ || is_led_here())) {
        if (std::string reason = remove(caller); !reason.empty())
            return reason;
        cleaned_ = true;
    }
    return "";
}

// What is at work. Code, facts and control stay: a thread that a signal has interrupted there may come back to them.
std::string Copies::remove(const Caller &caller) {
    if (std::string reason = send_home(); !reason.empty())
        return reason;
    const bool ended = wait_for_ends();
    fault_point("copy_home");
    if (is_led_here()) {
        // Nobody of ours is there to change it back: in a child, or if the threads could not.
        int error = 0;
        std::string reason = map_stacks(caller);
        const pid_t tid = reason.empty() ? start(caller, false, error) : 0;
        if (tid == 0)
            return reason.empty() ? cannot("the driver's reference to memcpy cannot be brought back", -error) : reason;
        ptrace(PTRACE_CONT, tid, nullptr, nullptr);
        wait_for_end(tid);
    }
    if (is_led_here())
        return "the driver's reference to memcpy cannot be brought back";
    if (!ended)
        return "a thread that copied has not ended: its stack stays";
    if (!stacks_mapped_)
        return "";
    const std::int64_t result = caller(SYS_munmap, {blob::stacks_at, blob::all_stacks_bytes}).value();
    fault_point("copy_unmapped");
    stacks_mapped_ = result < 0;
    return result < 0 ? cannot("the stacks of the threads that copied cannot be unmapped", result) : "";
}

// All our threads have ended when this returns, between two pieces of a copy.
std::string Copies::send_home() {
    find_threads();
    blob::Control last{};
    const std::uint32_t word = blob::go_home;
    if (!write_control(offsetof(blob::Control, woken), &word, sizeof word))
        return "its memory cannot be written";
    fault_point("copy_go_home");
    for (const pid_t tid : std::vector<pid_t>(helpers_)) {
        // Who sleeps finds on the word that it waits for another one than it fell asleep with.
        ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr);
        wait_for_end(tid);
    }
    helpers_.clear();
    if (read_memory(pid_, blob::control_at, &last, sizeof last)) {
        copies_ = last.copies;
        copied_bytes_ = last.copied_bytes;
        slow_copies_ = last.slow_copies;
    }
    return "";
}

// One that was made just before its visitor was killed has no name yet to be found by: it ends as soon as it runs.
bool Copies::wait_for_ends() const {
    const double begun_s = now_s();
    while (threads_at_work() > 0) {
        if (now_s() - begun_s > end_wait_s)
            return false;
        const timespec millisecond{0, 1'000'000}; // nobody tells of a thread that is not traced
        nanosleep(&millisecond, nullptr);
    }
    return true;
}

// Threads that an earlier visit left: they have our name, and stand in our code.
void Copies::find_threads() {
    if (threads_at_work() <= helpers_.size()) // of ours we know, and a process may have thousands of others
        return;
    for (const pid_t tid : threads(pid_)) {
        std::string name;
        std::getline(std::ifstream("/proc/" + std::to_string(pid_) + "/task/" + std::to_string(tid) + "/comm"), name);
        if (name != thread_name || owns(tid) || ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) != 0)
            continue;
        ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr);
        int status = 0;
        if (wait_for(tid, status) != Waited::stopped)
            continue;
        user_regs_struct registers;
        const bool ours = ptrace(PTRACE_GETREGS, tid, nullptr, &registers) == 0 && contains(registers.rip);
        if (ours)
            helpers_.push_back(tid);
        ptrace(ours ? PTRACE_CONT : PTRACE_DETACH, tid, nullptr, taken_signal(status));
    }
}

void Copies::wait_for_end(pid_t tid) {
    for (int status = 0; wait_for(tid, status) == Waited::stopped;)
        ptrace(PTRACE_CONT, tid, nullptr, taken_signal(status));
}

// All of them, if that cannot be read.
std::size_t Copies::threads_at_work() const {
    std::uint32_t stacks[blob::most_helpers];
    if (!read_memory(pid_, blob::control_at + offsetof(blob::Control, stacks), stacks, sizeof stacks))
        return blob::most_helpers;
    const auto free = std::count(std::begin(stacks), std::end(stacks), 0u);
    return blob::most_helpers - static_cast<std::size_t>(free);
}

bool Copies::is_led_here() const {
    std::uint64_t value = 0;
    return facts_.slot != 0 && read_memory(pid_, facts_.slot, &value, sizeof value) && contains(value);
}

// Why nobody is to come between the driver and what its reference leads to; empty if that is a file's code. Other code
// may be taken away at any time, and another version's brings the reference back only if it finds its own in it.
std::string Copies::led_elsewhere() const {
    for (const Mapping &one : mappings(pid_)) {
        if (facts_.replaced < one.begin || facts_.replaced >= one.end || one.path.starts_with("/"))
            continue;
        blob::Header header{};
        const bool read = read_memory(pid_, one.begin, &header, sizeof header);
        const std::string version = read ? version_of(header.magic) : "";
        return version.empty() ? "its driver's reference to memcpy leads to code that is no file's"
                               : of_another_version(version);
    }
    return "";
}

bool Copies::contains(std::uintptr_t address) const {
    return address >= blob::place && address < blob::place + blob::code_bytes;
}

bool Copies::write_control(std::size_t member, const void *from, std::size_t size) const {
    return write_memory(pid_, blob::control_at + member, from, size);
}

// While threads may be reading it: the begin is written last.
void Copies::write_range(std::size_t number) const {
    const blob::Range &one = memory_[number];
    const std::uint64_t at = blob::facts_at + offsetof(blob::Facts, ranges) + number * sizeof one;
    if (write_memory(pid_, at + offsetof(blob::Range, end), &one.end, sizeof one.end))
        write_memory(pid_, at, &one.begin, sizeof one.begin);
}

void Copies::add_memory(std::uint64_t begin, std::uint64_t size) {
    if (!looks_for_memory() || ranges_ == blob::most_ranges)
        return;
    memory_[ranges_] = {begin, begin + size};
    if (state_ == State::in)
        write_range(ranges_);
    ranges_++;
}

void Copies::drop_memory(std::uint64_t begin, std::uint64_t size) {
    for (std::size_t number = 0; number < ranges_; number++) {
        blob::Range &one = memory_[number];
        if (one.begin >= begin + size || one.end <= begin)
            continue;
        one.end = 0; // the place is not used again: a thread may be reading it
        if (state_ == State::in)
            write_range(number);
    }
}

// Where the last visit saw what the driver saved, as far as that is there still: the driver's own memory is private,
// and no file's.
void Copies::find_memory() {
    ranges_ = 0;
    const auto maps = mappings(pid_);
    for (const blob::Range &range : facts_.ranges) {
        std::uint64_t reached = range.begin;
        for (const Mapping &one : maps) {
            if (one.begin <= reached && one.end > reached && one.is_anonymous() && one.readable && one.writable)
                reached = one.end;
        }
        if (range.begin != 0 && range.end > range.begin && reached >= range.end)
            memory_[ranges_++] = range;
    }
}

void Copies::add_driver(std::uint64_t thread_pointer) {
    if (thread_pointer == 0)
        return;
    // The place of one that has ended, or a new one.
    auto place = std::find(drivers_.begin(), drivers_.end(), std::uint64_t{0});
    if (place == drivers_.end() && drivers_.size() == blob::most_drivers)
        return;
    const auto number = static_cast<std::size_t>(place - drivers_.begin());
    if (place == drivers_.end())
        drivers_.push_back(thread_pointer);
    else
        *place = thread_pointer;
    if (state_ == State::in)
        write_control(number * sizeof thread_pointer, &thread_pointer, sizeof thread_pointer);
}

void Copies::drop_driver(std::uint64_t thread_pointer) {
    const auto place = std::find(drivers_.begin(), drivers_.end(), thread_pointer);
    if (thread_pointer == 0 || place == drivers_.end())
        return;
    *place = 0;
    if (state_ == State::in)
        write_control(static_cast<std::size_t>(place - drivers_.begin()) * sizeof *place, &*place, sizeof *place);
}

bool Copies::owns(pid_t tid) const {
    return std::find(helpers_.begin(), helpers_.end(), tid) != helpers_.end();
}

void Copies::event(pid_t tid, int status) {
    if (!WIFSTOPPED(status))
        std::erase(helpers_, tid);
    else if (status >> 16 == PTRACE_EVENT_STOP && WSTOPSIG(status) != SIGTRAP)
        ptrace(PTRACE_LISTEN, tid, nullptr, nullptr); // stopped together with its process
    else
        ptrace(PTRACE_CONT, tid, nullptr, taken_signal(status));
}

void Copies::tell() const {
    if (state_ == State::nothing)
        return;
    Line("copies")
        .add("threads", static_cast<std::uint64_t>(threads_))
        .add("copies", copies_)
        .add("copied_bytes", copied_bytes_)
        .add("slow_copies", slow_copies_)
        .add_raw("cleaned", cleaned_ ? "true" : "false")
        .add("reason", state_ == State::waiting ? no_thread : reason_)
        .send();
}

} // namespace woodfrog::enter

#endif
