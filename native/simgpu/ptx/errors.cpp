// The two exceptions of the interpreter and the sentences they carry. Nothing else belongs here.
#include "ptx.hpp"

#include <cstdio>

namespace simgpu::ptx {

namespace {

std::string hexadecimal(std::uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

std::string triple(const std::array<unsigned, 3> &id) {
    char text[48];
    std::snprintf(text, sizeof text, "(%u,%u,%u)", id[0], id[1], id[2]);
    return text;
}

std::string sentence(Fault::Kind kind, const std::string &kernel, unsigned line, std::uint64_t address,
                     const std::array<unsigned, 3> &block, const std::array<unsigned, 3> &thread,
                     const std::string &detail) {
    std::string text = "kernel " + kernel + ": " + name(kind);
    if (!detail.empty())
        text += ": " + detail;
    if (kind == Fault::Kind::illegal_address || kind == Fault::Kind::misaligned)
        text += " at " + hexadecimal(address);
    if (line != 0)
        text.append(" (PTX line ").append(std::to_string(line));
    if (line != 0 && kind != Fault::Kind::unsupported && kind != Fault::Kind::invalid_launch)
        text.append(", block ").append(triple(block)).append(", thread ").append(triple(thread));
    if (line != 0)
        text += ")";
    return text;
}

} // namespace

const char *name(Fault::Kind kind) noexcept {
    switch (kind) {
    case Fault::Kind::illegal_address:
        return "illegal address";
    case Fault::Kind::misaligned:
        return "misaligned address";
    case Fault::Kind::illegal_instruction:
        return "illegal instruction";
    case Fault::Kind::unsupported:
        return "not supported by the simulated GPU";
    case Fault::Kind::trap:
        return "trap";
    case Fault::Kind::assert_failed:
        return "assertion failed";
    case Fault::Kind::launch_timeout:
        return "launch stopped";
    case Fault::Kind::invalid_launch:
        return "invalid launch";
    case Fault::Kind::out_of_memory:
        return "out of memory";
    }
    return "fault";
}

ParseError::ParseError(unsigned line_number, unsigned column_number, const std::string &text)
    : std::runtime_error("line " + std::to_string(line_number) + ", column " + std::to_string(column_number) + ": " +
                         text),
      line(line_number), column(column_number), message(text) {}

Fault::Fault(Kind fault_kind, std::string kernel_name, unsigned source_line, std::uint64_t bad_address,
             std::array<unsigned, 3> block_id, std::array<unsigned, 3> thread_id, std::string text)
    : std::runtime_error(sentence(fault_kind, kernel_name, source_line, bad_address, block_id, thread_id, text)),
      kind(fault_kind), kernel(std::move(kernel_name)), line(source_line), address(bad_address), block(block_id),
      thread(thread_id), detail(std::move(text)) {}

} // namespace simgpu::ptx
