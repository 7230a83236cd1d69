/* What the generated handlers of scalar instructions are made of. */
#pragma once
#include "machine.h"
#include "numerics.h"

#pragma GCC diagnostic ignored "-Wtype-limits" /* one text for signed and unsigned types */
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wunused-variable"

/* A lane reads and writes its own place of every register, so the loop may vectorise though registers may be the same. All 32 lanes are
 * computed; a warp that is not full computes them beside its register, and MERGE puts the running lanes' results there. */
#define EVERY_LANE(...) _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) __VA_ARGS__
#define RESULT(type, offset)                      \
    type *const D = (type *)(w->regs + (offset)); \
    type beside[LANES], *const to = lanes == FULL ? D : beside
#define MERGE()                                                                  \
    do {                                                                         \
        if (lanes != FULL) EVERY_LANE(D[l] = lanes >> l & 1 ? beside[l] : D[l];) \
    } while (0)

/* ---- registers to values and back, beside those of numerics.h ------------------------------------------------------------ */

#define u8_of(x, flags) ((u8)(x))
#define s8_of(x, flags) ((s8)(x))
#define u16_of(x, flags) ((u16)(x))
#define s16_of(x, flags) ((s16)(x))
#define u32_of(x, flags) ((u32)(x))
#define s32_of(x, flags) ((s32)(x))
#define u64_of(x, flags) ((u64)(x))
#define s64_of(x, flags) ((s64)(x))
#define b8_of u8_of
#define b16_of u16_of
#define b32_of u32_of
#define b64_of u64_of
#define u8_to(x, rounding, flags) ((u8)(x))
#define s8_to(x, rounding, flags) ((u8)(x))
#define u16_to(x, rounding, flags) ((u16)(x))
#define s16_to(x, rounding, flags) ((u16)(x))
#define u32_to(x, rounding, flags) ((u32)(x))
#define s32_to(x, rounding, flags) ((u32)(x))
#define u64_to(x, rounding, flags) ((u64)(x))
#define s64_to(x, rounding, flags) ((u64)(x))
#define b8_to u8_to
#define b16_to u16_to
#define b32_to u32_to
#define b64_to u64_to
#define tf32_to float_to_tf32
#define e4m3_of(x, flags) widen((x) & 0xff, AS_E4M3)
#define e5m2_of(x, flags) widen((x) & 0xff, AS_E5M2)
#define e2m3_of(x, flags) widen((x) & 0x3f, AS_E2M3)
#define e3m2_of(x, flags) widen((x) & 0x3f, AS_E3M2)
#define e2m1_of(x, flags) widen((x) & 0xf, AS_E2M1)
#define ue8m0_of(x, flags) ue8m0_to_float((x) & 0xff)
#define e4m3_to(x, rounding, flags) narrow(x, AS_E4M3, rounding, flags)
#define e5m2_to(x, rounding, flags) narrow(x, AS_E5M2, rounding, flags)
#define e2m3_to(x, rounding, flags) narrow(x, AS_E2M3, rounding, flags)
#define e3m2_to(x, rounding, flags) narrow(x, AS_E3M2, rounding, flags)
#define e2m1_to(x, rounding, flags) narrow(x, AS_E2M1, rounding, flags)
#define ue8m0_to float_to_ue8m0
#define round_randomly(x, format, flags, random) narrow_random(x, format, RS, flags, random)

enum { MIN_u2 = 0, MAX_u2 = 3, MIN_s2 = -2, MAX_s2 = 1, MIN_u4 = 0, MAX_u4 = 15, MIN_s4 = -8, MAX_s4 = 7 };
#define MIN_u8 0
#define MIN_u16 0
#define MIN_u32 0
#define MIN_u64 0
#define MAX_u8 UINT8_MAX
#define MAX_u16 UINT16_MAX
#define MAX_u32 UINT32_MAX
#define MAX_u64 UINT64_MAX
#define MIN_s8 INT8_MIN
#define MIN_s16 INT16_MIN
#define MIN_s32 INT32_MIN
#define MIN_s64 INT64_MIN
#define MAX_s8 INT8_MAX
#define MAX_s16 INT16_MAX
#define MAX_s32 INT32_MAX
#define MAX_s64 INT64_MAX

