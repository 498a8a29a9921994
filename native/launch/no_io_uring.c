// woodfrog-no-io-uring: runs a program for which io_uring does not exist.
//
//     woodfrog-no-io-uring [--where-free] [--report FD] PROGRAM [ARGUMENT…]
//
// CRIU cannot save an io_uring. Programs that would like one (libuv, and with it the store of PyTorch's launcher) do
// without where the kernel has none; so a seccomp filter answers io_uring_setup with ENOSYS and lets everything else
// pass. Children inherit it, and it is part of an image. A filter needs CAP_SYS_ADMIN, or a process that can no longer
// gain privileges: only without the capability is that (no_new_privs) set, as setuid programs inside lose theirs by it.
// --where-free: only where nothing is given up for it; else the program runs with what io_uring the kernel has.
// --report: what goes wrong is written to FD as one int, errno of the exec or minus that of the filter; the exec that
// succeeds closes FD.
// Exit status: the program's; 126 the filter cannot be had, 127 the program cannot be run (as of a shell).
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#define OTHER_ABI 0x40000000u // x32's calls have this bit
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#define OTHER_ABI 0u
#else
#error "the number of io_uring_setup is to be looked up for this architecture"
#endif

#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425 // on every architecture: the newer calls share their numbers
#endif

static int install(int where_free) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, ~OTHER_ABI),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof(code) / sizeof(code[0]), .filter = code};
    // Before Linux 5.16 a filter would also turn off the processor's speculation past stores, which costs far more.
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program) == 0)
        return 0;
    if (where_free)
        return 0;
    if (errno != EACCES || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        return -1;
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, &program);
}

static int failed(int report, int said, int status) {
    if (report >= 0 && write(report, &said, sizeof(said)) != (ssize_t)sizeof(said))
        perror("woodfrog-no-io-uring: report");
    return status;
}

int main(int argc, char **argv) {
    int where_free = 0, report = -1, first = 1;
    if (first < argc && strcmp(argv[first], "--where-free") == 0) {
        where_free = 1;
        ++first;
    }
    if (first + 1 < argc && strcmp(argv[first], "--report") == 0) {
        report = atoi(argv[first + 1]);
        first += 2;
        if (fcntl(report, F_SETFD, FD_CLOEXEC) != 0) {
            perror("woodfrog-no-io-uring: --report");
            return 126;
        }
    }
    if (argc <= first) {
        fprintf(stderr, "usage: woodfrog-no-io-uring [--where-free] [--report FD] PROGRAM [ARGUMENT...]\n");
        return 126;
    }
    if (install(where_free) != 0) {
        const int reason = errno;
        fprintf(stderr, "woodfrog-no-io-uring: no seccomp filter: %s\n", strerror(reason));
        return failed(report, -reason, 126);
    }
    execvp(argv[first], argv + first);
    const int reason = errno;
    if (report < 0) // who asked for the report says it in words
        fprintf(stderr, "woodfrog-no-io-uring: %s: %s\n", argv[first], strerror(reason));
    return failed(report, reason, 127);
}
