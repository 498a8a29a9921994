// Runs the registered cases against each PTX file named on the command line: the same kernels, compiled in several
// ways.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "device.hpp"

namespace {
std::string text_under_test;
std::string target_under_test;
} // namespace

namespace test {
Device make_device() {
    return Device(text_under_test);
}
const std::string &target() {
    return target_under_test;
}
} // namespace test

int main(int argc, char **argv) {
    std::string only;
    std::vector<std::string> files;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.starts_with("--only="))
            only = argument.substr(7);
        else
            files.push_back(argument);
    }
    if (files.empty()) {
        std::fprintf(stderr, "usage: %s [--only=NAME] FILE.ptx…\n", argv[0]);
        return 2;
    }
    unsigned failed = 0;
    unsigned run = 0;
    for (const std::string &file : files) {
        std::ifstream stream(file);
        if (!stream) {
            std::fprintf(stderr, "cannot read %s\n", file.c_str());
            return 2;
        }
        text_under_test.assign(std::istreambuf_iterator<char>(stream), {});
        const auto begin = std::chrono::steady_clock::now();
        target_under_test = test::ptx::Module::parse(text_under_test)->target();
        for (const test::Case &each : test::cases()) {
            if (!only.empty() && each.name.find(only) == std::string::npos)
                continue;
            ++run;
            try {
                each.body();
            } catch (const std::exception &error) {
                ++failed;
                std::fprintf(stderr, "FAILED %s (%s)\n  %s\n", each.name.c_str(), file.c_str(), error.what());
            }
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        std::printf("%s: %.2f s\n", file.c_str(), took.count());
    }
    std::printf("%u of %u cases failed\n", failed, run);
    return failed == 0 && run != 0 ? 0 : 1;
}
