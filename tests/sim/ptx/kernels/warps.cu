// Operations between the lanes of a warp.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

extern "C" __global__ void shuffles(const int *in, int *out) {
    const int i = threadIdx.x;
    const int value = in[i];
    int *o = out + i * 8;
    o[0] = __shfl_sync(0xffffffffu, value, i * 7 + 3);
    o[1] = __shfl_up_sync(0xffffffffu, value, 3);
    o[2] = __shfl_down_sync(0xffffffffu, value, 5);
    o[3] = __shfl_xor_sync(0xffffffffu, value, 9);
    o[4] = __shfl_sync(0xffffffffu, value, i + 1, 8);
    o[5] = __shfl_up_sync(0xffffffffu, value, 2, 4);
    o[6] = __shfl_down_sync(0xffffffffu, value, 1, 16);
    o[7] = static_cast<int>(__shfl_xor_sync(0xffffffffu, static_cast<long long>(value) << 20, 1, 8) >> 20);
}

extern "C" __global__ void votes(const int *in, unsigned *out) {
    const int i = threadIdx.x;
    unsigned *o = out + i * 6;
    o[0] = __ballot_sync(0xffffffffu, in[i] % 3 == 0);
    o[1] = __any_sync(0xffffffffu, in[i] == 1000);
    o[2] = __all_sync(0xffffffffu, in[i] >= 0);
    o[3] = __match_any_sync(0xffffffffu, in[i] % 4);
    int all;
    o[4] = __match_all_sync(0xffffffffu, static_cast<unsigned long long>(in[i]) >> 40, &all);
    o[5] = static_cast<unsigned>(all);
}

extern "C" __global__ void reductions(const int *in, int *out) {
    const int i = threadIdx.x;
    int *o = out + i * 6;
    o[0] = __reduce_add_sync(0xffffffffu, in[i]);
    o[1] = __reduce_min_sync(0xffffffffu, in[i]);
    o[2] = __reduce_max_sync(0xffffffffu, in[i]);
    o[3] = static_cast<int>(__reduce_and_sync(0xffffffffu, static_cast<unsigned>(in[i]) | 0xf0u));
    o[4] = static_cast<int>(__reduce_xor_sync(0xffffffffu, static_cast<unsigned>(in[i])));
    o[5] = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned>(in[i])));
}

// The lanes of one shuffle come to it from both sides of a branch.
extern "C" __global__ void meeting_from_two_places(const int *in, int *out) {
    const int i = threadIdx.x;
    int result;
    if (i % 2 == 0) {
        result = __shfl_xor_sync(0xffffffffu, in[i], 1) + 1;
    } else {
        result = __shfl_xor_sync(0xffffffffu, in[i] * 2, 1) + 2;
    }
    // Each half of the warp for itself.
    if (i < 16)
        result += __shfl_sync(0x0000ffffu, in[i], 3);
    else
        result += __shfl_sync(0xffff0000u, in[i], 20);
    __syncwarp();
    out[i] = result;
}

extern "C" __global__ void exited_lanes(int *out) {
    const int i = threadIdx.x;
    if (i >= 20)
        return;
    out[i] = static_cast<int>(__ballot_sync(0xffffffffu, i % 2 == 0)) + __popc(__activemask());
}

extern "C" __global__ void lane_masks(unsigned *out) {
    unsigned eq, lt, le, gt, ge;
    asm("mov.u32 %0, %%lanemask_eq;" : "=r"(eq));
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lt));
    asm("mov.u32 %0, %%lanemask_le;" : "=r"(le));
    asm("mov.u32 %0, %%lanemask_gt;" : "=r"(gt));
    asm("mov.u32 %0, %%lanemask_ge;" : "=r"(ge));
    unsigned *o = out + threadIdx.x * 5;
    o[0] = eq;
    o[1] = lt;
    o[2] = le;
    o[3] = gt;
    o[4] = ge;
}

extern "C" __global__ void tiles(const int *in, int *out) {
    const auto block = cg::this_thread_block();
    const auto tile = cg::tiled_partition<8>(block);
    const int i = block.thread_rank();
    int sum = cg::reduce(tile, in[i], cg::plus<int>());
    if (i % 3 == 0) {
        const auto together = cg::coalesced_threads();
        sum += static_cast<int>(together.size()) * 1000 + together.shfl(in[i], 0);
    }
    out[i] = sum;
}

extern "C" __global__ void grid_barrier(int *values, int *out, int rounds) {
    const auto grid = cg::this_grid();
    const int i = grid.thread_rank();
    const int n = grid.size();
    for (int k = 0; k < rounds; ++k) {
        const int next = values[(i + 33) % n] + k;
        grid.sync();
        values[i] = next;
        grid.sync();
    }
    out[i] = values[n - 1 - i];
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_exchange(int *out) {
    __shared__ int value[32];
    const auto cluster = cg::this_cluster();
    value[threadIdx.x] = static_cast<int>(blockIdx.x * 100 + threadIdx.x);
    cluster.sync();
    const unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
    const int *remote = cluster.map_shared_rank(value, next);
    out[blockIdx.x * 32 + threadIdx.x] = remote[31 - threadIdx.x];
    cluster.sync();
}
extern "C" __global__ void electing(int *out) {
    unsigned elected;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(elected));
    out[threadIdx.x] = static_cast<int>(elected);
}
#endif
