"""The states that enter the segments of a sequence, one value head, 8 columns: edge[p] = h, h = M[p] @ h + added[p].
Where the first segment began with the state that enters the sequence (`begun`), h is what it ended with, and its edge
is not written.

`back`, from the last segment to the first, for what the gradients of states are where they leave segments:
edge[p] = dh, dh = M[p]^T @ dh + added[p].

All in float32, so that a sequence that is cut has the state of one that is not, but for the order of sums.  A thread
has one row of h and half of its sum.  M is transposed, so that neighbouring threads read neighbouring elements of it.

  barrier  threads  says
  0        2 K      h is in shared memory, and the halves of the segment before were read
  0        2 K      the other halves are in shared memory, and h was read

  shared memory: h (K, 8) float32, the other halves (K, 8) float32
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.memory import SmemAllocator

from .configs import STRIP
from .copies import load, load_one, store
from .entry import Entry, permit_early_launch, wait_for_the_kernel_before


class Compose(Entry):
    @cute.kernel
    def kernel(self, x):
        K = self.c.K
        strip, head, n = cute.arch.block_idx()
        if cutlass.const_expr(self.c.pdl):
            permit_early_launch()
            wait_for_the_kernel_before()
        row, half = cute.arch.thread_idx()[0] % K, cute.arch.thread_idx()[0] // K
        smem = SmemAllocator()
        h = smem.allocate_array(Float32, K * STRIP, byte_alignment=32)
        halves = smem.allocate_array(Float32, K * STRIP, byte_alignment=32)
        begin, end = n * x.segments, n * x.segments + x.segments
        if cutlass.const_expr(self.c.packed):
            begin, end = load_one(x.first_segment + n), load_one(x.first_segment + n + 1)
        first, column = row * STRIP, strip * STRIP                             # in h; the strip's first
        if half == 0:
            if cutlass.const_expr(self.c.begun):
                ended = load(x.added + self.place(begin, x.HV, head, row, column), STRIP)
                store(h + first, [ended[e] for e in range(STRIP)])
            else:
                store(h + first, self.entering(x.h0, n * x.HV + head, row, column))
        if cutlass.const_expr(self.c.begun):
            begin, end = begin + 1, end + 1
        for j in cutlass.range(begin, end - 1, unroll=1):
            p = begin + (end - 1 - j) if cutlass.const_expr(self.c.back) else j
            m = self.half_of_row(x.M, p * x.HV + head, row, half)              # all on their way before h is waited for
            place = self.place(p, x.HV, head, row, column)
            new = [Float32(0.0)] * STRIP
            if half == 0:
                new = [load(x.added + place, STRIP)[e] for e in range(STRIP)]
                store(x.edge + place, [load(h + first, STRIP)[e] for e in range(STRIP)])
            cute.arch.sync_threads()                                           # h is there
            for i in cutlass.range_constexpr(K // 2):
                other = load(h + (half * (K // 2) + i) * STRIP, STRIP)
                new = [new[e] + m[i] * other[e] for e in range(STRIP)]
            if half == 1:
                store(halves + first, new)
            cute.arch.sync_threads()                                           # the halves are there, h was read
            if half == 0:
                rest = load(halves + first, STRIP)
                store(h + first, [new[e] + rest[e] for e in range(STRIP)])
        if half == 0:
            if cutlass.const_expr(not self.c.begun):
                last = begin if cutlass.const_expr(self.c.back) else end - 1
                place = self.place(last, x.HV, head, row, column)
                store(x.edge + place, [load(h + first, STRIP)[e] for e in range(STRIP)])
            if cutlass.const_expr(self.c.ht):
                ht = x.ht + Int64(n * x.HV + head) * (K * self.c.V)
                for e in cutlass.range_constexpr(STRIP):
                    store(ht + self.in_state(row, column + e), [load_one(h + first + e)])

    def half_of_row(self, M, number, row, half):
        """Half a row of a matrix, which lies transposed: neighbouring threads read neighbouring elements; of its
        transpose a thread reads all that it needs from one place."""
        K = self.c.K
        if self.c.back:
            source = M + (Int64(number) * (K * K) + row * K + half * (K // 2))
            found = [load(source + i, 4) for i in range(0, K // 2, 4)]
            return [four[e] for four in found for e in range(4)]
        of_row = M + (Int64(number) * (K * K) + half * (K * K // 2) + row)
        return [load_one(of_row + i * K) for i in range(K // 2)]

    def place(self, segment, HV, head, row, column):
        """Elements from the first of (segments, HV, K, V)."""
        return Int64(segment * HV + head) * (self.c.K * self.c.V) + row * self.c.V + column

    def in_state(self, row, column):
        """Elements from the first of a state in the caller's layout."""
        return column * self.c.K + row if self.c.v_first else row * self.c.V + column

    def entering(self, h0, number, row, column):
        """A row of the state that enters the sequence."""
        found = [Float32(0.0)] * STRIP
        if self.c.h0:
            state = h0 + Int64(number) * (self.c.K * self.c.V)
            for e in range(STRIP):
                found[e] = load_one(state + self.in_state(row, column + e)).to(Float32)
        return found


build = Compose.build
