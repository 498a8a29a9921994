// launch_loop: launches of a tiny kernel, one after the other, as fast as the driver takes them. It measures what the
// interposer adds to a launch.
//
//   --steps N (20)   steps, each of --launches M (20000) launches;  --log FILE, --pace-ms T, --hold FILE
//
// A step is launched in bursts that fit the launch queue, each followed by a wait, so that two rates come out: all
// launches over all time (`launches_per_s`) and the time that the calls alone take (`submit_ns_per_launch`), which a
// queue that is full would otherwise hide.
//
// Every other burst calls the driver's own function, found in the driver's symbol table, which no interposer sees: what
// the calls of the two kinds of bursts take differs by what an interposer adds, and by nothing else that the machine
// does (`direct_ns_per_launch`).
#include <algorithm>
#include <vector>

#include "../../native/interpose/elf_lookup.hpp"
#include "driver_support.hpp"

TARGET_EMBED_PTX(launch_loop_ptx);

namespace {

constexpr uint64_t kBurst = 500; // below the 1024 launches that a stream queues before cuLaunchKernel blocks

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
    const target::Options options(argc, argv, {{"steps", "20"}, {"launches", "20000"}});
    const target::Log log(options.text("log"));
    const uint64_t steps = options.count("steps");
    const uint64_t launches = options.count("launches");

    TARGET_CHECK(cuInit(0));
    CUdevice device = 0;
    TARGET_CHECK(cuDeviceGet(&device, 0));
    target::create_context(device);
    CUmodule module = nullptr;
    TARGET_CHECK(cuModuleLoadData(&module, launch_loop_ptx));
    const CUfunction tick = target::kernel_of(module, "tick");
    CUstream stream = nullptr;
    TARGET_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr counter = 0;
    TARGET_CHECK(cuMemAlloc(&counter, sizeof(uint64_t)));
    TARGET_CHECK(cuMemsetD8(counter, 0, sizeof(uint64_t)));
    const auto direct =
        reinterpret_cast<decltype(&cuLaunchKernel)>(woodfrog::interpose::elf_lookup("libcuda.so.1", "cuLaunchKernel"));
    if (direct == nullptr)
        target::fail("libcuda.so.1 has no cuLaunchKernel");
    log.start("launch_loop", sizeof(uint64_t));

    target::Digest digest;
    std::vector<double> rates;
    std::vector<double> submit_ns, direct_ns;
    void *arguments[] = {&counter};
    for (uint64_t step = 1; step <= steps; ++step) {
        double submit_s[2] = {0.0, 0.0}; // as every program calls it; directly
        uint64_t submitted[2] = {0, 0};
        unsigned kind = step % 2; // which one goes first
        const double start_s = monotonic_s();
        for (uint64_t done = 0; done < launches;) {
            const uint64_t burst = std::min(kBurst, launches - done);
            const double burst_start_s = monotonic_s();
            if (kind == 0)
                for (uint64_t i = 0; i < burst; ++i)
                    TARGET_CHECK(cuLaunchKernel(tick, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
            else
                for (uint64_t i = 0; i < burst; ++i)
                    TARGET_CHECK(direct(tick, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
            submit_s[kind] += monotonic_s() - burst_start_s;
            submitted[kind] += burst;
            TARGET_CHECK(cuStreamSynchronize(stream));
            done += burst;
            kind ^= 1;
        }
        const double elapsed_s = monotonic_s() - start_s;
        uint64_t value = 0;
        TARGET_CHECK(cuMemcpyDtoH(&value, counter, sizeof value));
        digest.add(value);
        rates.push_back(static_cast<double>(launches) / elapsed_s);
        submit_ns.push_back(1e9 * submit_s[0] / static_cast<double>(std::max<uint64_t>(1, submitted[0])));
        direct_ns.push_back(1e9 * submit_s[1] / static_cast<double>(std::max<uint64_t>(1, submitted[1])));
        log.step(step, target::hex(value),
                 ", \"launches_per_s\": " + std::to_string(rates.back()) +
                     ", \"submit_ns_per_launch\": " + std::to_string(submit_ns.back()) +
                     ", \"direct_ns_per_launch\": " + std::to_string(direct_ns.back()));
        target::pace(options.real("pace-ms"));
        target::hold(options.text("hold"), step);
    }
    log.done(steps, digest.value(),
             ", \"launches_per_s\": " + std::to_string(median(rates)) +
                 ", \"submit_ns_per_launch\": " + std::to_string(median(submit_ns)) +
                 ", \"direct_ns_per_launch\": " + std::to_string(median(direct_ns)));
    return 0;
}
