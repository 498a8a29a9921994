// The part of the Python module that keeps the account of a snapshot by copy-on-write. Same rules as in module.cpp.
#include "binding.hpp"
#include "guard.hpp"

using namespace nb::literals;

namespace woodfrog::transfer {
namespace {

using PartArgument = std::tuple<std::vector<uint64_t>, nb::bytes>;
using RunArgument = std::tuple<uint64_t, uint64_t, uint32_t, uint32_t>;

std::vector<RunArgument> to_rows(const std::vector<Guard::Run> &runs) {
    std::vector<RunArgument> rows;
    rows.reserve(runs.size());
    for (const Guard::Run &run : runs)
        rows.emplace_back(run.first, run.count, run.unit, run.units);
    return rows;
}

} // namespace

void bind_guard(nb::module_ &m) {
    nb::class_<Guard>(m, "Guard", "What of a running target's snapshot is captured; see guard.hpp.")
        .def(
            "__init__",
            [](Guard *self, const std::vector<PartArgument> &arguments, uint64_t chunk_bytes) {
                std::vector<Guard::Part> parts;
                for (const auto &[sizes, positions] : arguments)
                    parts.push_back({sizes, {positions.c_str(), positions.size()}});
                nb::gil_scoped_release release;
                new (self) Guard(parts, chunk_bytes);
            },
            "parts"_a, nb::kw_only(), "chunk_bytes"_a)
        .def_prop_ro("fd", &Guard::fd, "The page's own descriptor: pass it on, do not close it.")
        .def_prop_ro("unit_bytes", &Guard::unit_bytes)
        .def(
            "places",
            [](const Guard &self, size_t part) {
                std::vector<std::tuple<uint32_t, uint32_t>> rows;
                for (const Guard::Place &place : self.places(part))
                    rows.emplace_back(place.first, place.count);
                return rows;
            },
            "part"_a, "First unit and number of units of each piece of a part.")
        .def(
            "take",
            [](Guard &self, size_t part, uint64_t most_chunks) { return to_rows(self.take(part, most_chunks)); },
            "part"_a, "most_chunks"_a, "The next runs that nobody has taken.")
        .def(
            "take_wanted",
            [](Guard &self, size_t part, uint64_t most_chunks) {
                std::vector<Guard::Run> runs;
                {
                    nb::gil_scoped_release release;
                    runs = self.take_wanted(part, most_chunks);
                }
                return to_rows(runs);
            },
            "part"_a, "most_chunks"_a, "Runs that the target waits for; waits for them. None: it is over.")
        .def(
            "captured",
            [](Guard &self, size_t part, const std::vector<RunArgument> &rows) {
                std::vector<Guard::Run> runs;
                for (const auto &[first, count, unit, units] : rows)
                    runs.push_back({first, count, unit, units});
                nb::gil_scoped_release release;
                self.captured(part, runs);
            },
            "part"_a, "runs"_a, "The target may write there.")
        .def("left", &Guard::left, "part"_a, "Chunks that are not captured yet.")
        .def("finish", &Guard::finish, nb::call_guard<nb::gil_scoped_release>(), "Nobody waits any more.")
        .def_prop_ro("waits", &Guard::waits)
        .def_prop_ro("waited_s", [](const Guard &self) { return static_cast<double>(self.waited_ns()) / 1e9; })
        .def_prop_ro("given_up", &Guard::given_up);
}

} // namespace woodfrog::transfer
