// Pages of a file into a process that CRIU is restoring and whose missing pages come from a userfaultfd (criu(8),
// --lazy-pages): many threads put them there where CRIU's one would read them.
//
// Until the descriptor is closed whoever touches a page that is not there waits for it; once it is closed what was not
// put there is zero. So it must never be closed before `fill_pages` has returned well, unless the process is to die.
#pragma once
#include "piece.hpp"
#include "transfer/progress.hpp"

#include <string>

namespace woodfrog::pages {

// Why this process cannot have a userfaultfd; empty when it can.
std::string userfaultfd_trouble();

// Puts all pieces into the process that `uffd` is of. All of their memory must be registered with it by now.
// TransferError (-ESRCH: the process has ended).
void fill_pages(int uffd, int fd, const std::vector<PageRange> &pieces, unsigned threads, transfer::Progress &progress);

// Answers page faults until `stop_fd` can be read: with pages of the file, or with zeros where no piece is. To be run
// from the moment the descriptor is there. TransferError.
void answer_page_faults(int uffd, int fd, const std::vector<PageRange> &pieces, int stop_fd);

} // namespace woodfrog::pages
