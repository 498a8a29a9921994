// The messages between the interposer's agent thread (in a target) and the node daemon.
//
// This file is their only definition. The interposer includes it; the daemon reads the same tables through the
// `woodfrog._native.wire` module (native/wire/module.cpp), which is generated from the WF_* lists below, so the two
// sides cannot differ. It must never depend on CUDA headers, and no message may carry GPU data.
//
// Transport: AF_UNIX, SOCK_SEQPACKET, path $WOODFROG_RUNTIME_DIR/agent.sock. The agent connects; the daemon checks the
// peer with SO_PEERCRED (the pid in `hello` is information only: inside a PID namespace it is another number).
// One message is one packet of at most WF_MAX_MESSAGE bytes:
//     Header | body of its type | header.count entries of its type      (+ header.fd_count file descriptors,
//     SCM_RIGHTS)
// All integers are little-endian; every struct is packed by construction (fields sorted so that no padding arises).
// Every command of the daemon is answered by exactly one `reply` (after zero or more batches) with the same sequence.
//
// Agent states and who may ask what:
//
//     running ──quiesce──▶ quiesced ──export──▶ exported ──release──▶ released ──return──▶ returned
//        ▲                    │                    │                     │                    │
//        └──────resume────────┴───────resume───────┘         (only return leads on)           │
//        └───────────────────────────────────resume───────────────────────────────────────────┘
//
// Processes that come to rest together are `held` on the way: running ──hold──▶ held ──hold──▶ held ──quiesce──▶
// quiesced (or resume). A quiesce that fails opens the gate.
//
// When the daemon's end of the socket closes without `detach`: held, quiesced, exported and returned go back to running
// by themselves (exported fds are closed); released stays and waits. `detach` closes the socket in any state and keeps
// the state. While it has no connection the agent holds no file descriptor of ours and sleeps in sigwaitinfo for the
// thread-directed signal WF_WAKE_SIGNAL, upon which it connects again and says `hello` with its state.
#pragma once
#include <stdint.h>

#define WF_WIRE_MAGIC 0x47524657u /* "WFRG" */
#define WF_WIRE_VERSION 1
#define WF_MAX_MESSAGE 65536
#define WF_MAX_ENTRIES 240 /* per message; also keeps fd_count below the kernel's SCM_MAX_FD of 253 */
#define WF_AGENT_THREAD_NAME "woodfrog-agent"
#define WF_WAKE_SIGNAL_OFFSET 3 /* the wake signal is SIGRTMAX - 3; blocked only in the agent thread */
/* reply.value of `hold`. Before, threads at the gate give the GPU work, `admit` pieces of it, which are counted: a few
   at a time, as long as the GPU is idle again after these. */
#define WF_HELD_IDLE 1u
#define WF_HELD_CAPTURING 2u /* a capture is active: the gate is open still */
#define WF_HELD_SUBMITTED_SHIFT 8
#define WF_HELD_WAITING_SHIFT 32
/* `control_memory`: what was offered and not taken is taken back; memory of the target's own; reply.value is how much
   would be offered (0: none, or none of others); the whole memory behind the descriptor that comes with it */
#define WF_CONTROL_WITHDRAW 0u
#define WF_CONTROL_OWN 1u
#define WF_CONTROL_ASK 2u
#define WF_CONTROL_SHARED 3u
#define WF_FLAG_LAST 1u /* header.flags: the last batch of a series */
#define WF_FLAG_SAME 2u /* of return_batch: the very memory that was released, so it lies where that lay */

// The tables are laid out by hand: clang-format does not come to rest on them.
// clang-format off
// name, value
#define WF_STATES(X) X(running, 0) X(quiesced, 1) X(exported, 2) X(released, 3) X(returned, 4) X(held, 5)

