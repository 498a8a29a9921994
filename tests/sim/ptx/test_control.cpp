// Control flow, calls, barriers, printf and assert, and kernels that never end by themselves.
#include <cstdio>
#include <numeric>
#include <thread>

#include "device.hpp"

namespace {

using namespace test;
using Kind = ptx::Fault::Kind;

template <class F> ptx::Fault fault_of(F &&run) {
    try {
        run();
    } catch (const ptx::Fault &fault) {
        return fault;
    }
    throw Failure("no fault was raised");
}

std::vector<int> small_integers(std::size_t count) {
    std::vector<int> values(count);
    unsigned seed = 77;
    for (auto &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<int>(seed >> 16);
    }
    return values;
}

TEST(nested_divergent_loops_equal_the_host) {
    Device device = make_device();
    const auto in = small_integers(200);
    const auto out = device.make<int>(200);
    device.launch("nested_loops", {.grid = {4, 1, 1}, .block = {64, 1, 1}}, device.make(in), out, 200);
    std::vector<int> expected;
    for (int i = 0; i < 200; ++i) {
        unsigned sum = 0;
        for (int a = 0; a < in[i] % 13; ++a) {
            if (a == 7)
                continue;
            for (int b = a; b < i % 11; ++b) {
                if ((a ^ b) == 5)
                    break;
                sum = sum * 3 + static_cast<unsigned>(a * b + (b & 1 ? i : -i));
            }
            while (sum % 5 == 2 && sum > 100)
                sum /= 3;
        }
        expected.push_back(static_cast<int>(sum));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(every_case_of_a_switch_is_taken) {
    Device device = make_device();
    const auto in = small_integers(256);
    const auto out = device.make<int>(256);
    device.launch("big_switch", {.grid = {2, 1, 1}, .block = {128, 1, 1}}, device.make(in), out);
    std::vector<int> expected;
    for (int i = 0; i < 256; ++i) {
        int value = in[static_cast<std::size_t>(i)];
        switch (value % 12) {
        case 0:
            value += 11;
            break;
        case 1:
            value *= 3;
            [[fallthrough]];
        case 2:
            value ^= 0x55;
            break;
        case 3:
            value = -value;
            break;
        case 4:
            value <<= 2;
            break;
        case 5:
            value -= 1000;
            [[fallthrough]];
        case 6:
            value /= 3;
            break;
        case 7:
            value = static_cast<int>(static_cast<unsigned>(value) * static_cast<unsigned>(value));
            break;
        case 8:
            value |= 1 << (value & 7);
            break;
        case 9:
            value = ~value;
            break;
        case 10:
            value += i;
            break;
        default:
            value = 42;
        }
        expected.push_back(value);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

int fibonacci(int n) {
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}
unsigned ackermann(unsigned m, unsigned n) {
    if (m == 0)
        return n + 1;
    return ackermann(m - 1, n == 0 ? 1 : ackermann(m, n - 1));
}

TEST(recursion_may_differ_from_lane_to_lane) {
    Device device = make_device();
    const auto out = device.make<int>(40);
    device.launch("recursion", {.block = {40, 1, 1}}, out);
    std::vector<int> expected;
    for (unsigned i = 0; i < 40; ++i)
        expected.push_back(i % 3 == 0 ? fibonacci(static_cast<int>(i % 12))
                                      : static_cast<int>(ackermann(i % 3, i % 4)));
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(endless_recursion_ends_in_a_fault) {
    Device device = make_device();
    const auto out = device.make<int>(1);
    CHECK(fault_of([&] { device.launch("endless_recursion", {}, out); }).kind == Kind::out_of_memory);
}

TEST(function_pointers_may_differ_from_lane_to_lane) {
    Device device = make_device();
    const auto choice = small_integers(32);
    const auto out = device.make<int>(32);
    device.launch("function_pointers", {.block = {32, 1, 1}}, device.make(choice), out);
    const auto call = [](int which, int x) {
        return which == 0   ? x * 2
               : which == 1 ? static_cast<int>(static_cast<unsigned>(x) * static_cast<unsigned>(x))
                            : -x;
    };
    std::vector<int> expected;
    for (int i = 0; i < 32; ++i) {
        const int c = choice[static_cast<std::size_t>(i)];
        expected.push_back(
            static_cast<int>(static_cast<unsigned>(call(c % 3, i)) + static_cast<unsigned>(call(i / 8 % 3, c))));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(a_call_of_no_function_faults) {
    Device device = make_device();
    const auto out = device.make<int>(1);
    for (const std::uint64_t address : {std::uint64_t{0}, out.address, std::uint64_t{4} << 56, ~std::uint64_t{0}})
        CHECK(fault_of([&] { device.launch("wild_call", {}, address, out); }).kind == Kind::illegal_instruction);
}

TEST(virtual_functions_are_found_through_their_tables) {
    Device device = make_device();
    const auto out = device.make<double>(32);
    device.launch("virtual_functions", {.block = {32, 1, 1}}, out);
    std::vector<double> expected;
    for (int i = 0; i < 32; ++i)
        expected.push_back(i % 2 == 0 ? i * i + 4.0 : (i + 1.0) * (i + 1.0) * 3.0);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(structs_go_through_calls_and_come_back) {
    Device device = make_device();
    const auto out = device.make<long long>(32);
    device.launch("structs_through_calls", {.block = {32, 1, 1}}, out);
    std::vector<long long> expected;
    for (int i = 0; i < 32; ++i) {
        long long first = i;
        auto second = static_cast<short>(i * 2);
        for (int k = 1; k < 4; ++k) {
            first *= k + i % 2;
            second = static_cast<short>(second - (k + i % 2));
        }
        expected.push_back(first * 100000 + second);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(barriers_in_both_branches_of_a_loop_match) {
    Device device = make_device();
    const auto out = device.make<int>(128);
    device.launch("barriers_in_loops", {.block = {128, 1, 1}}, out, 5);
    std::vector<int> values(128);
    std::iota(values.begin(), values.end(), 0);
    for (int k = 0; k < 5; ++k) {
        std::vector<int> next(128);
        for (std::size_t i = 0; i < 128; ++i)
            next[i] = i % 2 == 0 ? values[(i + 1) % 128] * 3 : values[(i + 126) % 128] + k;
        values = next;
    }
    CHECK_SAME_BYTES(device.read(out), values);
}

TEST(threads_that_have_exited_are_not_waited_for) {
    Device device = make_device();
    const auto out = device.make<int>(100);
    device.launch("early_exit", {.block = {100, 1, 1}}, out);
    int sum = 0;
    for (int i = 0; i < 100; ++i)
        sum += i % 5 == 3 ? 0 : i;
    std::vector<int> expected;
    for (int i = 0; i < 100; ++i)
        expected.push_back(i % 5 == 3 ? 0 : sum);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(producers_arrive_at_a_named_barrier_without_waiting) {
    Device device = make_device();
    const auto out = device.make<int>(128);
    device.launch("named_barriers", {.block = {128, 1, 1}}, out);
    std::vector<int> expected;
    for (int i = 0; i < 128; ++i)
        expected.push_back(i < 64 ? -1 : (127 - i) * (127 - i));
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(reducing_barriers_give_every_thread_the_result) {
    Device device = make_device();
    std::vector<int> in(96, 5);
    for (std::size_t i = 0; i < 96; i += 7)
        in[i] = 30;
    const auto out = device.make<int>(96 * 3);
    device.launch("barrier_reductions", {.block = {96, 1, 1}}, device.make(in), out);
    std::vector<int> expected;
    for (int i = 0; i < 96; ++i)
        expected.insert(expected.end(), {14, 1, 0});
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(a_lock_among_lanes_of_a_warp_makes_progress) {
    Device device = make_device();
    const auto lock = device.make<int>(1);
    const auto counter = device.make<int>(1);
    device.launch("lock_within_a_warp", {.grid = {2, 1, 1}, .block = {64, 1, 1}}, lock, counter);
    CHECK_EQUAL(device.read(counter)[0], 128);
}

TEST(lanes_that_spin_do_not_starve_the_lane_they_wait_for) {
    Device device = make_device();
    const auto flag = device.make<int>(1);
    const auto out = device.make<int>(32);
    device.launch("spin_within_a_warp", {.block = {32, 1, 1}}, flag, out);
    const auto got = device.read(out);
    for (int i = 0; i < 31; ++i)
        CHECK_EQUAL(got[static_cast<std::size_t>(i)], 5 + i);
}

TEST(blocks_that_spin_do_not_starve_the_block_they_wait_for) {
    Device device = make_device();
    const auto flags = device.make<int>(6);
    const auto out = device.make<int>(6);
    device.launch("spin_between_blocks", {.grid = {6, 1, 1}, .block = {32, 1, 1}}, flags, out);
    CHECK_SAME_BYTES(device.read(out), (std::vector<int>{6, 5, 4, 3, 2, 1}));
}

TEST(a_kernel_that_never_ends_stops_when_it_is_cancelled) {
    Device device = make_device();
    std::atomic<bool> cancel{true};
    device.cancel = &cancel;
    const auto flag = device.make<int>(1);
    const auto fault = fault_of([&] { device.launch("endless_loop", {.grid = {3, 1, 1}, .block = {32, 1, 1}}, flag); });
    CHECK(fault.kind == Kind::launch_timeout);
}

TEST(threads_that_wait_for_each_other_for_ever_are_reported) {
    Device device = make_device();
    const auto out = device.make<int>(32);
    CHECK(fault_of([&] { device.launch("deadlock", {.block = {32, 1, 1}}, out); }).kind == Kind::launch_timeout);
}

TEST(printf_prints_what_the_hosts_prints) {
    Device device = make_device();
    const auto word = device.make(std::vector<char>{'h', 'o', 'p', '\0'});
    device.launch("printing", {.block = {32, 1, 1}}, 3, word);
    std::string expected;
    for (int i = 0; i < 3; ++i) {
        char line[200];
        std::snprintf(line, sizeof line, "%d of %u: %5.2f|%-4s|%llx|%c%%\n", i, 3u, i * 1.25, "hop",
                      0x123456789abcull + static_cast<unsigned>(i), 'a' + i);
        expected += line;
    }
    CHECK_EQUAL(device.printed, expected);
}

TEST(a_failed_assertion_says_what_failed) {
    Device device = make_device();
    device.launch("asserting", {.block = {32, 1, 1}}, 32);
    const auto fault = fault_of([&] { device.launch("asserting", {.block = {32, 1, 1}}, 10); });
    CHECK(fault.kind == Kind::assert_failed);
    CHECK_EQUAL(fault.thread[0], 10u);
    CHECK(fault.detail.find("threadIdx.x) < limit") != std::string::npos);
    CHECK(fault.detail.find("control.cu") != std::string::npos);
}

TEST(a_trap_faults_with_the_thread_that_trapped) {
    Device device = make_device();
    const auto fault = fault_of([&] { device.launch("trapping", {.block = {64, 1, 1}}, 45); });
    CHECK(fault.kind == Kind::trap);
    CHECK_EQUAL(fault.thread[0], 45u);
}

TEST(special_registers_identify_every_thread) {
    Device device = make_device();
    const auto out = device.make<unsigned>(2 * 3 * 2 * 5 * 4 * 3);
    device.launch("thread_ids", {.grid = {2, 3, 2}, .block = {5, 4, 3}}, out);
    std::vector<unsigned> expected;
    for (unsigned block = 0; block < 12; ++block)
        for (unsigned thread = 0; thread < 60; ++thread)
            expected.push_back(block << 16 | thread << 6 | 3);
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(an_instruction_that_is_not_supported_is_named_at_launch_only) {
    Device device = make_device();
    const auto out = device.make<float>(1);
    const auto fault = fault_of([&] { device.launch("uses_textures", {}, out, std::uint64_t{0}); });
    CHECK(fault.kind == Kind::unsupported);
    CHECK(fault.detail.find("tex.1d.v4.f32.s32") != std::string::npos);
    CHECK(fault.line != 0);
}

} // namespace
