// Diagnostics for people who look for a fault in the interposer: to stderr, only with WOODFROG_DEBUG=1.
#pragma once

namespace woodfrog::interpose {

// One line; printf's format. Costs one load when it is off.
__attribute__((format(printf, 1, 2))) void debug(const char *format, ...);

} // namespace woodfrog::interpose
