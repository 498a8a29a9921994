// fill_state: a target that is nothing but state. It fills X GiB of GPU memory with a pattern, then steps a counter in
// module memory and, on SIGUSR1, checks every byte on the GPU; on SIGUSR2 it writes all of it anew and then checks it.
// The benchmarks of the data path and of whole cycles measure with it, since its size is exact and its contents can be
// verified in milliseconds.
//
//   --state-gib X     GPU state in GiB (1)          --buffers N   allocations it lies in (8)
//   --steps N         steps; 0: until SIGTERM (0)   --write-mib M rewrite this much of the state in each step (0)
//   --pace-ms T       pause after each step (5)     --log FILE, --seed S
#include <csignal>
#include <vector>

#include "driver_support.hpp"

TARGET_EMBED_PTX(fill_state_ptx);

namespace {

volatile std::sig_atomic_t verify_wanted = 0;
volatile std::sig_atomic_t rewrite_wanted = 0;
volatile std::sig_atomic_t stop_wanted = 0;

void on_verify(int) {
    verify_wanted = 1;
}
void on_rewrite(int) {
    rewrite_wanted = 1;
    verify_wanted = 1;
}
void on_stop(int) {
    stop_wanted = 1;
}

constexpr uint64_t kMebibyte = 1ULL << 20;
constexpr unsigned kThreads = 256;

// A piece of the state that is written and checked as a whole; it never crosses the end of a buffer.
struct Region {
    CUdeviceptr address;
    uint64_t size_bytes;
    uint64_t first_index; // of its first word in the pattern
    uint64_t generation;  // how often it was rewritten
};

struct Verdict {
    uint64_t wrong_words;
    uint64_t checksum;
};

class State {
  public:
    State(CUdevice device, CUmodule module, uint64_t size_bytes, uint64_t buffers, uint64_t region_bytes, uint64_t seed)
        : device_(device), fill_(target::kernel_of(module, "fill")), verify_(target::kernel_of(module, "verify")),
          seed_(seed) {
        TARGET_CHECK(cuMemAlloc(&result_, 2 * sizeof(uint64_t)));
        uint64_t index = 0;
        for (uint64_t b = 0; b < buffers && index * 8 < size_bytes; ++b) {
            uint64_t buffer_bytes = (size_bytes / buffers) / 8 * 8;
            if (b + 1 == buffers)
                buffer_bytes = (size_bytes - index * 8) / 8 * 8;
            if (buffer_bytes == 0)
                continue;
            CUdeviceptr address = 0;
            TARGET_CHECK(cuMemAlloc(&address, buffer_bytes));
            for (uint64_t offset = 0; offset < buffer_bytes; offset += region_bytes) {
                const uint64_t size = std::min(region_bytes, buffer_bytes - offset);
                regions_.push_back({address + offset, size, index + offset / 8, 0});
            }
            index += buffer_bytes / 8;
        }
        for (Region &region : regions_)
            write(region);
        TARGET_CHECK(cuCtxSynchronize());
    }

    // Rewrites the next `size_bytes` (rounded up to regions) with the next generation of the pattern.
    void rewrite(uint64_t size_bytes) {
        for (uint64_t done = 0; done < size_bytes && !regions_.empty();) {
            Region &region = regions_[next_];
            next_ = (next_ + 1) % regions_.size();
            ++region.generation;
            write(region);
            done += region.size_bytes;
        }
    }

    Verdict verify() const {
        TARGET_CHECK(cuMemsetD8(result_, 0, 2 * sizeof(uint64_t)));
        for (const Region &region : regions_)
            target::launch(verify_, target::blocks_for(device_, region.size_bytes / 8, kThreads), kThreads, nullptr,
                           region.address, region.size_bytes / 8, region.first_index, region.generation, seed_,
                           result_);
        uint64_t result[2] = {};
        TARGET_CHECK(cuMemcpyDtoH(result, result_, sizeof result));
        return {result[0], result[1]};
    }

  private:
    void write(const Region &region) {
        target::launch(fill_, target::blocks_for(device_, region.size_bytes / 8, kThreads), kThreads, nullptr,
                       region.address, region.size_bytes / 8, region.first_index, region.generation, seed_);
    }

    CUdevice device_;
    CUfunction fill_;
    CUfunction verify_;
    uint64_t seed_;
    CUdeviceptr result_ = 0;
    std::vector<Region> regions_;
    size_t next_ = 0;
};

} // namespace

int main(int argc, char **argv) {
    const target::Options options(
        argc, argv, {{"state-gib", "1"}, {"buffers", "8"}, {"steps", "0"}, {"write-mib", "0"}, {"pace-ms", "5"}});
    const target::Log log(options.text("log"));
    const uint64_t state_bytes = static_cast<uint64_t>(options.real("state-gib") * 1024.0) * kMebibyte;
    const uint64_t buffers = std::max<uint64_t>(1, options.count("buffers"));
    const uint64_t steps = options.count("steps");
    const uint64_t write_bytes = options.count("write-mib") * kMebibyte;
    // Regions of 256 MiB keep the launches few; with rewriting they are as large as one step's share.
    const uint64_t region_bytes = write_bytes != 0 ? std::min(write_bytes, 64 * kMebibyte) : 256 * kMebibyte;

    struct sigaction action{};
    action.sa_handler = on_verify;
    sigaction(SIGUSR1, &action, nullptr);
    action.sa_handler = on_rewrite;
    sigaction(SIGUSR2, &action, nullptr);
    action.sa_handler = on_stop;
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGINT, &action, nullptr);

    TARGET_CHECK(cuInit(0));
    CUdevice device = 0;
    TARGET_CHECK(cuDeviceGet(&device, 0));
    target::create_context(device);
    CUmodule module = nullptr;
    TARGET_CHECK(cuModuleLoadData(&module, fill_state_ptx));
    const CUfunction step_kernel = target::kernel_of(module, "step");
    CUdeviceptr step_result = 0;
    TARGET_CHECK(cuMemAlloc(&step_result, sizeof(uint64_t)));
    State state(device, module, state_bytes, buffers, region_bytes, options.count("seed"));
    log.start("fill_state", state_bytes);

    target::Digest digest;
    uint64_t step = 0;
    while (!stop_wanted && (steps == 0 || step < steps)) {
        ++step;
        target::launch(step_kernel, 1, 1, nullptr, step_result);
        if (write_bytes != 0)
            state.rewrite(write_bytes);
        if (rewrite_wanted) {
            rewrite_wanted = 0;
            state.rewrite(state_bytes);
        }
        uint64_t counter = 0;
        TARGET_CHECK(cuMemcpyDtoH(&counter, step_result, sizeof counter));
        digest.add(counter);
        log.step(step, target::hex(counter));
        if (verify_wanted) {
            verify_wanted = 0;
            const Verdict verdict = state.verify();
            log.line("{\"verify\": true, \"step\": " + std::to_string(step) +
                     ", \"wrong_words\": " + std::to_string(verdict.wrong_words) + ", \"checksum\": \"" +
                     target::hex(verdict.checksum) + "\"}");
        }
        target::pace(options.real("pace-ms"));
    }
    const Verdict verdict = state.verify();
    digest.add(verdict.checksum);
    log.done(step, digest.value(), ", \"wrong_words\": " + std::to_string(verdict.wrong_words));
    return verdict.wrong_words == 0 ? 0 : 1;
}
