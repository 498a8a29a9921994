// BLAKE3 of many pieces of one GPU's memory in few launches: plans the kernels' tables, and collects what they write.
#pragma once
#include "digests.hpp"
#include "kernels.hpp"
#include "progress.hpp"

#include <cstdint>
#include <vector>

namespace woodfrog::transfer {

// Not empty; its chunks' digests are numbers first_chunk and so on of the result.
struct HashPart {
    CUdeviceptr address;
    uint64_t size;
    uint64_t first_chunk;
};

// Sets the digests of all chunks of the parts, which are the context's. Progress counts a batch when it is done and may
// cancel between two batches. Throws when nothing of it runs any more: TransferError(-ENOTSUP) without kernels, with
// CUDA_ERROR_OUT_OF_MEMORY before progress has begun if the GPU is too full even for the code. There must be a part.
void hash_by_kernel(const Context &context, const HashVariant &variant, const std::vector<HashPart> &parts,
                    uint64_t chunk_bytes, DigestList &digests, Progress &progress);

} // namespace woodfrog::transfer
