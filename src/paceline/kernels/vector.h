// Sixteen-lane vectors and the arithmetic on them. Every function gives the same bits on the same input whatever
// surrounds the call: fused multiply-adds are written out and the compiler may not contract others
// (-ffp-contract=off).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {

constexpr int LANES = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 { uint16_t bits; };

static inline f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
static inline i32x16 splat(int32_t x) { return i32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

static inline f32x16 load(const float* p) { f32x16 v; std::memcpy(&v, p, 64); return v; }
static inline void store(float* p, f32x16 v) { std::memcpy(p, &v, 64); }

static inline f32x16 load(const bf16* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#endif
    u16x16 half; std::memcpy(&half, p, 32);
    i32x16 bits = __builtin_convertvector(half, i32x16) << 16;
    return (f32x16)bits;
}

struct f16 { uint16_t bits; };

// Exact: every IEEE half is a float. No infinities or NaN: scales are finite by construction.
static inline float to_float(f16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    uint32_t bits = rest << 13;
    float f; std::memcpy(&f, &bits, 4);
    f *= 0x1p112f;  // moves the exponent's bias from 15 to 127, subnormals included
    std::memcpy(&bits, &f, 4);
    bits |= sign;
    std::memcpy(&f, &bits, 4);
    return f;
}
static inline f32x16 load(const f16* p) {
#if defined(__AVX512F__) && !defined(PACELINE_PORTABLE)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    f32x16 v;
    for (int i = 0; i < LANES; ++i) v[i] = to_float(p[i]);
    return v;
#endif
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) { uint32_t b = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &b, 4); return f; }

// Round to nearest, ties to even; NaN stays NaN because kept weights and activations are finite by construction.
static inline void from_float(float x, float* out) { *out = x; }
static inline void from_float(float x, bf16* out) {
    uint32_t b; std::memcpy(&b, &x, 4);
    out->bits = uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    f32x16 r;
    for (int i = 0; i < LANES; ++i) r[i] = std::fma(a[i], b[i], c[i]);
    return r;
#endif
}

static inline f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }
static inline f32x16 absolute(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }

// Round to nearest even; exact for |x| < 2^22, which is all that callers pass.
static inline i32x16 round_to_int(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23
    return (i32x16)(x + magic) - (i32x16)magic;
}

// Lanes are combined pairwise in one fixed order.
static inline float sum(f32x16 v) {
    float a[LANES]; store(a, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) a[i] += a[i + width];
    return a[0];
}
static inline int32_t sum(i32x16 v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
}
static inline float maximum(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float a[LANES]; store(a, v);
    float m = a[0];
    for (int i = 1; i < LANES; ++i) m = a[i] > m ? a[i] : m;
    return m;
}

// e^x to 2 ulp for x <= 88; exactly 1 at 0, exactly 0 below -87 (softmax weights that cannot matter).
static inline f32x16 exponential(f32x16 x) {
    const f32x16 low = splat(-87.0f);
    f32x16 clamped = x < low ? low : x;
    clamped = clamped > splat(88.0f) ? splat(88.0f) : clamped;
    i32x16 n = round_to_int(clamped * splat(1.44269504088896341f));
    f32x16 nf = __builtin_convertvector(n, f32x16);
    f32x16 r = fma(nf, splat(-0.693359375f), clamped);
    r = fma(nf, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r) + splat(1.0f);
    f32x16 scale = (f32x16)((n + 127) << 23);
    f32x16 y = p * scale;
    return x < low ? splat(0.0f) : y;
}
static inline float exponential(float x) { return exponential(splat(x))[0]; }

static inline f32x16 hyperbolic_tangent(f32x16 x) {
    f32x16 e = exponential(absolute(x) * splat(-2.0f));
    f32x16 t = (splat(1.0f) - e) / (splat(1.0f) + e);
    return x < splat(0.0f) ? -t : t;
}

static inline f32x16 silu(f32x16 x) { return x / (splat(1.0f) + exponential(-x)); }
static inline f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = splat(0.7978845608028654f) * fma(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
}

}  // namespace paceline
