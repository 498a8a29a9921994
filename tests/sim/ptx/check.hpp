// A registry of test cases and the checks they use. A failed check throws, so that a case cannot go on with wrong data.
#pragma once

#include <cstring>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace test {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Case {
    std::string name;
    std::function<void()> body;
};

inline std::vector<Case> &cases() {
    static std::vector<Case> all;
    return all;
}

struct Register {
    Register(const char *name, std::function<void()> body) { cases().push_back({name, std::move(body)}); }
};

template <class A, class B>
void equal(const A &actual, const B &expected, const char *what, const char *file, int line) {
    if (actual == expected)
        return;
    std::ostringstream text;
    text << file << ":" << line << ": " << what << ": got " << actual << ", expected " << expected;
    throw Failure(text.str());
}

/// Bit for bit, element by element; NaNs with the same bits are equal.
template <class T>
void same_bytes(const std::vector<T> &actual, const std::vector<T> &expected, const char *what, const char *file,
                int line) {
    equal(actual.size(), expected.size(), what, file, line);
    for (std::size_t i = 0; i < actual.size(); ++i) {
        if (std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0)
            continue;
        std::ostringstream text;
        text.precision(17);
        text << file << ":" << line << ": " << what << "[" << i << "]: got " << actual[i] << ", expected "
             << expected[i];
        throw Failure(text.str());
    }
}

} // namespace test

#define TEST_JOIN2(a, b) a##b
#define TEST_JOIN(a, b) TEST_JOIN2(a, b)
/// A test case named by the promise that it keeps.
#define TEST(name)                                                                                                     \
    static void name();                                                                                                \
    static const test::Register TEST_JOIN(name, _registered)(#name, name);                                             \
    static void name()

#define CHECK_EQUAL(actual, expected) test::equal(actual, expected, #actual, __FILE__, __LINE__)
#define CHECK_SAME_BYTES(actual, expected) test::same_bytes(actual, expected, #actual, __FILE__, __LINE__)
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            throw test::Failure(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition);             \
    } while (false)
