/* Numbers: formats that C lacks, rounding in every direction, and the functions that PTX approximates.
 *
 * A narrow format is read into a float, which holds each of them exactly, and written from one. Where a result is computed wider than
 * the format that it is for, it is first rounded to odd: the last bit says whether anything was cut off, so that the second rounding is
 * the only one that counts. All of it is arithmetic without branches, so that loops over lanes vectorise.
 */
#pragma once
#include "instructions.h"

#include <fenv.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))

/* isa/rows.py numbers them like this. */
typedef enum { RN, RZ, RM, RP, RNA, RS } Rounding;
enum { FTZ = 1, SAT = 2, RELU = 4, SATFINITE = 8, NAN_WINS = 16, XORSIGN = 32, ABS = 64 };

INLINE float bits_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
INLINE u32 float_bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }
INLINE double bits_double(u64 x) { double d; memcpy(&d, &x, 8); return d; }
INLINE u64 double_bits(double d) { u64 x; memcpy(&x, &d, 8); return x; }

/* The direction in which C's own arithmetic rounds. The barrier keeps arithmetic on memory on its side of the call. */
INLINE void round_towards(Rounding r) {
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    fesetround(modes[r & 3]);
    __asm__ volatile("" ::: "memory");
}

/* ---- narrow formats ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int exponent, mantissa; /* bits */
    u32 most;               /* the largest finite number's code */
    u32 over;               /* what lies beyond it: infinity, or the largest number again */
    u32 nan;
} SmallFloat;

#define AS_F16 ((SmallFloat){5, 10, 0x7bff, 0x7c00, 0x7fff})
#define AS_BF16 ((SmallFloat){8, 7, 0x7f7f, 0x7f80, 0x7fff})
#define AS_TF32 ((SmallFloat){8, 10, 0x3fbff, 0x3fc00, 0x3ffff})
#define AS_E4M3 ((SmallFloat){4, 3, 0x7e, 0x7f, 0x7f})
#define AS_E5M2 ((SmallFloat){5, 2, 0x7b, 0x7c, 0x7f})
#define AS_E2M1 ((SmallFloat){2, 1, 7, 7, 7})
#define AS_E2M3 ((SmallFloat){2, 3, 0x1f, 0x1f, 0x1f})
#define AS_E3M2 ((SmallFloat){3, 2, 0x1f, 0x1f, 0x1f})

/* What is added to a significand before its last `shift` bits are cut off. */
INLINE u32 rounding_term(u32 significand, u32 shift, bool negative, Rounding rounding, u32 random, u32 random_bits) {
    u32 half = 1u << (shift - 1), all = 2 * half - 1;
    switch (rounding) {
    case RN: return half - 1 + (significand >> shift & 1);
    case RNA: return half;
    case RM: return negative ? all : 0;
    case RP: return negative ? 0 : all;
    case RS: return random << (shift - random_bits);
    default: return 0;
    }
}

/* The code of x in a format: rounded once, subnormals kept. random: for RS, as many bits as a normal number loses. */
INLINE u32 narrow_random(float x, const SmallFloat f, Rounding rounding, int flags, u32 random) {
    const u32 bits = float_bits(x), magnitude = bits & 0x7fffffff, negative = bits >> 31;
    const s32 field = (s32)(magnitude >> 23), exponent = (field ? field : 1) - 127, least = 2 - (1 << (f.exponent - 1));
    const u32 significand = (magnitude & 0x7fffff) | (field ? 0x800000u : 0);
    const s32 below = least - exponent, lost = 23 - f.mantissa + (below > 0 ? below : 0);
    const u32 shift = (u32)(lost < 31 ? lost : 31);
    u32 code = (significand + rounding_term(significand, shift, negative, rounding, random, 23 - (u32)f.mantissa)) >> shift;
    code += below > 0 ? 0 : (u32)-below << f.mantissa;
    const bool inwards = rounding == RZ || (rounding == RM && !negative) || (rounding == RP && negative);
    const bool saturates = (flags & SATFINITE) || (inwards && magnitude < 0x7f800000);
    code = code > f.most ? (saturates ? f.most : f.over) : code;
    code = (flags & RELU) && negative ? 0 : code | negative << (f.exponent + f.mantissa);
    return magnitude > 0x7f800000 ? f.nan : code;
}
INLINE u32 narrow(float x, const SmallFloat f, Rounding rounding, int flags) { return narrow_random(x, f, rounding, flags, 0); }

