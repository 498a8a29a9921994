// The restart policy behind supervisor.h. The first restart follows at once (a frozen target waits for it); after that
// the pause doubles from 100 ms, and when `limit` starts fell into one window, the next waits until the window is over.
#include "supervisor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FIRST_PAUSE_S 0.1

extern struct rlimit original_fd_limit; // main.c: the limit we were started with, for the daemon

double monotonic_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

// In the child. Ignored signals and the blocked mask outlive exec, so both are put back.
static void become_daemon(char **argv) {
    sigset_t none;
    sigemptyset(&none);
    signal(SIGHUP, SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    setrlimit(RLIMIT_NOFILE, &original_fd_limit);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execvp(argv[0], argv);
    dprintf(STDERR_FILENO, "woodfrog-keeper: cannot start the daemon %s: %s\n", argv[0], strerror(errno));
    _exit(127);
}

static void start(struct Supervisor *s, double now) {
    pid_t pid = fork();
    if (pid == 0)
        become_daemon(s->argv);
    s->starts[s->start_count++ % s->limit] = now; // a failed fork counts too: it must not be tried in a tight loop
    if (pid < 0) {
        fprintf(stderr, "woodfrog-keeper: fork: %s\n", strerror(errno));
        s->next_start_s = now + 1;
        return;
    }
    s->pid = pid;
}

int supervisor_poll(struct Supervisor *s) {
    if (!s->argv || s->ended || s->pid)
        return -1;
    double now = monotonic_s();
    if (now >= s->next_start_s) {
        start(s, now);
        if (s->pid)
            return -1;
    }
    double wait_ms = (s->next_start_s - now) * 1000;
    return wait_ms > 60000 ? 60000 : (int)wait_ms + 1;
}

// When the daemon has just died: the time from which it may be started again.
static double restart_time(const struct Supervisor *s, double now) {
    unsigned recent = 0; // starts within the last window, this one included
    for (unsigned i = 0; i < s->limit && i < s->start_count; i++)
        recent += now - s->starts[i] < s->window_s;
    if (recent >= s->limit)
        return now + s->window_s;
    double pause = 0;
    for (unsigned i = 1; i < recent; i++)
        pause = pause ? pause * 2 : FIRST_PAUSE_S;
    return now + pause;
}

static void describe_end(int status) {
    if (WIFSIGNALED(status))
        fprintf(stderr, "woodfrog-keeper: the daemon was killed by signal %d\n", WTERMSIG(status));
    else
        fprintf(stderr, "woodfrog-keeper: the daemon ended with status %d\n", WEXITSTATUS(status));
}

void supervisor_reap(struct Supervisor *s) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid != s->pid)
            continue;
        double now = monotonic_s();
        s->pid = 0;
        s->next_start_s = restart_time(s, now);
        describe_end(status);
        if (!s->ended)
            fprintf(stderr, "woodfrog-keeper: starting it again in %.1f s\n", s->next_start_s - now);
    }
}
