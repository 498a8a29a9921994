// The page that a target and the node daemon share while a snapshot by copy-on-write drains (a memfd; message `guard`).
//
// The memory of the snapshot is divided into units of `unit_bytes` (each handle into its own, the last one may be
// short). A unit whose state is not WF_UNIT_FREE must not be written: the target makes it WF_UNIT_WANTED, counts
// `calls` up and wakes the daemon there, and waits at `captured` until the state is WF_UNIT_FREE or `over` is set.
// Whoever writes memory of the snapshot without that is found out, because the daemon compares what it has captured
// with the digests taken while the target was at rest.
//
// Neither side trusts the other: the daemon keeps its own account of what is captured and takes from here only that
// somebody waits; the target checks all sizes, and goes on by itself when nothing moves (`given_up`).
#pragma once
#include <stdint.h>

#define WF_GUARD_MAGIC 0x47524657434f5721ull
#define WF_GUARD_VERSION 1
#define WF_GUARD_MAX_UNITS (1u << 26) /* 128 TiB of units of 2 MiB */

#define WF_UNIT_FREE 0u   /* may be written */
#define WF_UNIT_KEPT 1u   /* not captured yet */
#define WF_UNIT_WANTED 2u /* likewise, and a thread waits for it */

struct GuardPage {
    uint64_t magic;
    uint32_t version;
    uint32_t units;
    uint64_t unit_bytes;
    uint32_t calls;    /* futex of the daemon: something is wanted, or it is over */
    uint32_t captured; /* futex of the target: something was captured, or it is over */
    uint32_t over;     /* 1: nothing need be waited for any more */
    uint32_t given_up; /* how many threads of the target went on without waiting to the end */
    uint64_t waits;    /* calls of the target that waited */
    uint64_t waited_ns;
    /* `units` states follow at WF_GUARD_STATES_AT, 32 bits each */
};
#define WF_GUARD_STATES_AT 4096
#define WF_GUARD_BYTES(units) (WF_GUARD_STATES_AT + sizeof(uint32_t) * (uint64_t)(units))
#ifdef __cplusplus
static_assert(sizeof(GuardPage) <= WF_GUARD_STATES_AT);
#endif
