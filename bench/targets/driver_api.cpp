// driver_api: a program that calls the CUDA driver directly and uses what frameworks hide: a module from PTX, two
// contexts, several streams with events between them, pitched memory, stream-ordered memory, and its own use of the
// virtual memory calls. All arithmetic is on integers, so every result is exact.
//
//   --steps N (100)      --state-gib X (0.25) spread over all buffers      --log FILE, --pace-ms T
#include <algorithm>
#include <vector>

#include "driver_support.hpp"

TARGET_EMBED_PTX(driver_api_ptx);

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kStreams = 3;
constexpr unsigned kPitchedRows = 64;
constexpr uint64_t kMostWords = 1ULL << 30; // of one buffer: kernels index with 32 bits

unsigned blocks(unsigned words) {
    return (words + kThreads - 1) / kThreads;
}

// Memory made with the virtual memory calls, as frameworks with growing segments make it: two physical pieces behind
// one range of addresses. The program itself asks for no exportable handles.
class MappedMemory {
  public:
    MappedMemory(CUdevice device, uint64_t wanted_bytes) {
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = device;
        size_t granularity_bytes = 0;
        TARGET_CHECK(
            cuMemGetAllocationGranularity(&granularity_bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
        const uint64_t pieces = std::max<uint64_t>(1, wanted_bytes / 2 / granularity_bytes);
        const size_t piece_bytes = pieces * granularity_bytes;
        size_bytes_ = 2 * piece_bytes;
        TARGET_CHECK(cuMemAddressReserve(&address_, size_bytes_, 0, 0, 0));
        for (int i = 0; i < 2; ++i) {
            CUmemGenericAllocationHandle handle = 0;
            TARGET_CHECK(cuMemCreate(&handle, piece_bytes, &properties, 0));
            TARGET_CHECK(cuMemMap(address_ + static_cast<uint64_t>(i) * piece_bytes, piece_bytes, 0, handle, 0));
            TARGET_CHECK(cuMemRelease(handle)); // the mapping keeps it
        }
        CUmemAccessDesc access{};
        access.location = properties.location;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        TARGET_CHECK(cuMemSetAccess(address_, size_bytes_, &access, 1));
    }

    CUdeviceptr address() const { return address_; }
    uint64_t size_bytes() const { return size_bytes_; }

  private:
    CUdeviceptr address_ = 0;
    uint64_t size_bytes_ = 0;
};

struct Kernels {
    explicit Kernels(CUmodule loaded)
        : module(loaded), stir(target::kernel_of(loaded, "stir")), blend(target::kernel_of(loaded, "blend")),
          add_rows(target::kernel_of(loaded, "add_rows")), checksum(target::kernel_of(loaded, "checksum")) {}

    CUmodule module;
    CUfunction stir, blend, add_rows, checksum;
};

// Everything that lives in the first context.
class MainContext {
  public:
    MainContext(CUdevice device, unsigned words)
        : words_(words), context_(target::create_context(device)), kernels_(load()),
          mapped_(device, sizeof(uint32_t) * static_cast<uint64_t>(words)) {
        for (unsigned s = 0; s < kStreams; ++s) {
            CUstream stream = nullptr;
            CUevent event = nullptr;
            CUdeviceptr buffer = 0;
            TARGET_CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
            TARGET_CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
            TARGET_CHECK(cuMemAlloc(&buffer, buffer_bytes()));
            TARGET_CHECK(cuMemsetD32(buffer, s + 1, words_));
            streams_.push_back(stream);
            events_.push_back(event);
            buffers_.push_back(buffer);
        }
        TARGET_CHECK(cuMemsetD32(mapped_.address(), 77, mapped_.size_bytes() / 4));
        row_words_ = std::max(1u, words_ / kPitchedRows - 3); // an odd width, so that the pitch is more than the row
        TARGET_CHECK(cuMemAllocPitch(&pitched_, &pitch_bytes_, row_words_ * sizeof(uint32_t), kPitchedRows, 4));
        TARGET_CHECK(cuMemsetD2D32(pitched_, pitch_bytes_, 5, row_words_, kPitchedRows));
        TARGET_CHECK(cuMemAlloc(&sum_, sizeof(uint64_t)));
        TARGET_CHECK(cuCtxSynchronize());
        target::pop_context();
    }

    uint64_t state_bytes() const {
        return kStreams * buffer_bytes() + mapped_.size_bytes() + pitch_bytes_ * kPitchedRows;
    }

    // One step on all streams; returns a checksum of all buffers.
    uint64_t step(unsigned round) {
        TARGET_CHECK(cuCtxPushCurrent(context_));
        for (unsigned s = 0; s < kStreams; ++s) {
            target::launch(kernels_.stir, blocks(words_), kThreads, streams_[s], buffers_[s], words_, round + s);
            TARGET_CHECK(cuEventRecord(events_[s], streams_[s]));
        }
        // The next stream takes what this one made: an order that only the events give.
        for (unsigned s = 0; s < kStreams; ++s) {
            const unsigned next = (s + 1) % kStreams;
            TARGET_CHECK(cuStreamWaitEvent(streams_[next], events_[s], 0));
            target::launch(kernels_.blend, blocks(words_), kThreads, streams_[next], buffers_[next], buffers_[s],
                           words_, round);
            TARGET_CHECK(cuEventRecord(events_[next], streams_[next]));
        }
        wait_for_all_in(streams_[0]);

        // Stream-ordered memory lives from here to the end of the step and belongs to the driver's pool.
        CUdeviceptr temporary = 0;
        TARGET_CHECK(cuMemAllocAsync(&temporary, buffer_bytes(), streams_[0]));
        TARGET_CHECK(cuMemcpyDtoDAsync(temporary, buffers_[0], buffer_bytes(), streams_[0]));
        target::launch(kernels_.add_rows, blocks(row_words_ * kPitchedRows), kThreads, streams_[0], temporary, pitched_,
                       static_cast<unsigned long long>(pitch_bytes_), row_words_, kPitchedRows);
        target::launch(kernels_.blend, blocks(mapped_words()), kThreads, streams_[0], mapped_.address(), temporary,
                       std::min(mapped_words(), words_), round % 97);
        copy_to_rows(temporary);
        TARGET_CHECK(cuMemFreeAsync(temporary, streams_[0]));

        TARGET_CHECK(cuMemsetD8Async(sum_, 0, sizeof(uint64_t), streams_[0]));
        for (const CUdeviceptr buffer : buffers_)
            target::launch(kernels_.checksum, blocks(words_), kThreads, streams_[0], buffer, words_, sum_);
        target::launch(kernels_.checksum, blocks(mapped_words()), kThreads, streams_[0], mapped_.address(),
                       mapped_words(), sum_);
        uint64_t sum = 0;
        TARGET_CHECK(cuMemcpyDtoHAsync(&sum, sum_, sizeof sum, streams_[0]));
        TARGET_CHECK(cuStreamSynchronize(streams_[0]));
        sum += rounds_done();
        target::pop_context();
        return sum;
    }

  private:
    static Kernels load() {
        CUmodule module = nullptr;
        TARGET_CHECK(cuModuleLoadData(&module, driver_api_ptx));
        return Kernels(module);
    }

    uint64_t buffer_bytes() const { return sizeof(uint32_t) * static_cast<uint64_t>(words_); }
    unsigned mapped_words() const { return static_cast<unsigned>(mapped_.size_bytes() / sizeof(uint32_t)); }

    void wait_for_all_in(CUstream stream) {
        for (const CUevent event : events_)
            TARGET_CHECK(cuStreamWaitEvent(stream, event, 0));
    }

    void copy_to_rows(CUdeviceptr flat) {
        CUDA_MEMCPY2D copy{};
        copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = flat;
        copy.srcPitch = row_words_ * sizeof(uint32_t);
        copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = pitched_;
        copy.dstPitch = pitch_bytes_;
        copy.WidthInBytes = row_words_ * sizeof(uint32_t);
        copy.Height = kPitchedRows;
        TARGET_CHECK(cuMemcpy2DAsync(&copy, streams_[0]));
    }

    uint64_t rounds_done() const {
        CUdeviceptr address = 0;
        size_t size_bytes = 0;
        TARGET_CHECK(cuModuleGetGlobal(&address, &size_bytes, kernels_.module, "rounds_done"));
        unsigned value = 0;
        if (size_bytes != sizeof value)
            target::fail("rounds_done has an unexpected size");
        TARGET_CHECK(cuMemcpyDtoH(&value, address, sizeof value));
        return value;
    }

    unsigned words_;
    CUcontext context_;
    Kernels kernels_;
    MappedMemory mapped_;
    std::vector<CUstream> streams_;
    std::vector<CUevent> events_;
    std::vector<CUdeviceptr> buffers_;
    CUdeviceptr pitched_ = 0;
    size_t pitch_bytes_ = 0;
    unsigned row_words_ = 0;
    CUdeviceptr sum_ = 0;
};

// The second context: its own module, its own memory, its own module variable.
class SideContext {
  public:
    SideContext(CUdevice device, unsigned words) : words_(words), context_(target::create_context(device)) {
        CUmodule module = nullptr;
        TARGET_CHECK(cuModuleLoadData(&module, driver_api_ptx));
        stir_ = target::kernel_of(module, "stir");
        checksum_ = target::kernel_of(module, "checksum");
        TARGET_CHECK(cuMemAlloc(&buffer_, sizeof(uint32_t) * static_cast<uint64_t>(words_)));
        TARGET_CHECK(cuMemsetD32(buffer_, 9, words_));
        TARGET_CHECK(cuMemAlloc(&sum_, sizeof(uint64_t)));
        TARGET_CHECK(cuCtxSynchronize());
        target::pop_context();
    }

    uint64_t state_bytes() const { return sizeof(uint32_t) * static_cast<uint64_t>(words_); }

    uint64_t step(unsigned round) {
        TARGET_CHECK(cuCtxPushCurrent(context_));
        target::launch(stir_, blocks(words_), kThreads, nullptr, buffer_, words_, round);
        TARGET_CHECK(cuMemsetD8(sum_, 0, sizeof(uint64_t)));
        target::launch(checksum_, blocks(words_), kThreads, nullptr, buffer_, words_, sum_);
        uint64_t sum = 0;
        TARGET_CHECK(cuMemcpyDtoH(&sum, sum_, sizeof sum));
        target::pop_context();
        return sum;
    }

  private:
    unsigned words_;
    CUcontext context_;
    CUfunction stir_ = nullptr;
    CUfunction checksum_ = nullptr;
    CUdeviceptr buffer_ = 0;
    CUdeviceptr sum_ = 0;
};

} // namespace

int main(int argc, char **argv) {
    const target::Options options(argc, argv, {{"steps", "100"}, {"state-gib", "0.25"}});
    const target::Log log(options.text("log"));
    const uint64_t steps = options.count("steps");
    // Six buffers of equal size: one a stream, the mapped one, the pitched one, the side context's.
    const double words = options.real("state-gib") * 1073741824.0 / sizeof(uint32_t) / (kStreams + 3);
    if (words > static_cast<double>(kMostWords))
        target::fail("--state-gib is too large for this program: at most 24");
    const unsigned buffer_words = std::max(1024u, static_cast<unsigned>(words));

    TARGET_CHECK(cuInit(0));
    CUdevice device = 0;
    TARGET_CHECK(cuDeviceGet(&device, 0));
    MainContext main_context(device, buffer_words);
    SideContext side_context(device, buffer_words);
    log.start("driver_api", main_context.state_bytes() + side_context.state_bytes());

    target::Digest digest;
    for (uint64_t step = 1; step <= steps; ++step) {
        const unsigned round = static_cast<unsigned>(step);
        digest.add(main_context.step(round));
        digest.add(side_context.step(round));
        log.step(step, target::hex(digest.value()));
        target::pace(options.real("pace-ms"));
    }
    log.done(steps, digest.value());
    return 0;
}
