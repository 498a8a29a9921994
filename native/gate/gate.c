// woodfrog-gate: CRIU's action script (criu(8), --action-script) for a dump or a restore that woodfrog takes part in.
//
// At the stage `pre-dump` CRIU has looked at the machine and not yet at the processes that it is to save: there this
// waits until one byte comes through a pipe, WOODFROG_GATE, for a dump that is started before its target stands still.
// At the stage `pre-restore` it knows what it is to make and has made nothing: there this waits for the same, for a
// restore that begins before its files are whole. At `post-restore` the processes
// are there and stand still, with pages that CRIU left out: this says so through the first pipe of WOODFROG_FILL and
// waits for one byte through the second, which comes when the pages are there.
// CRIU closes every descriptor of a script but keeps its own, so both name pipes by their numbers in CRIU. Without the
// byte (its writer has given up, or is dead) CRIU ends with nothing saved or restored.
// How long it waited goes to CRIU's log.
// Exit status: 0 go on; 1 what it waits for will not come; 2 this was not started as CRIU's script.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int open_pipe(int number, int flags) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)getppid(), number);
    const int pipe = open(path, flags | O_CLOEXEC);
    if (pipe < 0)
        fprintf(stderr, "woodfrog-gate: %s: %s\n", path, strerror(errno));
    return pipe;
}

static int wait_for_byte(int pipe, const char *what) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    char word;
    ssize_t got;
    do
        got = read(pipe, &word, 1);
    while (got < 0 && errno == EINTR);
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double waited = (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9;
    fprintf(stderr, "woodfrog-gate: %s %.6f s\n", what, waited);
    return got == 1 ? 0 : 1;
}

int main(void) {
    const char *stage = getenv("CRTOOLS_SCRIPT_ACTION");
    const char *gate = getenv("WOODFROG_GATE");
    const char *fill = getenv("WOODFROG_FILL");
    if (!stage || (!gate && !fill)) {
        fprintf(stderr, "woodfrog-gate: to be run by CRIU\n");
        return 2;
    }
    if (gate && (strcmp(stage, "pre-dump") == 0 || strcmp(stage, "pre-restore") == 0)) {
        const int pipe = open_pipe(atoi(gate), O_RDONLY);
        return pipe < 0 ? 2 : wait_for_byte(pipe, "waited");
    }
    if (fill && strcmp(stage, "post-restore") == 0) {
        int numbers[2];
        if (sscanf(fill, "%d,%d", &numbers[0], &numbers[1]) != 2)
            return 2;
        const int arrived = open_pipe(numbers[0], O_WRONLY);
        const int filled = open_pipe(numbers[1], O_RDONLY);
        if (arrived < 0 || filled < 0)
            return 2;
        if (write(arrived, "1", 1) != 1)
            return 1;
        return wait_for_byte(filled, "filled in");
    }
    return 0;
}
