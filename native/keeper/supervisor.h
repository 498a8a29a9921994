// Starts the daemon and starts it again when it dies. It must never spin: at most `limit` starts per window, and a
// growing pause between two that follow each other closely.
#pragma once
#include <stdbool.h>
#include <sys/types.h>

#define SUPERVISOR_MAX_LIMIT 64

struct Supervisor {
    char **argv;                         // the daemon's command line, NULL-terminated; NULL: nothing to supervise
    unsigned limit;                      // starts per window
    double window_s;                     // seconds
    pid_t pid;                           // the living daemon, or 0
    bool ended;                          // never start it again
    double starts[SUPERVISOR_MAX_LIMIT]; // monotonic times of the last `limit` starts, as a ring
    unsigned long start_count;
    double next_start_s; // monotonic time from which it may be started
};

double monotonic_s(void);

// Starts the daemon if it is due. Returns the milliseconds until it is worth calling again, or -1 for never.
int supervisor_poll(struct Supervisor *supervisor);

// Reaps everything that has ended: the daemon, and orphans that fell to us as subreaper.
void supervisor_reap(struct Supervisor *supervisor);
