// Process 1 of a namespace: runs the program that makes the tree (CRIU), and afterwards is the tree's parent.
#pragma once

#include <sys/types.h>

namespace woodfrog::init {

// Runs `command`, says on `report` (an int) how it ended, and lives as long as process `root` does, which the program
// must have left behind: reaps whatever ends, passes signals on to `root`, and ends with its status (128 + signal as
// shells have it). With it ends everything else in the namespace. `idle` is called once the program has succeeded.
[[noreturn]] void supervise(char **command, pid_t root, int report, void (*idle)());

// Forks and runs `command`; its status as above, 127 when it could not be run.
int run(char **command);

} // namespace woodfrog::init