#define low24(x) ((x) << 8 >> 8)

/* ---- integers ----------------------------------------------------------------------------------------------------------- */

INLINE s32 clamp_s32(s64 x) { return x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : (s32)x; }
INLINE u64 without_sign(s64 x) { return (u64)(x < 0 ? ~x : x); }
INLINE u32 highest_bit(u64 x) { return x ? 63 - (u32)__builtin_clzll(x) : FULL; }
INLINE u64 reverse_bits(u64 x) {
    x = (x >> 1 & 0x5555555555555555) | (x & 0x5555555555555555) << 1;
    x = (x >> 2 & 0x3333333333333333) | (x & 0x3333333333333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f0f0f0f0f) | (x & 0x0f0f0f0f0f0f0f0f) << 4;
    return __builtin_bswap64(x);
}
INLINE u32 nth_set_bit(u32 mask, u32 base, s32 offset) {
    if (offset == 0) return base < 32 && mask >> base & 1 ? base : FULL;
    s64 left = offset > 0 ? offset : -(s64)offset;
    for (s64 bit = base; bit >= 0 && bit < 32; bit += offset > 0 ? 1 : -1)
        if ((mask >> bit & 1) && --left == 0) return (u32)bit;
    return FULL;
}
INLINE u64 low_bits(u32 n) { return n < 64 ? (1ull << n) - 1 : ~0ull; }

/* len bits of an integer of `size` bits from pos on; what lies beyond its top is the field's sign. */
INLINE u64 extract_bits(u64 a, u32 pos, u32 len, u32 size, bool is_signed) {
    const u64 value = a & low_bits(size);
    const u32 last = pos + len - 1 < size - 1 ? pos + len - 1 : size - 1;
    const u64 sign = is_signed && len ? -(value >> last & 1) : 0, kept = low_bits(len < size ? len : size) & (pos < size ? low_bits(size - pos) : 0);
    return ((pos < size ? value >> pos : 0) & kept) | (sign & ~kept);
}
INLINE u64 insert_bits(u64 a, u64 b, u32 pos, u32 len, u32 size) {
    const u64 field = pos < size ? low_bits(len) << pos : 0;
    return (b & ~field) | (pos < size ? a << pos & field : 0);
}
INLINE u32 bit_mask(u32 a, u32 b, bool clamp) {
    if (clamp && a >= 32) return 0;
    const u32 width = clamp ? (b < 32 ? b : 32) : b & 31;
    return (u32)(low_bits(width) << (a & 31));
}
INLINE u32 dot4(u32 a, u32 b, bool signed_a, bool signed_b) {
    u32 sum = 0;
    for (int n = 0; n < 32; n += 8) {
        const s32 x = signed_a ? (s8)(a >> n) : (u8)(a >> n), y = signed_b ? (s8)(b >> n) : (u8)(b >> n);
        sum += (u32)(x * y);
    }
    return sum;
}
INLINE u32 dot2(u32 a, u32 b, bool signed_a, bool signed_b) {
    u32 sum = 0;
    for (int n = 0; n < 2; n++) {
        const s32 x = signed_a ? (s16)(a >> 16 * n) : (u16)(a >> 16 * n), y = signed_b ? (s8)(b >> 8 * n) : (u8)(b >> 8 * n);
        sum += (u32)(x * y);
    }
    return sum;
}
INLINE u32 pack(s32 a, s32 b, u32 c, u32 size, s32 least, s32 most) {
    const u32 high = (u32)(a < least ? least : a > most ? most : a), low = (u32)(b < least ? least : b > most ? most : b);
    const u32 field = (u32)low_bits(size);
    return (low & field) | (high & field) << size | (size < 16 ? c << 2 * size : 0);
}

/* ---- bits --------------------------------------------------------------------------------------------------------------- */

