// The Python module woodfrog._native.transfer: argument conversion, the GIL, and exceptions. No logic of its own.
// Rule: everything that takes time or calls the driver runs with the GIL released, and nothing Python owns is touched
// meanwhile (lists are copied first; a Python Memory is a reference to the C++ one, which the copy keeps alive).
#include "binding.hpp"
#include "blake3.hpp"
#include "copy.hpp"
#include "device_hash.hpp"
#include "file_transfer.hpp"

using namespace nb::literals;
using namespace woodfrog;
using namespace woodfrog::transfer;

namespace {

constexpr uint64_t default_copy_chunk_bytes = 64ull
                                              << 20;      // submitted at once; the H200's bus needs no more than 16 MiB
constexpr uint64_t default_file_chunk_bytes = 4ull << 20; // what a digest covers

// An exception of ours becomes one of the module's with its fields as attributes.
PyObject *transfer_error, *cancelled_error, *integrity_error;

void set_error(PyObject *type, const TransferError &error, std::optional<size_t> chunk = std::nullopt) {
    nb::object instance = nb::borrow(type)(error.what());
    instance.attr("code") = error.code;
    instance.attr("call") = error.call;
    if (chunk)
        instance.attr("chunk") = *chunk;
    PyErr_SetObject(type, instance.ptr());
}

void translate(const std::exception_ptr &pointer, void *) {
    try {
        std::rethrow_exception(pointer);
    } catch (const IntegrityError &error) {
        set_error(integrity_error, error, error.chunk);
    } catch (const CancelledError &error) {
        set_error(cancelled_error, error);
    } catch (const TransferError &error) {
        set_error(transfer_error, error);
    }
}

PyObject *new_error(nb::module_ &m, const char *name, const char *doc, PyObject *base) {
    const std::string full = std::string("woodfrog._native.transfer.") + name;
    PyObject *type = PyErr_NewExceptionWithDoc(full.c_str(), doc, base, nullptr);
    if (!type)
        throw nb::python_error();
    m.attr(name) = nb::borrow(type);
    return type;
}

void bind_errors(nb::module_ &m) {
    transfer_error = new_error(m, "TransferError",
                               "A transfer failed, and everything in flight has stopped. `code` is the driver's "
                               "CUresult, or a negative errno; `call` is the function that failed.",
                               PyExc_RuntimeError);
    cancelled_error = new_error(m, "CancelledError", "Progress.cancel() was called.", transfer_error);
    integrity_error =
        new_error(m, "IntegrityError", "`chunk` is the index of the first chunk whose digest differs.", transfer_error);
    nb::register_exception_translator(translate);
}

void bind_arena(nb::module_ &m) {
    nb::class_<Progress>(
        m, "Progress",
        "How far an operation is; may be shared by several. With bytes_total 0 each operation adds its "
        "own bytes to the total when it starts.")
        .def(nb::init<uint64_t>(), "bytes_total"_a = 0)
        .def_prop_ro("bytes_done", &Progress::bytes_done)
        .def_prop_ro("bytes_total", &Progress::bytes_total)
        .def_prop_ro("cancelled", &Progress::cancelled)
        .def("cancel", &Progress::cancel, "The operation raises CancelledError at its next chunk. From any thread.");

    nb::class_<Arena>(m, "Arena", "Host memory on a memfd; see arena.hpp. The caller decides what lies where.")
        .def(
            "__init__",
            [](Arena *self, uint64_t size_bytes, int numa_node, unsigned threads, int fd) {
                nb::gil_scoped_release release;
                new (self) Arena(size_bytes, numa_node, threads, fd);
            },
            "size_bytes"_a, nb::kw_only(), "numa_node"_a = -1, "threads"_a = 0, "fd"_a = -1)
        .def_prop_ro("size_bytes", &Arena::size_bytes)
        .def_prop_ro("fd", &Arena::fd, "The arena's own descriptor: pass it on, do not close it. -1 once closed.")
        .def_prop_ro("numa_node", &Arena::numa_node)
        .def_prop_ro("huge_pages", &Arena::huge_pages, "Whether the kernel backs it with huge pages.")
        .def_prop_ro("populated_bytes", &Arena::populated_bytes)
        .def_prop_ro("registered_bytes", &Arena::registered_bytes)
        .def(
            "populate",
            [](Arena &self, uint64_t offset, uint64_t size, Progress *progress) {
                released(progress, [&](Progress &p) { self.populate(offset, size, p); });
            },
            "offset"_a, "size"_a, "progress"_a = nb::none())
        .def(
            "clear",
            [](Arena &self, uint64_t offset, uint64_t size, Progress *progress) {
                released(progress, [&](Progress &p) { self.clear(offset, size, p); });
            },
            "offset"_a, "size"_a, "progress"_a = nb::none())
        .def("register", &Arena::register_pieces, "ordinal"_a = 0, nb::call_guard<nb::gil_scoped_release>())
        .def("unregister", &Arena::unregister_pieces, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Arena::close, nb::call_guard<nb::gil_scoped_release>());
}

void bind_device(nb::module_ &m) {
    nb::class_<MemoryHandle>(m, "Memory", "GPU memory held by this process, made by a Device.")
        .def_prop_ro("size_bytes", [](const MemoryHandle &self) { return self.memory->size_bytes(); })
        .def_prop_ro("ordinal", [](const MemoryHandle &self) { return self.memory->context()->ordinal(); })
        .def(
            "export_fd", [](const MemoryHandle &self) { return self.memory->export_fd(); },
            nb::call_guard<nb::gil_scoped_release>(), "A new descriptor, the caller's to close. Created memory only.")
        .def(
            "release", [](const MemoryHandle &self) { self.memory->release(); },
            nb::call_guard<nb::gil_scoped_release>(), "Gives the memory up; a second call does nothing.");

    nb::class_<Device>(m, "Device", "A GPU. Its primary context is retained from the first call that needs it.")
        .def(nb::init<int>(), "ordinal"_a)
        .def_ro("ordinal", &Device::ordinal)
        .def_prop_ro("uuid",
                     [](const Device &self) {
                         CUuuid uuid;
                         WF_CUDA(cuDeviceGetUuid, &uuid, self.device());
                         return nb::bytes(uuid.bytes, sizeof(uuid.bytes));
                     })
        .def_prop_ro("name",
                     [](const Device &self) {
                         char name[256] = {};
                         WF_CUDA(cuDeviceGetName, name, int{sizeof(name) - 1}, self.device());
                         return std::string(name);
                     })
        .def_prop_ro("total_bytes",
                     [](const Device &self) {
                         size_t bytes = 0;
                         WF_CUDA(cuDeviceTotalMem, &bytes, self.device());
                         return bytes;
                     })
        .def_prop_ro(
            "granularity_bytes",
            [](Device &self) {
                nb::gil_scoped_release release;
                return granularity_bytes(*self.context());
            },
            "Every size of memory is a multiple of it.")
        .def_prop_ro(
            "hashes",
            [](Device &self) {
                nb::gil_scoped_release release;
                return to_string(self.context()->kernels().way());
            },
            "How hash_device computes digests of its memory: gpu, cpu or copy.")
        .def("free_bytes",
             [](Device &self) {
                 nb::gil_scoped_release release;
                 Current current(*self.context());
                 size_t free_bytes = 0, total_bytes = 0;
                 WF_CUDA(cuMemGetInfo, &free_bytes, &total_bytes);
                 return free_bytes;
             })
        .def(
            "import_memories",
            [](Device &self, const std::vector<int> &fds, const std::vector<uint64_t> &sizes) {
                std::vector<std::shared_ptr<Memory>> memories;
                {
                    nb::gil_scoped_release release;
                    memories = Memory::import(self.context(), fds, sizes);
                }
                return to_list(memories);
            },
            "fds"_a, "sizes"_a, "All or none; the descriptors stay the caller's. Neighbours are copied as one.")
        .def(
            "create_memories",
            [](Device &self, const std::vector<uint64_t> &sizes, const std::vector<int> &host_nodes) {
                std::vector<std::shared_ptr<Memory>> memories;
                {
                    nb::gil_scoped_release release;
                    memories = Memory::create(self.context(), sizes, host_nodes);
                }
                return to_list(memories);
            },
            "sizes"_a, "host_nodes"_a = std::vector<int>(), "All or none. Neighbours are copied as one.")
        .def(
            "import_memory",
            [](Device &self, int fd, uint64_t size_bytes) {
                nb::gil_scoped_release release;
                return MemoryHandle{Memory::import(self.context(), {fd}, {size_bytes}).front()};
            },
            "fd"_a, "size_bytes"_a)
        .def(
            "view_memory",
            [](Device &self, uint64_t address, uint64_t size_bytes) {
                nb::gil_scoped_release release;
                return MemoryHandle{Memory::view(self.context(), address, size_bytes)};
            },
            "address"_a, "size_bytes"_a, "Memory that is mapped here and belongs to somebody else.")
        .def(
            "create_memory",
            [](Device &self, uint64_t size_bytes) {
                nb::gil_scoped_release release;
                return MemoryHandle{Memory::create(self.context(), {size_bytes}).front()};
            },
            "size_bytes"_a);
}

void bind_copies(nb::module_ &m) {
    m.def(
        "drain",
        [](const std::vector<ExtentArgument> &extents, Arena &arena, uint64_t chunk_bytes, Progress *progress) {
            const std::vector<Extent> copied = to_extents(extents);
            released(progress,
                     [&](Progress &p) { copy_extents("drain", Direction::to_arena, copied, arena, chunk_bytes, p); });
        },
        "extents"_a, "arena"_a, nb::kw_only(), "chunk_bytes"_a = default_copy_chunk_bytes, "progress"_a = nb::none(),
        "GPU memory to the arena. extents: (memory, memory_offset, arena_offset, size).");
    m.def(
        "refill",
        [](const std::vector<ExtentArgument> &extents, Arena &arena, uint64_t chunk_bytes, Progress *progress) {
            const std::vector<Extent> copied = to_extents(extents);
            released(progress,
                     [&](Progress &p) { copy_extents("refill", Direction::to_device, copied, arena, chunk_bytes, p); });
        },
        "extents"_a, "arena"_a, nb::kw_only(), "chunk_bytes"_a = default_copy_chunk_bytes, "progress"_a = nb::none(),
        "The arena to GPU memory. extents: (memory, memory_offset, arena_offset, size).");
}

void bind_files(nb::module_ &m) {
    m.def(
        "drain_to_file",
        [](const std::vector<PieceArgument> &pieces, int fd, uint64_t file_offset, Arena &arena, uint64_t arena_offset,
           uint64_t arena_bytes, uint64_t chunk_bytes, unsigned threads, Progress *progress) {
            const std::vector<Piece> copied = to_pieces(pieces);
            return to_bytes(released(progress, [&](Progress &p) {
                return drain_to_file(copied, fd, file_offset, {arena, arena_offset, arena_bytes},
                                     {chunk_bytes, threads}, p);
            }));
        },
        "pieces"_a, "fd"_a, "file_offset"_a, "arena"_a, "arena_offset"_a, "arena_bytes"_a, nb::kw_only(),
        "chunk_bytes"_a = default_file_chunk_bytes, "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "refill_from_file",
        [](const std::vector<PieceArgument> &pieces, int fd, uint64_t file_offset, Arena &arena, uint64_t arena_offset,
           uint64_t arena_bytes, const std::optional<nb::bytes> &digests, uint64_t chunk_bytes, unsigned threads,
           Progress *progress) {
            const std::vector<Piece> copied = to_pieces(pieces);
            released(progress, [&](Progress &p) {
                refill_from_file(copied, fd, file_offset, {arena, arena_offset, arena_bytes}, view(digests),
                                 {chunk_bytes, threads}, p);
            });
        },
        "pieces"_a, "fd"_a, "file_offset"_a, "arena"_a, "arena_offset"_a, "arena_bytes"_a, nb::kw_only(),
        "digests"_a.none(), "chunk_bytes"_a = default_file_chunk_bytes, "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "hash_memory",
        [](const std::vector<PieceArgument> &pieces, Arena &arena, uint64_t arena_offset, uint64_t arena_bytes,
           uint64_t chunk_bytes, unsigned threads, Progress *progress) {
            const std::vector<Piece> copied = to_pieces(pieces);
            return to_bytes(released(progress, [&](Progress &p) {
                return hash_memory(copied, {arena, arena_offset, arena_bytes}, {chunk_bytes, threads}, p);
            }));
        },
        "pieces"_a, "arena"_a, "arena_offset"_a, "arena_bytes"_a, nb::kw_only(),
        "chunk_bytes"_a = default_file_chunk_bytes, "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "write_arena",
        [](Arena &arena, const std::vector<RangeArgument> &ranges, int fd, uint64_t file_offset, uint64_t chunk_bytes,
           unsigned threads, Progress *progress) {
            const std::vector<Range> copied = to_ranges(ranges);
            return to_bytes(released(progress, [&](Progress &p) {
                return write_arena(arena, copied, fd, file_offset, {chunk_bytes, threads}, p);
            }));
        },
        "arena"_a, "ranges"_a, "fd"_a, "file_offset"_a, nb::kw_only(), "chunk_bytes"_a = default_file_chunk_bytes,
        "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "read_to_arena",
        [](Arena &arena, const std::vector<RangeArgument> &ranges, int fd, uint64_t file_offset,
           const std::optional<nb::bytes> &digests, uint64_t chunk_bytes, unsigned threads, Progress *progress) {
            const std::vector<Range> copied = to_ranges(ranges);
            released(progress, [&](Progress &p) {
                read_to_arena(arena, copied, fd, file_offset, view(digests), {chunk_bytes, threads}, p);
            });
        },
        "arena"_a, "ranges"_a, "fd"_a, "file_offset"_a, nb::kw_only(), "digests"_a.none(),
        "chunk_bytes"_a = default_file_chunk_bytes, "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "hash_file",
        [](int fd, uint64_t offset, uint64_t size_bytes, uint64_t chunk_bytes, unsigned threads, Progress *progress) {
            return to_bytes(released(
                progress, [&](Progress &p) { return hash_file(fd, offset, size_bytes, {chunk_bytes, threads}, p); }));
        },
        "fd"_a, "offset"_a, "size_bytes"_a, nb::kw_only(), "chunk_bytes"_a = default_file_chunk_bytes, "threads"_a = 0,
        "progress"_a = nb::none());
    m.def(
        "hash_arena",
        [](Arena &arena, const std::vector<RangeArgument> &ranges, uint64_t chunk_bytes, unsigned threads,
           Progress *progress) {
            const std::vector<Range> copied = to_ranges(ranges);
            return to_bytes(
                released(progress, [&](Progress &p) { return hash_arena(arena, copied, {chunk_bytes, threads}, p); }));
        },
        "arena"_a, "ranges"_a, nb::kw_only(), "chunk_bytes"_a = default_file_chunk_bytes, "threads"_a = 0,
        "progress"_a = nb::none());
}

} // namespace

