# cmake -DIN=flat file -DOUT=source file -P embed.cmake: the bytes as an array of C++.
file(READ "${IN}" bytes HEX)
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE "${OUT}" "// Made from blob/copy.cpp by the build.
#include <cstddef>
namespace woodfrog::enter::blob {
extern const unsigned char code[];
extern const std::size_t code_size;
alignas(8) const unsigned char code[] = {\n${bytes}};
const std::size_t code_size = sizeof code;
} // namespace woodfrog::enter::blob
")
