// Kernels with the tensor cores' and the copy engine's instructions, as inline assembly. The simulated GPU does not run
// all of them; what they touch is known by construction.
#include <cstdint>

__device__ inline unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// One warp multiplies a 16x8 by an 8x8 tile of tf32 numbers; each block one tile of the result.
extern "C" __global__ void mma_tiles(const float *a, const float *b, float *c, int columns, int depth) {
    int lane = threadIdx.x, group = lane >> 2, quad = lane & 3;
    int row = blockIdx.y * 16, column = blockIdx.x * 8;
    float d[4] = {0, 0, 0, 0};
    for (int k = 0; k < depth; k += 8) {
        std::uint32_t fa[4], fb[2];
        fa[0] = __float_as_uint(a[(row + group) * depth + k + quad]);
        fa[1] = __float_as_uint(a[(row + group + 8) * depth + k + quad]);
        fa[2] = __float_as_uint(a[(row + group) * depth + k + quad + 4]);
        fa[3] = __float_as_uint(a[(row + group + 8) * depth + k + quad + 4]);
        fb[0] = __float_as_uint(b[(k + quad) * columns + column + group]);
        fb[1] = __float_as_uint(b[(k + quad + 4) * columns + column + group]);
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[0]), "r"(fb[1]));
    }
    c[(row + group) * columns + column + 2 * quad] = d[0];
    c[(row + group) * columns + column + 2 * quad + 1] = d[1];
    c[(row + group + 8) * columns + column + 2 * quad] = d[2];
    c[(row + group + 8) * columns + column + 2 * quad + 1] = d[3];
}

extern "C" __global__ void ldmatrix_copy(const uint4 *in, unsigned *out) {
    __shared__ uint4 tile[32];
    tile[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
    __syncwarp();
    unsigned r0, r1, r2, r3;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(shared_address(&tile[threadIdx.x])));
    out[blockIdx.x * 32 + threadIdx.x] = r0 + r1 + r2 + r3;
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void bulk_copy(const float *in, float *out, int bytes) {
    __shared__ alignas(128) float stage[1024];
    __shared__ std::uint64_t barrier;
    if (threadIdx.x == 0) {
        unsigned b = shared_address(&barrier), s = shared_address(stage);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(b));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(b), "r"(bytes) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(s),
            "l"(in + blockIdx.x * 1024), "r"(bytes), "r"(b)
            : "memory");
        asm volatile("{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra "
                     "wait;\n}\n" ::"r"(b)
                     : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(out + blockIdx.x * 1024),
                     "r"(s), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n" ::: "memory");
    }
}

// One warp group multiplies a 64x16 by a 16x8 tile of half-precision numbers out of shared memory; sm_90a has wgmma.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
extern "C" __global__ void wgmma_tile(const uint4 *a, const uint4 *b, float *c, int columns) {
    __shared__ alignas(128) uint4 left[128], right[16];
    left[threadIdx.x] = a[blockIdx.y * 128 + threadIdx.x];
    if (threadIdx.x < 16)
        right[threadIdx.x] = b[blockIdx.x * 16 + threadIdx.x];
    __syncthreads();
    std::uint64_t descriptor_a =
        (shared_address(left) & 0x3FFFF) >> 4 | std::uint64_t{8} << 16 | std::uint64_t{16} << 32;
    std::uint64_t descriptor_b =
        (shared_address(right) & 0x3FFFF) >> 4 | std::uint64_t{8} << 16 | std::uint64_t{16} << 32;
    float d[4] = {0, 0, 0, 0};
    asm volatile("wgmma.fence.sync.aligned;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;\n"
                 "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(descriptor_a), "l"(descriptor_b)
                 : "memory");
    int row = blockIdx.y * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    int column = blockIdx.x * 8 + threadIdx.x % 4 * 2;
    c[row * columns + column] = d[0];
    c[row * columns + column + 1] = d[1];
    c[(row + 8) * columns + column] = d[2];
    c[(row + 8) * columns + column + 1] = d[3];
}
#endif

extern "C" __global__ void tensor_map_copy(const void *map, float *out) {
    __shared__ alignas(128) float stage[1024];
    __shared__ std::uint64_t barrier;
    unsigned b = shared_address(&barrier), s = shared_address(stage);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n" ::
            "r"(s),
        "l"(map), "r"(0), "r"(static_cast<int>(blockIdx.x)), "r"(b)
        : "memory");
    out[threadIdx.x] = stage[threadIdx.x];
}
#endif
