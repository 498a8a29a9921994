// Uses the driver in the constructor of a library (-DLIBRARY), before any preloaded library's own constructor has run,
// and again in main: each prints what it got.
#include <cstdio>
#include <cuda.h>

#ifdef LIBRARY
__attribute__((constructor)) static void begin() {
    int count = 0;
    const int initialised = cuInit(0);
    std::printf("library %d %d\n", initialised, cuDeviceGetCount(&count));
}
extern "C" void early() {}
#else
extern "C" void early();
int main() {
    early();
    int count = 0;
    const int initialised = cuInit(0);
    std::printf("main %d %d\n", initialised, cuDeviceGetCount(&count));
}
#endif
