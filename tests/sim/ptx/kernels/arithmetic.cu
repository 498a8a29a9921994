// Integer and floating arithmetic at its corners. Each kernel applies many operations to one pair of inputs and writes
// one result after the other; the test computes the same on the host.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> __device__ T multiply_high(T a, T b);
template <> __device__ int multiply_high(int a, int b) {
    return __mulhi(a, b);
}
template <> __device__ unsigned multiply_high(unsigned a, unsigned b) {
    return __umulhi(a, b);
}
template <> __device__ long long multiply_high(long long a, long long b) {
    return __mul64hi(a, b);
}
template <> __device__ unsigned long long multiply_high(unsigned long long a, unsigned long long b) {
    return __umul64hi(a, b);
}

template <class T> __device__ void integer_operations(const T *x, const T *y, T *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const T a = x[i], b = y[i];
    T *o = out + i * 16;
    o[0] = a + b;
    o[1] = a - b;
    o[2] = a * b;
    o[3] = multiply_high(a, b);
    o[4] = b != 0 && b != static_cast<T>(-1) ? a / b : 0;
    o[5] = b != 0 && b != static_cast<T>(-1) ? a % b : 0;
    o[6] = a & b;
    o[7] = a | ~b;
    o[8] = a ^ b;
    o[9] = a << (static_cast<unsigned>(b) % (8 * sizeof(T)));
    o[10] = a >> (static_cast<unsigned>(b) % (8 * sizeof(T)));
    o[11] = a < b ? a : b;
    o[12] = a > b ? a : b;
    o[13] = a * 7 + b;
    o[14] = a / 7 + b % 10;
    o[15] = -a;
}
extern "C" __global__ void integers_s32(const int *x, const int *y, int *out, int n) {
    integer_operations(x, y, out, n);
}
extern "C" __global__ void integers_u32(const unsigned *x, const unsigned *y, unsigned *out, int n) {
    integer_operations(x, y, out, n);
}
extern "C" __global__ void integers_s64(const long long *x, const long long *y, long long *out, int n) {
    integer_operations(x, y, out, n);
}
extern "C" __global__ void integers_u64(const unsigned long long *x, const unsigned long long *y,
                                        unsigned long long *out, int n) {
    integer_operations(x, y, out, n);
}

extern "C" __global__ void narrow_integers(const int *x, const int *y, int *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const signed char a8 = static_cast<signed char>(x[i]);
    const unsigned char b8 = static_cast<unsigned char>(y[i]);
    const short a16 = static_cast<short>(x[i]);
    const unsigned short b16 = static_cast<unsigned short>(y[i]);
    int *o = out + i * 8;
    o[0] = static_cast<signed char>(a8 + b8);
    o[1] = static_cast<unsigned char>(a8 * b8);
    o[2] = static_cast<short>(a16 * b16);
    o[3] = static_cast<unsigned short>(a16 - b16);
    o[4] = a8 < b8;
    o[5] = static_cast<short>(a16 >> 3) ^ (b16 >> 5);
    o[6] = b16 != 0 ? a16 / b16 : a16;
    o[7] = static_cast<signed char>(a16) + static_cast<unsigned char>(b16);
}

extern "C" __global__ void bit_operations(const unsigned *x, const unsigned *y, unsigned *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const unsigned a = x[i], b = y[i];
    const unsigned long long wide = static_cast<unsigned long long>(a) << 32 | b;
    unsigned *o = out + i * 16;
    o[0] = __popc(a);
    o[1] = __clz(a);
    o[2] = __ffs(a);
    o[3] = __brev(a);
    o[4] = __byte_perm(a, b, 0x6172);
    o[5] = __funnelshift_l(a, b, b);
    o[6] = __funnelshift_rc(a, b, a & 63);
    o[7] = __popcll(wide);
    o[8] = __clzll(wide);
    o[9] = static_cast<unsigned>(__brevll(wide) >> 32);
    o[10] = __dp4a(static_cast<int>(a), static_cast<int>(b), 17);
    o[11] = __dp4a(a, b, 17u);
    o[12] = __sad(static_cast<int>(a), static_cast<int>(b), 5u);
    unsigned extracted, inserted, lookup;
    asm("bfe.s32 %0, %1, %2, %3;" : "=r"(extracted) : "r"(a), "r"(b & 31), "r"(b >> 8 & 31));
    asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(inserted) : "r"(a), "r"(b), "r"(a & 31), "r"(b & 31));
    asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(lookup) : "r"(a), "r"(b), "r"(a * b));
    o[13] = extracted;
    o[14] = inserted;
    o[15] = lookup;
}

