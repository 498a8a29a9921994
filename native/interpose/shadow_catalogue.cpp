// Reading, checking and loading; see shadow_catalogue.hpp. KEY.kernels is text, one item a line:
//
//     woodfrog-kernels 1
//     kernel NUMBER PTX_VERSION BOUNDED PARAMETER_BYTES NAME
//     parameter OFFSET SIZE        of the kernel before
//     symbol NAME                  of the kernel before
//     end
#include "shadow_catalogue.hpp"

#include "debug.hpp"
#include "resolve.hpp"
#include "shadow_image.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace woodfrog::interpose::shadow {
namespace {

constexpr size_t kLargestList = size_t{64} << 20;

bool read_private(const std::string &name, std::string *text) {
    const int folder = open_catalogue_folder();
    if (folder < 0)
        return false;
    const int fd = openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    close(folder);
    if (fd < 0)
        return false;
    struct stat status{};
    bool good = is_private(fd, false) && fstat(fd, &status) == 0 && static_cast<size_t>(status.st_size) <= kLargestList;
    if (good) {
        text->resize(static_cast<size_t>(status.st_size));
        for (size_t at = 0; good && at < text->size();) {
            const ssize_t got = read(fd, text->data() + at, text->size() - at);
            good = got > 0;
            at += good ? static_cast<size_t>(got) : 0;
        }
    }
    close(fd);
    return good;
}

// False when the text is not whole and right.
bool parse(std::string &text, Catalogue *catalogue) {
    CatalogueKernel *kernel = nullptr;
    bool first = true;
    for (char *line = text.data(); line != nullptr && *line != '\0';) {
        char *end = strchr(line, '\n');
        if (end != nullptr)
            *end = '\0';
        char *next = end == nullptr ? nullptr : end + 1;
        CatalogueKernel made;
        unsigned bounded = 0;
        ParameterPlace place{};
        long long number = 0;
        int name_at = 0;
        if (first) {
            if (strcmp(line, "woodfrog-kernels 1") != 0)
                return false;
            first = false;
        } else if (strcmp(line, "end") == 0) {
            return true;
        } else if (sscanf(line, "kernel %lld %d %u %zu %n", &number, &made.ptx_version, &bounded,
                          &made.parameters_bytes, &name_at) == 4 &&
                   name_at > 0) {
            made.number = number;
            made.bounded = bounded != 0;
            kernel = &catalogue->kernels.emplace(line + name_at, std::move(made))->second;
        } else if (kernel != nullptr && strncmp(line, "symbol ", 7) == 0) {
            kernel->symbols.emplace_back(line + 7);
        } else if (kernel != nullptr &&
                   sscanf(line, "parameter %zu %zu", &place.offset_bytes, &place.size_bytes) == 2) {
            kernel->parameters.push_back(place);
        } else {
            return false;
        }
        line = next;
    }
    return false; // no `end`
}

} // namespace

Catalogue *find_catalogue(const std::string &key) {
    std::string text;
    if (!read_private(key + ".kernels", &text))
        return nullptr;
    Catalogue *catalogue = new Catalogue;
    catalogue->key = key;
    if (!parse(text, catalogue)) {
        debug("the list of kernels of %s is damaged", key.c_str());
        delete catalogue;
        return nullptr;
    }
    return catalogue;
}

bool load_catalogue(Catalogue *catalogue) {
    if (catalogue->evaluate.load(std::memory_order_acquire) != nullptr)
        return true;
    const int folder = open_catalogue_folder();
    if (folder < 0)
        return false;
    const std::string name = catalogue->key + ".so";
    const int fd = openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    close(folder);
    if (fd < 0)
        return false;
    const bool trusted = is_private(fd, false);
    close(fd);
    if (!trusted)
        return false;
    // Between the check and this nobody but the user can have changed it: the folder is the user's alone.
    const std::string path = catalogue_folder() + "/" + name;
    catalogue->library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (catalogue->library == nullptr) {
        debug("%s cannot be loaded: %s", path.c_str(), dlerror());
        return false;
    }
    const auto evaluate = reinterpret_cast<Evaluate>(real_dlsym(catalogue->library, "access_templates_evaluate"));
    if (evaluate == nullptr)
        unload_catalogue(catalogue);
    catalogue->evaluate.store(evaluate, std::memory_order_release);
    return evaluate != nullptr;
}

void unload_catalogue(Catalogue *catalogue) {
    catalogue->evaluate.store(nullptr, std::memory_order_release);
    if (catalogue->library != nullptr && dlclose(catalogue->library) != 0)
        debug("a catalogue cannot be unloaded: %s", dlerror());
    catalogue->library = nullptr;
}

} // namespace woodfrog::interpose::shadow
