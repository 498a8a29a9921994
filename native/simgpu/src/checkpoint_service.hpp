// How another process reaches the checkpoint machine of this one: a thread that reads calls from a pipe, and connects
// to whoever called.
//
// The pipe has no name of its own, so any number of processes that were restored from one image can be reached: a memfd
// says which descriptor it is, and whoever may look into /proc/<pid>/fd opens it there. One connection carries one
// request and one reply, then the service closes first, so that at a CRIU dump none is open. Only the owner of the
// process and root are admitted.
#pragma once

#include <cstdint>
#include <vector>

#include <cuda.h>

namespace simgpu {

inline constexpr const char *kServiceFile = "checkpoint-service"; // the memfd: a u32, the pipe's read end
inline constexpr const char *kServiceThreadName = "simgpu-service";
inline constexpr std::uint32_t kServiceMagic = 0x77667368; // "wfsh", changes with the layout below
inline constexpr unsigned kMaxGpuPairs = 64;

// What is written into the pipe, in one piece: where the caller listens, a name as the kernel's autobind gives it.
struct ServiceCall {
    std::uint32_t magic = kServiceMagic;
    std::uint32_t length = 0;
    char name[24] = {}; // an abstract one, without the leading NUL
};

enum class CheckpointAction : std::uint32_t {
    kGetState = 1,
    kLock,
    kCheckpoint,
    kRestore,
    kUnlock,
    // Of CUDA 13.4: the device memory is lent to the caller, until it says that it has copied it, or cannot.
    kLend,
    kLendBack,
    kComplete,
    kAbandon,
    kHold // a connection that stays: when it ends before the loan does, the caller has died, and the loan is abandoned
};

struct CheckpointRequest {
    std::uint32_t magic = kServiceMagic;
    CheckpointAction action = CheckpointAction::kGetState;
    std::uint32_t timeout_ms = 0;
    std::uint32_t pair_count = 0;
    CUcheckpointGpuPair pairs[kMaxGpuPairs] = {};
};

struct CheckpointReply {
    std::uint32_t magic = kServiceMagic;
    std::uint32_t result = CUDA_ERROR_UNKNOWN;
    std::uint32_t state = CU_PROCESS_STATE_FAILED;
    std::uint32_t descriptor_count = 0; // of lent memory: they follow, kMaxDescriptors with a byte each time
};

inline constexpr unsigned kMaxDescriptors = 250; // of one message: SCM_MAX_FD is 253

// One request to the service of another process. Descriptors that come with the answer are the caller's; without a
// place for them they are closed. Throws an Error when there is no such process, or no answer.
CheckpointReply ask(int pid, const CheckpointRequest &request, std::vector<int> *descriptors = nullptr);

// For as long as the caller has what was lent: a connection, the caller's, that tells the other process that it lives.
int hold_loan(int pid);

// Throws CUDA_ERROR_OPERATING_SYSTEM when there can be no such thread.
void start_checkpoint_service();

} // namespace simgpu
