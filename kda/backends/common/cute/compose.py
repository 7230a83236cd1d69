"""The states that enter the segments of a sequence, one value head, 16 columns: edge[p] = h, h = M[p] @ h + added[p].
Where the first segment began with the state that enters the sequence (`begun`), h is what it ended with, and its edge
is not written.

`back`, from the last segment to the first, for what the gradients of states are where they leave segments:
edge[p] = dh, dh = M[p]^T @ dh + added[p].

All in float32, so that a sequence that is cut has the state of one that is not, but for the order of sums.  A thread
computes half of each sum of 4 rows and 4 columns of h.  M lies transposed, in rows that are 16 bytes apart in banks.
While a segment is computed, copies bring M and `added` of the next one.

  barrier  threads  says
  0        2 K      M and added of the segment are there, and h
  0        2 K      the other halves are there; M, added and h were read

  shared memory: configs.ComposeConfig.struct; K = V = 128: 2 x (M 66 KiB and added 8), h 8 and the other halves 8
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from .async_copies import copy_16_bytes_later
from .configs import COMPOSED
from .copies import allocate, load, load_one, store
from .entry import Entry, permit_early_launch, wait_for_the_kernel_before

FOUR = 4                                     # rows and columns of a thread, and elements of a piece of 16 bytes


class Compose(Entry):
    @cute.kernel
    def kernel(self, x):
        strip, head, n = cute.arch.block_idx()
        if cutlass.const_expr(self.c.pdl):
            permit_early_launch()
            wait_for_the_kernel_before()
        s = allocate(self.c.struct)
        begin, end = n * x.segments, n * x.segments + x.segments
        if cutlass.const_expr(self.c.packed):
            begin, end = load_one(x.first_segment + n), load_one(x.first_segment + n + 1)
        rows, first, half = self.place_of_thread()
        column = strip * COMPOSED + first
        h = cute.make_rmem_tensor(FOUR * FOUR, Float32)                        # in the threads of the first half
        if cutlass.const_expr(self.c.begun):
            for a in cutlass.range_constexpr(FOUR):
                ended = load(x.added + self.place(begin, x.HV, head, rows[a], column), FOUR)
                for b in cutlass.range_constexpr(FOUR):
                    h[FOUR * a + b] = ended[b]
            begin, end = begin + 1, end + 1
        else:
            self.enter(x, h, n * x.HV + head, rows, column)
        steps = end - 1 - begin
        if steps > 0:
            self.request(x, s, self.segment(begin, end, 0), head, strip, 0)
        cute.arch.cp_async_commit_group()
        for j in cutlass.range(steps, unroll=1):
            stage = j & 1
            if j + 1 < steps:
                self.request(x, s, self.segment(begin, end, j + 1), head, strip, stage ^ 1)
            cute.arch.cp_async_commit_group()
            if half == 0:
                self.put(s.h, rows, first, h)
                self.store_edge(x, self.segment(begin, end, j), head, rows, column, h)
            cute.arch.cp_async_wait_group(1)
            cute.arch.sync_threads()                                           # M, added and h are there
            new = self.multiply(s, stage, rows, first, half)
            if half == 1:
                self.put(s.halves, rows, first, new)
            cute.arch.sync_threads()                                           # the halves are there; all was read
            if half == 0:
                for a in cutlass.range_constexpr(FOUR):
                    rest = load(s.halves + (rows[a] * COMPOSED + first), FOUR)
                    for b in cutlass.range_constexpr(FOUR):
                        h[FOUR * a + b] = new[FOUR * a + b] + rest[b]
        if half == 0:
            if cutlass.const_expr(not self.c.begun):
                self.store_edge(x, self.segment(begin, end, steps), head, rows, column, h)
            if cutlass.const_expr(self.c.ht):
                ht = x.ht + Int64(n * x.HV + head) * (self.c.K * self.c.V)
                for i in cutlass.range_constexpr(FOUR * FOUR):
                    store(ht + self.in_state(rows[i // FOUR], column + i % FOUR), [h[i]])

    def place_of_thread(self):
        """Return the rows of a thread, the first of its columns in the strip, and its half of sums.  Rows are such that
        the threads of a warp read M without bank conflicts."""
        K, thread = self.c.K, cute.arch.thread_idx()[0]
        number, first = thread // (COMPOSED // FOUR) % (K // FOUR), thread % (COMPOSED // FOUR) * FOUR
        rows = [number + K // FOUR * a if self.c.back else FOUR * number + a for a in range(FOUR)]
        return rows, first, thread // K

    def segment(self, begin, end, step):
        """Return the segment of a step; the last step has none behind it."""
        return end - 1 - step if self.c.back else begin + step

    @cute.jit
    def request(self, x, s, segment, head, strip, stage):
        """Begin the copies of M and added."""
        K, V, thread = self.c.K, self.c.V, cute.arch.thread_idx()[0]
        of_M, of_added = K // FOUR, COMPOSED // FOUR                           # pieces of a row
        source = x.M + Int64(segment * x.HV + head) * (K * K)
        for i in cutlass.range_constexpr(K * of_M // self.c.threads):
            piece = thread + self.c.threads * i
            to = s.M + ((stage * K + piece // of_M) * self.c.pitch + piece % of_M * FOUR)
            copy_16_bytes_later((source + FOUR * piece).toint(), to)
        source = x.added + (Int64(segment * x.HV + head) * (K * V) + strip * COMPOSED)
        for i in cutlass.range_constexpr(K * of_added // self.c.threads):
            piece = thread + self.c.threads * i
            place = piece // of_added * V + piece % of_added * FOUR
            copy_16_bytes_later((source + place).toint(), s.added + (stage * (K * COMPOSED) + FOUR * piece))

    @cute.jit
    def multiply(self, s, stage, rows, first, half):
        """Half of the sums of the thread's rows and columns, the first half with added."""
        K, new = self.c.K, cute.make_rmem_tensor(FOUR * FOUR, Float32)
        new.fill(0.0)
        if half == 0:
            for a in cutlass.range_constexpr(FOUR):
                added = load(s.added + (stage * (K * COMPOSED) + rows[a] * COMPOSED + first), FOUR)
                for b in cutlass.range_constexpr(FOUR):
                    new[FOUR * a + b] = added[b]
        M, h = s.M + stage * (K * self.c.pitch), s.h + first
        for i in cutlass.range(half * (K // 2), (half + 1) * (K // 2), FOUR, unroll=FOUR):
            m = self.square_of_M(M, rows, i)
            for k in cutlass.range_constexpr(FOUR):
                other = load(h + (i + k) * COMPOSED, FOUR)
                for a in cutlass.range_constexpr(FOUR):
                    for b in cutlass.range_constexpr(FOUR):
                        new[FOUR * a + b] += m[k][a] * other[b]
        return new

    def square_of_M(self, M, rows, i):
        """Return what four elements of h, from i on, are multiplied by for each of the thread's rows."""
        if self.c.back:
            of_rows = [load(M + (row * self.c.pitch + i), FOUR) for row in rows]
            return [[of_row[k] for of_row in of_rows] for k in range(FOUR)]
        return [load(M + ((i + k) * self.c.pitch + rows[0]), FOUR) for k in range(FOUR)]

    def put(self, to, rows, first, values):
        """The thread's rows and columns to h or halves."""
        for a in range(FOUR):
            store(to + (rows[a] * COMPOSED + first), [values[FOUR * a + b] for b in range(FOUR)])

    def store_edge(self, x, segment, head, rows, column, h):
        for a in range(FOUR):
            edge = x.edge + self.place(segment, x.HV, head, rows[a], column)
            store(edge, [h[FOUR * a + b] for b in range(FOUR)])

    def place(self, segment, HV, head, row, column):
        """Elements from the first of (segments, HV, K, V)."""
        return Int64(segment * HV + head) * (self.c.K * self.c.V) + row * self.c.V + column

    def in_state(self, row, column):
        """Elements from the first of a state in the caller's layout."""
        return column * self.c.K + row if self.c.v_first else row * self.c.V + column

    def enter(self, x, h, number, rows, column):
        """The thread's rows and columns of the state that enters the sequence."""
        h.fill(0.0)
        if self.c.h0:
            state = x.h0 + Int64(number) * (self.c.K * self.c.V)
            for i in range(FOUR * FOUR):
                h[i] = load_one(state + self.in_state(rows[i // FOUR], column + i % FOUR)).to(Float32)


build = Compose.build
