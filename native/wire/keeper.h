// The messages between the node daemon and the keeper, which holds file descriptors for it.
//
// The keeper knows nothing of CUDA: a record is a key and a list of file descriptors (GPU memory exported by a target,
// an arena's memfd, a memfd with the daemon's own notes about them). It must never look into what it holds, and never
// drop a record unless told to.
//
// Transport: AF_UNIX, SOCK_SEQPACKET, path $WOODFROG_RUNTIME_DIR/keeper.sock, owner only (SO_PEERCRED), one client at
// a time (a second connection waits in the backlog until the first closes). Requests and replies are one packet each:
//     KeeperMessage (96 bytes) (+ fd_count descriptors, SCM_RIGHTS)
// Every request gets exactly one reply of the same command; status 0 or an errno. `append` is acknowledged only when
// the keeper owns all its descriptors: what is acknowledged survives the daemon.
#pragma once
#include <stdint.h>

#define WF_KEEPER_MAGIC 0x4b524657u /* "WFRK" */
#define WF_KEEPER_VERSION 1
#define WF_KEEPER_MAX_FDS 240 /* per message, below SCM_MAX_FD */
#define WF_KEEPER_MAX_RECORDS 4096

// name, value
#define WF_KEEPER_COMMANDS(X)                                                                                          \
    X(append, 1)  /* add fds to the record `key` (made if new); reply.total = fds it holds now */                      \
    X(fetch, 2)   /* fds [first, first+240) of `key`; reply.total = fds it holds */                                    \
    X(drop, 3)    /* close all fds of `key` and forget it; ENOENT if unknown */                                        \
    X(list, 4)    /* the record number `first` in order of creation: reply.key, reply.total; ENOENT past the end */    \
    X(replace, 5) /* the fd at index `first` of `key` becomes the one sent (notes are rewritten this way) */           \
    X(stop, 6)    /* leave when nothing is held (EBUSY otherwise); the supervised daemon is not restarted */           \
    X(ping, 7)

struct KeeperMessage {
    uint32_t magic;
    uint16_t version;
    uint16_t command;
    int32_t status;
    uint32_t fd_count;
    uint64_t first;
    uint64_t total;
    char key[64]; /* NUL-terminated, [A-Za-z0-9._:@/-] */
};
#ifdef __cplusplus
static_assert(sizeof(KeeperMessage) == 96);
#endif
