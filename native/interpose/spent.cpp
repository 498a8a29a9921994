// The rows; see spent.hpp.
#include "spent.hpp"

#include <iterator>

namespace woodfrog::interpose::spent {

namespace detail {
constinit thread_local Row *t_row __attribute__((tls_model("initial-exec"))) = nullptr;
} // namespace detail

namespace {

constexpr wire::Type kCommands[] = {wire::Type::quiesce,        wire::Type::hold,         wire::Type::export_memory,
                                    wire::Type::release_memory, wire::Type::return_batch, wire::Type::guard,
                                    wire::Type::resume};
constexpr size_t kRows = std::size(kCommands);
constexpr size_t kWhats = static_cast<size_t>(What::registering) + 1;

// The agent's thread alone touches them.
constinit Row g_rows[kRows];
constinit uint64_t g_begun_ns = 0;

Row *row_of(wire::Type command) {
    for (size_t i = 0; i < kRows; ++i)
        if (kCommands[i] == command)
            return &g_rows[i];
    return nullptr;
}

} // namespace

void begin(wire::Type command) {
    Row *row = row_of(command);
    if (row != nullptr && row == detail::t_row)
        return; // the next packet of a series
    if (command == wire::Type::quiesce)
        for (Row &one : g_rows)
            one = Row{};
    if (row != nullptr) {
        *row = Row{};
        g_begun_ns = detail::now_ns();
    }
    detail::t_row = row;
}

void end() {
    Row *row = detail::t_row;
    detail::t_row = nullptr;
    if (row == nullptr)
        return;
    row->ns[static_cast<size_t>(What::all)] = detail::now_ns() - g_begun_ns;
    row->count[static_cast<size_t>(What::all)] = 1;
}

std::vector<wire::Spent> all() {
    std::vector<wire::Spent> found;
    for (size_t i = 0; i < kRows; ++i) {
        for (size_t what = 0; what < kWhats; ++what) {
            if (g_rows[i].count[what] == 0)
                continue;
            wire::Spent one{};
            one.ns = g_rows[i].ns[what];
            one.count = g_rows[i].count[what];
            one.command = static_cast<uint32_t>(kCommands[i]);
            one.spending = static_cast<uint32_t>(what);
            found.push_back(one);
        }
    }
    return found;
}

} // namespace woodfrog::interpose::spent
