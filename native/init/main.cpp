// woodfrog-init: runs CRIU in a PID namespace.
//
//   woodfrog-init new INSTANCE NAME ROOT LAST [--bind FROM ONTO]... -- PROGRAM [ARGUMENT...]
//       makes a PID namespace and a mount namespace, runs the program in them, and ends when the program has ended,
//       with its status. If that is 0, process 1 stays as the parent of process ROOT (its number inside), under the
//       command line `woodfrog-init new INSTANCE NAME`: that is how the instance is found and what it is called.
//       Otherwise nothing of the namespaces is left. The program's number is above LAST; that of process 1 as seen from
//       outside is written to the file init.pid in the working directory.
//   woodfrog-init enter PID -- PROGRAM [ARGUMENT...]
//       runs the program in the PID and mount namespaces of process PID, and ends with its status.
//
// A program of its own, because a process can change its own PID namespace only for its children, and because process 1
// must go on when the daemon does not.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "namespace.hpp"
#include "supervise.hpp"

namespace {

using namespace woodfrog::init;

constexpr int kUsage = 2;
constexpr int kFailed = 126;
constexpr int kShown = 4; // words of our own command line that stay: program, new, INSTANCE, NAME

char **g_words;

[[noreturn]] void usage() {
    std::fprintf(stderr, "usage: woodfrog-init new INSTANCE NAME ROOT LAST [--bind FROM ONTO]... -- PROGRAM...\n"
                         "       woodfrog-init enter PID -- PROGRAM...\n");
    std::exit(kUsage);
}

pid_t number(const char *text) {
    char *end = nullptr;
    const long value = text != nullptr ? std::strtol(text, &end, 10) : -1;
    if (text == nullptr || end == text || *end != '\0' || value < 0 || value > 1 << 22) // PID_MAX_LIMIT
        usage();
    return static_cast<pid_t>(value);
}

// The program and its arguments: what follows "--".
char **command_after(char **words) {
    if (*words == nullptr || std::string_view(*words) != "--" || words[1] == nullptr)
        usage();
    return words + 1;
}

// Process 1 has nothing left to do but to wait: it keeps nothing of its start open.
void become_idle() {
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
        dup2(null, standard);
    close(null);
    if (chdir("/") != 0)
        std::abort(); // there is always a root directory
    setsid();         // the group of the launcher is the daemon's to kill
}

// The command line of process 1 says which instance it is and nothing of the program that it runs: whoever looks for
// CRIU must not find it here. Returns a copy of the words from `command` on, which are gone then.
char **show_instance_only(char **command) {
    static std::vector<char *> copies;
    for (; *command != nullptr; command++)
        copies.push_back(strdup(*command));
    copies.push_back(nullptr);
    char *first = g_words[kShown];
    char *last = first;
    for (char **word = g_words + kShown; *word != nullptr; word++)
        last = *word + std::strlen(*word);
    std::memset(first, 0, static_cast<size_t>(last - first));
    return copies.data();
}

// Whoever called us becomes the parent of process 1, and has to know its number even if that has ended by then.
bool note_child(pid_t child) {
    const int file = open("init.pid", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const bool written = file >= 0 && dprintf(file, "%d", static_cast<int>(child)) > 0;
    if (!written)
        std::perror("woodfrog-init: init.pid");
    if (file >= 0)
        close(file);
    return written;
}

int make_new(char **words) {
    for (int i = 0; i < kShown; i++) {
        if (words[i] == nullptr)
            usage();
    }
    const pid_t root = number(words[2]);
    const pid_t last = number(words[3]);
    words += 4;
    std::vector<Bind> binds;
    for (; *words != nullptr && std::string_view(*words) == "--bind"; words += 3) {
        if (words[1] == nullptr || words[2] == nullptr)
            usage();
        binds.push_back({words[1], words[2]});
    }
    char **command = command_after(words);
    int report[2];
    if (pipe2(report, O_CLOEXEC) != 0) {
        std::perror("woodfrog-init: pipe");
        return kFailed;
    }
    const pid_t child = fork_into_new();
    if (child < 0) {
        std::fprintf(stderr, "woodfrog-init: no PID namespace can be made: %s\n", std::strerror(errno));
        return kFailed;
    }
    if (child == 0) {
        close(report[0]);
        if (!prepare_mounts(binds) || !set_last_number(last))
            _exit(kFailed);
        supervise(show_instance_only(command), root, report[1], become_idle);
    }
    close(report[1]);
    int status = kFailed;
    if (!note_child(child))
        kill(child, SIGKILL);
    const bool told = read(report[0], &status, sizeof status) == sizeof status;
    if (told && status == 0)
        return 0;
    // Process 1 ends, and with it all that is in its namespace; whoever reads our status may count on that.
    int ended = 0;
    while (waitpid(child, &ended, 0) < 0 && errno == EINTR) {
    }
    return told ? status : kFailed;
}

int enter(char **words) {
    if (words[0] == nullptr)
        usage();
    const pid_t pid = number(words[0]);
    char **command = command_after(words + 1);
    return join(pid) ? run(command) : kFailed;
}

} // namespace

int main(int count, char **words) {
    g_words = words;
    if (count > 2 && std::string_view(words[1]) == "new")
        return make_new(words + 2);
    if (count > 2 && std::string_view(words[1]) == "enter")
        return enter(words + 2);
    usage();
}