// header.status of a reply: name, value
#define WF_STATUSES(X)                                                                                                 \
    X(ok, 0)                                                                                                           \
    X(timeout, 1)      /* the work in flight did not finish in time; the state is what it was before */                \
    X(wrong_state, 2)  /* the command is not allowed in the agent's state */                                           \
    X(driver_error, 3) /* a driver call failed: body.driver_result and message say which */                            \
    X(no_memory, 4)                                                                                                    \
    X(bad_message, 5)                                                                                                  \
    X(unsupported, 6) /* something the target uses cannot be handed over: message names it */

// kind of an owned allocation: name, value
#define WF_KINDS(X)                                                                                                    \
    X(allocation, 0)     /* cuMemAlloc*, cuMemAllocPitch: one handle of its own */                                     \
    X(slab, 1)           /* a handle that holds many small allocations */                                              \
    X(virtual_handle, 2) /* the application's own cuMemCreate */                                                       \
    X(host_handle, 3)    /* the same in host memory */

// what the agent's time went to: name, value. `all` is the whole command; what no other names is its own work.
#define WF_SPENDINGS(X)                                                                                                \
    X(all, 0) X(waiting, 1) /* for the next packet of a series */ X(sending, 2)                                        \
    X(descriptors, 3)       /* copied, moved to where they are kept, closed */                                         \
    X(gate, 4) X(idle, 5)   /* closing it; work in flight */                                                           \
    X(export_call, 6) X(unmap_call, 7) X(release_call, 8)                                                              \
    X(import_call, 9) X(properties_call, 10) X(map_call, 11) X(access_call, 12) X(registering, 13)

// obstacles seen by the interposer (bits of survey body.obstacles)
#define WF_OBSTACLES(X)                                                                                                \
    X(managed_memory, 0) X(imported_memory, 1) X(legacy_ipc, 2) X(multicast, 3) X(capture_active, 4) X(mig_or_mps, 5)   \
    X(ending, 6) /* the process runs its exit handlers, or has shut the driver down */

// Field codes are those of Python's struct module: B u8, H u16, I u32, i i32, Q u64, q i64, Ns bytes.
// WF_FIELDS_x(F): F(name, C type, array length or 1, struct code)
#define WF_FIELDS_header(F)                                                                                            \
    F(magic, uint32_t, 1, "I")                                                                                         \
    F(version, uint16_t, 1, "H")                                                                                       \
    F(type, uint16_t, 1, "H")                                                                                          \
    F(sequence, uint64_t, 1, "Q")                                                                                      \
    F(count, uint32_t, 1, "I") F(fd_count, uint32_t, 1, "I") F(status, int32_t, 1, "i") F(flags, uint32_t, 1, "I")

// bodies
#define WF_FIELDS_hello(F)                                                                                             \
    F(start_ticks, uint64_t, 1, "Q")                                                                                   \
    F(operation, uint64_t, 1, "Q")                                                                                     \
    F(owned_bytes, uint64_t, 1, "Q")                                                                                   \
    F(owned_count, uint64_t, 1, "Q")                                                                                   \
    F(pid, uint32_t, 1, "I") F(agent_tid, uint32_t, 1, "I") F(state, uint32_t, 1, "I")                                 \
        F(device_count, uint32_t, 1, "I") F(name, char, 64, "64s") F(build, char, 32, "32s")
#define WF_FIELDS_empty(F)
#define WF_FIELDS_quiesce(F)                                                                                           \
    F(operation, uint64_t, 1, "Q") F(timeout_ms, uint32_t, 1, "I") F(admit, uint32_t, 1, "I")
// offer: WF_CONTROL_…; bytes: what to make ready if the agent knows no better.
#define WF_FIELDS_control(F)                                                                                           \
    F(bytes, uint64_t, 1, "Q") F(offer, uint32_t, 1, "I") F(reserved, uint32_t, 1, "I")
#define WF_FIELDS_reply(F)                                                                                             \
    F(elapsed_us, uint64_t, 1, "Q")                                                                                    \
    F(value, uint64_t, 1, "Q")                                                                                         \
    F(driver_result, int32_t, 1, "i") F(state, uint32_t, 1, "I") F(message, char, 232, "232s")
