// Single instructions in forms that the compiler seldom emits, each with the result that the PTX manual defines.
#include "device.hpp"
#include "text.hpp"

namespace {

using namespace test;

struct Example {
    const char *code; ///< leaves its result in %x (64 bits) or %r (32 bits)
    std::uint64_t expected;
};

void check(const std::vector<Example> &examples, const std::string &before = "") {
    for (const Example &example : examples) {
        const std::string code = example.code;
        const bool wide = code.find("%x") != std::string::npos;
        Device device(kernel_with(
            std::string("{\n.reg .pred %p<4>;\n.reg .b16 %h<5>;\n.reg .b32 %r, %a, %b, %c;\n.reg .b64 %x, %y, %z;\n"
                        ".reg .f32 %f<4>;\n.reg .f64 %d<4>;\n") +
                code + (wide ? "\nst.global.u64 [%out], %x;\n}" : "\nst.global.u32 [%out], %r;\n}"),
            before));
        const auto out = device.make<std::uint64_t>(1);
        try {
            device.launch("k", {}, out);
        } catch (const std::exception &error) {
            throw Failure(code + ": " + error.what());
        }
        const std::uint64_t got = device.read(out)[0];
        if (got != example.expected) {
            std::ostringstream text;
            text << code << ": got 0x" << std::hex << got << ", expected 0x" << example.expected;
            throw Failure(text.str());
        }
    }
}

TEST(integer_instructions_in_rare_forms) {
    check({
        {"add.sat.s32 %r, 0x7fffffff, 5;", 0x7fffffff},
        {"sub.sat.s32 %r, 0x80000000, 5;", 0x80000000},
        {"mul24.lo.s32 %r, 0xfffffd, 7;", 0xffffffeb},
        {"mul24.hi.u32 %r, 0xffffff, 0xffffff;", 0xfffffe00},
        {"mad24.lo.u32 %r, 0x1000003, 5, 2;", 17},
        {"mad.hi.sat.s32 %r, 0x7fffffff, 0x7fffffff, 0x7fffffff;", 0x7fffffff},
        {"mad.wide.s32 %x, -3, 5, -1;", 0xfffffffffffffff0},
        {"mul.wide.s16 %r, 0x8000, 2;", 0xffff0000},
        {"div.s32 %r, 0x80000000, -1;", 0x80000000},
        {"div.u32 %r, 7, 0;", 0xffffffff},
        {"rem.s64 %x, -7, 3;", 0xffffffffffffffff},
        {"sad.u32 %r, 3, 10, 100;", 107},
        {"bfind.u32 %r, 0;", 0xffffffff},
        {"bfind.s32 %r, 0xfffffff0;", 3},
        {"bfind.shiftamt.u64 %r, 0x100000000;", 31},
        {"bmsk.clamp.b32 %r, 4, 8;", 0xff0},
        {"bmsk.wrap.b32 %r, 36, 40;", 0xff0},
        {"szext.clamp.s32 %r, 0xff, 8;", 0xffffffff},
        {"szext.wrap.u32 %r, 0x1ff, 40;", 0xff},
        {"bfe.u64 %x, 0x123456789abcdef0, 4, 16;", 0xcdef},
        {"bfe.s32 %r, 0x80, 4, 100;", 0x8},
        {"bfe.s32 %r, 0x80000000, 28, 100;", 0xfffffff8},
        {"bfi.b64 %x, 0xff, 0, 60, 8;", 0xf000000000000000},
        {"fns.b32 %r, 0b10110100, 2, 2;", 4},
        {"fns.b32 %r, 0b10110100, 7, -3;", 4},
        {"prmt.b32.f4e %r, 0x33221100, 0x77665544, 1;", 0x44332211},
        {"prmt.b32.b4e %r, 0x33221100, 0x77665544, 1;", 0x66770011},
        {"prmt.b32.rc16 %r, 0x33221100, 0, 1;", 0x33223322},
        {"prmt.b32 %r, 0x80f0, 0, 0x9810;", 0xffff80f0},
        {"shf.l.clamp.b32 %r, 1, 2, 40;", 1},
        {"shf.r.wrap.b32 %r, 0x10, 1, 36;", 0x10000001},
        {"shl.b32 %r, 1, 32;", 0},
        {"shr.s32 %r, -1, 99;", 0xffffffff},
        {"shr.u64 %x, 0x8000000000000000, 63;", 1},
        {"dp2a.lo.s32.u32 %r, 0xffff0002, 0x00000305, 1;", 8},
        {"dp2a.hi.u32.u32 %r, 0x00030002, 0x07050000, 0;", 31},
        {"cnot.b32 %r, 0;", 1},
        {"add.u16x2 %r, 0x0001ffff, 0x00010001;", 0x00020000},
        {"max.s16x2 %r, 0x0001ffff, 0xffff0005;", 0x00010005},
        {"min.relu.s32 %r, -5, 3;", 0},
        {"add.cc.u32 %a, 0xffffffff, 1; addc.cc.u32 %b, 0xffffffff, 0; addc.u32 %r, 5, 0;", 6},
        {"sub.cc.u32 %a, 0, 1; subc.u32 %r, 5, 0;", 4},
        {"mad.lo.cc.u32 %a, 0xffffffff, 2, 2; madc.hi.u32 %r, 0xffffffff, 2, 0;", 2},
        {"popc.b64 %r, 0xff00ff00ff00ff00;", 32},
        {"brev.b64 %x, 1;", 0x8000000000000000},
        {"abs.s16 %h1, 0x8000; cvt.u32.u16 %r, %h1;", 0x8000},
    });
}

TEST(comparisons_and_selections_in_rare_forms) {
    check({
        {"setp.lt.and.s32 %p1|%p2, 3, 5, !%p3; selp.u32 %r, 1, 2, %p1;", 1},
        {"setp.eq.s32 %p3, 1, 1; setp.lt.xor.s32 %p1|%p2, 3, 5, %p3; selp.u32 %a, 1, 0, %p1; selp.u32 %r, 2, %a, %p2;",
         2},
        {"setp.hi.u32 %p1, -1, 1; selp.u32 %r, 7, 8, %p1;", 7},
        {"setp.lo.s32 %p1, -1, 1; selp.u32 %r, 7, 8, %p1;", 8},
        {"set.gt.u32.s32 %r, 5, -5;", 0xffffffff},
        {"set.gt.f32.f32 %f1, 0f40000000, 0f3F800000; mov.b32 %r, %f1;", 0x3f800000},
        {"set.le.u32.f64 %r, 0d7FF8000000000000, 0d0000000000000000;", 0},
        {"setp.leu.f64 %p1, 0d7FF8000000000000, 0d0000000000000000; selp.u32 %r, 1, 0, %p1;", 1},
        {"setp.num.f32 %p1, 0f7FC00000, 0f00000000; selp.u32 %r, 1, 0, %p1;", 0},
        {"setp.gt.ftz.f32 %p1, 0f00000001, 0f00000000; selp.u32 %r, 1, 0, %p1;", 0},
        {"slct.u32.s32 %r, 10, 20, -1;", 20},
        {"slct.u64.f32 %x, 10, 20, 0f80000000;", 10},
        {"testp.subnormal.f32 %p1, 0f00000001; selp.u32 %r, 1, 0, %p1;", 1},
        {"testp.infinite.f64 %p1, 0dFFF0000000000000; selp.u32 %r, 1, 0, %p1;", 1},
        {"setp.eq.s32 %p1, 1, 1; not.pred %p2, %p1; or.pred %p3, %p1, %p2; selp.u32 %r, 1, 0, %p3;", 1},
        {"setp.eq.f16x2 %p1|%p2, 0x3c004000, 0x3c003c00; selp.u32 %a, 1, 0, %p1; selp.u32 %r, 2, %a, %p2;", 2},
        {"set.eq.f16x2.f16x2 %r, 0x3c004000, 0x3c003c00;", 0x3c000000},
        {"setp.eq.s32 %p1, 1, 2; @!%p1 mov.u32 %r, 5; @%p1 mov.u32 %r, 6;", 5},
    });
}

TEST(floating_instructions_flush_saturate_and_make_canonical_nans) {
    check({
        {"add.ftz.f32 %f1, 0f00000001, 0f00000001; mov.b32 %r, %f1;", 0},
        {"add.f32 %f1, 0f00000001, 0f00000001; mov.b32 %r, %f1;", 2},
        {"mul.ftz.f32 %f1, 0f80800000, 0f3F000000; mov.b32 %r, %f1;", 0x80000000},
        {"add.sat.f32 %f1, 0f40000000, 0f40000000; mov.b32 %r, %f1;", 0x3f800000},
        {"add.sat.f32 %f1, 0f7FC00000, 0f40000000; mov.b32 %r, %f1;", 0},
        {"sub.f32 %f1, 0f7F800000, 0f7F800000; mov.b32 %r, %f1;", 0x7fffffff},
        {"fma.rn.sat.f32 %f1, 0f3F000000, 0f3F000000, 0f3F000000; mov.b32 %r, %f1;", 0x3f400000},
        {"min.f32 %f1, 0f80000000, 0f00000000; mov.b32 %r, %f1;", 0x80000000},
        {"max.NaN.f32 %f1, 0f7FC00000, 0f00000000; mov.b32 %r, %f1;", 0x7fffffff},
        {"min.xorsign.abs.f32 %f1, 0fC0000000, 0f3F800000; mov.b32 %r, %f1;", 0xbf800000},
        {"rcp.approx.f32 %f1, 0f40000000; mov.b32 %r, %f1;", 0x3f000000},
        {"rsqrt.approx.f32 %f1, 0f40800000; mov.b32 %r, %f1;", 0x3f000000},
        {"rsqrt.approx.f32 %f1, 0f80000000; mov.b32 %r, %f1;", 0xff800000},
        {"lg2.approx.f32 %f1, 0f41000000; mov.b32 %r, %f1;", 0x40400000},
        {"ex2.approx.ftz.f32 %f1, 0f40400000; mov.b32 %r, %f1;", 0x41000000},
        {"tanh.approx.f32 %f1, 0f00000000; mov.b32 %r, %f1;", 0},
        {"div.full.f32 %f1, 0f41000000, 0f40000000; mov.b32 %r, %f1;", 0x40800000},
        {"copysign.f32 %f1, 0f80000000, 0f3F800000; mov.b32 %r, %f1;", 0xbf800000},
        {"mov.f32 %f1, 1.5; mov.b32 %r, %f1;", 0x3fc00000},
        {"fma.rn.relu.f16x2 %r, 0x3c003c00, 0xc0004000, 0x00000000;", 0x00004000},
        {"max.bf16x2 %r, 0x3f804000, 0x40003f80;", 0x40004000},
        {"ex2.approx.f16 %h1, 0x4000; cvt.u32.u16 %r, %h1;", 0x4400},
        {"neg.bf16 %h1, 0x3f80; cvt.u32.u16 %r, %h1;", 0xbf80},
    });
}

TEST(conversions_in_rare_forms) {
    check({
        {"cvt.sat.u8.s32 %r, 300;", 255},
        {"cvt.sat.s8.s32 %r, -300;", 0xffffff80},
        {"cvt.u8.u32 %r, 0x1ff;", 0xff},
        {"cvt.s64.s8 %x, 0x80;", 0xffffffffffffff80},
        {"cvt.sat.u32.s64 %r, -5;", 0},
        {"cvt.rzi.s32.f32 %r, 0f7FC00000;", 0},
        {"cvt.rni.s32.f32 %r, 0f40200000;", 2},
        {"cvt.rmi.f32.f32 %f1, 0fBFC00000; mov.b32 %r, %f1;", 0xc0000000},
        {"cvt.rn.f16x2.f32 %r, 0f3F800000, 0f40000000;", 0x3c004000},
        {"cvt.rz.bf16x2.f32 %r, 0f3F80FFFF, 0f40000000;", 0x3f804000},
        {"cvt.rn.relu.bf16x2.f32 %r, 0fBF800000, 0f40000000;", 0x4000},
        {"cvt.rna.tf32.f32 %r, 0f3F801000;", 0x3f802000},
        {"cvt.rn.f16.f32 %h1, 0f477FFF00; cvt.u32.u16 %r, %h1;", 0x7c00},
        {"cvt.rn.satfinite.f16.f32 %h1, 0f477FFF00; cvt.u32.u16 %r, %h1;", 0x7bff},
        {"cvt.rn.f16.u64 %h1, 2049; cvt.u32.u16 %r, %h1;", 0x6800},
        {"cvt.sat.f32.f32 %f1, 0fC0000000; mov.b32 %r, %f1;", 0},
        {"cvt.pack.sat.u8.s32.b32 %r, 300, -5, 0x1234;", 0x1234ff00},
        {"cvt.pack.sat.s16.s32 %r, 40000, -40000;", 0x7fff8000},
        {"cvt.rp.f64.u64 %d1, 0xffffffffffffffff; mov.b64 %x, %d1;", 0x43f0000000000000},
        {"cvt.rz.f64.u64 %d1, 0xffffffffffffffff; mov.b64 %x, %d1;", 0x43efffffffffffff},
    });
}

TEST(moves_pack_unpack_and_name_addresses) {
    check({
        {"mov.b64 %x, {1, 2};", 0x200000001},
        {"mov.b64 {%a, %b}, 0x500000003; add.u32 %r, %a, %b;", 8},
        {"mov.b64 {_, %r}, 0x500000003;", 5},
        {"mov.b32 {%h1, %h2}, 0x00070003; mov.b32 %r, {%h2, %h1};", 0x00030007},
        {"mov.b64 %x, {%h1, %h2, %h3, %h4};", 0},
        {".reg .b128 %q; mov.b64 %y, 9; mov.b128 %q, {%y, %z}; mov.b128 {%x, %z}, %q;", 9},
        {"mov.u16 %h1, %ntid.x; cvt.u32.u16 %r, %h1;", 1},
        {"mov.u32 %r, WARP_SZ;", 32},
        {"mov.u64 %y, %clock64; mov.u64 %z, %clock64; setp.gt.u64 %p1, %z, %y; selp.u32 %r, 1, 0, %p1;", 1},
        {".local .b32 cell; mov.u64 %y, cell; cvta.local.u64 %y, %y; st.u32 [%y], 77; ld.local.u32 %r, [cell];", 77},
        {".local .b32 cell; mov.u64 %y, cell; cvta.local.u64 %y, %y; isspacep.local %p1, %y; selp.u32 %r, 1, 0, %p1;",
         1},
        {".shared .b32 cell[2]; mov.u32 %a, cell; st.shared.u32 [%a+4], 78; cvt.u64.u32 %y, %a; cvta.shared.u64 %y, "
         "%y; ld.u32 %r, [%y+4];",
         78},
        {"mov.b64 %y, out; cvta.param.u64 %y, %y; ld.u64 %z, [%y]; setp.eq.u64 %p1, %z, %out; selp.u32 %r, 1, 0, %p1;",
         1},
        {"st.global.v2.b32 [%out], {7, 8}; ld.global.b64 %x, [%out];", 0x800000007},
        {"st.global.b8 [%out+3], 200; ld.global.s8 %r, [%out+3];", 0xffffffc8},
        {"st.global.b32 [%out], {5}; ld.global.b32 {%r}, [%out];", 5},
        {".local .v4 .b32 quad; st.local.v4.b32 [quad], {1, 2, 3, 4}; ld.local.v4.u32 {%a, %b, _, %c}, [quad]; add.u32 "
         "%r, %b, %c;",
         6},
        {"atom.global.cas.b16 %h1, [%out], 0, 7; ld.global.u16 %r, [%out];", 7},
        {"red.global.add.v2.f32 [%out], {0f3F800000, 0f40000000}; ld.global.u64 %x, [%out];", 0x400000003f800000},
        {"createpolicy.fractional.L2::evict_first.b64 %y, 0f3F800000; ld.global.L2::cache_hint.u32 %r, [%out], %y;", 0},
        {"stacksave.u64 %y; alloca.u64 %z, 64; st.local.u32 [%z+60], 4; stackrestore.u64 %y; mov.u32 %r, 4;", 4},
    });
}

TEST(branch_tables_and_register_parameters) {
    check({{R"(
    ts: .branchtargets L0, L1, L2;
    mov.u32 %a, 1;
    brx.idx %a, ts;
    L0: mov.u32 %r, 100; bra DONE;
    L1: mov.u32 %r, 101; bra DONE;
    L2: mov.u32 %r, 102;
    DONE:)",
            101},
           {"call (%r), sum, (40, 2);", 42},
           {"mov.u32 %a, 5; { .param .b32 x; .param .b32 y; st.param.b32 [x], %a; call (y), factorial, (x); "
            "ld.param.b32 %r, [y]; }",
            120}},
          R"(
.func (.reg .b32 result) sum(.reg .b32 a, .reg .b32 b) { add.u32 result, a, b; ret; }
.func (.param .b32 result) factorial(.param .b32 n) {
  .reg .b32 %v<4>; .reg .pred %q;
  ld.param.u32 %v1, [n];
  setp.gt.u32 %q, %v1, 1;
  mov.u32 %v2, 1;
  @!%q bra END;
  sub.u32 %v2, %v1, 1;
  { .param .b32 x; .param .b32 y; st.param.b32 [x], %v2; call (y), factorial, (x); ld.param.b32 %v2, [y]; }
  mul.lo.u32 %v2, %v2, %v1;
END:
  st.param.b32 [result], %v2;
}
)");
}

