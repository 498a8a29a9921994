// What can go wrong in a transfer, as exceptions that the Python module turns into its own (module.cpp). Every one is
// thrown after everything in flight has stopped. It must never be used for control flow.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>

namespace woodfrog::transfer {

// `code` is a CUresult (positive) or a negated errno; `call` the driver's or the kernel's function, or the operation
// whose arguments make no sense (code -EINVAL).
struct TransferError : std::runtime_error {
    TransferError(int code, std::string call, const std::string &reason);
    int code;
    std::string call;
};

// Progress.cancel() was called. code is -ECANCELED.
struct CancelledError : TransferError {
    CancelledError();
};

// The digest of a chunk differs from the one given; `chunk` is the first such chunk's index.
struct IntegrityError : TransferError {
    explicit IntegrityError(size_t chunk);
    IntegrityError(size_t chunk, const std::string &reason); // stored bytes that are damaged in another way
    size_t chunk;
};

// Throws TransferError for an errno.
[[noreturn]] void throw_errno(int error, const char *call, const std::string &about);

// Throws TransferError(-EINVAL).
[[noreturn]] void throw_invalid(const char *operation, const std::string &reason);

} // namespace woodfrog::transfer
