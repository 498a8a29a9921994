// woodfrog-gate: CRIU's action script (criu(8), --action-script) for a restore that begins before its files are whole.
//
// At the stage `pre-restore` CRIU knows what it is to make and has made nothing: there this waits until one byte comes
// through a pipe. CRIU closes every descriptor of a script but keeps its own, so WOODFROG_GATE is the pipe's number in
// CRIU. Without the byte (its writer has given up, or is dead) CRIU ends with nothing restored.
// How long it waited goes to CRIU's log.
// Exit status: 0 go on; 1 the files will not come; 2 this was not started as CRIU's script.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int main(void) {
    const char *stage = getenv("CRTOOLS_SCRIPT_ACTION");
    const char *number = getenv("WOODFROG_GATE");
    if (!stage || !number) {
        fprintf(stderr, "woodfrog-gate: to be run by CRIU\n");
        return 2;
    }
    if (strcmp(stage, "pre-restore") != 0)
        return 0;
    char path[64];
    const int length = snprintf(path, sizeof path, "/proc/%d/fd/%s", (int)getppid(), number);
    const int pipe = length > 0 && (size_t)length < sizeof path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (pipe < 0) {
        fprintf(stderr, "woodfrog-gate: %s: %s\n", path, strerror(errno));
        return 2;
    }
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    char word;
    ssize_t got;
    do
        got = read(pipe, &word, 1);
    while (got < 0 && errno == EINTR);
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double waited = (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9;
    fprintf(stderr, "woodfrog-gate: waited %.6f s\n", waited);
    return got == 1 ? 0 : 1;
}
