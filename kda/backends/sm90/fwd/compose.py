"""The states that enter the segments of a sequence, one value head, 8 columns: edge[p] = h, h = M[p] @ h + added[p].

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

from ...common.cute.copies import load, load_one, pointers, store
from ...common.cute.order import after_the_kernel_before
from ..configs import STRIP, ComposeConfig


class Compose:
    def __init__(self, config: ComposeConfig):
        self.c = config

    @cute.jit
    def __call__(
        self, M: cute.Pointer, added: cute.Pointer, h0: cute.Pointer, edge: cute.Pointer, first_segment: cute.Pointer,
        pieces: Int32, HV: Int32, N: Int32, stream,
    ):  # fmt: skip
        self.kernel(M, added, h0, edge, first_segment, pieces, HV).launch(
            grid=(self.c.parts, HV, N), block=(self.c.threads, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, M: cute.Pointer, added: cute.Pointer, h0: cute.Pointer, edge: cute.Pointer, first_segment: cute.Pointer,
        pieces: Int32, HV: Int32,
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
            store(h + own, self.start(h0, n * HV + head, row, first))
        for p in cutlass.range(begin, end - 1, unroll=1):
            of_row = M + (Int64(p * HV + head) * (K * K) + half * (K * K // 2) + row)
            m = [load_one(of_row + i * K) for i in range(K // 2)]              # all on their way before h is waited for
            at = Int64(p * HV + head) * (K * V) + row * V + first
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
            at = Int64((end - 1) * HV + head) * (K * V) + row * V + first
            store(edge + at, [load(h + own, STRIP)[e] for e in range(STRIP)])

    @cute.jit
    def start(self, h0, number, row, first):
        K, V = self.c.K, self.c.V
        x = h0 + Int64(number) * (K * V)
        found = [Float32(0.0)] * STRIP
        if cutlass.const_expr(self.c.h0):
            for e in cutlass.range_constexpr(STRIP):
                at = (first + e) * K + row if cutlass.const_expr(self.c.v_first) else row * V + first + e
                found[e] = load_one(x + at).to(Float32)
        return found


def build(c: ComposeConfig, target: Target) -> cutedsl.Compiled:
    x = pointers(f"float32 float32 {c.h0 or 'float32'} float32 int32")
    return cutedsl.compile(Compose(c), *x, *[Int32(1)] * 3, cutedsl.fake_stream(), target=target)
