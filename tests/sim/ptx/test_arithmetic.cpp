// Integer and floating results at the corners of their ranges, bit for bit as IEEE 754 and the PTX manual define them.
#include <bit>
#include <cfenv>
#include <cmath>
#include <limits>

#include "device.hpp"
#include "half.hpp"

namespace {

using namespace test;
using simgpu::ptx::float_from_bfloat;
using simgpu::ptx::float_from_half;

std::uint64_t next_random(std::uint64_t &state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1dull;
}

constexpr std::size_t pairs = 700;

template <class T> std::vector<T> integer_inputs(std::uint64_t seed) {
    using L = std::numeric_limits<T>;
    const T corners[] = {0, 1, static_cast<T>(-1), L::min(), L::max(), static_cast<T>(L::min() + 1),
                         2, 7, static_cast<T>(-7), 31};
    std::vector<T> values;
    std::uint64_t state = seed;
    for (std::size_t i = 0; i < pairs; ++i) {
        const std::uint64_t random = next_random(state);
        values.push_back(random % 3 == 0 ? corners[random / 3 % 10] : static_cast<T>(random >> (random % 7 * 8)));
    }
    return values;
}

template <class T> T multiply_high(T a, T b) {
    return static_cast<T>(static_cast<__int128>(a) * static_cast<__int128>(b) >> (8 * sizeof(T)));
}
template <> std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
    return static_cast<std::uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

template <class T> void check_integers(const char *kernel) {
    using U = std::make_unsigned_t<T>;
    Device device = make_device();
    const auto x = integer_inputs<T>(11);
    const auto y = integer_inputs<T>(22);
    const auto out = device.make<T>(pairs * 16);
    device.launch(kernel, {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), device.make(y), out,
                  static_cast<int>(pairs));
    std::vector<T> expected;
    for (std::size_t i = 0; i < pairs; ++i) {
        const T a = x[i], b = y[i];
        const U ua = static_cast<U>(a), ub = static_cast<U>(b);
        const bool divides = b != 0 && b != static_cast<T>(-1);
        const unsigned shift = static_cast<unsigned>(b) % (8 * sizeof(T));
        const auto add = [&](U value) { expected.push_back(static_cast<T>(value)); };
        add(ua + ub);
        add(ua - ub);
        add(ua * ub);
        expected.push_back(multiply_high<T>(a, b));
        expected.push_back(divides ? a / b : 0);
        expected.push_back(divides ? a % b : 0);
        add(ua & ub);
        add(ua | ~ub);
        add(ua ^ ub);
        add(ua << shift);
        expected.push_back(a >> shift);
        expected.push_back(std::min(a, b));
        expected.push_back(std::max(a, b));
        add(ua * 7 + ub);
        add(static_cast<U>(a / 7) + static_cast<U>(b % 10));
        add(U{0} - ua);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(integers_of_32_and_64_bits_wrap_and_divide_exactly) {
    check_integers<std::int32_t>("integers_s32");
    check_integers<std::uint32_t>("integers_u32");
    check_integers<std::int64_t>("integers_s64");
    check_integers<std::uint64_t>("integers_u64");
}

TEST(narrow_integers_promote_and_wrap) {
    Device device = make_device();
    const auto x = integer_inputs<std::int32_t>(33);
    const auto y = integer_inputs<std::int32_t>(44);
    const auto out = device.make<int>(pairs * 8);
    device.launch("narrow_integers", {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), device.make(y), out,
                  static_cast<int>(pairs));
    std::vector<int> expected;
    for (std::size_t i = 0; i < pairs; ++i) {
        const auto a8 = static_cast<std::int8_t>(x[i]);
        const auto b8 = static_cast<std::uint8_t>(y[i]);
        const auto a16 = static_cast<std::int16_t>(x[i]);
        const auto b16 = static_cast<std::uint16_t>(y[i]);
        expected.push_back(static_cast<std::int8_t>(a8 + b8));
        expected.push_back(static_cast<std::uint8_t>(a8 * b8));
        expected.push_back(static_cast<std::int16_t>(static_cast<unsigned>(a16) * b16));
        expected.push_back(static_cast<std::uint16_t>(a16 - b16));
        expected.push_back(a8 < b8);
        expected.push_back(static_cast<std::int16_t>(a16 >> 3) ^ (b16 >> 5));
        expected.push_back(b16 != 0 ? a16 / b16 : a16);
        expected.push_back(static_cast<std::int8_t>(a16) + static_cast<std::uint8_t>(b16));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

std::uint32_t reverse(std::uint32_t a) {
    std::uint32_t result = 0;
    for (int i = 0; i < 32; ++i)
        result |= (a >> i & 1) << (31 - i);
    return result;
}

TEST(bit_operations_equal_their_definitions) {
    Device device = make_device();
    const auto x = integer_inputs<std::uint32_t>(55);
    const auto y = integer_inputs<std::uint32_t>(66);
    const auto out = device.make<std::uint32_t>(pairs * 16);
    device.launch("bit_operations", {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), device.make(y), out,
                  static_cast<int>(pairs));
    std::vector<std::uint32_t> expected;
    for (std::size_t i = 0; i < pairs; ++i) {
        const std::uint32_t a = x[i], b = y[i];
        const std::uint64_t wide = std::uint64_t{a} << 32 | b;
        const auto byte = [&](unsigned k) {
            return static_cast<std::uint32_t>((std::uint64_t{b} << 32 | a) >> (8 * k) & 0xff);
        };
        expected.push_back(static_cast<std::uint32_t>(std::popcount(a)));
        expected.push_back(static_cast<std::uint32_t>(std::countl_zero(a)));
        expected.push_back(a == 0 ? 0 : static_cast<std::uint32_t>(std::countr_zero(a)) + 1);
        expected.push_back(reverse(a));
        expected.push_back(byte(6) << 24 | byte(1) << 16 | byte(7) << 8 | byte(2));
        expected.push_back(static_cast<std::uint32_t>((std::uint64_t{b} << 32 | a) << (b & 31) >> 32));
        expected.push_back(static_cast<std::uint32_t>((std::uint64_t{b} << 32 | a) >> std::min(a & 63, 32u)));
        expected.push_back(static_cast<std::uint32_t>(std::popcount(wide)));
        expected.push_back(static_cast<std::uint32_t>(std::countl_zero(wide)));
        expected.push_back(reverse(b));
        std::uint32_t dot_signed = 17, dot_unsigned = 17;
        for (int k = 0; k < 32; k += 8) {
            dot_signed +=
                static_cast<std::uint32_t>(static_cast<std::int8_t>(a >> k) * static_cast<std::int8_t>(b >> k));
            dot_unsigned += (a >> k & 0xff) * (b >> k & 0xff);
        }
        expected.push_back(dot_signed);
        expected.push_back(dot_unsigned);
        const std::int64_t distance = std::int64_t{static_cast<std::int32_t>(a)} - static_cast<std::int32_t>(b);
        expected.push_back(5 + static_cast<std::uint32_t>(distance < 0 ? -distance : distance));
        const std::uint32_t position = b & 31, length = b >> 8 & 31;
        std::uint32_t field = 0, inserted = b;
        for (std::uint32_t k = 0; k < 32; ++k) {
            const std::uint32_t sign = length == 0 ? 0 : a >> std::min(position + length - 1, 31u) & 1;
            field |= (k < length && position + k < 32 ? a >> (position + k) & 1 : sign) << k;
        }
        for (std::uint32_t k = 0; k < (b & 31) && (a & 31) + k < 32; ++k) {
            const std::uint32_t at = (a & 31) + k;
            inserted = (inserted & ~(1u << at)) | (a >> k & 1) << at;
        }
        expected.push_back(field);
        expected.push_back(inserted);
        expected.push_back(a ^ b ^ (a * b));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

TEST(arithmetic_of_128_bits_carries_and_borrows) {
    Device device = make_device();
    const auto x = integer_inputs<std::uint64_t>(77);
    const auto y = integer_inputs<std::uint64_t>(88);
    const auto out = device.make<std::uint64_t>(pairs * 8);
    device.launch("wide_arithmetic", {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), device.make(y), out,
                  static_cast<int>(pairs));
    std::vector<std::uint64_t> expected;
    for (std::size_t i = 0; i < pairs; ++i) {
        const auto a = static_cast<unsigned __int128>(x[i]) << 64 | y[i];
        const auto b = static_cast<unsigned __int128>(y[i]) << 64 | ~x[i];
        for (const unsigned __int128 value : {a + b, a - b, a * b}) {
            expected.push_back(static_cast<std::uint64_t>(value));
            expected.push_back(static_cast<std::uint64_t>(value >> 64));
        }
        expected.push_back(x[i] + y[i]);
        expected.push_back(x[i] + y[i] < x[i] ? 1 : 0);
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

template <class T> std::vector<T> float_inputs(std::uint64_t seed) {
    using L = std::numeric_limits<T>;
    const T corners[] = {
        T{0},     -T{0},       T{1},          -T{1},          L::min(),       L::denorm_min(), -L::denorm_min() * 5,
        L::max(), -L::max(),   L::infinity(), -L::infinity(), L::quiet_NaN(), T{0.5},          T{2.5},
        T{-3.5},  L::epsilon()};
    std::vector<T> values;
    std::uint64_t state = seed;
    for (std::size_t i = 0; i < pairs; ++i) {
        const std::uint64_t random = next_random(state);
        if (random % 3 == 0)
            values.push_back(corners[random / 3 % 16]);
        else if (random % 3 == 1)
            values.push_back(static_cast<T>(static_cast<std::int64_t>(random)) / static_cast<T>(1ull << 60));
        else if constexpr (sizeof(T) == 4)
            values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random >> 32)));
        else
            values.push_back(std::bit_cast<double>(next_random(state)));
    }
    return values;
}

// The result in a rounding direction. volatile keeps the compiler from computing it in another one.
template <class F> auto rounded(int direction, F &&compute) {
    std::fesetround(direction);
    const auto result = compute();
    std::fesetround(FE_TONEAREST);
    return result;
}
template <class T> T calculate(int direction, char operation, T x, T y, T z = 0) {
    volatile T a = x, b = y, c = z;
    volatile T result = rounded(direction, [&]() -> T {
        switch (operation) {
        case '+':
            return a + b;
        case '*':
            return a * b;
        case '/':
            return a / b;
        case 'r':
            return std::sqrt(static_cast<T>(a));
        default:
            return std::fma(static_cast<T>(a), static_cast<T>(b), static_cast<T>(c));
        }
    });
    return result;
}

template <class T>
void same_values(const std::vector<T> &actual, const std::vector<T> &expected, std::size_t per_input,
                 const std::vector<T> &x, const std::vector<T> &y) {
    CHECK_EQUAL(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
        if (std::isnan(actual[i]) && std::isnan(expected[i]))
            continue; // IEEE leaves the bits of a NaN open
        if (std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0)
            continue;
        std::ostringstream text;
        text.precision(17);
        text << "result " << i % per_input << " for " << x[i / per_input] << " and " << y[i / per_input] << ": got "
             << actual[i] << ", expected " << expected[i];
        throw Failure(text.str());
    }
}

template <class T> T smaller(T a, T b) {
    if (std::isnan(a))
        return b;
    if (std::isnan(b))
        return a;
    return a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
}
template <class T> T larger(T a, T b) {
    return -smaller(-a, -b);
}

TEST(f32_operations_are_correctly_rounded_in_every_direction) {
    Device device = make_device();
    const auto x = float_inputs<float>(101);
    const auto y = float_inputs<float>(202);
    const auto out = device.make<float>(pairs * 24);
    device.launch("floats_f32", {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), device.make(y), out,
                  static_cast<int>(pairs));
    std::vector<float> expected;
    for (std::size_t i = 0; i < pairs; ++i) {
        const float a = x[i], b = y[i];
        for (const char operation : {'+', '*', 'f'})
            for (const int direction : {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD})
                expected.push_back(calculate<float>(direction, operation, a, b, 0.3f));
        expected.push_back(calculate<float>(FE_TONEAREST, '/', a, b));
        expected.push_back(calculate<float>(FE_TOWARDZERO, '/', a, b));
        expected.push_back(calculate<float>(FE_TONEAREST, 'r', std::fabs(a), b));
        expected.push_back(calculate<float>(FE_UPWARD, 'r', std::fabs(a), b));
        expected.push_back(calculate<float>(FE_DOWNWARD, '/', 1.0f, b));
        expected.push_back(smaller(a, b));
        expected.push_back(larger(a, b));
        expected.push_back(std::copysign(a, b));
        expected.push_back(std::floor(a));
        expected.push_back(std::nearbyint(b));
        expected.push_back(a > 0 ? std::min(a, 1.0f) : 0.0f);
        expected.push_back(a < b ? -a : std::fabs(b));
    }
    same_values(device.read(out), expected, 24, x, y);
}

TEST(f64_operations_are_correctly_rounded_in_every_direction) {
    Device device = make_device();
    const auto x = float_inputs<double>(303);
    const auto y = float_inputs<double>(404);
    const auto out = device.make<double>(pairs * 16);
    device.launch("floats_f64", {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), device.make(y), out,
                  static_cast<int>(pairs));
    std::vector<double> expected;
    for (std::size_t i = 0; i < pairs; ++i) {
        const double a = x[i], b = y[i];
        expected.push_back(calculate<double>(FE_TONEAREST, '+', a, b));
        expected.push_back(calculate<double>(FE_TOWARDZERO, '+', a, b));
        expected.push_back(calculate<double>(FE_DOWNWARD, '*', a, b));
        expected.push_back(calculate<double>(FE_UPWARD, '*', a, b));
        expected.push_back(calculate<double>(FE_TONEAREST, 'f', a, b, 0.3));
        expected.push_back(calculate<double>(FE_DOWNWARD, 'f', a, b, 0.3));
        expected.push_back(calculate<double>(FE_TONEAREST, '/', a, b));
        expected.push_back(calculate<double>(FE_TONEAREST, 'r', std::fabs(a), b));
        expected.push_back(smaller(a, b));
        expected.push_back(larger(a, b));
        expected.push_back(std::ceil(a));
        expected.push_back(std::trunc(b));
        expected.push_back(calculate<double>(FE_UPWARD, '/', 1.0, b));
        expected.push_back(std::copysign(b, a));
        expected.push_back(a >= b ? a : b);
        expected.push_back(-a);
    }
    same_values(device.read(out), expected, 16, x, y);
}

template <class To> To to_integer(double value, int direction) {
    if (std::isnan(value))
        return 0;
    const double whole = rounded(direction, [&] {
        volatile double input = value;
        return std::nearbyint(input);
    });
    if (whole >= static_cast<double>(std::numeric_limits<To>::max()))
        return std::numeric_limits<To>::max();
    if (whole <= static_cast<double>(std::numeric_limits<To>::min()))
        return std::numeric_limits<To>::min();
    return static_cast<To>(whole);
}
std::int64_t float_bits(double value, int direction) {
    volatile float result = rounded(direction, [&] {
        volatile double input = value;
        volatile float output = static_cast<float>(input);
        return static_cast<float>(output);
    });
    // Every NaN the device makes is the canonical one.
    if (std::isnan(static_cast<float>(result)))
        return 0x7fffffff;
    return std::bit_cast<std::int32_t>(static_cast<float>(result));
}
template <class To, class From> double from_integer(From value, int direction) {
    return rounded(direction, [&] {
        volatile From input = value;
        volatile To output = static_cast<To>(input);
        return static_cast<double>(output);
    });
}

TEST(conversions_round_and_saturate_as_their_names_say) {
    Device device = make_device();
    auto x = float_inputs<double>(505);
    for (std::size_t i = 0; i < x.size(); i += 2)
        x[i] = std::ldexp(std::remainder(x[i], 4.0), static_cast<int>(i % 70));
    const auto out = device.make<std::int64_t>(pairs * 16);
    const auto floats = device.make<double>(pairs * 8);
    device.launch("conversions", {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), out, floats,
                  static_cast<int>(pairs));
    std::vector<std::int64_t> expected;
    std::vector<double> expected_floats;
    constexpr int rn = FE_TONEAREST, rz = FE_TOWARDZERO, rd = FE_DOWNWARD, ru = FE_UPWARD;
    for (const double a : x) {
        const auto f = static_cast<float>(a);
        const std::size_t first = expected.size();
        for (const int direction : {rn, rz, rd, ru})
            expected.push_back(to_integer<std::int32_t>(a, direction));
        expected.push_back(to_integer<std::int64_t>(a, rn));
        expected.push_back(to_integer<std::int64_t>(a, rd));
        expected.push_back(static_cast<std::int64_t>(to_integer<std::uint64_t>(a, rz)));
        expected.push_back(to_integer<std::uint32_t>(a, ru));
        expected.push_back(to_integer<std::int32_t>(f, rn));
        expected.push_back(to_integer<std::uint32_t>(f, rz));
        expected.push_back(to_integer<std::int64_t>(f, ru));
        expected.push_back(static_cast<std::int8_t>(to_integer<std::int32_t>(f, rz)));
        expected.push_back(float_bits(a, rz));
        expected.push_back(float_bits(a, ru));
        expected.push_back(float_bits(a, rd));
        expected.push_back(float_bits(a, rn));
        const auto whole = static_cast<std::int64_t>(static_cast<std::uint64_t>(expected[first + 4]) * 1000003u +
                                                     static_cast<std::uint64_t>(expected[first + 5]));
        expected_floats.push_back(from_integer<float>(whole, rn));
        expected_floats.push_back(from_integer<float>(whole, rz));
        expected_floats.push_back(from_integer<double>(whole, rn));
        expected_floats.push_back(from_integer<double>(whole, rd));
        expected_floats.push_back(from_integer<double>(static_cast<std::uint64_t>(whole), ru));
        expected_floats.push_back(from_integer<float>(static_cast<std::int32_t>(whole), rd));
        expected_floats.push_back(from_integer<float>(static_cast<std::uint32_t>(whole), ru));
        expected_floats.push_back(from_integer<float>(static_cast<std::uint64_t>(whole), rn));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
    CHECK_SAME_BYTES(device.read(floats), expected_floats);
}

// The nearest 16-bit value, found by search: an oracle that shares nothing with the code under test.
template <class Decode> class Format {
  public:
    explicit Format(Decode decode, std::uint16_t infinity) : decode_(decode), infinity_(infinity) {}
    std::uint16_t nearest(long double value) const {
        if (std::isnan(value))
            return 0x7fff;
        const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
        const long double magnitude = std::fabs(value);
        // Values grow with their bits, so the largest one not above the magnitude is found by bisection.
        std::uint16_t low = 0, high = infinity_;
        while (high - low > 1) {
            const auto middle = static_cast<std::uint16_t>((low + high) / 2);
            (static_cast<long double>(decode_(middle)) <= magnitude ? low : high) = middle;
        }
        if (std::isinf(magnitude))
            return static_cast<std::uint16_t>(sign | infinity_);
        const long double below = decode_(low);
        // Above the largest finite value the step goes on as if there were one more.
        const long double above =
            high == infinity_ ? 2 * below - static_cast<long double>(decode_(static_cast<std::uint16_t>(low - 1)))
                              : static_cast<long double>(decode_(high));
        const long double to_low = magnitude - below, to_high = above - magnitude;
        const bool up = to_high < to_low || (to_high == to_low && (low & 1) != 0);
        return static_cast<std::uint16_t>(sign | (up ? high : low));
    }
    long double value(std::uint16_t bits) const { return decode_(bits); }

  private:
    Decode decode_;
    std::uint16_t infinity_;
};

std::vector<std::uint16_t> half_inputs(std::uint64_t seed, std::uint16_t infinity) {
    const std::uint16_t corners[] = {0,
                                     0x8000,
                                     1,
                                     0x8001,
                                     infinity,
                                     static_cast<std::uint16_t>(infinity | 0x8000),
                                     static_cast<std::uint16_t>(infinity - 1),
                                     static_cast<std::uint16_t>(infinity + 1),
                                     0x3c00,
                                     0x0400};
    std::vector<std::uint16_t> values;
    std::uint64_t state = seed;
    for (std::size_t i = 0; i < pairs; ++i) {
        const std::uint64_t random = next_random(state);
        if (random % 4 == 0)
            values.push_back(corners[random / 4 % 10]);
        else if (random % 4 == 1)
            values.push_back(static_cast<std::uint16_t>(random >> 32));
        else
            values.push_back(static_cast<std::uint16_t>(0x3800 + (random >> 32) % 0x1000));
    }
    return values;
}

TEST(halves_are_rounded_once) {
    Device device = make_device();
    const auto x = half_inputs(606, 0x7c00), y = half_inputs(707, 0x7c00), z = half_inputs(808, 0x7c00);
    const auto out = device.make<std::uint16_t>(pairs * 12);
    device.launch("halves", {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), device.make(y), device.make(z),
                  out, static_cast<int>(pairs));
    const Format format([](std::uint16_t bits) { return float_from_half(bits); }, 0x7c00);
    std::vector<std::uint16_t> expected;
    for (std::size_t i = 0; i < pairs; ++i) {
        const long double a = format.value(x[i]), b = format.value(y[i]), c = format.value(z[i]);
        expected.push_back(format.nearest(a + b));
        expected.push_back(format.nearest(a - b));
        expected.push_back(format.nearest(a * b));
        expected.push_back(format.nearest(a * b + c));
        expected.push_back(format.nearest(static_cast<float>(a) * 1.0009765625f));
        const float scaled = static_cast<float>(b) * 1.0009765625f;
        std::uint16_t truncated = format.nearest(scaled);
        if (!std::isnan(scaled) && !std::isinf(scaled) && std::fabs(format.value(truncated)) > std::fabs(scaled))
            --truncated;
        expected.push_back(truncated);
        expected.push_back(x[i] ^ 0x8000);
        expected.push_back(static_cast<std::uint16_t>((a < b ? 1 : 0) | (a >= c ? 2 : 0) | (b == c ? 4 : 0) |
                                                      (std::isnan(a) ? 8 : 0)));
        expected.push_back(format.nearest(a * b + c));
        expected.push_back(format.nearest(b * c + a));
        expected.push_back(static_cast<std::uint16_t>(to_integer<std::int16_t>(static_cast<double>(c), FE_TOWARDZERO)));
        expected.push_back(format.nearest(static_cast<std::int16_t>(x[i])));
    }
    // -NaN is a matter of taste: the negation of a NaN is not compared.
    auto got = device.read(out);
    for (std::size_t i = 0; i < pairs; ++i)
        if ((x[i] & 0x7fff) > 0x7c00)
            got[i * 12 + 6] = expected[i * 12 + 6];
    CHECK_SAME_BYTES(got, expected);
}

TEST(bfloats_are_rounded_once) {
    Device device = make_device();
    const auto x = half_inputs(909, 0x7f80), y = half_inputs(1010, 0x7f80), z = half_inputs(1111, 0x7f80);
    const auto out = device.make<std::uint16_t>(pairs * 8);
    device.launch("bfloats", {.grid = {6, 1, 1}, .block = {128, 1, 1}}, device.make(x), device.make(y), device.make(z),
                  out, static_cast<int>(pairs));
    const Format format([](std::uint16_t bits) { return float_from_bfloat(bits); }, 0x7f80);
    std::vector<std::uint16_t> expected;
    for (std::size_t i = 0; i < pairs; ++i) {
        const long double a = format.value(x[i]), b = format.value(y[i]), c = format.value(z[i]);
        expected.push_back(format.nearest(a + b));
        expected.push_back(format.nearest(a - b));
        expected.push_back(format.nearest(a * b));
        expected.push_back(format.nearest(a * b + c));
        expected.push_back(format.nearest(static_cast<float>(a) * 1.00048828125f));
        expected.push_back(format.nearest(a));
        expected.push_back(format.nearest(static_cast<float>(b) * 3.0f));
        expected.push_back(static_cast<std::uint16_t>((a < b ? 1 : 0) | (a > c ? 2 : 0)));
    }
    CHECK_SAME_BYTES(device.read(out), expected);
}

/// Largest error of the device, in units of the last place of T.
template <class T> double error_in_ulps(T actual, double expected) {
    if (std::isnan(actual) && std::isnan(expected))
        return 0;
    const T near = static_cast<T>(expected);
    if (actual == near)
        return 0;
    const double ulp = std::fabs(static_cast<double>(std::nextafter(near, std::numeric_limits<T>::infinity())) -
                                 static_cast<double>(near));
    return std::fabs(static_cast<double>(actual) - expected) / ulp;
}

TEST(mathematical_functions_keep_the_error_bounds_of_the_manual) {
    Device device = make_device();
    std::vector<float> x;
    std::vector<double> wide;
    for (int i = -150; i < 150; ++i) {
        x.push_back(static_cast<float>(i) * 0.0537f);
        wide.push_back(i * 0.0537);
    }
    const int n = 300;
    const auto out = device.make<float>(12 * n);
    device.launch("functions_f32", {.grid = {3, 1, 1}, .block = {128, 1, 1}}, device.make(x), out, n);
    const auto got = device.read(out);
    for (int i = 0; i < n; ++i) {
        const double a = x[static_cast<std::size_t>(i)];
        const double positive = std::fabs(x[static_cast<std::size_t>(i)]);
        const double expected[] = {
            std::sin(a),
            std::cos(a),
            std::exp(a),
            std::log(static_cast<float>(positive + 0.5)),
            std::pow(static_cast<double>(static_cast<float>(positive) + 0.1f), static_cast<double>(1.7f)),
            std::tanh(a),
            1.0 / std::sqrt(static_cast<double>(static_cast<float>(positive + 0.25))),
            std::erf(a),
            std::exp(a),
            a / 3.0,
            std::atan2(a, 2.0),
            std::fmod(a, static_cast<double>(1.3f))};
        const double bounds[] = {2, 2, 2, 2, 8, 2, 2, 2, 20, 2, 3, 0};
        for (int k = 0; k < 12; ++k) {
            const double error = error_in_ulps(got[static_cast<std::size_t>(i * 12 + k)], expected[k]);
            if (error > bounds[k])
                throw Failure("f32 function " + std::to_string(k) + " of " + std::to_string(a) + " is off by " +
                              std::to_string(error) + " ulp");
        }
    }
    const auto out64 = device.make<double>(8 * n);
    device.launch("functions_f64", {.grid = {3, 1, 1}, .block = {128, 1, 1}}, device.make(wide), out64, n);
    const auto got64 = device.read(out64);
    for (int i = 0; i < n; ++i) {
        const double a = wide[static_cast<std::size_t>(i)];
        const double expected[] = {std::sin(a),
                                   std::cos(a * 1e6),
                                   std::exp(a),
                                   std::log(std::fabs(a) + 0.5),
                                   std::pow(std::fabs(a) + 0.1, 1.7),
                                   std::tanh(a),
                                   std::cbrt(a),
                                   std::lgamma(std::fabs(a) + 1.0)};
        for (int k = 0; k < 8; ++k) {
            const double actual = got64[static_cast<std::size_t>(i * 8 + k)];
            const double bound = k == 7 ? 1e-13 : 1e-14;
            if (std::fabs(actual - expected[k]) > bound * std::max(1.0, std::fabs(expected[k])))
                throw Failure("f64 function " + std::to_string(k) + " of " + std::to_string(a) + ": got " +
                              std::to_string(actual) + ", expected " + std::to_string(expected[k]));
        }
    }
}

} // namespace
