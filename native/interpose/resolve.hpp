// The C library's real dlsym and dlvsym, for our own use.
#pragma once

namespace woodfrog::interpose {

void *real_dlsym(void *handle, const char *name);

} // namespace woodfrog::interpose
