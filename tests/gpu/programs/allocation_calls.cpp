// Makes a random but repeatable sequence of allocation calls and prints everything about them that an application can
// rely on: results, alignment, ranges, attributes, contents. Run with and without the interposer, it must print the
// same. Nothing is printed that the driver itself may choose anew in each run, such as an address.
//
//   --operations N (400)  --seed S (1)
#include <cinttypes>
#include <vector>

#include "driver_support.hpp"

namespace {

struct Block {
    CUdeviceptr address;
    size_t size_bytes;
    unsigned char value; // that all its bytes have
};

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 1) {}
    uint64_t below(uint64_t bound) { // xorshift64*, as in alloc_churn
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return ((state_ * 0x2545f4914f6cdd1dULL) >> 11) % bound;
    }

  private:
    uint64_t state_;
};

const char *name_of(CUresult result) {
    const char *name = nullptr;
    return cuGetErrorName(result, &name) == CUDA_SUCCESS ? name : "unnamed";
}

template <typename T> T attribute(CUpointer_attribute which, CUdeviceptr address) {
    T value{};
    TARGET_CHECK(cuPointerGetAttribute(&value, which, address));
    return value;
}

// What an application can ask about an address somewhere in `block`.
void describe(const Block &block, size_t offset) {
    const CUdeviceptr address = block.address + offset;
    CUdeviceptr base = 0;
    size_t size = 0;
    const CUresult range = cuMemGetAddressRange(&base, &size, address);
    std::printf("  range %s base %s size %zu", name_of(range), base == block.address ? "same" : "OTHER", size);
    std::printf(" type %u managed %u ordinal %d mapped %u",
                static_cast<unsigned>(attribute<CUmemorytype>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)),
                attribute<unsigned>(CU_POINTER_ATTRIBUTE_IS_MANAGED, address),
                attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address),
                attribute<unsigned>(CU_POINTER_ATTRIBUTE_MAPPED, address));
    std::printf(" start %s range-size %zu pointer %s\n",
                attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address) == block.address ? "same"
                                                                                                        : "OTHER",
                attribute<size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, address),
                attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address) == address ? "same" : "OTHER");
}

// Reads the whole block back; returns how many bytes are not what was written.
size_t wrong_bytes(const Block &block) {
    std::vector<unsigned char> bytes(block.size_bytes);
    TARGET_CHECK(cuMemcpyDtoH(bytes.data(), block.address, block.size_bytes));
    size_t wrong = 0;
    for (const unsigned char byte : bytes)
        wrong += byte != block.value;
    return wrong;
}

size_t random_size(Random &random) {
    const uint64_t kind = random.below(10);
    if (kind < 5)
        return 1 + random.below(4096);
    if (kind < 8)
        return 1 + random.below(1 << 20);
    return 1 + random.below(24 << 20);
}

void allocate(Random &random, std::vector<Block> &blocks) {
    Block block{0, random_size(random), static_cast<unsigned char>(1 + random.below(255))};
    CUresult result;
    if (random.below(4) == 0) {
        const size_t width = 1 + random.below(3000);
        const size_t height = 1 + random.below(60);
        size_t pitch = 0;
        result = cuMemAllocPitch(&block.address, &pitch, width, height, 4);
        block.size_bytes = pitch * height;
        std::printf("pitch %zux%zu %s pitch %zu", width, height, name_of(result), pitch);
    } else {
        result = cuMemAlloc(&block.address, block.size_bytes);
        std::printf("alloc %zu %s", block.size_bytes, name_of(result));
    }
    std::printf(" misaligned %" PRIu64 "\n", static_cast<uint64_t>(block.address % 256));
    if (result != CUDA_SUCCESS)
        return;
    TARGET_CHECK(cuMemsetD8(block.address, block.value, block.size_bytes));
    describe(block, 0);
    describe(block, block.size_bytes - 1);
    blocks.push_back(block);
}

void free_one(Random &random, std::vector<Block> &blocks) {
    if (blocks.empty())
        return;
    const size_t victim = random.below(blocks.size());
    const Block block = blocks[victim];
    std::printf("free %zu wrong %zu", block.size_bytes, wrong_bytes(block));
    if (block.size_bytes > 1)
        std::printf(" inside %s", name_of(cuMemFree(block.address + block.size_bytes / 2)));
    std::printf(" whole %s", name_of(cuMemFree(block.address)));
    std::printf(" again %s\n", name_of(cuMemFree(block.address)));
    blocks[victim] = blocks.back();
    blocks.pop_back();
}

void refused_calls() {
    CUdeviceptr address = 0;
    size_t pitch = 0;
    std::printf("alloc nothing %s\n", name_of(cuMemAlloc(&address, 0)));
    std::printf("alloc a pebibyte %s\n", name_of(cuMemAlloc(&address, 1ULL << 50)));
    std::printf("alloc to nowhere %s\n", name_of(cuMemAlloc(nullptr, 4096)));
    std::printf("pitch of odd elements %s\n", name_of(cuMemAllocPitch(&address, &pitch, 64, 64, 3)));
    std::printf("pitch of nothing %s\n", name_of(cuMemAllocPitch(&address, &pitch, 0, 64, 4)));
    std::printf("free null %s\n", name_of(cuMemFree(0)));
    std::printf("free what never was %s\n", name_of(cuMemFree(0x1000)));
    std::printf("range of what never was %s\n", name_of(cuMemGetAddressRange(&address, &pitch, 0x1000)));
}

// Free memory must fall by an allocation and come back; the numbers themselves depend on the rest of the machine.
void memory_information() {
    constexpr size_t kSizeBytes = 64 << 20;
    size_t before = 0, during = 0, after = 0, total = 0;
    CUdeviceptr address = 0;
    TARGET_CHECK(cuMemGetInfo(&before, &total));
    TARGET_CHECK(cuMemAlloc(&address, kSizeBytes));
    TARGET_CHECK(cuMemGetInfo(&during, &total));
    TARGET_CHECK(cuMemFree(address));
    TARGET_CHECK(cuMemGetInfo(&after, &total));
    std::printf("free memory falls %s comes back %s\n", before - during >= kSizeBytes ? "yes" : "no",
                after - during >= kSizeBytes ? "yes" : "no");
}

} // namespace

int main(int argc, char **argv) {
    const target::Options options(argc, argv, {{"operations", "400"}});
    TARGET_CHECK(cuInit(0));
    CUdevice device = 0;
    TARGET_CHECK(cuDeviceGet(&device, 0));
    target::create_context(device);
    refused_calls();
    memory_information();
    Random random(options.count("seed"));
    std::vector<Block> blocks;
    for (uint64_t i = 0; i < options.count("operations"); ++i) {
        if (blocks.size() < 100 && random.below(5) < 3)
            allocate(random, blocks);
        else
            free_one(random, blocks);
    }
    size_t wrong = 0;
    for (const Block &block : blocks)
        wrong += wrong_bytes(block);
    std::printf("left %zu wrong %zu\n", blocks.size(), wrong);
    return wrong == 0 ? 0 : 1;
}
