// Shuffles, votes, matches, reductions, cooperative groups, clusters; atomics on every kind of memory.
#include <algorithm>
#include <numeric>

#include "device.hpp"

namespace {

using namespace test;

std::vector<int> lanes_of_values() {
    std::vector<int> values(32);
    unsigned seed = 5;
    for (auto &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<int>(seed >> 20);
    }
    return values;
}

TEST(shuffles_move_values_between_lanes) {
    Device device = make_device();
    const auto in = lanes_of_values();
    const auto out = device.make<int>(256);
    device.launch("shuffles", {.block = {32, 1, 1}}, device.make(in), out);
    std::vector<int> expected;
    const auto at = [&](int lane) { return in[static_cast<std::size_t>(lane)]; };
    for (int i = 0; i < 32; ++i) {
        expected.push_back(at((i * 7 + 3) % 32));
        expected.push_back(at(i >= 3 ? i - 3 : i));
        expected.push_back(at(i + 5 < 32 ? i + 5 : i));
        expected.push_back(at(i ^ 9));
        expected.push_back(at((i & ~7) | ((i + 1) & 7)));
        expected.push_back(at(i % 4 >= 2 ? i - 2 : i));
        expected.push_back(at(i % 16 < 15 ? i + 1 : i));
        expected.push_back(at(i ^ 1));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(votes_and_matches_see_all_lanes) {
    Device device = make_device();
    const auto in = lanes_of_values();
    const auto out = device.make<unsigned>(192);
    device.launch("votes", {.block = {32, 1, 1}}, device.make(in), out);
    unsigned ballot = 0;
    for (std::size_t i = 0; i < 32; ++i)
        ballot |= (in[i] % 3 == 0 ? 1u : 0u) << i;
    std::vector<unsigned> expected;
    for (std::size_t i = 0; i < 32; ++i) {
        unsigned same = 0;
        for (std::size_t k = 0; k < 32; ++k)
            same |= (in[k] % 4 == in[i] % 4 ? 1u : 0u) << k;
        expected.insert(expected.end(),
                        {ballot, std::count(in.begin(), in.end(), 1000) != 0 ? 1u : 0u, 1u, same, 0xffffffffu, 1u});
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(warp_reductions_combine_all_lanes) {
    Device device = make_device();
    const auto in = lanes_of_values();
    const auto out = device.make<int>(192);
    device.launch("reductions", {.block = {32, 1, 1}}, device.make(in), out);
    int all = -1, exclusive = 0;
    for (const int value : in) {
        all &= value | 0xf0;
        exclusive ^= value;
    }
    const int largest = *std::max_element(in.begin(), in.end());
    std::vector<int> expected;
    for (int i = 0; i < 32; ++i)
        expected.insert(expected.end(), {std::accumulate(in.begin(), in.end(), 0),
                                         *std::min_element(in.begin(), in.end()), largest, all, exclusive, largest});
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(lanes_meet_in_a_shuffle_from_two_places) {
    Device device = make_device();
    const auto in = lanes_of_values();
    const auto out = device.make<int>(32);
    device.launch("meeting_from_two_places", {.block = {32, 1, 1}}, device.make(in), out);
    std::vector<int> expected;
    for (std::size_t i = 0; i < 32; ++i)
        expected.push_back((i % 2 == 0 ? in[i ^ 1] * 2 + 1 : in[i ^ 1] + 2) + in[i < 16 ? 3 : 20]);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(exited_lanes_take_no_part_in_votes) {
    Device device = make_device();
    const auto out = device.make<int>(32);
    device.launch("exited_lanes", {.block = {32, 1, 1}}, out);
    std::vector<int> expected(32);
    for (std::size_t i = 0; i < 20; ++i)
        expected[i] = 0x55555 + 20;
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(lane_masks_name_the_lanes_around) {
    Device device = make_device();
    const auto out = device.make<unsigned>(160);
    device.launch("lane_masks", {.block = {32, 1, 1}}, out);
    std::vector<unsigned> expected;
    for (unsigned i = 0; i < 32; ++i) {
        const unsigned eq = 1u << i, lt = eq - 1;
        expected.insert(expected.end(), {eq, lt, lt | eq, ~(lt | eq), ~lt});
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(cooperative_tiles_and_coalesced_groups_work) {
    Device device = make_device();
    const auto in = lanes_of_values();
    const auto out = device.make<int>(32);
    device.launch("tiles", {.block = {32, 1, 1}}, device.make(in), out);
    std::vector<int> expected;
    for (std::size_t i = 0; i < 32; ++i) {
        const auto first = in.begin() + static_cast<std::ptrdiff_t>(i / 8 * 8);
        int sum = std::accumulate(first, first + 8, 0);
        if (i % 3 == 0)
            sum += 11 * 1000 + in[0];
        expected.push_back(sum);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(a_grid_barrier_holds_all_blocks_of_a_cooperative_launch) {
    Device device = make_device();
    const std::size_t n = 5 * 64;
    std::vector<int> values(n);
    std::iota(values.begin(), values.end(), 0);
    const auto data = device.make(values);
    const auto out = device.make<int>(n);
    device.launch("grid_barrier", {.grid = {5, 1, 1}, .block = {64, 1, 1}, .cooperative = true}, data, out, 4);
    for (int k = 0; k < 4; ++k) {
        std::vector<int> next(n);
        for (std::size_t i = 0; i < n; ++i)
            next[i] = values[(i + 33) % n] + k;
        values = next;
    }
    std::reverse(values.begin(), values.end());
    CHECK_SAME_BYTES(device.read(out), values);
}

TEST(blocks_of_a_cluster_read_each_others_shared_memory) {
    if (target() != "sm_90")
        return; // clusters begin with sm_90; the kernel does not exist below
    Device device = make_device();
    const auto out = device.make<int>(256);
    CHECK_EQUAL(device.module->kernel("cluster_exchange").required_cluster()[0], 4u);
    device.launch("cluster_exchange", {.grid = {8, 1, 1}, .block = {32, 1, 1}, .cluster = {4, 1, 1}}, out);
    std::vector<int> expected;
    for (int block = 0; block < 8; ++block)
        for (int i = 0; i < 32; ++i)
            expected.push_back((block / 4 * 4 + (block + 1) % 4) * 100 + 31 - i);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(one_lane_is_elected) {
    if (target() != "sm_90")
        return; // elect.sync begins with sm_90
    Device device = make_device();
    const auto out = device.make<int>(32);
    device.launch("electing", {.block = {32, 1, 1}}, out);
    const auto got = device.read(out);
    CHECK_EQUAL(std::accumulate(got.begin(), got.end(), 0), 1);
}

template <class T> std::vector<T> expected_cells(const std::vector<T> &start, const std::vector<T> &values) {
    std::vector<T> cells = start;
    for (std::size_t i = 0; i < values.size(); ++i) {
        cells[0] = static_cast<T>(cells[0] + values[i]);
        cells[1] = std::min(cells[1], values[i]);
        cells[2] = std::max(cells[2], values[i]);
        cells[3] &= static_cast<T>(~(T{1} << (i % 30)));
        cells[4] |= T{1} << (i % 31);
        cells[5] ^= values[i];
        cells[6] = 7;
        if (cells[7] == static_cast<T>(i))
            cells[7] = static_cast<T>(i + 1);
    }
    return cells;
}

TEST(integer_atomics_combine_all_threads) {
    Device device = make_device();
    std::vector<int> values(128), start{5, 0, 0, -1, 0, 9, 1, 0};
    for (int i = 0; i < 128; ++i)
        values[static_cast<std::size_t>(i)] = i * 17 - 300;
    const auto cells = device.make(start);
    const auto old = device.make<int>(128);
    device.launch("atomics_s32", {.grid = {4, 1, 1}, .block = {32, 1, 1}}, cells, old);
    CHECK_SAME_BYTES(device.read(cells), expected_cells(start, values));
    std::vector<int> before(128);
    std::exclusive_scan(values.begin(), values.end(), before.begin(), 5);
    CHECK_SAME_BYTES(device.read(old), before);

    std::vector<std::uint64_t> wide(128), wide_start{5, ~0ull, 0, ~0ull, 0, 9, 1, 0};
    for (std::size_t i = 0; i < 128; ++i)
        wide[i] = i * 0x100000001ull;
    const auto wide_cells = device.make(wide_start);
    device.launch("atomics_u64", {.grid = {4, 1, 1}, .block = {32, 1, 1}}, wide_cells, device.make<std::uint64_t>(128));
    CHECK_SAME_BYTES(device.read(wide_cells), expected_cells(wide_start, wide));
}

TEST(signed_64_bit_and_wrapping_atomics_work) {
    Device device = make_device();
    const auto cells = device.make<long long>(2);
    device.launch("atomics_s64", {.block = {20, 1, 1}}, cells);
    CHECK_SAME_BYTES(device.read(cells), (std::vector<long long>{-57000000000ll, 57000000000ll}));
    const auto wrapping = device.make<unsigned>(2);
    device.launch("atomics_wrapping", {.block = {25, 1, 1}}, wrapping);
    CHECK_SAME_BYTES(device.read(wrapping), (std::vector<unsigned>{25 % 11, 12 - 24 % 13}));
}

TEST(floating_atomics_add_in_the_order_of_the_threads) {
    Device device = make_device();
    const auto f = device.make<float>(1);
    const auto d = device.make<double>(1);
    const auto h = device.make<unsigned>(1);
    const auto b = device.make<unsigned short>(1);
    device.launch("atomics_float", {.grid = {2, 1, 1}, .block = {64, 1, 1}}, f, d, h, b);
    float sum = 0;
    double wide = 0;
    for (int i = 0; i < 128; ++i) {
        sum += 0.5f + static_cast<float>(i);
        wide += 0.25 * i;
    }
    CHECK_EQUAL(device.read(f)[0], sum);
    CHECK_EQUAL(device.read(d)[0], wide);
    CHECK_EQUAL(device.read(h)[0], 0x54005800u); // 64 and 128 as halves
    CHECK_EQUAL(device.read(b)[0], 0x4300u);     // 128 as bfloat16
}

TEST(atomics_on_shared_memory_and_by_swapping_lose_nothing) {
    Device device = make_device();
    std::vector<int> in(96);
    std::iota(in.begin(), in.end(), 3);
    const auto out = device.make<int>(17);
    device.launch("atomics_shared", {.block = {96, 1, 1}}, device.make(in), out);
    std::vector<int> expected(16, 6);
    expected.push_back(std::accumulate(in.begin(), in.end(), 0));
    CHECK_SAME_BYTES(device.read(out), expected);
    const auto cell = device.make<double>(1);
    device.launch("atomics_by_swapping", {.block = {64, 1, 1}}, cell);
    CHECK_EQUAL(device.read(cell)[0], 64.0 + 63 * 32);
}

TEST(a_histogram_counts_every_value) {
    Device device = make_device();
    std::vector<unsigned char> in(5000);
    std::vector<unsigned> expected(256);
    unsigned seed = 3;
    for (auto &value : in) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<unsigned char>(seed >> 24);
        ++expected[value];
    }
    const auto bins = device.make<unsigned>(256);
    device.launch("histogram", {.grid = {4, 1, 1}, .block = {128, 1, 1}}, device.make(in), bins, 5000);
    CHECK_SAME_BYTES(device.read(bins), expected);
}

TEST(the_last_block_sees_what_all_others_wrote) {
    Device device = make_device();
    std::vector<int> in(3000);
    std::iota(in.begin(), in.end(), -100);
    const auto out = device.make<int>(1);
    for (int round = 0; round < 2; ++round)
        device.launch("last_block_sums", {.grid = {7, 1, 1}, .block = {64, 1, 1}}, device.make(in), device.make<int>(7),
                      out, 3000);
    CHECK_EQUAL(device.read(out)[0], std::accumulate(in.begin(), in.end(), 0));
}

} // namespace
