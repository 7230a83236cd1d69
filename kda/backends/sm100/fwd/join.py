"""o += response @ edge: what a row of o has of the state that enters its segment (fwd/fused.py, `cut`).  Of a segment,
not the first of its sequence, one value head and at most ROWS rows.

  edge      (K, V) float32, rounded into shared memory: panels of 64 columns, rows of 128 bytes, swizzled
  response  (tokens, HV, K), as operands of mma.sync straight from where it is
  warps     16 rows each, and those 128 below

  barrier 0  256  edge is there
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute.copies import both_halves, load, load_one, load_transposed, pointers, store
from ...common.cute.order import after_the_kernel_before
from ...common.cute.tile import in_wide_rows
from ..configs import ROWS, JoinConfig
from ..parts.matrices import mma_bf16
from ..parts.segments import place, segment


class Join:
    def __init__(self, config: JoinConfig):
        self.c = config

    @cute.jit
    def __call__(
        self, response: cute.Pointer, edge: cute.Pointer, o: cute.Pointer, cu_seqlens: cute.Pointer, T: Int32,
        HV: Int32, pieces: Int32, blocks: Int32, N: Int32, stream,
    ):  # fmt: skip
        self.kernel(response, edge, o, cu_seqlens, T, HV, pieces).launch(
            grid=(blocks, HV, N * (pieces - 1)), block=(self.c.threads, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, response: cute.Pointer, edge: cute.Pointer, o: cute.Pointer, cu_seqlens: cute.Pointer, T: Int32,
        HV: Int32, pieces: Int32,
    ):  # fmt: skip
        block, head, z = cute.arch.block_idx()
        after_the_kernel_before()
        n = z // (pieces - 1)
        piece = z - n * (pieces - 1) + 1
        begin, tokens = segment(*place(self.c.offsets, cu_seqlens, n, T), piece, pieces)
        rows = cutlass.min(tokens - block * ROWS, ROWS)
        if rows > 0:
            K, V, warp = self.c.K, self.c.V, cute.arch.make_warp_uniform(cute.arch.warp_idx())
            B = SmemAllocator().allocate_array(BFloat16, K * V, byte_alignment=1024)
            self.round_edge(edge + (Int64(n * pieces + piece) * HV + head) * (K * V), B)
            cute.arch.sync_threads()
            first = (begin + block * ROWS) * HV + head
            for row in cutlass.range(16 * warp, rows, self.c.threads // 32 * 16, unroll=1):
                self.add(response + first * K, o + first * V, B, row, rows, HV)

    @cute.jit
    def round_edge(self, edge, B):
        """A thread moves a half of a row at a time."""
        K, V, threads = self.c.K, self.c.V, self.c.threads
        for i in cutlass.range_constexpr(K * V // 8 // threads):
            number = i * threads + cute.arch.thread_idx()[0]
            row, column = number // (V // 8), number % (V // 8) * 8
            parts = [load(edge + (row * V + column + at), 4) for at in (0, 4)]
            store(B + in_wide_rows(row, column, K) // 2, [part[e] for part in parts for e in range(4)])

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
                b = load_transposed(B + in_wide_rows(channel, column, K) // 2)
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
    x = pointers(f"bfloat16 float32 bfloat16 {c.offsets or 'int64'}")
    return cutedsl.compile(Join(c), *x, *[Int32(1)] * 5, cutedsl.fake_stream(), target=target)