TEST(operands_that_do_not_fit_are_refused_at_launch) {
    for (const char *code :
         {"add.u64 %r, %r, %r;", "mov.pred %r, %r;", "ld.global.u64 %r, [%out];", "add.u32 %r, %q, 1;", "bra NOWHERE;",
          "mul.u32 %r, %r, %r;", "ld.global.v2.u32 {%r}, [%out];", "ld.global.u32 {}, [%out];",
          "st.param.u64 [out], %out;", "ld.param.u64 %out, [out+8];", "shfl.idx.b32 %r, %r, 0, 0;",
          "wgmma.fence.sync.aligned;", "setp.eq.u32 %r, 1, 1;", "mov.u32 %r, nothing;", "call missing, ();",
          "atom.global.add.u8 %r, [%out], 1;", "cvt.u32 %r, %r;"}) {
        Device device(kernel_with(std::string(".reg .b32 %r;\n") + code));
        const auto out = device.make<std::uint64_t>(1);
        bool faulted = false;
        try {
            device.launch("k", {}, out);
        } catch (const ptx::Fault &fault) {
            CHECK(fault.kind == ptx::Fault::Kind::unsupported);
            CHECK_EQUAL(fault.line, 9u);
            faulted = true;
        }
        if (!faulted)
            throw Failure(std::string(code) + " was executed");
    }
}

TEST(a_launch_that_exceeds_its_bound_of_operations_stops) {
    Device device(kernel_with("L: bra L;"));
    const auto out = device.make<std::uint64_t>(1);
    const auto kernel = device.module->kernel("k");
    ptx::Launch launch;
    launch.parameters = reinterpret_cast<const std::byte *>(&out.address);
    launch.parameters_bytes = 8;
    launch.max_operations = 1000;
    try {
        ptx::execute(kernel, launch, device.memory);
        throw Failure("an endless loop ended");
    } catch (const ptx::Fault &fault) {
        CHECK(fault.kind == ptx::Fault::Kind::launch_timeout);
    }
}

} // namespace
