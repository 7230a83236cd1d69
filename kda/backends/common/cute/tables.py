"""Where chunks of C = 32 rows (or 64), and segments of some chunks, lie in packed sequences [cu_seqlens[n],
cu_seqlens[n+1]).

  chunk_table (.., 3)     its first token, its tokens, its number in its sequence; n <= 0 tokens: no chunk, but -n
                          tokens of no sequence
  segment_table (.., 6)   its sequence (-1: no segment), which one it is there, its first token, the tokens from there
                          to the end of the sequence, its first chunk, the first of its states that are kept, one for
                          `every` chunks; an empty sequence has one segment
  first_segment (N + 1)   that of each sequence; the last says how many there are

One CTA of 256 threads writes pieces RUN p .. RUN p + RUN - 1 of every sequence, a thread a sequence; no length is read
by the host, grids cover the most pieces there can be.

  barrier  threads  says
  0        256      the sums of the warps are there;  they were read
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from .configs import RUN, THREADS, ChunkTable, SegmentTable
from .copies import load_one, store
from .entry import Entry, permit_early_launch


class Tables(Entry):
    @cute.kernel
    def kernel(self, x):
        rows = self.c.rows
        thread, p = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        permit_early_launch()
        totals = SmemAllocator().allocate_array(Int32, THREADS // 32)
        end = Int64(load_one(x.cu_seqlens + x.N))
        chunks, segments, states = Int32(0), Int32(0), Int32(0)
        for n0 in cutlass.range(0, x.N, THREADS, unroll=1):
            n = n0 + thread
            sequence = cutlass.min(n, x.N - 1)
            begin = Int64(load_one(x.cu_seqlens + sequence))
            length = Int32(Int64(load_one(x.cu_seqlens + sequence + 1)) - begin) if n < x.N else Int32(0)
            own_chunks = (length + rows - 1) // rows
            before, total = scan(own_chunks, totals)
            chunk = chunks + before
            if cutlass.const_expr(self.c.segments):
                own_segments = cutlass.max((own_chunks + x.segment - 1) // x.segment, 1) if n < x.N else Int32(0)
                before, more = scan(own_segments, totals)
                first = segments + before
                before, kept = scan((own_chunks + x.every - 1) // x.every, totals)
                state = states + before
                if n < x.N and p == 0:
                    store(x.first_segment + n, [first])
            for j in cutlass.range(RUN * p, cutlass.min(own_chunks, RUN * p + RUN), unroll=1):
                put(x.chunk_table, chunk + j, begin + j * rows, cutlass.min(length - j * rows, rows), j)
            if cutlass.const_expr(self.c.segments):
                for j in cutlass.range(RUN * p, cutlass.min(own_segments, RUN * p + RUN), unroll=1):
                    skipped, row = j * x.segment * rows, x.segment_table + Int64(first + j) * SegmentTable.WIDTH
                    place = (begin + skipped, length - skipped, chunk + j * x.segment, state + j * x.segment // x.every)
                    for i, value in enumerate((n, j, *place)):
                        store(row + i, [Int64(value)])
                segments += more
                states += kept
            chunks += total
        if cutlass.const_expr(self.c.segments):
            if p == 0 and thread == 0:
                store(x.first_segment + x.N, [segments])
        every = THREADS * cute.arch.grid_dim()[0]
        for i in cutlass.range(p * THREADS + thread, x.chunk_entries - chunks, every, unroll=1):
            begin = cutlass.min(end + i * rows, Int64(x.T))
            none = begin - cutlass.min(begin + rows, Int64(x.T))
            put(x.chunk_table, chunks + i, begin, none, 0)
        if cutlass.const_expr(self.c.segments):
            for i in cutlass.range(p * THREADS + thread, x.segment_entries - segments, every, unroll=1):
                store(x.segment_table + Int64(segments + i) * SegmentTable.WIDTH, [Int64(-1)])


def put(chunk_table, chunk, *entry):
    for i, value in enumerate(entry):
        store(chunk_table + Int64(chunk) * ChunkTable.WIDTH + i, [Int64(value)])


@cute.jit
def scan(value, totals):
    """The sum over the threads before this one, and over all."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    upto = value
    for d in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(upto, 1 << d, mask_and_clamp=0)
        upto += other if lane >= 1 << d else Int32(0)
    if lane == 31:
        store(totals + warp, [upto])
    cute.arch.sync_threads()                                                   # the sums of the warps are there
    before, total = upto - value, Int32(0)
    for w in cutlass.range_constexpr(THREADS // 32):
        of_w = load_one(totals + w)
        before += of_w if w < warp else Int32(0)
        total += of_w
    cute.arch.sync_threads()                                                   # totals may be written again
    return before, total


build = Tables.build