#define WF_FIELDS_image(F) F(operation, uint64_t, 1, "Q")
#define WF_FIELDS_follow(F) F(on, uint32_t, 1, "I") F(reserved, uint32_t, 1, "I")
// What was written since the image of operation `baseline` (0: there is none, everything was). With `everything` no
// ranges follow, and `why` says what made it so. `covered`: launches that had a template.
#define WF_FIELDS_tracking(F)                                                                                          \
    F(baseline, uint64_t, 1, "Q")                                                                                      \
    F(launches, uint64_t, 1, "Q")                                                                                      \
    F(covered, uint64_t, 1, "Q") F(everything, uint32_t, 1, "I") F(reserved, uint32_t, 1, "I") F(why, char, 160, "160s")
#define WF_FIELDS_survey(F)                                                                                            \
    F(owned_bytes, uint64_t, 1, "Q")                                                                                   \
    F(owned_count, uint64_t, 1, "Q")                                                                                   \
    F(allocation_count, uint64_t, 1, "Q")                                                                              \
    F(driver_owned_bytes, uint64_t, 1, "Q")                                                                            \
    F(host_bytes, uint64_t, 1, "Q") F(launches, uint64_t, 1, "Q") F(contexts, uint32_t, 1, "I")                        \
        F(obstacles, uint32_t, 1, "I")

// entries
#define WF_FIELDS_device(F)                                                                                            \
    F(owned_bytes, uint64_t, 1, "Q")                                                                                   \
    F(largest_bytes, uint64_t, 1, "Q")                                                                                 \
    F(uuid, uint8_t, 16, "16s") F(ordinal, uint32_t, 1, "I") F(owned_count, uint32_t, 1, "I")
// One physical allocation; in `export_batch` and `return_batch` entry k goes with file descriptor k.
#define WF_FIELDS_handle(F)                                                                                            \
    F(handle, uint64_t, 1, "Q") F(size, uint64_t, 1, "Q") F(device, uint32_t, 1, "I") F(kind, uint32_t, 1, "I")
// One allocation as the application sees it: [address, address+size) lies at `offset` in `handle`.
#define WF_FIELDS_mapping(F)                                                                                           \
    F(address, uint64_t, 1, "Q")                                                                                       \
    F(size, uint64_t, 1, "Q")                                                                                          \
    F(handle, uint64_t, 1, "Q") F(offset, uint64_t, 1, "Q") F(device, uint32_t, 1, "I") F(kind, uint32_t, 1, "I")

// May have been written: [offset, offset+size) of a handle; it may reach past the handle's end.
#define WF_FIELDS_dirty(F)                                                                                             \
    F(handle, uint64_t, 1, "Q") F(offset, uint64_t, 1, "Q") F(size, uint64_t, 1, "Q")
// A handle whose memory other processes may have too, or of host memory. `exports`: how often the application exported
// it; `imported`: it was imported by the application, from process `exporter` (0: not known). `kept_fd`: our descriptor
// of it there. `host_node`: the NUMA node of host memory, else -1. `by_ipc`: exported by cuIpcGetMemHandle, which only
// processes with our interposer can open.
#define WF_FIELDS_shared(F)                                                                                            \
    F(handle, uint64_t, 1, "Q")                                                                                        \
    F(exports, uint32_t, 1, "I")                                                                                       \
    F(imported, uint32_t, 1, "I") F(exporter, uint32_t, 1, "I") F(kept_fd, int32_t, 1, "i")                            \
    F(host_node, int32_t, 1, "i") F(by_ipc, uint32_t, 1, "I")
// Launches of a kernel since the last report; `covered`: by a template.
#define WF_FIELDS_kernel(F)                                                                                            \
    F(launches, uint64_t, 1, "Q") F(covered, uint32_t, 1, "I") F(reserved, uint32_t, 1, "I") F(name, char, 160, "160s")

