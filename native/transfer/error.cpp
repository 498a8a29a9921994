// The sentences of error.hpp's exceptions.
#include "error.hpp"

#include <cerrno>
#include <system_error>

namespace woodfrog::transfer {

TransferError::TransferError(int code, std::string call, const std::string &reason)
    : std::runtime_error(call.empty() ? reason : call + ": " + reason), code(code), call(std::move(call)) {}

CancelledError::CancelledError() : TransferError(-ECANCELED, "", "the transfer was cancelled") {}

IntegrityError::IntegrityError(size_t chunk)
    : TransferError(-EBADMSG, "", "chunk " + std::to_string(chunk) + " does not have the digest it was stored with"),
      chunk(chunk) {}

IntegrityError::IntegrityError(size_t chunk, const std::string &reason)
    : TransferError(-EBADMSG, "", reason), chunk(chunk) {}

void throw_errno(int error, const char *call, const std::string &about) {
    throw TransferError(-error, call, std::generic_category().message(error) + (about.empty() ? "" : ": " + about));
}

void throw_invalid(const char *operation, const std::string &reason) {
    throw TransferError(-EINVAL, operation, reason);
}

} // namespace woodfrog::transfer
