// A collective in miniature: every rank waits on the GPU for what the others have written into memory of theirs.
#include <cstdint>

constexpr uint32_t kValues = 32; // one thread each
constexpr uint32_t kMostRanks = 4;
// Words of a rank's private state: step, its wish to stop, the ranks that wished to at the last step, and the values.
constexpr uint32_t kStep = 0, kStop = 1, kStops = 2, kFirst = 8;
// Words of the memory that it shares: the step that it has written, then two slots in turn.
constexpr uint32_t kSlots = 8, kSlot = 64;

struct Peers {
    uint64_t *of[kMostRanks];
};

// Sums everybody's values: nobody leaves before all have come.
extern "C" __global__ void all_reduce(Peers peers, uint64_t *state, uint32_t rank, uint32_t ranks) {
    const uint32_t i = threadIdx.x;
    const uint64_t step = state[kStep] + 1;
    const uint32_t at = kSlots + static_cast<uint32_t>(step & 1) * kSlot;
    volatile uint64_t *mine = peers.of[rank];
    mine[at + i] = state[kFirst + i] + step;
    if (i == 0)
        mine[at + kValues] = state[kStop];
    __threadfence_system();
    __syncthreads();
    if (i == 0) {
        mine[0] = step;
        for (uint32_t other = 0; other < ranks; ++other) {
            volatile uint64_t *there = peers.of[other];
            while (there[0] < step)
                ;
        }
        __threadfence_system();
        state[kStep] = step;
    }
    __syncthreads();
    uint64_t sum = 0, stops = 0;
    for (uint32_t other = 0; other < ranks; ++other) {
        volatile uint64_t *there = peers.of[other];
        sum += there[at + i];
        stops += there[at + kValues];
    }
    state[kFirst + i] = sum * 6364136223846793005ull + rank * 7 + i;
    if (i == 0)
        state[kStops] = stops;
}

// What a rank does alone between two of them.
extern "C" __global__ void local(uint64_t *state, uint32_t rank) {
    state[kFirst + threadIdx.x] = state[kFirst + threadIdx.x] * 3 + rank + 1;
}
