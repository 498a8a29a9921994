# cmake -DIN=flat file -DLAYOUT=layout.hpp -DOUT=source file -P embed.cmake: the bytes as an array of C++.
file(READ "${IN}" bytes HEX)
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE "${OUT}" "// Made from blob/copy.cpp by the build.
#include \"${LAYOUT}\"
namespace woodfrog::enter::blob {
extern const unsigned char code[];
extern const std::size_t code_size;
alignas(8) constexpr unsigned char code[] = {\n${bytes}};
const std::size_t code_size = sizeof code;
constexpr std::uint64_t head() {
    std::uint64_t value = 0;
    for (unsigned i = 0; i < 8; i++)
        value |= std::uint64_t{code[i]} << 8 * i;
    return value;
}
static_assert(head() == magic, \"the header in copy.cpp and layout.hpp have different magic numbers\");
} // namespace woodfrog::enter::blob
")
