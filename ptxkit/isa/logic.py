"""Bits: logic, shifts, permutations, and the moves and selections that leave values as they are."""

from ptxkit.isa.rows import rows

BITS = "b16 b32 b64"
WORDS = "b16|u16|s16 b32|u32|s32|f32 b64|u64|s64|f64"


def _by(type_):
    """Return the types of slct: what it selects, then what it looks at."""
    return " ".join("|".join(f"{t}.{type_}" for t in entry.split("|")) for entry in WORDS.split())


TABLE = rows(
    ("and", BITS, "a & b"),
    ("or", BITS, "a | b"),
    ("xor", BITS, "a ^ b"),
    ("not", BITS, "~a"),
    ("cnot", BITS, "a == 0"),
    # shifts of the width or more leave nothing, or the sign
    ("shl", BITS, "b < BITS ? a << (b & (BITS - 1)) : 0", "T = T, u32"),
    ("shr", "u16|b16 u32|b32 u64|b64", "b < BITS ? a >> (b & (BITS - 1)) : 0", "T = T, u32"),
    ("shr", "s16 s32 s64", "a >> (b < BITS ? b : BITS - 1)", "T = T, u32"),
    ("shf.l.clamp", "b32", "(u32)(pair(a, b) << (c < 32 ? c : 32) >> 32)"),
    ("shf.l.wrap", "b32", "(u32)(pair(a, b) << (c & 31) >> 32)"),
    ("shf.r.clamp", "b32", "(u32)(pair(a, b) >> (c < 32 ? c : 32))"),
    ("shf.r.wrap", "b32", "(u32)(pair(a, b) >> (c & 31))"),
    ("lop3", "b32", "look_up(a, b, c, e)"),
    ("prmt", "b32", "permute_bytes(a, b, c)"),
    ("prmt.f4e", "b32", "pick_bytes(a, b, (c & 3) * 0x1111 + 0x3210)"),
    ("prmt.b4e", "b32", "pick_bytes(a, b, (c & 3) * 0x1111 + 0x5670)"),
    ("prmt.rc8", "b32", "pick_bytes(a, b, (c & 3) * 0x1111)"),
    ("prmt.ecl", "b32", "pick_bytes(a, b, (u32)(0x3333322232113210ull >> 16 * (c & 3)))"),
    ("prmt.ecr", "b32", "pick_bytes(a, b, (u32)(0x3210221011100000ull >> 16 * (c & 3)))"),
    ("prmt.rc16", "b32", "pick_bytes(a, b, c & 1 ? 0x3232 : 0x1010)"),
    ("cvta", "b64", "(a & b) | c"),  # b: what is kept of an address, c: the window that it moves to
    ("mov", WORDS, "a"),
    ("selp", WORDS, "c ? a : b", "T = T, T, pred"),
    ("slct", _by("s32"), "c >= 0 ? a : b", "T = T, T, s32"),
    ("slct{.ftz}", _by("f32"), "c >= 0 ? a : b", "T = T, T, f32"),
)