/* The value of a code. Beyond the largest number lie infinities and NaN, which keep their payload; e4m3 has one NaN alone. */
INLINE float widen(u32 code, const SmallFloat f) {
    const u32 sign = code >> (f.exponent + f.mantissa) << 31, magnitude = code & ((1u << (f.exponent + f.mantissa)) - 1);
    const float scaled = bits_float(magnitude << (23 - f.mantissa)) * bits_float((u32)(254 - ((1 << (f.exponent - 1)) - 1)) << 23);
    const u32 beyond = magnitude << (23 - f.mantissa) | (f.over == f.nan ? 0x7fffffff : 0x7f800000);
    return bits_float((magnitude > f.most && f.most != f.over ? beyond : float_bits(scaled)) | sign);
}

INLINE float half_to_float(u16 h) { return widen(h, AS_F16); }
INLINE u16 float_to_half(float f) { return (u16)narrow(f, AS_F16, RN, 0); }
INLINE float bf16_to_float(u16 b) { return bits_float((u32)b << 16); }
INLINE u16 float_to_bf16(float f) {
    u32 x = float_bits(f);
    return f != f ? 0x7fff : (u16)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

/* tf32 lies in the upper bits of a float. .rna works on the bits as they are: the largest floats, and NaN whose payload lies below,
 * become infinities. */
INLINE u32 float_to_tf32(float x, Rounding rounding, int flags) {
    const u32 bits = float_bits(x), magnitude = bits & 0x7fffffff;
    if (rounding != RNA) return narrow(x, AS_TF32, rounding, flags) << 13;
    u32 code = (magnitude < 0x7f800000 ? bits + 0x1000 : bits) & 0xffffe000;
    if (!(flags & SATFINITE)) return code;
    return magnitude > 0x7f800000 ? 0x7fffffff : (code & 0x7fffffff) >= 0x7f800000 ? (code & 0x80000000) | 0x7f7fe000 : code;
}

/* ue8m0: a power of two, or 0xff for NaN; the sign is dropped. */
INLINE u32 float_to_ue8m0(float x, Rounding rounding, int flags) {
    const u32 magnitude = float_bits(x) & 0x7fffffff, field = magnitude >> 23, up = rounding == RP && (magnitude & 0x7fffff);
    u32 code = field + up; /* below 2^-127 only RP goes up */
    if (!field) code = rounding == RP ? magnitude > 0x400000 : 0;
    if (code > 0xfe) code = (flags & SATFINITE) || (rounding == RZ && magnitude < 0x7f800000) ? 0xfe : 0xff;
    return magnitude > 0x7f800000 ? 0xff : code;
}
INLINE float ue8m0_to_float(u32 code) { return bits_float(code == 0xff ? 0x7fffffff : code ? code << 23 : 0x400000); }

/* ---- modifiers ---------------------------------------------------------------------------------------------------------- */

INLINE float flush(float f) { /* .ftz: subnormals become zeros of their sign */
    u32 x = float_bits(f);
    return bits_float(x & 0x7f800000 ? x : x & 0x80000000);
}
INLINE float absolute(float x) { return bits_float(float_bits(x) & 0x7fffffff); }
INLINE double quiet(double x) { return bits_double(double_bits(x) | 1ull << 51); }
INLINE u32 flush_half(u32 h) { return h & 0x7c00 ? h : h & 0x8000; }
INLINE float saturated(float f) { return f > 0 ? (f < 1 ? f : 1) : 0; } /* NaN becomes 0 */
INLINE double saturated_double(double f) { return f > 0 ? (f < 1 ? f : 1) : 0; }

/* Registers to values and back: what rows read as a, b, ... and what becomes of their result. */
INLINE float f32_of(u32 x, int flags) { return flags & FTZ ? flush(bits_float(x)) : bits_float(x); }
INLINE u32 f32nan_to(float f, Rounding r, int flags) {
    if (flags & FTZ) f = flush(f);
    return float_bits(flags & SAT ? saturated(f) : f);
}
INLINE u32 f32_to(float f, Rounding r, int flags) { return f != f && !(flags & SAT) ? 0x7fffffff : f32nan_to(f, r, flags); }
INLINE double f64_of(u64 x, int flags) { return bits_double(x); }
INLINE u64 f64_to(double f, Rounding r, int flags) { return double_bits(flags & SAT ? saturated_double(f) : f); }
INLINE float f16_of(u32 x, int flags) { return widen(flags & FTZ ? flush_half(x & 0xffff) : x & 0xffff, AS_F16); }
INLINE u32 f16_to(float f, Rounding r, int flags) {
    if (flags & SAT) f = saturated(f);
    const u32 h = narrow(f, AS_F16, r, flags), scaled = narrow(f * 0x1p8f, AS_F16, r, flags) & 0x7fff;
    return (flags & FTZ) && scaled < 0x2400 ? h & 0x8000 : h; /* whether it is subnormal is told by rounding without a limit */
}
INLINE float bf16_of(u32 x, int flags) { return bits_float(x << 16); }
INLINE u32 f16nan_to(float f, Rounding r, int flags) {
    const u32 bits = float_bits(f);
    return f != f && !(flags & SAT) ? (bits >> 16 & 0x8000) | 0x7c00 | (bits >> 13 & 0x3ff) : f16_to(f, r, flags);
}
INLINE u32 bf16_to(float f, Rounding r, int flags) { return narrow(flags & SAT ? saturated(f) : f, AS_BF16, r, flags); }
INLINE u32 bf16nan_to(float f, Rounding r, int flags) { return f != f ? float_bits(f) >> 16 : bf16_to(f, r, flags); }

/* A double's NaN keeps the payload of the operand that counts first; 0xfff8... where no operand is one. */
INLINE double payload(double r, double first, double second, double third) {
    const double of_none = bits_double(0xfff8000000000000);
    const double nan = first != first ? quiet(first) : second != second ? quiet(second) : third != third ? quiet(third) : of_none;
    return r != r ? nan : r;
}
INLINE float canonical(float f) { return f != f ? bits_float(0x7fffffff) : f; }
/* The NaN that .oob looks for, of either sign: 0x7ff7 on an H200, for f16 and bf16 alike. PTX does not publish it. */
INLINE bool out_of_bounds(float a, float b, u32 nan) { return float_bits(absolute(a)) == nan || float_bits(absolute(b)) == nan; }

/* ---- more than one rounding --------------------------------------------------------------------------------------------- */

/* x rounded to odd: towards zero, and the last bit set if anything was lost. */
INLINE float odd_float(double x) {
    const float f = (float)x;
    u32 bits = float_bits(f) - (fabs((double)f) > fabs(x));
    return bits_float(f == x ? bits : bits | 1);
}

/* a + b rounded to odd, where nothing overflows: the sum, and one step towards what it missed if its last bit is even. */
INLINE double odd_sum(double a, double b) {
    const double s = a + b, t = s - a, error = (a - (s - t)) + (b - t);
    const u64 bits = double_bits(s), step = (error > 0) == (s > 0) ? 1 : ~0ull;
    return bits_double(bits + (error == 0 || s - s != 0 || (bits & 1) ? 0 : step));
}
INLINE float odd_fma(float a, float b, float c) { return odd_float(odd_sum((double)a * b, c)); }

/* A whole number that a double holds and that rounds, to fewer than 50 bits, as this one does. */
INLINE u64 sticky(u64 x) { return x >> 53 ? (x & ~0xfffull) | (u64)((x & 0xfff) != 0) << 12 : x; }
INLINE float odd_unsigned(u64 x) { return odd_float((double)sticky(x)); }
INLINE float odd_signed(s64 x) { return x < 0 ? -odd_unsigned(-(u64)x) : odd_unsigned((u64)x); }

/* ---- whole numbers ------------------------------------------------------------------------------------------------------ */

INLINE double to_whole(double x, Rounding r) {
    return r == RN ? rint(x) : r == RZ ? trunc(x) : r == RM ? floor(x) : ceil(x);
}

/* Float to integer, clamped; what NaN gives depends on both types. */
#define TO_INTEGER(type, x, r, low, high, of_nan)                                        \
    ({                                                                                   \
        const double whole_ = to_whole(x, r);                                            \
        whole_ != whole_ ? (type)(of_nan)                                                \
        : whole_ <= (double)(low) ? (type)(low)                                          \
        : whole_ >= (double)(high) ? (type)(high)                                        \
                                   : (type)whole_;                                       \
    })

/* ---- arithmetic whose results .ftz may flush ----------------------------------------------------------------------------- */

/* A result is subnormal, and flushed, if it is below 2^-126 once rounded to 24 bits as though exponents had no limit. What rounds to
 * 2^-126 from below where subnormals lie is computed again, larger. */
#define LARGER 0x1p64f
INLINE float flushed(float r, float larger, int flags) {
    return (flags & FTZ) && absolute(r) == 0x1p-126f && absolute(larger) < 0x1p-62f ? copysignf(0, r) : r;
}
INLINE float fused(float a, float b, float c, int flags) {
    const bool large = absolute(a) > 1;
    const float a_or_larger = large ? a : a * LARGER, b_or_larger = large ? b * LARGER : b;
    return flushed(fmaf(a, b, c), fmaf(a_or_larger, b_or_larger, c * LARGER), flags);
}
INLINE float product(float a, float b, int flags) {
    const bool large = absolute(a) > 1;
    const float a_or_larger = large ? a : a * LARGER, b_or_larger = large ? b * LARGER : b;
    return flushed(a * b, a_or_larger * b_or_larger, flags);
}
INLINE float quotient(float a, float b, int flags) { return flushed(a / b, a * LARGER / b, flags); }

/* ---- minimum and maximum ------------------------------------------------------------------------------------------------ */

/* A float's bits as an integer that orders as the numbers do, with -0 below +0. */
INLINE s32 rank_float(float x) { s32 bits = (s32)float_bits(x); return bits ^ (s32)((u32)(bits >> 31) >> 1); }
INLINE s64 rank_double(double x) { s64 bits = (s64)double_bits(x); return bits ^ (s64)((u64)(bits >> 63) >> 1); }

INLINE float extreme(float a, float b, bool largest, int flags) {
    const u32 sign = (flags & XORSIGN) ? (float_bits(a) ^ float_bits(b)) & 0x80000000 : 0;
    if (flags & ABS) a = absolute(a), b = absolute(b);
    const float first = (rank_float(a) < rank_float(b)) != largest ? a : b;
    const float other = flags & NAN_WINS ? bits_float(0x7fffffff) : a != a ? b : a;
    const float r = a != a || b != b ? other : first;
    return flags & XORSIGN ? (r != r ? r : bits_float(float_bits(r) | sign)) : r;
}
INLINE float minimum(float a, float b, int flags) { return extreme(a, b, false, flags); }
INLINE float maximum(float a, float b, int flags) { return extreme(a, b, true, flags); }
INLINE double extreme_double(double a, double b, bool largest) {
    const double first = (rank_double(a) < rank_double(b)) != largest ? a : b;
    return a != a ? (b != b ? quiet(b) : b) : b != b ? a : first;
}

/* ---- approximated functions: the rounded result, which lies within PTX's bounds but need not be the hardware's ------------ */

/* 2^x to 2^-52 or so, for loops that vectorise: a Taylor series around the nearest whole number. */
INLINE double power_of_two(double x) {
    static const double over[] = {0x1p0, 0x1.62e42fefa39efp-1, 0x1.ebfbdff82c58fp-3, 0x1.c6b08d704a0cp-5, 0x1.3b2ab6fba4e77p-7,
                                  0x1.5d87fe78a6731p-10, 0x1.430912f86c787p-13, 0x1.ffcbfc588b0c7p-17, 0x1.62c0223a5c824p-20,
                                  0x1.b5253d395e7c4p-24, 0x1.e4cf5158b8ecap-28, 0x1.e8cac7351bb25p-32, 0x1.c3bd650fc2986p-36,
                                  0x1.816193166d0f9p-40}; /* ln(2)^k / k! */
    const double held = x < -1000 ? -1000 : x > 1000 ? 1000 : x, whole = rint(held), part = held - whole;
    double sum = over[13];
    _Pragma("GCC unroll 13") for (int k = 12; k >= 0; k--) sum = sum * part + over[k];
    return x != x ? x : sum * bits_double((u64)((s64)whole + 1023) << 52);
}
INLINE float divide_approximately(float a, float b) { /* computes a * (1 / b), which is 0 for large b */
    return absolute(b) > 0x1p126f ? a * copysignf(0, b) : a / b;
}
INLINE u64 upper_half(double x) { return x != x ? 0x7fffffff00000000 : double_bits(x) & ~0xffffffffull; }
INLINE double flush_double(double x) { return fabs(x) < 0x1p-1022 ? copysign(0, x) : x; }
INLINE u64 reciprocal_upper(u64 a) { return upper_half(flush_double(1 / flush_double(bits_double(a & ~0xffffffffull)))); }
INLINE u64 root_upper(u64 a) { return upper_half(1 / sqrt(flush_double(bits_double(a & ~0xffffffffull)))); }
