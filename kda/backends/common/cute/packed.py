"""Two float32 at a time: a pair is a word of 64 bits, two neighbouring registers.  From sm_100 on an instruction for
f32x2 computes both, before that two do.  Moves between pairs and single registers have no instruction in SASS.

Single registers of float32 are passed as words: the DSL would move each of them in front of an instruction of ours.
"""

import struct

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32
from cutlass.base_dsl import Arch
from cutlass.base_dsl.dsl import BaseDSL

from .fast import LOG1P, LOG2_E


def pair(instruction: str, *operands):
    return cute.arch.inline_ptx(instruction, write_only_types=[Int64], read_only_args=list(operands))


def of_both(x, instruction: str, dtype):
    """Return what an instruction makes of a and b, the numbers of a pair."""
    text = "{.reg .f32 a, b; mov.b64 {a, b}, {$r0}; " + instruction + "}"
    return cute.arch.inline_ptx(text, write_only_types=[dtype], read_only_args=[x])


def both(x):
    """Twice the same number."""
    return pair("mov.b64 {$w0}, {{$r0}, {$r0}};", x.bitcast(Uint32))


def of_two(a, b):
    """A pair of single numbers."""
    return pair("mov.b64 {$w0}, {{$r0}, {$r1}};", a.bitcast(Uint32), b.bitcast(Uint32))


def both_of(x):
    """Return the numbers of a pair."""
    return list(cute.arch.inline_ptx(
        "mov.b64 {{$w0}, {$w1}}, {$r0};", write_only_types=[Float32] * 2, read_only_args=[x]
    ))


def constant(x: float):
    """Twice the same number."""
    bits = struct.pack(">f", x).hex()
    return pair(f"mov.b64 {{$w0}}, 0x{bits}{bits};")


def of_pairs(opcode: str, operands: int) -> str:
    """An instruction on pairs, in PTX for the target."""
    if BaseDSL._get_dsl().get_arch_enum() >= Arch.sm_100:
        return f"{opcode}.rn.f32x2 {{$w0}}, {', '.join(f'{{$r{i}}}' for i in range(operands))};"
    lower, upper = ([f"{half}{i}" for i in range(operands)] for half in "ab")
    moves = " ".join(f"mov.b64 {{{a}, {b}}}, {{$r{i}}};" for i, (a, b) in enumerate(zip(lower, upper)))
    work = " ".join(f"{opcode}.rn.f32 {half[0]}, {', '.join(half)};" for half in (lower, upper))
    return f"{{.reg .f32 {', '.join(lower + upper)}; {moves} {work} mov.b64 {{$w0}}, {{a0, b0}};}}"


def times(x, y):
    return pair(of_pairs("mul", 2), x, y)


def plus(x, y):
    return pair(of_pairs("add", 2), x, y)


def fused(x, y, z):
    """x * y + z."""
    return pair(of_pairs("fma", 3), x, y, z)


def from_bf16(word, low=None):
    """Two bfloat16 of a word, or at least `low`, as by `at_least`."""
    bounded = ""
    if low is not None:
        bounded = "".join(f"max.NaN.f32 {x}, {x}, {immediate(low)}; " for x in "ab")
    halves = "shl.b32 a, {$r0}, 16; and.b32 b, {$r0}, 0xFFFF0000; "
    return pair("{.reg .b32 a, b; " + halves + bounded + "mov.b64 {$w0}, {a, b};}", word)


def to_bf16(x):
    """A word of two bfloat16."""
    return of_both(x, "cvt.rn.bf16x2.f32 {$w0}, b, a;", Uint32)


def each(opcode: str, x, more: str = ""):
    """An instruction on each of two, with `more` operands."""
    work = f"{opcode} a, a{more}; {opcode} b, b{more};"
    return pair(f"{{.reg .f32 a, b; mov.b64 {{a, b}}, {{$r0}}; {work} mov.b64 {{$w0}}, {{a, b}};}}", x)


def exp2(x):
    return each("ex2.approx.ftz.f32", x)


def negative(x):
    return each("neg.f32", x)


def at_least(x, low):
    """max that keeps a nan."""
    return each("max.NaN.f32", x, f", {immediate(low)}")


def immediate(x):
    return f"0f{struct.pack('>f', x).hex()}"


def unless_equal(x, low, y):
    """y of the numbers of a pair whose x is not `low`, or nan; 0 of others."""
    test = "setp.neu.f32 p, {x}, {low}; selp.f32 {y}, {y}, 0f00000000, p; "
    work = "".join(test.format(x=x, y=y, low=immediate(low)) for x, y in ("ac", "bd"))
    return pair(
        "{.reg .f32 a, b, c, d; .reg .pred p; mov.b64 {a, b}, {$r0}; mov.b64 {c, d}, {$r1}; "
        + work + "mov.b64 {$w0}, {c, d};}", x, y,
    )


def whole(x):
    """The nearest integers."""
    return each("cvt.rni.ftz.f32.f32", x)


def constants_of_softplus():
    return [constant(x) for x in (-LOG2_E, *LOG1P[::-1])]


def softplus(x, constants):
    """Return softplus of both numbers, as common/cute/fast.py computes it."""
    to_log2, p, *further = constants
    e = exp2(times(each("abs.ftz.f32", x), to_log2))
    for of_power in further:
        p = fused(p, e, of_power)
    return fused(p, e, at_least(x, 0.0))


def powers(x):
    """2^x and 2^-x, while neither is flushed."""
    return cute.arch.inline_ptx(
        "{.reg .f32 a, b; mov.b64 {a, b}, {$r0}; ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; "
        "mov.b64 {$w0}, {a, b}; rcp.approx.ftz.f32 a, a; rcp.approx.ftz.f32 b, b; mov.b64 {$w1}, {a, b};}",
        write_only_types=[Int64] * 2, read_only_args=[x],
    )


def logistic(x, one):
    """1 / (one + 2^x)."""
    return pair(
        "{.reg .f32 a, b; mov.b64 {a, b}, {$r0}; ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; "
        "add.ftz.f32 a, a, {$r1}; add.ftz.f32 b, b, {$r1}; rcp.approx.ftz.f32 a, a; rcp.approx.ftz.f32 b, b; "
        "mov.b64 {$w0}, {a, b};}", x, one.bitcast(Uint32),
    )


def sum_of(x):
    """Return the sum of the two numbers."""
    return of_both(x, "add.ftz.f32 {$w0}, a, b;", Float32)


# Rows of single registers, as tensor memory has them.


def rounded(values):
    """Words of two bfloat16, of words of float32."""
    words = []
    for i in range(0, len(values), 2):
        words.append(cute.arch.inline_ptx(
            "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=values[i : i + 2]
        ))
    return words


def times_pairs(values, factor):
    """Words of float32, each times the same number, two at a time."""
    found = []
    for i in range(0, len(values), 2):
        found += cute.arch.inline_ptx(
            "{.reg .b64 x; mov.b64 x, {{$r0}, {$r1}}; mul.rn.f32x2 x, x, {$r2}; mov.b64 {{$w0}, {$w1}}, x;}",
            write_only_types=[Uint32] * 2, read_only_args=[values[i], values[i + 1], factor],
        )
    return found
