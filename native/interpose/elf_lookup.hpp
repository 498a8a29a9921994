// Finding a function of the C library without dlsym or dlvsym, which this library replaces, and where another library
// refers to one.
#pragma once

namespace woodfrog::interpose {

// The address of `name` in the loaded library `soname`, or null. Any version of the symbol serves.
void *elf_lookup(const char *soname, const char *name);

// Where the library that `function` lies in keeps the address of the function `name` that it calls, if that can be
// written: null if it refers to none or if the loader has made that part read-only.
void **elf_reference(const void *function, const char *name);

// The same of the library that is loaded from `library` on. Takes none of the loader's locks.
void **elf_reference_in(const void *library, const char *name);

// Where that library's code begins, if what lies there is the beginning of one; null if not.
const void *elf_code_in(const void *library);

} // namespace woodfrog::interpose
