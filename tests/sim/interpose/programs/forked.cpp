// Opens and maps the file named by its argument as the driver does with its device files, forks, and says what the
// child has of it: "descriptor <link>", "byte <value>", "mapped <lines of maps>", and the same of a file that is none
// of the driver's.
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

std::string link_of(int fd) {
    char path[4096] = {};
    const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof(path) - 1);
    return length < 0 ? "none" : std::string(path, static_cast<size_t>(length));
}

int lines_with(const char *name) {
    int count = 0;
    char line[8192];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof(line), maps) != nullptr)
        count += strstr(line, name) != nullptr;
    fclose(maps);
    return count;
}

int say(const char *device, int fd, const char *mapped, int other) {
    printf("descriptor %s\nbyte %d\nmapped %d\nother %s\n", link_of(fd).c_str(), mapped[5000], lines_with(device),
           link_of(other).c_str());
    fflush(stdout);
    return 0;
}

} // namespace

int main(int, char **arguments) {
    if (cuInit(0) != CUDA_SUCCESS)
        return 2;
    const char *device = arguments[1];
    const int fd = open(device, O_RDWR | O_CLOEXEC);
    const int other = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    void *memory = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || other < 0 || memory == MAP_FAILED)
        return 3;
    char *mapped = static_cast<char *>(memory);
    mapped[5000] = 7;
    const pid_t child = fork();
    if (child == 0)
        _exit(say(device, fd, mapped, other));
    int status = 0;
    waitpid(child, &status, 0);
    return status == 0 ? say(device, fd, mapped, other) : 4;
}
