// Looks driver functions up in each way that applications do, and prints whose function it got: "ours" (the
// interposer's), "driver", "other", "null". Not linked with a driver.
//
//   resolve dlopen NAME…      dlopen + dlsym          resolve proc VERSION FLAGS NAME…   cuGetProcAddress of itself
//   resolve default NAME…     RTLD_DEFAULT            resolve weak                       an undefined weak cuInit
//   resolve next LIB          see next.cpp            resolve close                      a call after dlclose
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <string>

extern "C" __attribute__((weak)) CUresult cuInit(unsigned);

namespace {

const char *owner(void *function) {
    Dl_info info{};
    if (function == nullptr)
        return "null";
    if (dladdr(function, &info) == 0)
        return "other";
    if (std::strstr(info.dli_fname, "woodfrog_interpose") != nullptr)
        return "ours";
    return std::strstr(info.dli_fname, "libcuda.so") != nullptr ? "driver" : "other";
}

int threads() {
    int count = 0;
    DIR *directory = opendir("/proc/self/task");
    while (const dirent *entry = readdir(directory))
        count += entry->d_name[0] != '.';
    closedir(directory);
    return count;
}

void *open_driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::printf("%s\n", dlerror());
        std::exit(1);
    }
    return library;
}

using GetProcAddress = CUresult (*)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

} // namespace

int main(int argc, char **argv) {
    const std::string mode = argv[1];
    if (mode == "dlopen") {
        void *library = open_driver();
        for (int i = 2; i < argc; ++i)
            std::printf("%s %s\n", argv[i], owner(dlsym(library, argv[i])));
        std::printf("threads %d\n", threads());
    } else if (mode == "default") {
        for (int i = 2; i < argc; ++i)
            std::printf("%s %s\n", argv[i], owner(dlsym(RTLD_DEFAULT, argv[i])));
        std::printf("loaded %d\n", dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW) != nullptr);
    } else if (mode == "weak") {
        std::printf("%d\n", cuInit == nullptr ? -1 : static_cast<int>(cuInit(0)));
        std::printf("loaded %d\n", dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW) != nullptr);
    } else if (mode == "proc") {
        // The way of cudart: one dlsym, then everything through the pointer that the function returns for itself.
        const auto first = reinterpret_cast<GetProcAddress>(dlsym(open_driver(), "cuGetProcAddress_v2"));
        CUdriverProcAddressQueryResult status{};
        void *pointer = nullptr;
        CUresult result = first("", &pointer, 12000, 0, &status);
        std::printf("probe %d %s\n", result, owner(pointer));
        pointer = nullptr;
        result = first("cuGetProcAddress", &pointer, 12000, 0, &status);
        std::printf("itself %d %s\n", result, owner(pointer));
        const auto ask = reinterpret_cast<GetProcAddress>(pointer);
        for (int i = 4; i < argc; ++i) {
            void *function = nullptr;
            result = ask(argv[i], &function, std::atoi(argv[2]), std::strtoull(argv[3], nullptr, 10), &status);
            std::printf("%s %d %s\n", argv[i], result, owner(function));
            if (std::strcmp(argv[i], "cuBrandNew") == 0) {
                using New = CUresult (*)(int, int, int, int, int, int, int, long, double, float, double);
                for (int again = 0; again < 3; ++again)
                    std::printf("sum %d\n", reinterpret_cast<New>(function)(1, 2, 3, 4, 5, 6, 7, 8, 9.0, 10.0f, 11.0));
            }
            if (std::strncmp(argv[i], "cuCtxGetFlags", 13) == 0) { // the stub's stand-in for "call it and see"
                unsigned flags = 0;
                reinterpret_cast<CUresult (*)(unsigned *)>(function)(&flags);
                std::printf("called %u\n", flags);
            }
        }
    } else if (mode == "next") {
        void *library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            std::printf("%s\n", dlerror());
            return 1;
        }
        const auto ask = reinterpret_cast<const char *(*)()>(dlsym(library, "who_is_next"));
        const auto local = reinterpret_cast<const char *(*)()>(dlsym(library, "who_is_local"));
        std::printf("next %s\nlocal %s\n", ask(), local());
        dlsym(library, "no_such_function");
        std::printf("error %d\n", dlerror() != nullptr);
        dlsym(RTLD_DEFAULT, "cuNoSuchFunction");
        std::printf("error %d\n", dlerror() != nullptr);
    } else if (mode == "close") {
        void *library = open_driver();
        const auto version = reinterpret_cast<CUresult (*)(int *)>(dlsym(library, "cuDriverGetVersion"));
        int number = 0;
        dlclose(library);
        const CUresult result = version(&number);
        std::printf("%d %s\n", result, number > 0 ? "a version" : "nothing");
    }
    return 0;
}
