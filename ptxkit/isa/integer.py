"""Integer arithmetic, with and without the carry flag.

Division by zero, which PTX leaves open, gives all ones as on an H200.
"""

from ptxkit.isa.rows import rows

ANY = "u16|s16 u32|s32 u64|s64"  # the sign makes no difference
SIGNED_OR_NOT = "u16 s16 u32 s32 u64 s64"
WORDS = "u32|s32 u64|s64"

# The value is as wide as it takes: what lies above the type is the carry out, or the borrow. `carry` is the carry in.
WITH_CARRY = tuple(
    (f"{op}{suffix.format(half)}", types, value + (f" {sign} carry" if suffix[0] == "c" else ""))
    for suffix in ("{}.cc", "c{}", "c{}.cc")
    for op, half, types, sign, value in (
        ("add", "", WORDS, "+", "(W)a + b"),
        ("sub", "", WORDS, "-", "(W)a - b"),
        ("mad", ".lo", WORDS, "+", "(W)(T)(a * b) + c"),
        ("mad", ".hi", "u32 u64", "+", "((W)a * b >> BITS) + c"),
        ("mad", ".hi", "s32", "+", "(u64)(u32)((s64)a * b >> 32) + (u32)c"),
        ("mad", ".hi", "s64", "+", "(unsigned __int128)(u64)((__int128)a * b >> 64) + (u64)c"),
    )
)

TABLE = rows(
    ("add", f"{ANY} u16x2|s16x2", "a + b"),
    ("sub", ANY, "a - b"),
    ("add.sat", "s32", "clamp_s32((s64)a + b)"),
    ("sub.sat", "s32", "clamp_s32((s64)a - b)"),
    ("mul.lo", ANY, "1u * a * b"),
    ("mul.hi", SIGNED_OR_NOT, "(W)a * b >> BITS"),
    ("mul.wide", "u16 s16 u32 s32", "(W)a * b", "W = T, T"),
    ("mad.lo", ANY, "1u * a * b + c"),
    ("mad.hi", SIGNED_OR_NOT, "(u64)((W)a * b >> BITS) + c"),
    ("mad.hi.sat", "s32", "clamp_s32(((s64)a * b >> 32) + c)"),
    ("mad.wide", "u16 s16 u32 s32", "(u64)((W)a * b) + c", "W = T, T, W"),
    ("mul24.lo", "u32 s32", "1u * low24(a) * low24(b)"),
    ("mul24.hi", "u32 s32", "(W)low24(a) * low24(b) >> 16"),
    ("mad24.lo", "u32 s32", "1u * low24(a) * low24(b) + c"),
    ("mad24.hi", "u32 s32", "(u32)((W)low24(a) * low24(b) >> 16) + c"),
    ("mad24.hi.sat", "s32", "clamp_s32((s32)((s64)low24(a) * low24(b) >> 16) + (s64)c)"),
    ("sad", "u16 s16 u32 s32 u64 s64", "(u64)c + (a < b ? (u64)b - (u64)a : (u64)a - (u64)b)"),
    ("div", "u16 u32 u64", "b ? a / b : (T)-1"),
    ("div", "s16 s32 s64", "b == 0 ? -1 : b == -1 ? (T)-(u64)a : a / b"),
    ("rem", "u16 u32 u64", "b ? a % b : (T)-1"),
    ("rem", "s16 s32 s64", "b == 0 ? -1 : b == -1 ? 0 : a % b"),
    ("abs", "s16 s32 s64", "a < 0 ? -(u64)a : (u64)a"),
    ("neg", "s16 s32 s64", "-(u64)a"),
    ("min", f"{SIGNED_OR_NOT} u16x2 s16x2", "a < b ? a : b"),
    ("max", f"{SIGNED_OR_NOT} u16x2 s16x2", "a > b ? a : b"),
    ("min.relu", "s32 s16x2", "a < 0 || b < 0 ? 0 : a < b ? a : b"),
    ("max.relu", "s32 s16x2", "a < 0 && b < 0 ? 0 : a > b ? a : b"),
    ("popc", "b32 b64", "(u32)__builtin_popcountll(a)", "u32 = T"),
    ("clz", "b32 b64", "a ? (u32)__builtin_clzll(a) - (64 - BITS) : BITS", "u32 = T"),
    ("bfind", "u32 u64", "highest_bit(a)", "u32 = T"),
    ("bfind", "s32 s64", "highest_bit(without_sign(a))", "u32 = T"),
    ("bfind.shiftamt", "u32 u64", "a ? BITS - 1 - highest_bit(a) : FULL", "u32 = T"),
    ("bfind.shiftamt", "s32 s64", "without_sign(a) ? BITS - 1 - highest_bit(without_sign(a)) : FULL", "u32 = T"),
    ("brev", "b32", "(u32)(reverse_bits(a) >> 32)"),
    ("brev", "b64", "reverse_bits(a)"),
    ("fns", "b32", "nth_set_bit(a, b, (s32)c)"),
    ("bfe", "u32 s32 u64 s64", "extract_bits(a, b & 255, c & 255, BITS, (T)-1 < 0)", "T = T, u32, u32"),
    ("bfi", "b32 b64", "insert_bits(a, b, c & 255, e & 255, BITS)", "T = T, T, u32, u32"),
    ("bmsk.clamp", "b32", "bit_mask(a, b, true)"),
    ("bmsk.wrap", "b32", "bit_mask(a, b, false)"),
    ("szext.clamp", "u32 s32", "b >= 32 ? a : extract_bits(a, 0, b, 32, (T)-1 < 0)", "T = T, u32"),
    ("szext.wrap", "u32 s32", "extract_bits(a, 0, b & 31, 32, (T)-1 < 0)", "T = T, u32"),
    ("dp4a", "u32.u32 u32.s32 s32.u32 s32.s32", "c + dot4(a, b, (T)-1 < 0, (S)-1 < 0)", "u32 = u32, u32, u32"),
    ("dp2a.lo", "u32.u32 u32.s32 s32.u32 s32.s32", "c + dot2(a, b, (T)-1 < 0, (S)-1 < 0)", "u32 = u32, u32, u32"),
    ("dp2a.hi", "u32.u32 u32.s32 s32.u32 s32.s32", "c + dot2(a, b >> 16, (T)-1 < 0, (S)-1 < 0)", "u32 = u32, u32, u32"),
    *WITH_CARRY,
)