INLINE u64 pair(u32 low, u32 high) { return (u64)high << 32 | low; }
INLINE u32 look_up(u32 a, u32 b, u32 c, u32 table) {
    u32 r = 0;
    for (int n = 0; n < 8; n++) r |= -(table >> n & 1) & (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
    return r;
}
/* Byte k of the result is byte selector[4k+2:4k] of {b, a}. */
INLINE u32 pick_bytes(u32 a, u32 b, u32 selector) {
    u32 r = 0;
    for (int k = 0; k < 4; k++) r |= (u32)(pair(a, b) >> 8 * (selector >> 4 * k & 7) & 0xff) << 8 * k;
    return r;
}
/* Works as pick_bytes does, but the fourth bit of a selector asks for the sign of the byte instead. */
INLINE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const u32 bytes = pick_bytes(a, b, selector), signs = (bytes >> 7 & 0x01010101) * 0xff;
    const u32 low = (selector >> 3 & 1) | (selector >> 7 & 1) << 8, high = (selector >> 11 & 1) | (selector >> 15 & 1) << 8;
    const u32 whole = (low | high << 16) * 0xff;
    return (signs & whole) | (bytes & ~whole);
}

/* ---- predicates --------------------------------------------------------------------------------------------------------- */

typedef enum { ALONE, AND, OR, XOR } Combine;

INLINE u32 joined(u32 bits, s64 how, u32 other) {
    return how == AND ? bits & other : how == OR ? bits | other : how == XOR ? bits ^ other : bits;
}
INLINE u32 source_predicate(const Warp *w, s32 offset, s64 negated) {
    return offset < 0 ? 0 : negated ? ~*PRED(w, offset) : *PRED(w, offset);
}

/* Two masks of lanes from a comparison's: of the lower and the upper element of a packed type, else of the comparison and its opposite,
 * each combined with the predicate c. arg: a, b, c. */
typedef u32 Comparison(const Warp *w, const s32 *arg, int flags, int shift);
typedef struct { u32 first, second; } Compared;

static inline Compared compared(const Warp *w, const s32 *arg, const s64 *mod, Comparison *compare) {
    const u32 flip = mod[COMPARE_NEGATE] ? FULL : 0, c = source_predicate(w, arg[2], mod[COMPARE_NEGATE_C]);
    const u32 first = compare(w, arg, (int)mod[COMPARE_FLAGS], 0) ^ flip;
    const u32 second = mod[COMPARE_PACKED] ? compare(w, arg, (int)mod[COMPARE_FLAGS], 16) ^ flip : ~first;
    return (Compared){joined(first, mod[COMPARE_COMBINE], c), joined(second, mod[COMPARE_COMBINE], c)};
}
/* setp: arg p, q, a, b, c */
static inline Outcome set_predicates(Warp *w, const Ins *i, u32 lanes, Comparison *compare) {
    const Compared r = compared(w, i->arg + 2, i->mod, compare);
    set_pred(w, i->arg[0], lanes, r.first);
    set_pred(w, i->arg[1], lanes, r.second);
    return NEXT;
}
/* set: arg d, a, b, c; mod[SET_TRUE] is what true looks like */
static inline Outcome set_register(Warp *w, const Ins *i, u32 lanes, Comparison *compare) {
    const Compared r = compared(w, i->arg + 1, i->mod, compare);
    const u32 low = (u32)i->mod[SET_TRUE], high = i->mod[COMPARE_PACKED] ? low << 16 : 0;
    RESULT(u32, i->arg[0]);
    EVERY_LANE(to[l] = (r.first >> l & 1 ? low : 0) | (r.second >> l & 1 ? high : 0);)
    MERGE();
    return NEXT;
}
#define COMPARISON(name)                                                                                            \
    static Outcome setp_##name(Warp *w, const Ins *i, u32 lanes) { return set_predicates(w, i, lanes, name); } \
    static Outcome set_##name(Warp *w, const Ins *i, u32 lanes) { return set_register(w, i, lanes, name); }

/* ---- the table of all handlers ------------------------------------------------------------------------------------------ */

#define DECLARED(name) Outcome name(Warp *w, const Ins *i, u32 lanes);
#define LISTED(name) {#name, name},

extern const HandlerEntry scalar_handlers[];
