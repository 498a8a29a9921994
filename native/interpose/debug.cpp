// Diagnostics; see debug.hpp.
#include "debug.hpp"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace woodfrog::interpose {

void debug(const char *format, ...) {
    static constinit std::atomic<int> enabled{-1};
    int on = enabled.load(std::memory_order_relaxed);
    if (on < 0) {
        const char *value = getenv("WOODFROG_DEBUG");
        on = value != nullptr && strcmp(value, "1") == 0 ? 1 : 0;
        enabled.store(on, std::memory_order_relaxed);
    }
    if (on == 0)
        return;
    char line[512];
    const int prefix = snprintf(line, sizeof(line), "woodfrog[%d]: ", getpid());
    va_list arguments;
    va_start(arguments, format);
    int length = prefix + vsnprintf(line + prefix, sizeof(line) - static_cast<size_t>(prefix) - 1, format, arguments);
    va_end(arguments);
    if (length > static_cast<int>(sizeof(line)) - 2)
        length = static_cast<int>(sizeof(line)) - 2;
    line[length++] = '\n';
    // A diagnostic that cannot be written is lost; there is nowhere else to say so.
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line, static_cast<size_t>(length));
}

} // namespace woodfrog::interpose
