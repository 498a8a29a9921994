// alloc_churn: allocations and frees of mixed sizes, as a framework makes while it starts. It measures what the
// interposer adds to cuMemAlloc and cuMemFree.
//
//   --steps N (20)       steps, each of --operations M (1000) calls
//   --state-gib X (8)    the most memory that is allocated at one time
//   --log FILE, --pace-ms T, --seed S
//
// Sizes are spread evenly over the powers of two from 4 KiB to 256 MiB: every one of these sizes costs as many calls.
#include <algorithm>
#include <vector>

#include "driver_support.hpp"

namespace {

constexpr unsigned kSmallestLog2 = 12;          // 4 KiB
constexpr unsigned kLargestLog2 = 28;           // 256 MiB
constexpr size_t kMostAllocations = 512;        // the order of what PyTorch's caching allocator holds
constexpr uint64_t kDeviceAlignmentBytes = 256; // what the CUDA programming guide promises at least

struct Allocation {
    CUdeviceptr address;
    uint64_t size_bytes;
};

// xorshift64* (Vigna 2016): the sequence of calls must be the same with and without the interposer.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 1) {}
    uint64_t next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return state_ * 0x2545f4914f6cdd1dULL;
    }
    uint64_t below(uint64_t bound) { return (next() >> 11) % bound; }

  private:
    uint64_t state_;
};

double monotonic_s() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double median(std::vector<double> values) {
    if (values.empty())
        return 0.0;
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

} // namespace

int main(int argc, char **argv) {
    const target::Options options(argc, argv, {{"steps", "20"}, {"operations", "1000"}, {"state-gib", "8"}});
    const target::Log log(options.text("log"));
    const uint64_t steps = options.count("steps");
    const uint64_t operations = options.count("operations");
    const uint64_t most_bytes = static_cast<uint64_t>(options.real("state-gib") * 1024.0) << 20;
    if (most_bytes < (2ULL << 20))
        target::fail("--state-gib must be at least 0.002");

    TARGET_CHECK(cuInit(0));
    CUdevice device = 0;
    TARGET_CHECK(cuDeviceGet(&device, 0));
    target::create_context(device);
    log.start("alloc_churn", most_bytes);

    Random random(options.count("seed"));
    std::vector<Allocation> live;
    uint64_t live_bytes = 0;
    std::vector<double> rates;
    target::Digest digest;
    for (uint64_t step = 1; step <= steps; ++step) {
        const double start_s = monotonic_s();
        for (uint64_t i = 0; i < operations; ++i) {
            uint64_t size_bytes = 0;
            if (live.size() < kMostAllocations && random.below(3) != 0) {
                const unsigned log2 = kSmallestLog2 + static_cast<unsigned>(random.below(kLargestLog2 - kSmallestLog2));
                size_bytes = (1ULL << log2) + random.below((1ULL << log2) + 1);
            }
            if (size_bytes != 0 && live_bytes + size_bytes <= most_bytes) {
                CUdeviceptr address = 0;
                TARGET_CHECK(cuMemAlloc(&address, size_bytes));
                if (address % kDeviceAlignmentBytes != 0)
                    target::fail("cuMemAlloc gave an address that is not aligned");
                live.push_back({address, size_bytes});
                live_bytes += size_bytes;
            } else if (!live.empty()) {
                const size_t victim = random.below(live.size());
                TARGET_CHECK(cuMemFree(live[victim].address));
                live_bytes -= live[victim].size_bytes;
                live[victim] = live.back();
                live.pop_back();
            }
            digest.add(size_bytes);
        }
        rates.push_back(static_cast<double>(operations) / (monotonic_s() - start_s));
        log.step(step, target::hex(digest.value()),
                 ", \"operations_per_s\": " + std::to_string(rates.back()) +
                     ", \"live_bytes\": " + std::to_string(live_bytes));
        target::pace(options.real("pace-ms"));
    }
    for (const Allocation &allocation : live)
        TARGET_CHECK(cuMemFree(allocation.address));
    log.done(steps, digest.value(), ", \"operations_per_s\": " + std::to_string(median(rates)));
    return 0;
}
