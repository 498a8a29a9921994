// Runs the cases that bring their own PTX text. The files on the command line are what nvcc makes: material to mutate.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "device.hpp"
#include "text.hpp"

namespace test {
std::vector<std::string> &compiled_texts() {
    static std::vector<std::string> texts;
    return texts;
}
} // namespace test

int main(int argc, char **argv) {
    std::string only;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.starts_with("--only=")) {
            only = argument.substr(7);
            continue;
        }
        if (argument.starts_with("--rounds=")) {
            test::mutation_rounds = static_cast<unsigned>(std::stoul(argument.substr(9)));
            continue;
        }
        if (argument.starts_with("--seed=")) {
            test::mutation_seed = static_cast<unsigned>(std::stoul(argument.substr(7)));
            continue;
        }
        std::ifstream stream(argument);
        if (!stream) {
            std::fprintf(stderr, "cannot read %s\n", argv[i]);
            return 2;
        }
        test::compiled_texts().emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
    }
    unsigned failed = 0;
    unsigned run = 0;
    for (const test::Case &each : test::cases()) {
        if (!only.empty() && each.name.find(only) == std::string::npos)
            continue;
        ++run;
        try {
            each.body();
        } catch (const std::exception &error) {
            ++failed;
            std::fprintf(stderr, "FAILED %s\n  %s\n", each.name.c_str(), error.what());
        }
    }
    std::printf("%u of %u cases failed\n", failed, run);
    return failed == 0 && run != 0 ? 0 : 1;
}
