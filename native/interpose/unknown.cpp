// Entry points for functions of unknown type; see unknown.hpp.
//
// A stub saves the registers that carry arguments, enters the gate, puts a return address of ours in the place of the
// caller's and jumps to the function: its arguments, on the stack too, lie where the caller put them. When the function
// returns to us, the gate is left and the saved return address is taken. Only the C calling convention of the System V
// ABI is assumed; nothing may be thrown or longjmp'ed across a call, which the driver does not do.
#include "unknown.hpp"

#include "cow.hpp"
#include "debug.hpp"
#include "gate.hpp"
#include "shadow.hpp"

#include <new>

namespace woodfrog::interpose {
namespace {
// It will be called without passing through here.
void called_unseen() {
    shadow::called_unknown_function();
    cow::memory_is_lent();
}
} // namespace

#if defined(__x86_64__)
namespace {

constexpr unsigned kStubs = 256;
constexpr unsigned kStubBytes = 16;
// Calls of such functions from within such functions.
constexpr unsigned kMostNested = 64;

constinit std::atomic<void *> g_functions[kStubs] = {};

struct Frame {
    void *return_address;
    alignas(GateScope) unsigned char scope[sizeof(GateScope)];
};
constinit thread_local Frame t_frames[kMostNested] __attribute__((tls_model("initial-exec"))) = {};
constinit thread_local unsigned t_frame_count __attribute__((tls_model("initial-exec"))) = 0;

} // namespace

extern "C" __attribute__((used)) void *woodfrog_enter_unknown(unsigned stub, void *return_address) {
    if (t_frame_count == kMostNested)
        __builtin_trap(); // a recursion without end
    Frame &frame = t_frames[t_frame_count++];
    frame.return_address = return_address;
    new (frame.scope) GateScope(Symbol::count);
    if (shadow::on())
        shadow::called_unknown_function();
    if (cow::armed())
        cow::will_write_anything();
    return g_functions[stub].load(std::memory_order_acquire);
}

extern "C" __attribute__((used)) void *woodfrog_leave_unknown() {
    Frame &frame = t_frames[--t_frame_count];
    std::launder(reinterpret_cast<GateScope *>(frame.scope))->~GateScope();
    return frame.return_address;
}

// Offsets in the common part: 8 floating-point registers (128 bytes), 8 general ones (64), the stub's number, the
// return address. The stack is aligned to 16 bytes at both calls.
__asm__(R"(
    .text
    .p2align 4
    .hidden woodfrog_unknown_stubs
    .globl woodfrog_unknown_stubs
    .type woodfrog_unknown_stubs, @function
woodfrog_unknown_stubs:
    .set woodfrog_stub, 0
    .rept 256
    .byte 0x68                                  # pushq $number, always with 32 bits
    .long woodfrog_stub
    .byte 0xe9                                  # jmp, always with 32 bits
    .long woodfrog_unknown_enter - . - 4
    .p2align 4
    .set woodfrog_stub, woodfrog_stub + 1
    .endr
woodfrog_unknown_enter:
    pushq %rdi
    pushq %rsi
    pushq %rdx
    pushq %rcx
    pushq %r8
    pushq %r9
    pushq %rax
    pushq %r10
    subq $128, %rsp
    movups %xmm0, 0(%rsp)
    movups %xmm1, 16(%rsp)
    movups %xmm2, 32(%rsp)
    movups %xmm3, 48(%rsp)
    movups %xmm4, 64(%rsp)
    movups %xmm5, 80(%rsp)
    movups %xmm6, 96(%rsp)
    movups %xmm7, 112(%rsp)
    movl 192(%rsp), %edi
    movq 200(%rsp), %rsi
    call woodfrog_enter_unknown
    movq %rax, %r11
    movups 0(%rsp), %xmm0
    movups 16(%rsp), %xmm1
    movups 32(%rsp), %xmm2
    movups 48(%rsp), %xmm3
    movups 64(%rsp), %xmm4
    movups 80(%rsp), %xmm5
    movups 96(%rsp), %xmm6
    movups 112(%rsp), %xmm7
    addq $128, %rsp
    popq %r10
    popq %rax
    popq %r9
    popq %r8
    popq %rcx
    popq %rdx
    popq %rsi
    popq %rdi
    leaq woodfrog_unknown_leave(%rip), %r10
    addq $8, %rsp
    movq %r10, (%rsp)
    jmp *%r11
woodfrog_unknown_leave:
    subq $8, %rsp
    pushq %rax
    pushq %rdx
    subq $24, %rsp
    movups %xmm0, (%rsp)
    call woodfrog_leave_unknown
    movups (%rsp), %xmm0
    addq $24, %rsp
    movq %rax, 16(%rsp)
    popq %rdx
    popq %rax
    ret
    .size woodfrog_unknown_stubs, . - woodfrog_unknown_stubs
)");
extern "C" const unsigned char woodfrog_unknown_stubs[];

void *gate_unknown(void *function) {
    for (unsigned stub = 0; stub < kStubs; ++stub) {
        void *there = nullptr;
        if (g_functions[stub].compare_exchange_strong(there, function, std::memory_order_acq_rel) || there == function)
            return const_cast<unsigned char *>(woodfrog_unknown_stubs + stub * kStubBytes);
    }
    debug("no entry point is left for an unknown function: it passes by the gate");
    called_unseen();
    return function;
}
#else
void *gate_unknown(void *function) {
    called_unseen();
    return function;
}
#endif

} // namespace woodfrog::interpose
