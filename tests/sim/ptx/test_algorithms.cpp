// Whole small programs: their results equal the host's, byte for byte.
#include <cfenv>
#include <cmath>
#include <numeric>

#include "device.hpp"

namespace {

using namespace test;

std::vector<float> some_floats(std::size_t count, unsigned seed = 1) {
    std::vector<float> values(count);
    for (auto &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(static_cast<int>(seed >> 8) - (1 << 23)) / 1048576.0f;
    }
    return values;
}
std::vector<int> some_integers(std::size_t count, unsigned seed = 1) {
    std::vector<int> values(count);
    for (auto &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<int>(seed >> 12);
    }
    return values;
}

TEST(block_reduction_adds_in_the_order_of_the_program) {
    Device device = make_device();
    const auto in = some_floats(1000);
    const auto out = device.make<float>(4);
    device.launch("block_reduction", {.grid = {4, 1, 1}, .block = {256, 1, 1}}, device.make(in), out, 1000);
    std::vector<float> expected;
    for (int block = 0; block < 4; ++block) {
        std::vector<float> values(256);
        for (int k = 0; k < 256; ++k)
            values[k] = block * 256 + k < 1000 ? in[block * 256 + k] : 0.0f;
        for (int step = 128; step > 0; step /= 2)
            for (int k = 0; k < step; ++k)
                values[k] += values[k + step];
        expected.push_back(values[0]);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(warp_reduction_adds_in_the_order_of_the_program) {
    Device device = make_device();
    const auto in = some_floats(256);
    const auto out = device.make<float>(8);
    device.launch("warp_reduction", {.grid = {2, 1, 1}, .block = {128, 1, 1}}, device.make(in), out);
    std::vector<float> expected;
    for (int warp = 0; warp < 8; ++warp) {
        std::vector<float> values(in.begin() + warp * 32, in.begin() + warp * 32 + 32);
        for (int step = 16; step > 0; step /= 2)
            for (int k = 0; k < step; ++k)
                values[k] += values[k + step];
        expected.push_back(values[0]);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(scan_in_dynamic_shared_memory_gives_all_prefix_sums) {
    Device device = make_device();
    const auto in = some_integers(500);
    const auto out = device.make<int>(500);
    device.launch("scan", {.block = {256, 1, 1}, .shared_bytes = 512 * 4}, device.make(in), out, 500);
    std::vector<int> expected(500);
    std::exclusive_scan(in.begin(), in.end(), expected.begin(), 0);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(tiled_matrix_product_equals_the_host) {
    Device device = make_device();
    const int n = 50;
    const auto a = some_floats(n * n, 3);
    const auto b = some_floats(n * n, 4);
    const auto c = device.make<float>(n * n);
    device.launch("matrix_product", {.grid = {4, 4, 1}, .block = {16, 16, 1}}, device.make(a), device.make(b), c, n);
    std::vector<float> expected(n * n);
    for (int i = 0; i < n; ++i)
        for (int j = 0; j < n; ++j) {
            float sum = 0.0f;
            for (int k = 0; k < 64; ++k)
                sum = std::fma(k < n ? a[i * n + k] : 0.0f, k < n ? b[k * n + j] : 0.0f, sum);
            expected[i * n + j] = sum;
        }
    CHECK_SAME_BYTES(device.read(c), expected);
}

TEST(bitonic_sort_sorts) {
    Device device = make_device();
    std::vector<unsigned> values;
    for (const int value : some_integers(512, 9))
        values.push_back(static_cast<unsigned>(value) * 2654435761u);
    const auto data = device.make(values);
    device.launch("bitonic_sort", {.block = {512, 1, 1}}, data);
    std::sort(values.begin(), values.end());
    CHECK_SAME_BYTES(device.read(data), values);
}

TEST(n_body_in_double_equals_the_host) {
    Device device = make_device();
    const int n = 70;
    const auto floats = some_floats(n * 4, 5);
    const std::vector<double> in(floats.begin(), floats.end());
    const auto out = device.make<double>(n * 4);
    device.launch("n_body", {.grid = {3, 1, 1}, .block = {32, 1, 1}}, device.make(in), out, n, 0.125);
    std::vector<double> expected;
    for (int i = 0; i < n; ++i) {
        double force[3] = {};
        for (int k = 0; k < n; ++k) {
            double delta[3];
            for (int c = 0; c < 3; ++c)
                delta[c] = in[k * 4 + c] - in[i * 4 + c];
            const double distance = delta[0] * delta[0] + delta[1] * delta[1] + delta[2] * delta[2] + 0.01;
            const double strength = in[k * 4 + 3] / (distance * std::sqrt(distance));
            for (int c = 0; c < 3; ++c)
                force[c] += delta[c] * strength;
        }
        for (int c = 0; c < 3; ++c)
            expected.push_back(in[i * 4 + c] + force[c] * 0.125);
        expected.push_back(in[i * 4 + 3]);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(random_numbers_are_the_generators_own) {
    Device device = make_device();
    std::vector<std::uint64_t> states(96);
    std::iota(states.begin(), states.end(), 12345u);
    const auto data = device.make(states);
    const auto out = device.make<double>(96);
    device.launch("random_numbers", {.grid = {3, 1, 1}, .block = {32, 1, 1}}, data, out, 50);
    std::vector<double> expected;
    for (auto &state : states) {
        double inside = 0;
        for (int k = 0; k < 50; ++k) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            const double x = static_cast<double>(state >> 11) / 9007199254740992.0;
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            const double y = static_cast<double>(state >> 11) / 9007199254740992.0;
            if (x * x + y * y < 1.0)
                inside += 1.0;
        }
        expected.push_back(inside);
    }
    CHECK_SAME_BYTES(device.read(data), states);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(lanes_that_leave_a_loop_at_different_times_all_finish) {
    Device device = make_device();
    const int width = 40, height = 30, limit = 200;
    const auto out = device.make<int>(width * height);
    device.launch("mandelbrot", {.grid = {5, 4, 1}, .block = {8, 8, 1}}, out, width, height, limit);
    std::vector<int> expected;
    for (int py = 0; py < height; ++py)
        for (int px = 0; px < width; ++px) {
            const double cx = -2.0 + 3.0 * px / width, cy = -1.5 + 3.0 * py / height;
            double x = 0, y = 0;
            int k = 0;
            while (k < limit && x * x + y * y <= 4.0) {
                const double keep = x * x - y * y + cx;
                y = 2.0 * x * y + cy;
                x = keep;
                ++k;
            }
            expected.push_back(k);
        }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(transpose_through_shared_memory_is_exact) {
    Device device = make_device();
    const int width = 70, height = 45;
    const auto in = some_integers(width * height);
    const auto out = device.make<int>(width * height);
    device.launch("transpose", {.grid = {3, 2, 1}, .block = {32, 8, 1}}, device.make(in), out, width, height);
    std::vector<int> expected(width * height);
    for (int y = 0; y < height; ++y)
        for (int x = 0; x < width; ++x)
            expected[x * height + y] = in[y * width + x];
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(saxpy_equals_the_host_with_and_without_address_ranges) {
    for (const bool use_ranges : {true, false}) {
        Device device = make_device();
        device.memory.use_ranges = use_ranges;
        const auto x = some_floats(1000, 6);
        const auto y = some_floats(1000, 7);
        const auto data = device.make(y);
        device.launch("saxpy", {.grid = {8, 1, 1}, .block = {128, 1, 1}}, 1.7f, device.make(x), data, 1000);
        std::vector<float> expected(1000);
        for (int i = 0; i < 1000; ++i)
            expected[i] = std::fma(1.7f, x[i], y[i]);
        CHECK_SAME_BYTES(device.read(data), expected);
    }
}

TEST(results_do_not_depend_on_the_number_of_host_threads) {
    std::vector<std::vector<unsigned>> results;
    for (const unsigned workers : {1u, 2u}) {
        Device device = make_device();
        device.max_workers = workers;
        const auto out = device.make<unsigned>(64 * 128);
        device.launch("spinning_work", {.grid = {64, 1, 1}, .block = {128, 1, 1}}, out, 300);
        results.push_back(device.read(out));
    }
    CHECK_SAME_BYTES(results[0], results[1]);
    unsigned last = 64 * 128 - 1;
    for (int k = 0; k < 300; ++k)
        last = last * 1664525u + 1013904223u;
    CHECK_EQUAL(results[0].back(), last);
}

TEST(results_do_not_depend_on_the_callers_rounding_direction) {
    std::vector<std::vector<float>> results;
    for (const int direction : {FE_TONEAREST, FE_UPWARD}) {
        Device device = make_device();
        const auto x = some_floats(256, 6);
        const auto data = device.make(some_floats(256, 7));
        std::fesetround(direction);
        device.launch("saxpy", {.grid = {2, 1, 1}, .block = {128, 1, 1}}, 1.7f, device.make(x), data, 256);
        const int afterwards = std::fegetround();
        std::fesetround(FE_TONEAREST);
        CHECK_EQUAL(afterwards, direction);
        results.push_back(device.read(data));
    }
    CHECK_SAME_BYTES(results[0], results[1]);
}

TEST(no_helper_thread_is_started_after_shutdown) {
    test::ptx::shutdown_workers();
    Device device = make_device();
    const auto out = device.make<unsigned>(64 * 128);
    device.launch("spinning_work", {.grid = {64, 1, 1}, .block = {128, 1, 1}}, out, 200);
    test::ptx::resume_workers();
    unsigned first = 0;
    for (int k = 0; k < 200; ++k)
        first = first * 1664525u + 1013904223u;
    CHECK_EQUAL(device.read(out)[0], first);
}

} // namespace
