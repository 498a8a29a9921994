// Whether the process has begun to exit: its driver is going away, and an image of it could not be brought back.
#pragma once

namespace woodfrog::interpose {

// After the first successful cuInit. Exit handlers run last first: those of the libraries that were loaded before run
// after ours, the driver's own among them.
void watch_for_the_end();
// Also true once the driver itself says that it has been shut down.
bool is_ending();

} // namespace woodfrog::interpose
