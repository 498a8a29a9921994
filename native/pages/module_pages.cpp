// The part of woodfrog._native.transfer that binds pages of processes: arguments, the GIL, nothing else. See
// binding.hpp for what holds for all of these.
#include "fill.hpp"
#include "save.hpp"
#include "transfer/binding.hpp"

namespace woodfrog::transfer {

using namespace nb::literals;
using namespace woodfrog::pages;

namespace {

std::vector<PageRange> to_pieces(const char *operation, const nb::bytes &packed) {
    return unpack_pieces(operation, {packed.c_str(), packed.size()});
}

} // namespace

void bind_pages(nb::module_ &m) {
    m.def("userfaultfd_trouble", &userfaultfd_trouble);
    m.def(
        "save_pages",
        [](int pid, int fd, const nb::bytes &pieces, unsigned threads, Progress *progress) {
            const std::vector<PageRange> unpacked = to_pieces("save_pages", pieces);
            released(progress, [&](Progress &p) { save_pages(pid, fd, unpacked, threads, p); });
        },
        "pid"_a, "fd"_a, "pieces"_a, nb::kw_only(), "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "fill_pages",
        [](int uffd, int fd, const nb::bytes &pieces, unsigned threads, Progress *progress) {
            const std::vector<PageRange> unpacked = to_pieces("fill_pages", pieces);
            released(progress, [&](Progress &p) { fill_pages(uffd, fd, unpacked, threads, p); });
        },
        "uffd"_a, "fd"_a, "pieces"_a, nb::kw_only(), "threads"_a = 0, "progress"_a = nb::none());
    m.def(
        "answer_page_faults",
        [](int uffd, int fd, const nb::bytes &pieces, int stop_fd) {
            const std::vector<PageRange> unpacked = to_pieces("answer_page_faults", pieces);
            nb::gil_scoped_release release;
            answer_page_faults(uffd, fd, unpacked, stop_fd);
        },
        "uffd"_a, "fd"_a, "pieces"_a, "stop_fd"_a);
}

} // namespace woodfrog::transfer