extern "C" __global__ void wide_arithmetic(const unsigned long long *x, const unsigned long long *y,
                                           unsigned long long *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const unsigned __int128 a = static_cast<unsigned __int128>(x[i]) << 64 | y[i];
    const unsigned __int128 b = static_cast<unsigned __int128>(y[i]) << 64 | ~x[i];
    const unsigned __int128 sum = a + b, difference = a - b, product = a * b;
    unsigned long long *o = out + i * 8;
    o[0] = static_cast<unsigned long long>(sum);
    o[1] = static_cast<unsigned long long>(sum >> 64);
    o[2] = static_cast<unsigned long long>(difference);
    o[3] = static_cast<unsigned long long>(difference >> 64);
    o[4] = static_cast<unsigned long long>(product);
    o[5] = static_cast<unsigned long long>(product >> 64);
    unsigned low, middle, high;
    asm("{\n\tadd.cc.u32 %0, %3, %4;\n\taddc.cc.u32 %1, %5, %6;\n\taddc.u32 %2, 0, 0;\n\t}"
        : "=r"(low), "=r"(middle), "=r"(high)
        : "r"(static_cast<unsigned>(x[i])), "r"(static_cast<unsigned>(y[i])), "r"(static_cast<unsigned>(x[i] >> 32)),
          "r"(static_cast<unsigned>(y[i] >> 32)));
    o[6] = static_cast<unsigned long long>(middle) << 32 | low;
    o[7] = high;
}

extern "C" __global__ void floats_f32(const float *x, const float *y, float *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const float a = x[i], b = y[i];
    float *o = out + i * 24;
    o[0] = __fadd_rn(a, b);
    o[1] = __fadd_rz(a, b);
    o[2] = __fadd_rd(a, b);
    o[3] = __fadd_ru(a, b);
    o[4] = __fmul_rn(a, b);
    o[5] = __fmul_rz(a, b);
    o[6] = __fmul_rd(a, b);
    o[7] = __fmul_ru(a, b);
    o[8] = __fmaf_rn(a, b, 0.3f);
    o[9] = __fmaf_rz(a, b, 0.3f);
    o[10] = __fmaf_rd(a, b, 0.3f);
    o[11] = __fmaf_ru(a, b, 0.3f);
    o[12] = __fdiv_rn(a, b);
    o[13] = __fdiv_rz(a, b);
    o[14] = __fsqrt_rn(fabsf(a));
    o[15] = __fsqrt_ru(fabsf(a));
    o[16] = __frcp_rd(b);
    o[17] = fminf(a, b);
    o[18] = fmaxf(a, b);
    o[19] = copysignf(a, b);
    o[20] = floorf(a);
    o[21] = rintf(b);
    o[22] = __saturatef(a);
    o[23] = a < b ? -a : fabsf(b);
}

extern "C" __global__ void floats_f64(const double *x, const double *y, double *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const double a = x[i], b = y[i];
    double *o = out + i * 16;
    o[0] = __dadd_rn(a, b);
    o[1] = __dadd_rz(a, b);
    o[2] = __dmul_rd(a, b);
    o[3] = __dmul_ru(a, b);
    o[4] = __fma_rn(a, b, 0.3);
    o[5] = __fma_rd(a, b, 0.3);
    o[6] = __ddiv_rn(a, b);
    o[7] = __dsqrt_rn(fabs(a));
    o[8] = fmin(a, b);
    o[9] = fmax(a, b);
    o[10] = ceil(a);
    o[11] = trunc(b);
    o[12] = __drcp_ru(b);
    o[13] = copysign(b, a);
    o[14] = a >= b ? a : b;
    o[15] = -a;
}

extern "C" __global__ void conversions(const double *x, long long *out, double *floats, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const double a = x[i];
    const float f = static_cast<float>(a);
    long long *o = out + i * 16;
    o[0] = __double2int_rn(a);
    o[1] = __double2int_rz(a);
    o[2] = __double2int_rd(a);
    o[3] = __double2int_ru(a);
    o[4] = __double2ll_rn(a);
    o[5] = __double2ll_rd(a);
    o[6] = static_cast<long long>(__double2ull_rz(a));
    o[7] = __double2uint_ru(a);
    o[8] = __float2int_rn(f);
    o[9] = __float2uint_rz(f);
    o[10] = __float2ll_ru(f);
    o[11] = static_cast<signed char>(__float2int_rz(f));
    o[12] = __float_as_int(__double2float_rz(a));
    o[13] = __float_as_int(__double2float_ru(a));
    o[14] = __float_as_int(__double2float_rd(a));
    o[15] = __float_as_int(f);
    const long long whole = o[4] * 1000003 + o[5];
    double *r = floats + i * 8;
    r[0] = __ll2float_rn(whole);
    r[1] = __ll2float_rz(whole);
    r[2] = __ll2double_rn(whole);
    r[3] = __ll2double_rd(whole);
    r[4] = __ull2double_ru(static_cast<unsigned long long>(whole));
    r[5] = __int2float_rd(static_cast<int>(whole));
    r[6] = __uint2float_ru(static_cast<unsigned>(whole));
    r[7] = __ull2float_rn(static_cast<unsigned long long>(whole));
}

