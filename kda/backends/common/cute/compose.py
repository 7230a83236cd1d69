"""The states that enter the segments of a sequence, one value head, 8 columns: edge[p] = h, h = M[p] @ h + added[p].
Where the first segment began with the state that enters the sequence, h is what it ended with, and its edge is left.

In float32, so that a sequence that is cut has the state of one that is not but for the order of sums.  A thread has a
row of h and half of the sum; M comes transposed, so that threads are neighbours in it; h is handed round in shared
memory, twice (K, 8) with the other halves.

  barrier 0  2 K threads   h is there, and nobody reads the one before;  the other halves are there
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from .configs import STRIP, ComposeConfig
from .copies import load, load_one, pointers, store
from .order import after_the_kernel_before


class Compose:
    def __init__(self, config: ComposeConfig):
        self.c = config

    @cute.jit
    def __call__(
        self, M: cute.Pointer, added: cute.Pointer, h0: cute.Pointer, edge: cute.Pointer, ht: cute.Pointer,
        first_segment: cute.Pointer, pieces: Int32, HV: Int32, N: Int32, stream,
    ):  # fmt: skip
        self.kernel(M, added, h0, edge, ht, first_segment, pieces, HV).launch(
            grid=(self.c.parts, HV, N), block=(self.c.threads, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, M: cute.Pointer, added: cute.Pointer, h0: cute.Pointer, edge: cute.Pointer, ht: cute.Pointer,
        first_segment: cute.Pointer, pieces: Int32, HV: Int32,
    ):  # fmt: skip
        K, V = self.c.K, self.c.V
        part, head, n = cute.arch.block_idx()
        after_the_kernel_before()
        row, half = cute.arch.thread_idx()[0] % K, cute.arch.thread_idx()[0] // K
        smem = SmemAllocator()
        h = smem.allocate_array(Float32, K * STRIP, byte_alignment=32)
        halves = smem.allocate_array(Float32, K * STRIP, byte_alignment=32)
        begin, end = n * pieces, n * pieces + pieces
        if cutlass.const_expr(self.c.packed):
            begin, end = load_one(first_segment + n), load_one(first_segment + n + 1)
        own, first = row * STRIP, part * STRIP
        if half == 0:
            if cutlass.const_expr(self.c.begun):
                x = load(added + self.place(begin, HV, head, row, first), STRIP)
                store(h + own, [x[e] for e in range(STRIP)])
            else:
                store(h + own, self.start(h0, n * HV + head, row, first))
        if cutlass.const_expr(self.c.begun):
            begin, end = begin + 1, end + 1
        for p in cutlass.range(begin, end - 1, unroll=1):
            of_row = M + (Int64(p * HV + head) * (K * K) + half * (K * K // 2) + row)
            m = [load_one(of_row + i * K) for i in range(K // 2)]              # all on their way before h is waited for
            at = self.place(p, HV, head, row, first)
            new = [Float32(0.0)] * STRIP
            if half == 0:
                new = [load(added + at, STRIP)[e] for e in range(STRIP)]
                store(edge + at, [load(h + own, STRIP)[e] for e in range(STRIP)])
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(K // 2):
                other = load(h + (half * (K // 2) + i) * STRIP, STRIP)
                new = [new[e] + m[i] * other[e] for e in range(STRIP)]
            if half == 1:
                store(halves + own, new)
            cute.arch.sync_threads()
            if half == 0:
                rest = load(halves + own, STRIP)
                store(h + own, [new[e] + rest[e] for e in range(STRIP)])
        if half == 0:
            if cutlass.const_expr(not self.c.begun):
                at = self.place(end - 1, HV, head, row, first)
                store(edge + at, [load(h + own, STRIP)[e] for e in range(STRIP)])
            if cutlass.const_expr(self.c.ht):
                x = ht + Int64(n * HV + head) * (K * V)
                for e in cutlass.range_constexpr(STRIP):
                    store(x + self.in_state(row, first + e), [load_one(h + own + e)])

    @cute.jit
    def place(self, segment, HV, head, row, column):
        return Int64(segment * HV + head) * (self.c.K * self.c.V) + row * self.c.V + column

    @cute.jit
    def in_state(self, row, column):
        """Elements to one of a state as it was given, or is asked for."""
        return column * self.c.K + row if cutlass.const_expr(self.c.v_first) else row * self.c.V + column

    @cute.jit
    def start(self, h0, number, row, first):
        found = [Float32(0.0)] * STRIP
        if cutlass.const_expr(self.c.h0):
            x = h0 + Int64(number) * (self.c.K * self.c.V)
            for e in cutlass.range_constexpr(STRIP):
                found[e] = load_one(x + self.in_state(row, first + e)).to(Float32)
        return found


def build(c: ComposeConfig, target: Target) -> cutedsl.Compiled:
    x = pointers(f"float32 float32 {c.h0 or 'float32'} float32 float32 int32")
    return cutedsl.compile(Compose(c), *x, *[Int32(1)] * 3, cutedsl.fake_stream(), target=target)
