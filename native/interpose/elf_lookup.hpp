// Finding a function of the C library without dlsym or dlvsym, which this library replaces.
#pragma once

namespace woodfrog::interpose {

// The address of `name` in the loaded library `soname`, or null. Any version of the symbol serves.
void *elf_lookup(const char *soname, const char *name);

} // namespace woodfrog::interpose