extern "C" __global__ void halves(const unsigned short *x, const unsigned short *y, const unsigned short *z,
                                  unsigned short *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const __half a = __ushort_as_half(x[i]), b = __ushort_as_half(y[i]), c = __ushort_as_half(z[i]);
    unsigned short *o = out + i * 12;
    o[0] = __half_as_ushort(__hadd(a, b));
    o[1] = __half_as_ushort(__hsub(a, b));
    o[2] = __half_as_ushort(__hmul(a, b));
    o[3] = __half_as_ushort(__hfma(a, b, c));
    o[4] = __half_as_ushort(__float2half_rn(__half2float(a) * 1.0009765625f));
    o[5] = __half_as_ushort(__float2half_rz(__half2float(b) * 1.0009765625f));
    o[6] = __half_as_ushort(__hneg(a));
    o[7] = static_cast<unsigned short>(__hlt(a, b) | __hge(a, c) << 1 | __heq(b, c) << 2 | __hisnan(a) << 3);
    const __half2 packed = __hfma2(__halves2half2(a, b), __halves2half2(b, c), __halves2half2(c, a));
    o[8] = __half_as_ushort(__low2half(packed));
    o[9] = __half_as_ushort(__high2half(packed));
    o[10] = static_cast<unsigned short>(__half2short_rz(c));
    o[11] = __half_as_ushort(__int2half_rn(static_cast<short>(x[i])));
}

extern "C" __global__ void bfloats(const unsigned short *x, const unsigned short *y, const unsigned short *z,
                                   unsigned short *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const __nv_bfloat16 a = __ushort_as_bfloat16(x[i]), b = __ushort_as_bfloat16(y[i]), c = __ushort_as_bfloat16(z[i]);
    unsigned short *o = out + i * 8;
    o[0] = __bfloat16_as_ushort(__hadd(a, b));
    o[1] = __bfloat16_as_ushort(__hsub(a, b));
    o[2] = __bfloat16_as_ushort(__hmul(a, b));
    o[3] = __bfloat16_as_ushort(__hfma(a, b, c));
    o[4] = __bfloat16_as_ushort(__float2bfloat16_rn(__bfloat162float(a) * 1.00048828125f));
    const __nv_bfloat162 packed = __floats2bfloat162_rn(__bfloat162float(a), __bfloat162float(b) * 3.0f);
    o[5] = __bfloat16_as_ushort(__low2bfloat16(packed));
    o[6] = __bfloat16_as_ushort(__high2bfloat16(packed));
    o[7] = static_cast<unsigned short>(__hlt(a, b) | __hgt(a, c) << 1);
}

extern "C" __global__ void functions_f32(const float *x, float *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const float a = x[i];
    float *o = out + i * 12;
    o[0] = sinf(a);
    o[1] = cosf(a);
    o[2] = expf(a);
    o[3] = logf(fabsf(a) + 0.5f);
    o[4] = powf(fabsf(a) + 0.1f, 1.7f);
    o[5] = tanhf(a);
    o[6] = rsqrtf(fabsf(a) + 0.25f);
    o[7] = erff(a);
    o[8] = __expf(a);
    o[9] = __fdividef(a, 3.0f);
    o[10] = atan2f(a, 2.0f);
    o[11] = fmodf(a, 1.3f);
}

extern "C" __global__ void functions_f64(const double *x, double *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const double a = x[i];
    double *o = out + i * 8;
    o[0] = sin(a);
    o[1] = cos(a * 1e6);
    o[2] = exp(a);
    o[3] = log(fabs(a) + 0.5);
    o[4] = pow(fabs(a) + 0.1, 1.7);
    o[5] = tanh(a);
    o[6] = cbrt(a);
    o[7] = lgamma(fabs(a) + 1.0);
}