NB_MODULE(transfer, m) {
    m.doc() = "Moves GPU memory: arena, copies, digests, files. See native/transfer/README.md.";
    nb::set_leak_warnings(false); // a daemon that ends with memories alive is nothing to report on stderr
    bind_errors(m);
    bind_arena(m);
    bind_device(m);
    bind_copies(m);
    bind_files(m);
    bind_hashing(m);
    bind_guard(m);
    bind_packs(m);
    bind_pages(m);
    m.def(
        "driver_version",
        [] {
            int version = 0;
            check(try_call("cuDriverGetVersion", driver_library().cuDriverGetVersion, &version), "cuDriverGetVersion");
            return version;
        },
        nb::call_guard<nb::gil_scoped_release>(), "As the driver gives it: 13000 is CUDA 13.0.");
    m.def(
        "device_count",
        [] {
            int count = 0;
            WF_CUDA(cuDeviceGetCount, &count);
            return count;
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "blake3",
        [](const nb::bytes &data, const std::optional<std::string> &implementation) {
            blake3::Digest digest;
            {
                nb::gil_scoped_release release;
                digest = implementation ? blake3::hash_with(*implementation, data.c_str(), data.size())
                                        : blake3::hash(data.c_str(), data.size());
            }
            return nb::bytes(digest.data(), digest.size());
        },
        "data"_a, "implementation"_a = nb::none(), "The 32-byte BLAKE3 digest of `data`.");
    m.def("blake3_implementations", &blake3::implementations, "What this processor can run, the one in use first.");
}
