// A library that looks up the next definition of a function that it has itself, as preloaded tools do, and a function
// that only libraries loaded together with it can see.
#include <dlfcn.h>

extern "C" const char *who() {
    return "the asking library itself";
}
extern "C" const char *only_here() {
    return "found";
}

extern "C" const char *who_is_next() {
    const auto next = reinterpret_cast<const char *(*)()>(dlsym(RTLD_NEXT, "who"));
    return next == nullptr ? "nobody" : next();
}

extern "C" const char *who_is_local() {
    // RTLD_DEFAULT includes the scope of the library that asks, which was loaded with RTLD_LOCAL.
    const auto here = reinterpret_cast<const char *(*)()>(dlsym(RTLD_DEFAULT, "only_here"));
    return here == nullptr ? "nobody" : here();
}
