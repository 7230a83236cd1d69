"""o += response @ edge: what a row of o has of the state that enters its segment (fwd/fused.py, `cut`).  Of a segment,
not the first of its sequence, one value head and at most JOIN_ROWS rows.

  edge      (K, V) float32, rounded into shared memory: panels of 64 columns, rows of 128 bytes, swizzled
  response  (tokens, HV, K), as operands of mma.sync straight from where it is
  warps     16 rows each, and those 128 below

  barrier  threads  says
  0        256      edge is in shared memory
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute import entry
from ...common.cute.copies import both_halves, load, load_one, store
from ...common.cute.fragments import load_matrices, mma_bf16
from ...common.cute.order import wait_for_the_kernel_before
from ...common.cute.tile import swizzle_128B
from ..configs import JOIN_ROWS, JoinConfig
from ..parts.walks import locate_segment, locate_sequence


class Join(entry.Entry):
    @cute.kernel
    def kernel(self, x):
        block, head, z = cute.arch.block_idx()
        wait_for_the_kernel_before()
        n = z // (x.segments - 1)
        number = z - n * (x.segments - 1) + 1
        begin, tokens = locate_segment(*locate_sequence(self.c.offsets, x, n), number, x.segments)
        rows = cutlass.min(tokens - block * JOIN_ROWS, JOIN_ROWS)
        if rows > 0:
            K, V, warp = self.c.K, self.c.V, cute.arch.make_warp_uniform(cute.arch.warp_idx())
            B = SmemAllocator().allocate_array(BFloat16, K * V, byte_alignment=1024)
            self.round_edge(x.edge + (Int64(n * x.segments + number) * x.HV + head) * (K * V), B)
            cute.arch.sync_threads()
            first = (begin + block * JOIN_ROWS) * x.HV + head
            for row in cutlass.range(16 * warp, rows, self.c.threads // 32 * 16, unroll=1):
                self.add(x.response + first * K, x.o + first * V, B, row, rows, x.HV)

    @cute.jit
    def round_edge(self, edge, B):
        """A thread moves a half of a row at a time."""
        K, V, threads = self.c.K, self.c.V, self.c.threads
        for i in cutlass.range_constexpr(K * V // 8 // threads):
            number = i * threads + cute.arch.thread_idx()[0]
            row, column = number // (V // 8), number % (V // 8) * 8
            parts = [load(edge + (row * V + column + at), 4) for at in (0, 4)]
            store(B + swizzle_128B(row, column, K) // 2, [part[e] for part in parts for e in range(4)])

    @cute.jit
    def add(self, response, o, B, row, rows, HV):
        """16 rows of o, 16 columns at a time: a lane has rows lane / 4 and that + 8."""
        K, V, lane = self.c.K, self.c.V, cute.arch.lane_idx()
        own = [row + (lane >> 2) + 8 * r for r in range(2)]
        there = [cutlass.min(x, rows - 1) for x in own]
        pair = (lane & 3) * 2
        a = []                                                                 # (16, K) in steps of 16
        for step in cutlass.range_constexpr(K // 16):
            for half in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    at = Int64(there[r] * HV) * K + (16 * step + 8 * half + pair)
                    a.append(load_one(cute.recast_ptr(response, dtype=Uint32) + at // 2))
        for panel in cutlass.range(V // 16, unroll=1):
            acc = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
            for step in cutlass.range_constexpr(K // 16):
                channel, column = 16 * step + (lane & 15), 16 * panel + 8 * (lane >> 4)
                b = load_matrices(B + swizzle_128B(channel, column, K) // 2, transposed=True)
                for side in cutlass.range_constexpr(2):
                    acc[side] = mma_bf16(acc[side], a[4 * step : 4 * step + 4], b[2 * side : 2 * side + 2])
            for side in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    if own[r] < rows:
                        to = o + (Int64(own[r] * HV) * V + (16 * panel + 8 * side + pair))
                        low, high = both_halves(load_one(cute.recast_ptr(to, dtype=Uint32)))
                        added = acc[side][2 * r : 2 * r + 2]
                        store(to, [low.bitcast(Float32) + added[0], high.bitcast(Float32) + added[1]])


def build(c: JoinConfig, target: Target) -> cutedsl.Compiled:
    return entry.compile(Join, c, target)
