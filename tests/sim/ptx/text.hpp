// PTX written by hand in tests, and the texts of the compiler.
#pragma once

#include <string>
#include <vector>

namespace test {

/// The PTX files named on the command line.
std::vector<std::string> &compiled_texts();
/// How many mutated texts to try, and the number that all mutations derive from: --rounds=N, --seed=N.
inline unsigned mutation_rounds = 1500;
inline unsigned mutation_seed = 20260101;

/// A module with one kernel `k` that takes a pointer `out` and has `body`, in which %out holds the pointer.
inline std::string kernel_with(const std::string &body, const std::string &before = "") {
    return ".version 8.8\n.target sm_90\n.address_size 64\n" + before +
           ".visible .entry k(.param .u64 out)\n{\n.reg .b64 %out;\nld.param.u64 %out, [out];\n" + body + "\nret;\n}\n";
}

} // namespace test
