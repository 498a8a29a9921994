// Reading PTX: what the module tells about itself, where errors are, and that no text whatever does harm.
#include <chrono>

#include "device.hpp"
#include "text.hpp"

namespace {

using namespace test;

ptx::ParseError error_of(const std::string &text) {
    try {
        ptx::Module::parse(text);
    } catch (const ptx::ParseError &error) {
        return error;
    }
    throw Failure("the text was accepted:\n" + text);
}

const std::string heading = ".version 8.0\n.target sm_80\n.address_size 64\n";

TEST(a_module_describes_its_kernels_and_variables) {
    const auto module = ptx::Module::parse(heading + R"(
.global .align 8 .u64 pointer = generic(numbers)+8;
.global .align 4 .b8 numbers[12] = {1, 0, 0, 0, 0xff};
.global .f32 real = 0f3FC00000;
.const .align 16 .b32 table[2][3] = {{1, 2, 3}, {4}};
.extern .shared .align 16 .b8 dynamic[];
.shared .align 8 .b8 unused[4096];
.global .align 8 .u64 function = helper;
.func helper(.param .b32 x) { ret; }
.visible .entry k(.param .u8 a, .param .u64 b, .param .align 16 .b8 c[20], .param .u16 d)
.reqntid 8, 4, 2
{
  .shared .align 4 .b8 used[100];
  .local .align 8 .b8 depot[24];
  .reg .b32 %r<3>;
  mov.u32 %r1, used;
  ret;
}
.entry other() .maxntid 96 { ret; }
)" + std::string(1, '\0') + "this is not read");
    CHECK_EQUAL(module->target(), "sm_80");
    CHECK_EQUAL(module->version(), 80u);
    CHECK_EQUAL(module->kernel_names().size(), 2u);
    const auto kernel = module->kernel("k");
    CHECK_EQUAL(kernel.parameters().size(), 4u);
    const std::size_t offsets[] = {0, 8, 16, 36};
    const std::size_t sizes[] = {1, 8, 20, 2};
    for (std::size_t i = 0; i < 4; ++i) {
        CHECK_EQUAL(kernel.parameters()[i].offset_bytes, offsets[i]);
        CHECK_EQUAL(kernel.parameters()[i].size_bytes, sizes[i]);
    }
    CHECK_EQUAL(kernel.parameters_bytes(), 38u);
    CHECK_EQUAL(kernel.static_shared_bytes(), 100u);
    CHECK_EQUAL(kernel.max_threads(), 64u);
    CHECK_EQUAL(kernel.required_block()[1], 4u);
    CHECK(kernel.local_bytes() >= 24);
    CHECK_EQUAL(module->kernel("other").max_threads(), 96u);
    CHECK(!module->has_kernel("helper"));

    const auto &globals = module->globals();
    CHECK_EQUAL(globals.size(), 5u);
    CHECK_EQUAL(globals[0].relocations.size(), 1u);
    CHECK_EQUAL(globals[0].relocations[0].symbol, "numbers");
    CHECK_EQUAL(globals[0].relocations[0].addend, 8);
    CHECK_EQUAL(globals[1].size_bytes, 12u);
    CHECK(globals[1].initial[4] == std::byte{0xff});
    CHECK(globals[2].initial[3] == std::byte{0x3f});
    CHECK(globals[3].space == ptx::Variable::Space::constant);
    CHECK_EQUAL(globals[3].size_bytes, 24u);
    CHECK(globals[3].initial[12] == std::byte{4});
    // Addresses of functions are known at once.
    CHECK(globals[4].relocations.empty());
    CHECK(globals[4].initial[7] != std::byte{0});
}

TEST(an_error_tells_its_line_and_column) {
    const auto error = error_of(heading + ".visible .entry k()\n{\n  .reg .b32 %r<2>;\n  mov.u32 %r1 %r0;\n}\n");
    CHECK_EQUAL(error.line, 7u);
    CHECK_EQUAL(error.column, 15u);
    CHECK(std::string(error.what()).find("line 7, column 15") != std::string::npos);
}

TEST(malformed_texts_are_refused_with_a_reason) {
    const char *bodies[] = {".entry k( {",
                            ".entry k() { ret }",
                            ".entry k() { ret; ",
                            ".global .b32 x[99999999999999999999];",
                            ".global .b32 x[4294967296][4294967296];",
                            ".global .align 3 .b32 x;",
                            ".global .b8 x[2] = {1, 2, 3};",
                            ".global .b32 x = y;",
                            ".global x;",
                            ".entry k() { mov.u32 %r1, 0f12; }",
                            ".entry k() { .reg .b32 %r<99999999999>; }",
                            "/* never closed",
                            ".entry k() { a: a: ret; }",
                            ".entry k() { .reg .b32 x; .reg .b32 x; }",
                            "}",
                            ".entry",
                            ".func (.param .b32 r) f(",
                            "\"open",
                            ".section .debug { {",
                            ".entry k() { mov.u32 %r1, 0x; }",
                            ".entry k() {} .entry k() {}",
                            ".address_size 32",
                            "\x01\x02",
                            ".global .u64 x[] = {1, {2}};",
                            ".version",
                            ".entry k(.param .u64) { ret; }",
                            ".entry k() { @ ret; }",
                            ".entry k() { mov.u32 {%r1, ; }"};
    for (const char *body : bodies) {
        const auto error = error_of(heading + body);
        CHECK(!error.message.empty());
        CHECK(error.line >= 1);
    }
    error_of("");
    error_of("not ptx at all");
    error_of(std::string(heading) + ".entry k() {" + std::string(100000, '{'));
    error_of(std::string(heading) + ".entry k() { mov.u32 a, " + std::string(100000, '!') + "b; }");
    error_of(std::string(heading) + ".global .b32 x[1] = " + std::string(100000, '{'));
}

TEST(unknown_instructions_do_not_keep_a_module_from_loading) {
    Device device(heading +
                  ".entry good() { ret; }\n.entry bad() {\n .reg .b32 %r<2>;\n frobnicate.b32 %r1, %r1;\n ret; }\n");
    device.launch("good", {});
    try {
        device.launch("bad", {});
        throw Failure("an unknown instruction was executed");
    } catch (const ptx::Fault &fault) {
        CHECK(fault.kind == ptx::Fault::Kind::unsupported);
        CHECK_EQUAL(fault.line, 7u);
        CHECK(fault.detail.find("frobnicate.b32") != std::string::npos);
    }
}

TEST(debug_sections_and_line_tables_are_skipped) {
    ptx::Module::parse(heading + R"(
.file 1 "it's a \"name\"", 123, 456
.visible .entry k() {
  .loc 1 3 4
  .loc 1 3 4, function_name $info, inlined_at 1 2 3
  .pragma "nounroll";
  ret;
}
.section .debug_abbrev { .b8 1, 17; .b64 $label+4 { .b8 2 } }
.file 2 "last"
)");
}

// The form of Triton's output: inline assembly with spaces everywhere, guarded vector accesses, line tables, debug
// sections.
TEST(texts_in_the_manner_of_triton_run) {
    Device device(R"(
//
// Generated by LLVM NVPTX Back-End
//
.version 8.4
.target sm_90a
.address_size 64

	// .globl	add_kernel
.extern .shared .align 16 .b8 global_smem[];
.visible .entry add_kernel(
	.param .u64 .ptr .global .align 1 add_kernel_param_0,
	.param .u64 .ptr .global .align 1 add_kernel_param_1,
	.param .u32 add_kernel_param_2
)
.reqntid 32, 1, 1
{
	.reg .pred 	%p<4>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<5>;
	.loc	1 7 0
$L__func_begin0:
	.loc	1 7 0
	ld.param.b64 	%rd3, [add_kernel_param_0];
	ld.param.b64 	%rd4, [add_kernel_param_1];
	ld.param.b32 	%r17, [add_kernel_param_2];
$L__tmp0:
	.loc	1 12 24
	mov.u32 	%r1, %tid.x;
	shl.b32 	%r2, %r1, 2;
	setp.lt.s32 	%p1, %r2, %r17;
	mul.wide.s32 	%rd2, %r2, 4;
	add.s64 	%rd1, %rd3, %rd2;
	add.s64 	%rd2, %rd4, %rd2;
	// begin inline asm
	mov.u32 %r3, 0x0;
	mov.u32 %r4, 0x0;
	mov.u32 %r5, 0x0;
	mov.u32 %r6, 0x0;
	@%p1 ld.global.v4.b32 { %r3, %r4, %r5, %r6 }, [ %rd1 + 0 ];
	// end inline asm
	add.f32 	%r7, %r3, %r4;
	add.f32 	%r8, %r5, %r6;
	add.f32 	%r9, %r7, %r8;
	shfl.sync.bfly.b32 	%r10, %r9, 1, 31, -1;
	add.f32 	%r11, %r9, %r10;
	mov.b32 	%r12, global_smem;
	add.s32 	%r13, %r12, %r2;
	// begin inline asm
	@%p1 st.shared.b32 [ %r13 + 0 ], %r11;
	// end inline asm
	bar.sync 	0;
	ld.shared.b32 	%r14, [%r13];
	// begin inline asm
	@%p1 st.global.b32 [ %rd2 + 0 ], { %r14 };
	// end inline asm
	ret;
$L__tmp1:
$L__func_end0:
}
	.file	1 "/tmp/kernel.py"
	.section	.debug_abbrev
	{
.b8 1                                   // Abbreviation Code
.b8 17                                  // DW_TAG_compile_unit
	}
	.section	.debug_macinfo	{	}
)");
    std::vector<float> in(128);
    for (std::size_t i = 0; i < in.size(); ++i)
        in[i] = static_cast<float>(i);
    const auto out = device.make<float>(128);
    device.launch("add_kernel", {.block = {32, 1, 1}, .shared_bytes = 512}, device.make(in), out, 80);
    const auto got = device.read(out);
    for (std::size_t i = 0; i < 20; ++i) {
        const std::size_t first = i / 2 * 8;
        CHECK_EQUAL(got[i * 4], static_cast<float>(first * 8 + 28));
    }
    CHECK_EQUAL(got[80], 0.0f);
}

// Any text must end in a module or in a ParseError, and every kernel of a module in its end or in a Fault.
TEST(mutated_texts_never_crash) {
    CHECK(!compiled_texts().empty());
    std::uint64_t state = mutation_seed;
    const auto random = [&](std::size_t bound) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<std::size_t>(state % bound);
    };
    // Single functions, because a whole file is too large to be parsed thousands of times.
    std::vector<std::string> pieces;
    for (const std::string &text : compiled_texts()) {
        for (std::size_t at = text.find(".visible .entry"); at != std::string::npos;
             at = text.find(".visible .entry", at + 1)) {
            const std::size_t end = text.find("\n}\n", at);
            if (end != std::string::npos && end - at < 6000)
                pieces.push_back(heading + text.substr(at, end + 3 - at));
        }
    }
    CHECK(pieces.size() > 40);
    const char *tokens[] = {"{",
                            "}",
                            "[",
                            "]",
                            "(",
                            ")",
                            ";",
                            ",",
                            ".b32",
                            ".v4",
                            "%r1",
                            "0",
                            "-1",
                            "0x7fffffffffffffff",
                            "@",
                            "!",
                            "_",
                            ".entry",
                            ".param",
                            "+",
                            "|",
                            "bra",
                            "ret;",
                            ".reg",
                            "<",
                            "\"",
                            "/*",
                            ".align",
                            "ld.param.u64",
                            "4294967296"};
    unsigned parsed = 0, refused = 0, ended = 0, faulted = 0;
    for (unsigned round = 0; round < mutation_rounds; ++round) {
        std::string text = pieces[random(pieces.size())];
        for (std::size_t change = 0, changes = 1 + random(4); change < changes; ++change) {
            const std::size_t at = heading.size() + random(text.size() - heading.size());
            switch (random(12)) {
            case 0:
                text.erase(at, 1 + random(20));
                break;
            case 1:
                text.insert(at, tokens[random(std::size(tokens))]);
                break;
            case 2:
                text[at] = static_cast<char>(random(256));
                break;
            case 3:
                text.insert(at, text.substr(heading.size() + random(text.size() - heading.size()), random(60)));
                break;
            case 4:
                text.resize(at);
                break;
            default: {
                // Another register, offset, constant or label: text that parses and does something else.
                const std::size_t digit = text.find_first_of("0123456789", at);
                if (digit != std::string::npos)
                    text[digit] = static_cast<char>('0' + random(10));
                break;
            }
            }
            if (text.size() <= heading.size() + 1)
                break;
        }
        try {
            Device device(text);
            ++parsed;
            for (const std::string &name : device.module->kernel_names()) {
                const auto kernel = device.module->kernel(name);
                std::vector<std::byte> parameters(kernel.parameters_bytes() > 4096 ? 4096 : kernel.parameters_bytes());
                const auto memory = device.make<std::uint64_t>(512);
                for (const auto &parameter : kernel.parameters())
                    if (parameter.size_bytes == 8 && parameter.offset_bytes + 8 <= parameters.size())
                        std::memcpy(parameters.data() + parameter.offset_bytes, &memory.address, 8);
                ptx::Launch launch;
                launch.block = {32, 1, 1};
                launch.parameters = parameters.data();
                launch.parameters_bytes = parameters.size();
                launch.max_local_bytes = 65536;
                // A bound, because a mutated loop may be endless.
                launch.max_operations = 20'000;
                std::string printed;
                try {
                    ptx::execute(kernel, launch, device.memory, nullptr, nullptr, &printed);
                    ++ended;
                } catch (const ptx::Fault &) {
                    ++faulted;
                }
            }
        } catch (const ptx::ParseError &) {
            ++refused;
        } catch (const Failure &) {
            ++refused; // a variable too large for the test's own memory
        } catch (const std::bad_alloc &) {
            ++refused;
        }
    }
    CHECK(parsed > 50);
    CHECK(refused > 200);
    CHECK(ended > 10);
    CHECK(faulted > 10);
}

} // namespace