// A handle of a snapshot that is still being captured: its units in the page that came with the message (guard.h).
#define WF_FIELDS_guarded(F)                                                                                           \
    F(handle, uint64_t, 1, "Q") F(first, uint32_t, 1, "I") F(count, uint32_t, 1, "I")

// Of the last command of type `command` in this operation: what went to `spending` (WF_SPENDINGS), in how many pieces.
#define WF_FIELDS_spent(F)                                                                                             \
    F(ns, uint64_t, 1, "Q")                                                                                            \
    F(count, uint32_t, 1, "I") F(command, uint32_t, 1, "I") F(spending, uint32_t, 1, "I") F(reserved, uint32_t, 1, "I")

// Messages: name, number, body, entry (empty: none), from ("agent" or "daemon")
#define WF_MESSAGES(M)                                                                                                 \
    M(hello, 1, hello, empty, "agent")            /* first packet of every connection; not answered */                 \
    M(reply, 2, reply, empty, "agent")            /* ends every command */                                             \
    M(survey_result, 3, survey, device, "agent")  /* before the reply to survey */                                     \
    M(export_batch, 4, empty, handle, "agent")    /* before the reply to export; carries fds */                        \
    M(mapping_batch, 5, empty, mapping, "agent")  /* before the reply to export, after the export batches */           \
    M(dirty_batch, 6, tracking, dirty, "agent")   /* before the reply to dirty, if launches are followed */            \
    M(kernel_batch, 7, empty, kernel, "agent")    /* what was launched, most often first: after the dirty batches,   \
                                                     and before the reply to guard_end */                              \
    M(spent_batch, 27, empty, spent, "agent")     /* before the reply to spent */                                      \
    M(shared_batch, 20, empty, shared, "agent")   /* before the reply to export, if there is any */                    \
    M(hosted_batch, 28, empty, handle, "agent")   /* before the reply to hosted; carries fds */                        \
    M(replaced_batch, 29, empty, handle, "agent") /* before the reply to replace_batch: which were replaced */         \
    M(accessed_batch, 30, empty, handle, "agent") /* before the reply to accessed: in the order of their first use */  \
    M(survey, 32, empty, empty, "daemon")         /* stops nothing */                                                  \
    M(quiesce, 33, quiesce, empty, "daemon")      /* gate closed, all contexts idle, or timeout and gate open */       \
    M(dirty, 42, image, empty, "daemon")          /* quiesced or exported: what was written, for that image */         \
    M(committed, 43, image, empty, "daemon")      /* that image is: what was told for it need not be told again */     \
    M(export_memory, 34, empty, empty, "daemon")  /* send an fd for every owned handle, keep everything mapped */      \
    M(release_memory, 35, empty, empty, "daemon") /* unmap, release, close the fds; addresses stay reserved */         \
    M(detach, 36, empty, empty, "daemon")         /* reply, then close the socket and sleep for the wake signal */     \
    M(return_batch, 37, empty, handle, "daemon")  /* fds; import, map, set access; reply only after the LAST batch */  \
    M(resume, 38, empty, empty, "daemon")         /* gate open */                                                      \
    M(ping, 39, empty, empty, "daemon")                                                                                \
    M(control_memory, 40, control, empty, "daemon") /* memory for the control state, made ready while running */       \
    M(guard, 45, empty, guarded, "daemon")        /* returned: the first carries the page; reply after the LAST one */  \
    M(guard_end, 46, empty, empty, "daemon")      /* nothing is captured any more; reply.value: how often one waited */ \
    M(export_ahead, 48, empty, empty, "daemon") /* running: descriptors are made and kept; reply.value says how many */  \
    M(stop_clock, 49, empty, empty, "daemon") /* running: PyTorch's clock stands still from the coming quiesce to the resume;
                                                 reply.value: of how many libraries (0: it cannot be) */              \
    M(hold, 44, quiesce, empty, "daemon") /* running or held: gate closed, work may go on; reply.value is WF_HELD_… */ \
    M(hosted, 60, empty, empty, "daemon") /* any state: device memory that lies on host memory (hosted.hpp) */        \
    M(replace_batch, 61, empty, handle, "daemon") /* quiesced; fds of device memory with the same contents, which takes
                                                     the place of the host memory; reply only after the LAST batch */  \
    M(accessed, 62, empty, empty, "daemon") /* which handles launches have named since follow_access began */          \
    M(spent, 58, empty, empty, "daemon") /* any state: where the time of this operation's commands went */             \
    M(follow_access, 63, follow, empty, "daemon") /* at rest: note what launches name; or, in any state, stop */
