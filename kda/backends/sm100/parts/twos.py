"""A chunk's rows in registers two channels at a time, for common/cute/gate.py and pairs.py: of a bounded gate, where
one product makes the pairs.

A pair of float32 is a word of 64 bits, two neighbouring registers: f32x2 takes one instruction for both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint32

from ...common.cute import fast
from ...common.cute.copies import load, store
from ...common.cute.gate import Gate
from ...common.cute.pairs import Pairs
from ...common.cute.tile import WARP_ROWS


class GateInTwos(Gate):
    """gate.py with rows of pairs."""

    @cute.jit
    def load_floats(self, pointer):
        E = self.c.K // 32
        if cutlass.const_expr(pointer.dtype is BFloat16):
            words = load(cute.recast_ptr(pointer, dtype=Uint32), E // 2)
            return [
                pair("{.reg .b32 a, b; shl.b32 a, {$r0}, 16; and.b32 b, {$r0}, 0xFFFF0000; mov.b64 {$w0}, {a, b};}",
                     words[w]) for w in range(E // 2)
            ]  # fmt: skip
        pairs = load(cute.recast_ptr(pointer, dtype=Int64), E // 2)
        return [pairs[w] for w in range(E // 2)]

    @cute.jit
    def times(self, row, x):
        twice = both(x)
        return [times(y, twice) for y in row]

    @cute.jit
    def square(self, row):
        total = times(row[0], row[0])
        for x in row[1:]:
            total = fused(x, x, total)
        return cute.arch.inline_ptx(
            "{.reg .f32 a, b; mov.b64 {a, b}, {$r0}; add.f32 {$w0}, a, b;}", write_only_types=[Float32],
            read_only_args=[total],
        )  # fmt: skip

    @cute.jit
    def sum_of_decays(self, raw_g, weight, at, d):
        rate, one, bias, gc = both(Float32(-fast.LOG2_E) * at.rate), both(Float32(1.0)), None, []
        if cutlass.const_expr(self.c.bias):
            of_head = load(at.bias + d, self.c.K // 32)
            bias = [times(x, rate) for x in in_pairs(of_head, self.c.K // 32)]
        for r in cutlass.range_constexpr(WARP_ROWS):
            most, row = both(Float32(fast.LOG2_E) * at.lower_bound * weight[r]), []
            for w in cutlass.range_constexpr(self.c.K // 64):
                x = fused(raw_g[r][w], rate, bias[w]) if self.c.bias else times(raw_g[r][w], rate)
                decay = times(each("rcp.approx.ftz.f32", plus(each("ex2.approx.ftz.f32", x), one)), most)
                row.append(plus(decay, gc[r - 1][w]) if cutlass.const_expr(r > 0) else decay)
            gc.append(row)
        return gc

    @cute.jit
    def sum_over_warps(self, gc, sums, d):
        ends = [out_of_pairs(gc[r]) if r in (0, WARP_ROWS - 1) else None for r in range(WARP_ROWS)]
        Gate.sum_over_warps(self, ends, sums, d)


class PairsInTwos(Pairs):
    """pairs.py with rows of pairs."""

    @cute.jit
    def under_decay(self, qn, kn, gc, to_x):
        x = [plus(y, z) for y, z in zip(gc, to_x)]
        up = [each("ex2.approx.ftz.f32", y) for y in x]
        down = [each("ex2.approx.ftz.f32", y, negated=True) for y in x]
        return self.times(kn, up), self.times(qn, up), self.times(kn, down)

    @cute.jit
    def row(self, values):
        return in_pairs(values, len(values))

    @cute.jit
    def times(self, row, other):
        return [times(x, y) for x, y in zip(row, other)]

    @cute.jit
    def words(self, row):
        return [
            cute.arch.inline_ptx(
                "{.reg .f32 a, b; mov.b64 {a, b}, {$r0}; cvt.rn.bf16x2.f32 {$w0}, b, a;}", write_only_types=[Uint32],
                read_only_args=[x],
            ) for x in row
        ]  # fmt: skip

    @cute.jit
    def store_row(self, to, row):
        store(cute.recast_ptr(to, dtype=Uint32), self.words(row))


@cute.jit
def pair(instruction: cutlass.Constexpr, *operands):
    return cute.arch.inline_ptx(instruction, write_only_types=[Int64], read_only_args=list(operands))


@cute.jit
def both(x):
    """Twice the same number."""
    return pair("mov.b64 {$w0}, {{$r0}, {$r0}};", x)


@cute.jit
def times(x, y):
    return pair("mul.rn.f32x2 {$w0}, {$r0}, {$r1};", x, y)


@cute.jit
def plus(x, y):
    return pair("add.rn.f32x2 {$w0}, {$r0}, {$r1};", x, y)


@cute.jit
def fused(x, y, z):
    """x * y + z."""
    return pair("fma.rn.f32x2 {$w0}, {$r0}, {$r1}, {$r2};", x, y, z)


@cute.jit
def each(opcode: cutlass.Constexpr, x, negated: cutlass.Constexpr = False):
    """An instruction on each of two."""
    first = "neg.ftz.f32 a, a; neg.ftz.f32 b, b; " if negated else ""
    work = f"{first}{opcode} a, a; {opcode} b, b;"
    return pair(f"{{.reg .f32 a, b; mov.b64 {{a, b}}, {{$r0}}; {work} mov.b64 {{$w0}}, {{a, b}};}}", x)


@cute.jit
def in_pairs(values, count: cutlass.Constexpr):
    return [pair("mov.b64 {$w0}, {{$r0}, {$r1}};", values[e], values[e + 1]) for e in range(0, count, 2)]


@cute.jit
def out_of_pairs(row):
    found = []
    for x in row:
        found += cute.arch.inline_ptx(
            "mov.b64 {{$w0}, {$w1}}, {$r0};", write_only_types=[Float32] * 2, read_only_args=[x]
        )
    return found
