"""bwd/shares: dA_log and ddt_bias of one value head, of what chunks give to them, always summed in one order.

  dA_log = sum_(chunks, channels) of_A_log        ddt_bias = sum_chunks of_dt_bias; of a gate per head of channels, too

Threads are SLICES x K: a thread has one channel, and of the chunks every SLICES-th.

  barrier  threads     says
  0        SLICES x K  each slice's sums are in shared memory;  sums of each warp are there

  shared memory: configs.SharesConfig.struct
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from .configs import SLICES
from .copies import allocate, load_one, store
from .entry import Entry

AT_ONCE = 8                                  # chunks of a slice whose shares are loaded before one of them is added


class Shares(Entry):
    @cute.kernel
    def kernel(self, x):
        c, head = self.c, cute.arch.block_idx()[0]
        thread = cute.arch.thread_idx()[0]
        channel, slice_ = thread % c.K, thread // c.K
        s = allocate(c.struct)
        of_A, of_bias = Float32(0.0), Float32(0.0)
        for first in cutlass.range(slice_, x.chunks, AT_ONCE * SLICES, unroll=1):
            chunks = [first + SLICES * n for n in range(AT_ONCE)]
            each_A = self.of_chunks(x, x.of_A_log, chunks, channel) if c.rate else []
            each_bias = self.of_chunks(x, x.of_dt_bias, chunks, channel) if c.bias else []
            if cutlass.const_expr(c.rate):
                of_A = self.add(x, of_A, chunks, each_A)
            if cutlass.const_expr(c.bias):
                of_bias = self.add(x, of_bias, chunks, each_bias)
        s.of_A[thread] = of_A
        s.of_bias[thread] = of_bias
        cute.arch.sync_threads()                                               # each slice's sums are there
        if thread < c.K:
            total_A, total_bias = Float32(0.0), Float32(0.0)
            for n in cutlass.range_constexpr(SLICES):
                total_A += s.of_A[n * c.K + channel]
                total_bias += s.of_bias[n * c.K + channel]
            if cutlass.const_expr(c.bias and not c.per_head):
                store(x.ddt_bias + (head * c.K + channel), [total_bias])
            if cutlass.const_expr(c.bias and c.per_head):
                total_bias = self.sum_of_lanes(total_bias)
                if thread % 32 == 0:
                    s.of_bias[thread] = total_bias                             # this thread alone has read it
            if cutlass.const_expr(c.rate):
                total_A = self.sum_of_lanes(total_A)
                if thread % 32 == 0:
                    s.of_warps[thread // 32] = total_A
        if cutlass.const_expr(c.rate or (c.bias and c.per_head)):
            cute.arch.sync_threads()                                           # sums of each warp are there
        if cutlass.const_expr(c.bias and c.per_head):
            if thread == 0:
                whole = self.sum_of_warps(s.of_bias, 32)
                store(x.ddt_bias + head, [whole])
        if cutlass.const_expr(c.rate):
            if thread == 0:
                whole = self.sum_of_warps(s.of_warps, 1)
                store(x.dA_log + head, [whole])

    def of_chunks(self, x, shares, chunks, channel):
        """Return the shares of these chunks, the last one's for those that there are not."""
        rows = [Int64(cutlass.min(chunk, x.chunks - 1)) * x.HV + cute.arch.block_idx()[0] for chunk in chunks]
        return [load_one(shares + (row * self.c.pitch + channel)) for row in rows]

    @cute.jit
    def add(self, x, total, chunks, shares):
        """Add those of chunks that there are."""
        for n in cutlass.range_constexpr(AT_ONCE):
            total += shares[n] if chunks[n] < x.chunks else Float32(0.0)
        return total

    def sum_of_lanes(self, total):
        for far in (16, 8, 4, 2, 1):
            total += cute.arch.shuffle_sync_bfly(total, far)
        return total

    def sum_of_warps(self, sums, apart: int):
        """The sum of all warps' numbers, which lie `apart` elements apart."""
        total = Float32(0.0)
        for warp in range(self.c.K // 32):
            total += sums[apart * warp]
        return total


build = Shares.build
