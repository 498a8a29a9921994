// State spaces, widths, pointers, and what happens when an access is not allowed.
#include <numeric>

#include "device.hpp"

namespace {

using namespace test;
using Kind = ptx::Fault::Kind;

struct Inner {
    short a;
    double b;
    unsigned char c[5];
};
struct alignas(16) Float4 {
    float x, y, z, w;
};
struct Record {
    int id;
    Inner inner[3];
    Float4 vector;
    std::uint64_t pointer;
};

TEST(structs_are_passed_by_value_with_their_layout) {
    Device device = make_device();
    Record record{};
    record.id = 1000;
    for (int k = 0; k < 3; ++k) {
        record.inner[k] = {static_cast<short>(-k * 100), k * 1.5, {}};
        for (int j = 0; j < 5; ++j)
            record.inner[k].c[j] = static_cast<unsigned char>(200 + k * 10 + j);
    }
    record.vector = {1, 2, 3, 4};
    record.pointer = device.make<int>(std::vector<int>{50000, 60000}).address;
    const auto out = device.make<double>(48);
    device.launch("structs_by_value", {.block = {48, 1, 1}}, record, 2.25, out);
    std::vector<double> expected;
    for (int i = 0; i < 48; ++i) {
        const Inner &inner = record.inner[i % 3];
        expected.push_back(record.id + inner.a + inner.b * 2.25 + inner.c[i % 5] + 3.0 + (i % 2 == 0 ? 50000 : 60000));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(module_variables_begin_with_their_values_and_pointers) {
    Device device = make_device();
    const auto out = device.make<long long>(32);
    device.launch("device_variables", {.block = {32, 1, 1}}, out);
    const int coefficients[] = {3, 1, 4, 1, 5, 9, 2, 6};
    const int table[] = {10, 20, 30, 40, 50, 60};
    const char text[] = "frog";
    const char *names[] = {"wood", "tree"};
    std::vector<long long> expected;
    for (int i = 0; i < 32; ++i)
        expected.push_back(coefficients[i % 8] + table[2 + i % 3] + ((i & 1) != 0 ? 60 : 10) + 93 + text[i % 5] +
                           ((i & 1) != 0 ? 5 : 3) + names[i & 1][i % 4]);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(vector_loads_and_stores_move_every_element) {
    Device device = make_device();
    const int n = 96;
    std::vector<float> a(n * 4);
    std::iota(a.begin(), a.end(), 0.5f);
    std::vector<short> b(n * 2);
    std::iota(b.begin(), b.end(), static_cast<short>(-70));
    std::vector<unsigned char> c(n * 4);
    std::iota(c.begin(), c.end(), static_cast<unsigned char>(3));
    std::vector<double> d(n * 2);
    std::iota(d.begin(), d.end(), 1000.25);
    const auto out = device.make<float>(n * 4);
    device.launch("vector_accesses", {.grid = {3, 1, 1}, .block = {32, 1, 1}}, device.make(a), device.make(b),
                  device.make(c), device.make(d), out);
    std::vector<float> expected;
    for (int i = 0; i < n; ++i) {
        expected.push_back(a[i * 4 + 3] + b[i * 2]);
        expected.push_back(a[i * 4 + 2] + c[i * 4 + 1]);
        expected.push_back(a[i * 4 + 1] + static_cast<float>(d[i * 2 + 1]));
        expected.push_back(a[i * 4] + c[i * 4 + 3] + b[i * 2 + 1] + static_cast<float>(d[i * 2]));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(local_arrays_may_be_indexed_at_run_time) {
    Device device = make_device();
    std::vector<int> in(37);
    std::iota(in.begin(), in.end(), 5);
    for (auto &value : in)
        value = value * value % 101;
    const auto out = device.make<int>(37);
    device.launch("local_arrays", {.block = {37, 1, 1}}, device.make(in), out, 37);
    std::vector<int> expected;
    for (int i = 0; i < 37; ++i) {
        int values[16];
        for (int k = 0; k < 16; ++k)
            values[k] = in[(i + k) % 37];
        for (int k = 0; k < 16; ++k) {
            const int j = values[k] & 15;
            const int keep = values[j];
            values[j] = values[k] + k;
            values[k] = keep;
        }
        unsigned sum = 0;
        for (int k = 0; k < 16; ++k)
            sum = sum * 31 + static_cast<unsigned>(values[(k * in[i]) & 15]);
        expected.push_back(static_cast<int>(sum));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(generic_pointers_reach_global_shared_and_local_memory) {
    Device device = make_device();
    const auto global = device.make<int>(std::vector<int>{7, 11, 13, 17});
    const auto out = device.make<int>(64);
    device.launch("generic_pointers", {.block = {32, 1, 1}}, global, out);
    std::vector<int> expected;
    for (int i = 0; i < 32; ++i) {
        expected.push_back(i % 3 == 0 ? 48 : i % 3 == 1 ? 18 : 4 * i + 11 + 26 + 51);
        expected.push_back(1 << (i % 3));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(dynamic_shared_memory_follows_the_static_part) {
    Device device = make_device();
    const int n = 40;
    const auto out = device.make<int>(n);
    device.launch("dynamic_shared",
                  {.block = {static_cast<unsigned>(n), 1, 1}, .shared_bytes = static_cast<std::size_t>(n) * 12}, out,
                  n);
    std::vector<int> expected;
    for (int i = 0; i < n; ++i)
        expected.push_back((n - 1 - i) + (i + 1) % n + i % 8 * 1000 + n * 12);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(indices_beyond_32_bits_address_correctly) {
    Device device = make_device();
    std::vector<unsigned char> bytes(300);
    std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(0));
    const auto data = device.make(bytes);
    const auto out = device.make<unsigned long long>(100);
    // The base lies far below the data, so that the offset needs all its bits.
    const std::uint64_t base = data.address - 0x700000000ull;
    device.launch("wide_indices", {.grid = {4, 1, 1}, .block = {32, 1, 1}}, base, 0x700000000ll + 20, out, 100u);
    std::vector<unsigned long long> expected;
    for (unsigned i = 0; i < 100; ++i)
        expected.push_back((20ull + i) * i);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(asynchronous_copies_are_there_after_the_wait) {
    Device device = make_device();
    std::vector<int> in(256);
    std::iota(in.begin(), in.end(), 1);
    const auto out = device.make<int>(256);
    device.launch("asynchronous_copies", {.block = {64, 1, 1}}, device.make(in), out);
    std::vector<int> expected;
    for (int i = 0; i < 64; ++i)
        for (int k = 0; k < 4; ++k)
            expected.push_back((63 - i) * 4 + k + 1);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(device_malloc_gives_memory_until_the_heap_is_exhausted) {
    Device device = make_device();
    const auto out = device.make<int>(32);
    device.launch("device_heap", {.block = {32, 1, 1}}, out);
    std::vector<int> expected;
    for (int i = 0; i < 32; ++i)
        expected.push_back(i * (i * (i + 1) / 2));
    CHECK_SAME_BYTES(device.read(out), expected);
    CHECK_EQUAL(device.memory.heap_blocks(), 0u);
}

TEST(stack_allocations_are_private_to_a_thread) {
    Device device = make_device();
    const auto out = device.make<int>(64);
    device.launch("stack_allocation", {.block = {64, 1, 1}}, out);
    std::vector<int> expected;
    for (int i = 0; i < 64; ++i) {
        const int count = i % 7 + 1;
        int sum = 0;
        for (int k = 0; k < count; ++k)
            sum += k * 3 % count + i;
        expected.push_back(sum);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

template <class F> ptx::Fault fault_of(F &&run) {
    try {
        run();
    } catch (const ptx::Fault &fault) {
        return fault;
    }
    throw Failure("no fault was raised");
}

TEST(an_access_outside_of_memory_faults_with_its_address_and_thread) {
    Device device = make_device();
    const auto data = device.make<int>(4);
    const auto fault = fault_of([&] { device.launch("out_of_bounds", {}, data, -1000000000000ll); });
    CHECK(fault.kind == Kind::illegal_address);
    CHECK_EQUAL(fault.address, data.address - 4000000000000ull);
    CHECK_EQUAL(fault.kernel, "out_of_bounds");
    CHECK(fault.line != 0);
    device.launch("out_of_bounds", {}, data, 2ll);
    CHECK_EQUAL(device.read(data)[2], 1);
}

TEST(an_access_beyond_shared_memory_faults) {
    Device device = make_device();
    const auto out = device.make<int>(32);
    const auto fault = fault_of([&] { device.launch("out_of_shared", {.block = {32, 1, 1}}, out, 1 << 20); });
    CHECK(fault.kind == Kind::illegal_address);
    device.launch("out_of_shared", {.block = {32, 1, 1}}, out, 31);
}

TEST(a_misaligned_access_faults) {
    Device device = make_device();
    const auto data = device.make<char>(8);
    const auto fault = fault_of([&] { device.launch("misaligned", {}, data); });
    CHECK(fault.kind == Kind::misaligned);
    CHECK_EQUAL(fault.address, data.address + 2);
}

TEST(a_launch_that_does_not_fit_the_kernel_is_refused) {
    Device device = make_device();
    const auto out = device.make<int>(1024);
    CHECK(fault_of([&] { device.launch("bounded", {.block = {256, 1, 1}}, out); }).kind == Kind::invalid_launch);
    CHECK(fault_of([&] { device.launch("bounded", {.grid = {0, 1, 1}}, out); }).kind == Kind::invalid_launch);
    const auto kernel = device.module->kernel("bounded");
    CHECK_EQUAL(kernel.max_threads(), 128u);
    ptx::Launch launch;
    CHECK(fault_of([&] { ptx::execute(kernel, launch, device.memory); }).kind == Kind::invalid_launch);
}

TEST(an_observer_sees_every_global_access_in_the_same_order) {
    struct Recorder final : ptx::Observer {
        void access(std::uint64_t address, std::uint32_t bytes, Kind kind) override {
            seen.push_back(address << 8 | bytes << 2 | static_cast<std::uint32_t>(kind));
        }
        std::vector<std::uint64_t> seen;
    };
    Device device = make_device();
    const auto x = device.make(std::vector<float>(64, 1.0f));
    const auto y = device.make(std::vector<float>(64, 2.0f));
    Recorder first, second;
    for (Recorder *each : {&first, &second}) {
        device.observer = each;
        device.launch("saxpy", {.grid = {2, 1, 1}, .block = {32, 1, 1}}, 2.0f, x, y, 64);
    }
    CHECK_EQUAL(first.seen.size(), 3u * 64);
    CHECK(first.seen == second.seen);
    CHECK(std::count(first.seen.begin(), first.seen.end(), x.address << 8 | 4 << 2 | 0u) == 1);
    CHECK(std::count(first.seen.begin(), first.seen.end(), (y.address + 252) << 8 | 4 << 2 | 1u) == 1);
}

} // namespace