// clang-format on

#ifdef __cplusplus
namespace woodfrog::wire {

#define WF_DECLARE_FIELD(name, type, length, code) Field<type, length>::Type name{};
template <typename T, int N> struct Field {
    using Type = T[N];
};
template <typename T> struct Field<T, 1> {
    using Type = T;
};
#define WF_DECLARE(struct_name, list)                                                                                  \
    struct struct_name {                                                                                               \
        list(WF_DECLARE_FIELD)                                                                                         \
    };
WF_DECLARE(Header, WF_FIELDS_header)
WF_DECLARE(Hello, WF_FIELDS_hello)
WF_DECLARE(Quiesce, WF_FIELDS_quiesce)
WF_DECLARE(Control, WF_FIELDS_control)
WF_DECLARE(Reply, WF_FIELDS_reply)
WF_DECLARE(Survey, WF_FIELDS_survey)
WF_DECLARE(Device, WF_FIELDS_device)
WF_DECLARE(Handle, WF_FIELDS_handle)
WF_DECLARE(Mapping, WF_FIELDS_mapping)
WF_DECLARE(Image, WF_FIELDS_image)
WF_DECLARE(Follow, WF_FIELDS_follow)
WF_DECLARE(Tracking, WF_FIELDS_tracking)
WF_DECLARE(Dirty, WF_FIELDS_dirty)
WF_DECLARE(Kernel, WF_FIELDS_kernel)
WF_DECLARE(Shared, WF_FIELDS_shared)
WF_DECLARE(Guarded, WF_FIELDS_guarded)
WF_DECLARE(Spent, WF_FIELDS_spent)
#undef WF_DECLARE
#undef WF_DECLARE_FIELD

#define WF_ENUM_ENTRY(name, value) name = value,
enum class State : uint32_t { WF_STATES(WF_ENUM_ENTRY) };
enum class Status : int32_t { WF_STATUSES(WF_ENUM_ENTRY) };
enum class Kind : uint32_t { WF_KINDS(WF_ENUM_ENTRY) };
enum class Spending : uint32_t { WF_SPENDINGS(WF_ENUM_ENTRY) };
#undef WF_ENUM_ENTRY
#define WF_OBSTACLE_ENTRY(name, bit) obstacle_##name = 1u << bit,
enum Obstacle : uint32_t { WF_OBSTACLES(WF_OBSTACLE_ENTRY) };
#undef WF_OBSTACLE_ENTRY
#define WF_TYPE_ENTRY(name, number, body, entry, from) name = number,
enum class Type : uint16_t { WF_MESSAGES(WF_TYPE_ENTRY) };
#undef WF_TYPE_ENTRY

static_assert(sizeof(Header) == 32 && sizeof(Reply) == 256 && sizeof(Handle) == 24 && sizeof(Mapping) == 40);
static_assert(sizeof(Header) + sizeof(Hello) < WF_MAX_MESSAGE);
static_assert(sizeof(Header) + WF_MAX_ENTRIES * sizeof(Mapping) < WF_MAX_MESSAGE);
static_assert(sizeof(Header) + sizeof(Tracking) + WF_MAX_ENTRIES * sizeof(Dirty) < WF_MAX_MESSAGE);
static_assert(sizeof(Header) + WF_MAX_ENTRIES * sizeof(Kernel) < WF_MAX_MESSAGE);
static_assert(sizeof(Shared) == 32 && sizeof(Guarded) == 16 && sizeof(Spent) == 24);

} // namespace woodfrog::wire
#endif
