// Memory of a process that stands still, into a file. It must never write to the process.
#pragma once
#include "piece.hpp"
#include "transfer/progress.hpp"

namespace woodfrog::pages {

// Copies the pieces of process `pid` to their places in the file, which must be as large as that already. The process
// must not run or end meanwhile. TransferError: -ESRCH, -EPERM; -ENOSPC when the file's place is full.
void save_pages(int pid, int fd, const std::vector<PageRange> &pieces, unsigned threads, transfer::Progress &progress);

} // namespace woodfrog::pages
