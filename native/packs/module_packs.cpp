// The part of woodfrog._native.transfer that binds packs and the chunk index: arguments, the GIL, nothing else. See
// binding.hpp for what holds for all of these.
#include "chunk_index.hpp"
#include "scan_pack.hpp"
#include "transfer/binding.hpp"
#include "transfer/file_queue.hpp"
#include "unpack.hpp"
#include "write_pack.hpp"

#include <cstring>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/unordered_map.h>
#include <utility>

namespace woodfrog::transfer {
namespace {

using namespace nb::literals;
using namespace woodfrog::packs;

std::string_view bytes_view(const nb::bytes &bytes) {
    return {bytes.c_str(), bytes.size()};
}

nb::bytes digest_to_bytes(const Digest &digest) {
    return nb::bytes(digest.data(), digest.size());
}

// The shared objects in the folder of Python package `name` whose names match `pattern`.
std::vector<std::string> files_of_package(const char *name, const char *pattern) {
    std::vector<std::string> files;
    const nb::object spec = nb::module_::import_("importlib.util").attr("find_spec")(name);
    if (spec.is_none() || spec.attr("submodule_search_locations").is_none())
        return files;
    const nb::object path = nb::module_::import_("pathlib").attr("Path");
    for (nb::handle folder : spec.attr("submodule_search_locations"))
        for (nb::handle file : path(folder).attr("glob")(pattern))
            files.push_back(nb::cast<std::string>(nb::str(file)));
    return files;
}

// The GIL makes this safe; importing Python modules cannot happen without it.
void find_codecs() {
    static bool done = false;
    if (done)
        return;
    // Both packages are woodfrog's own dependencies, and these files of theirs export the functions of their library.
    find_libraries(files_of_package("lz4", "_version*.so"), files_of_package("zstandard", "_cffi*.so"));
    done = true;
}

std::vector<Source> to_sources(const nb::sequence &arguments) {
    std::vector<Source> sources;
    for (nb::handle argument : arguments) {
        if (nb::isinstance<Arena>(argument))
            sources.push_back({nb::cast<Arena *>(argument), -1});
        else
            sources.push_back({nullptr, nb::cast<int>(argument)});
    }
    return sources;
}

std::optional<Packed<uint32_t>> to_sizes(const char *operation, const std::optional<nb::bytes> &sizes,
                                         const Packed<Digest> &digests) {
    if (!sizes)
        return std::nullopt;
    const Packed<uint32_t> packed(operation, "sizes", bytes_view(*sizes));
    if (packed.size() != digests.size())
        throw_invalid(operation, "there are " + std::to_string(packed.size()) + " sizes for " +
                                     std::to_string(digests.size()) + " digests");
    return packed;
}

// What `method` says of the digests; the GIL is given up meanwhile.
template <auto method>
nb::bytes look_up(const ChunkIndex &self, const nb::bytes &digests, const std::optional<nb::bytes> &sizes) {
    const Packed<Digest> packed("ChunkIndex", "digests", bytes_view(digests));
    const auto packed_sizes = to_sizes("ChunkIndex", sizes, packed);
    std::string found;
    {
        nb::gil_scoped_release release;
        found = (self.*method)(packed, packed_sizes);
    }
    return to_bytes(found);
}

void bind_index(nb::module_ &m) {
    nb::class_<ChunkIndex>(m, "ChunkIndex", "Which pack holds a digest, and where; see native/packs/README.md.")
        .def(nb::init<uint64_t>(), "chunk_bytes"_a)
        .def_prop_ro("chunk_bytes", &ChunkIndex::chunk_bytes)
        .def_prop_ro("memory_bytes", &ChunkIndex::memory_bytes, nb::call_guard<nb::gil_scoped_release>())
        .def("__len__", &ChunkIndex::size, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "add",
            [](ChunkIndex &self, uint32_t pack, const nb::bytes &records) {
                const Packed<Record> packed("ChunkIndex", "records", bytes_view(records));
                nb::gil_scoped_release release;
                self.add(pack, packed);
            },
            "pack"_a, "records"_a)
        .def("remove_pack", &ChunkIndex::remove_pack, "pack"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("find", &look_up<&ChunkIndex::find>, "digests"_a, "sizes"_a = nb::none())
        .def("missing", &look_up<&ChunkIndex::missing>, "digests"_a, "sizes"_a = nb::none())
        .def("digests", [](const ChunkIndex &self) {
            std::string digests;
            {
                nb::gil_scoped_release release;
                digests = self.digests();
            }
            return to_bytes(digests);
        });
}

// The rows of a packed table at these positions, back to back.
std::string select_rows(std::string_view table, const Packed<uint32_t> &positions, size_t row_bytes) {
    if (row_bytes == 0 || table.size() % row_bytes != 0)
        throw_invalid("select_rows",
                      std::to_string(table.size()) + " bytes are no table of rows of " + std::to_string(row_bytes));
    std::string rows(positions.size() * row_bytes, '\0');
    for (size_t i = 0; i < positions.size(); i++) {
        if (positions[i] >= table.size() / row_bytes)
            throw_invalid("select_rows", "there is no row " + std::to_string(positions[i]) + ": the table has " +
                                             std::to_string(table.size() / row_bytes));
        std::memcpy(rows.data() + i * row_bytes, table.data() + positions[i] * row_bytes, row_bytes);
    }
    return rows;
}

void bind_writing(nb::module_ &m) {
    m.def(
        "select_rows",
        [](const nb::bytes &table, const nb::bytes &positions, size_t row_bytes) {
            const Packed<uint32_t> packed("select_rows", "positions", bytes_view(positions));
            std::string rows;
            {
                nb::gil_scoped_release release;
                rows = select_rows(bytes_view(table), packed, row_bytes);
            }
            return to_bytes(rows);
        },
        "table"_a, "positions"_a, "row_bytes"_a);
    m.def("encodings", [] {
        find_codecs();
        std::vector<std::string> names;
        for (uint32_t i = 0; i < encoding_count; i++)
            if (is_available(static_cast<Encoding>(i)))
                names.emplace_back(name_of(static_cast<Encoding>(i)));
        return names;
    });
    m.def(
        "write_pack",
        [](int fd, const nb::bytes &chunks, const nb::sequence &sources, const std::string &compress, int level,
           bool cached, unsigned threads, Progress *progress) {
            find_codecs();
            const Packed<SourceChunk> packed("write_pack", "chunks", bytes_view(chunks));
            const std::vector<Source> copied = to_sources(sources);
            const WriteOptions options{parse_compression("write_pack", compress, level), cached, threads};
            const Written written =
                released(progress, [&](Progress &p) { return write_pack(fd, packed, copied, options, p); });
            return nb::make_tuple(to_bytes(written.records), digest_to_bytes(written.name));
        },
        "fd"_a, "chunks"_a, "sources"_a, nb::kw_only(), "compress"_a = "none", "level"_a = 0, "cached"_a = false,
        "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "scan_pack",
        [](int fd, bool salvage, bool contents, unsigned threads, Progress *progress) {
            find_codecs();
            const Scanned scanned =
                released(progress, [&](Progress &p) { return scan_pack(fd, {salvage, contents, threads}, p); });
            return nb::make_tuple(to_bytes(scanned.records), digest_to_bytes(scanned.name));
        },
        "fd"_a, nb::kw_only(), "salvage"_a = false, "contents"_a = false, "threads"_a = 0, "progress"_a = nb::none());
}

using PackArgument = std::unordered_map<uint32_t, int>;
using FilePieceArgument = std::tuple<int, uint64_t, uint64_t>;

std::vector<FilePiece> to_file_pieces(const std::vector<FilePieceArgument> &arguments) {
    std::vector<FilePiece> pieces;
    pieces.reserve(arguments.size());
    for (const auto &[fd, offset, size] : arguments)
        pieces.push_back({fd, offset, size});
    return pieces;
}

Cutting to_cutting(const char *operation, uint64_t chunk_bytes, const std::optional<nb::bytes> &sizes) {
    Cutting cutting{chunk_bytes, std::nullopt};
    if (sizes)
        cutting.sizes.emplace(operation, "sizes", bytes_view(*sizes));
    return cutting;
}

// Runs `work(stored, progress)` without the GIL.
template <typename Work>
auto with_stored(const char *operation, const nb::bytes &digests, const nb::bytes &locations, const PackArgument &packs,
                 Progress *progress, const Work &work) {
    find_codecs();
    const Packed<Digest> packed_digests(operation, "digests", bytes_view(digests));
    const Packed<Location> packed_locations(operation, "locations", bytes_view(locations));
    const Stored stored{packed_digests, packed_locations, packs};
    return released(progress, [&](Progress &p) { return work(stored, p); });
}

void bind_reading(nb::module_ &m) {
    m.def(
        "refill_from_packs",
        [](const std::vector<PieceArgument> &pieces, const nb::bytes &digests, const nb::bytes &locations,
           const PackArgument &packs, Arena &arena, uint64_t arena_offset, uint64_t arena_bytes, uint64_t chunk_bytes,
           bool check, unsigned threads, Progress *progress) {
            const std::vector<Piece> copied = to_pieces(pieces);
            with_stored("refill_from_packs", digests, locations, packs, progress,
                        [&](const Stored &stored, Progress &p) {
                            refill_from_packs(copied, stored, {arena, arena_offset, arena_bytes},
                                              {chunk_bytes, threads, check}, p);
                        });
        },
        "pieces"_a, "digests"_a, "locations"_a, "packs"_a, "arena"_a, "arena_offset"_a, "arena_bytes"_a, nb::kw_only(),
        "chunk_bytes"_a, "check"_a = true, "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "refill_arena_from_packs",
        [](Arena &arena, const std::vector<RangeArgument> &ranges, const nb::bytes &digests, const nb::bytes &locations,
           const PackArgument &packs, uint64_t chunk_bytes, unsigned threads, Progress *progress) {
            const std::vector<Range> copied = to_ranges(ranges);
            with_stored("refill_arena_from_packs", digests, locations, packs, progress,
                        [&](const Stored &stored, Progress &p) {
                            refill_arena_from_packs(arena, copied, stored, {chunk_bytes, threads}, p);
                        });
        },
        "arena"_a, "ranges"_a, "digests"_a, "locations"_a, "packs"_a, nb::kw_only(), "chunk_bytes"_a, "threads"_a = 0,
        "progress"_a = nb::none());
    m.def(
        "extract_from_packs",
        [](const std::vector<FilePieceArgument> &pieces, const nb::bytes &digests, const nb::bytes &locations,
           const PackArgument &packs, uint64_t chunk_bytes, const std::optional<nb::bytes> &sizes, unsigned threads,
           Progress *progress) {
            const std::vector<FilePiece> copied = to_file_pieces(pieces);
            const Cutting cutting = to_cutting("extract_from_packs", chunk_bytes, sizes);
            with_stored(
                "extract_from_packs", digests, locations, packs, progress,
                [&](const Stored &stored, Progress &p) { extract_from_packs(copied, cutting, stored, threads, p); });
        },
        "pieces"_a, "digests"_a, "locations"_a, "packs"_a, nb::kw_only(), "chunk_bytes"_a, "sizes"_a = nb::none(),
        "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "check_packs",
        [](const nb::bytes &digests, const nb::bytes &locations, const PackArgument &packs, unsigned threads,
           Progress *progress) {
            return with_stored("check_packs", digests, locations, packs, progress,
                               [&](const Stored &stored, Progress &p) { return check_packs(stored, threads, p); });
        },
        "digests"_a, "locations"_a, "packs"_a, nb::kw_only(), "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "hash_pieces",
        [](const std::vector<FilePieceArgument> &pieces, uint64_t chunk_bytes, const std::optional<nb::bytes> &sizes,
           unsigned threads, Progress *progress) {
            const std::vector<FilePiece> copied = to_file_pieces(pieces);
            const Cutting cutting = to_cutting("hash_pieces", chunk_bytes, sizes);
            return to_bytes(released(progress, [&](Progress &p) { return hash_pieces(copied, cutting, threads, p); }));
        },
        "pieces"_a, nb::kw_only(), "chunk_bytes"_a, "sizes"_a = nb::none(), "threads"_a = 0, "progress"_a = nb::none());
}

void bind_file_io(nb::module_ &m) {
    m.def(
        "choose_file_io",
        [](const std::string &choice) {
            if (choice == "uring")
                choose_file_io(FileIo::uring);
            else if (choice == "threads")
                choose_file_io(FileIo::threads);
            else if (choice == "auto")
                choose_file_io(FileIo::automatic);
            else
                throw_invalid("choose_file_io", "there is no way " + choice + ": auto, uring or threads");
        },
        "choice"_a);
    m.def("file_io", [] { return uses_uring() ? "uring" : "threads"; });
    m.def("uring_trouble", [] { return uring_trouble(); });
    m.def("uring_requests", &uring_requests);
}

} // namespace

void bind_packs(nb::module_ &m) {
    bind_file_io(m);
    m.attr("ABSENT") = pack_absent;
    m.attr("ZERO") = pack_zero;
    bind_index(m);
    bind_writing(m);
    bind_reading(m);
}

} // namespace woodfrog::transfer
