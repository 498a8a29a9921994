// The CUDA kernels that were compiled into this module (kernels/), as they are in the context of one GPU, and which way
// its memory is hashed. Loaded when first needed; belongs to the Context, with which it ends.
#pragma once
#include "driver.hpp"

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace woodfrog::transfer {

class Context;

// A cubin for GPUs of compute capability capability/10.capability%10, or (capability 0) PTX text for any.
struct KernelImage {
    int capability;
    const unsigned char *data;
    const unsigned char *end; // a zero byte stands there
};

// In a file that kernels/embed.py writes; empty where there was no nvcc.
const std::vector<KernelImage> &kernel_images();

// A hash kernel: all give the same digests. Which is fastest is a matter of measurement (bench/hash.py).
struct HashVariant {
    const char *name;
    unsigned threads; // of a block; leaves of a tile
};

// The one in use first. Their kernels are woodfrog_hash_NAME.
constexpr HashVariant hash_variants[] = {
    {"staged_256", 256},
    {"direct_128", 128},
};

enum class HashWay {
    gpu,  // by a kernel
    cpu,  // by threads that read the memory where it is: the simulated GPU's is host memory
    copy, // by threads, through a bounded host buffer
};

class HashBuffers;

class Kernels {
  public:
    explicit Kernels(const Context &context); // use Context::kernels()
    Kernels(const Kernels &) = delete;
    Kernels &operator=(const Kernels &) = delete;
    ~Kernels();

    // Never fails: a kernel that cannot be loaded is a reason to copy.
    HashWay way() const;
    bool simulated() const { return simulated_; }

    // TransferError(-ENOTSUP) with the reason when the kernels cannot be loaded into this context.
    CUfunction function(const char *name) const;

    // What a hash_device call works with is kept for the next one: allocating pinned memory takes as long as hashing
    // several gigabytes. Null if there is none, or another call has it.
    std::unique_ptr<HashBuffers> take_buffers() const;
    void keep_buffers(std::unique_ptr<HashBuffers> buffers) const;

  private:
    void load() const;
    bool try_image(const KernelImage &image) const;

    const Context &context_;
    bool simulated_ = false;
    int capability_ = 0;

    mutable std::mutex mutex_;
    mutable bool tried_ = false;
    mutable CUmodule module_ = nullptr;
    mutable std::string reason_; // why there is no module
    mutable std::unique_ptr<HashBuffers> buffers_;
};

} // namespace woodfrog::transfer
