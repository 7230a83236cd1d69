"""Where chunks of C = 32 rows, and segments of some chunks, lie in packed sequences [cu_seqlens[n], cu_seqlens[n+1]).

  chunk_table (.., 3)     its first token, its tokens, its number in its sequence; n <= 0 tokens: no chunk, but -n
                          tokens of no sequence
  segment_table (.., 6)   its sequence (-1: no segment), which one it is there, its first token, the tokens from there
                          to the end of the sequence, its first chunk, the first of its states that are kept, one for
                          `every` chunks; an empty sequence has one segment
  first_segment (N + 1)   that of each sequence; the last says how many there are

One CTA of 256 threads writes pieces RUN p .. RUN p + RUN - 1 of every sequence, a thread a sequence; no length is read
by the host, grids cover the most pieces there can be.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute.copies import load_one, pointers, store
from ...common.cute.order import after_the_kernel_before
from ...common.cute.tile import C
from ..configs import RUN, THREADS, TablesConfig


class Tables:
    @cute.jit
    def __call__(
        self, cu_seqlens: cute.Pointer, chunk_table: cute.Pointer, segment_table: cute.Pointer,
        first_segment: cute.Pointer, T: Int32, N: Int32, segment: Int32, every: Int32, chunk_entries: Int32,
        segment_entries: Int32, programs: Int32, stream,
    ):  # fmt: skip
        self.kernel(
            cu_seqlens, chunk_table, segment_table, first_segment, T, N, segment, every, chunk_entries,
            segment_entries,
        ).launch(grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, cu_seqlens: cute.Pointer, chunk_table: cute.Pointer, segment_table: cute.Pointer,
        first_segment: cute.Pointer, T: Int32, N: Int32, segment: Int32, every: Int32, chunk_entries: Int32,
        segment_entries: Int32,
    ):  # fmt: skip
        thread, p = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        after_the_kernel_before()
        totals = SmemAllocator().allocate_array(Int32, THREADS // 32)
        end = Int64(load_one(cu_seqlens + N))
        chunks, segments, states = Int32(0), Int32(0), Int32(0)
        for n0 in cutlass.range(0, N, THREADS, unroll=1):
            n = n0 + thread
            here = cutlass.min(n, N - 1)
            begin = Int64(load_one(cu_seqlens + here))
            length = Int32(Int64(load_one(cu_seqlens + here + 1)) - begin) if n < N else Int32(0)
            own = (length + C - 1) // C
            own_segments = cutlass.max((own + segment - 1) // segment, 1) if n < N else Int32(0)
            before, total = scan(own, totals)
            chunk = chunks + before
            before, more = scan(own_segments, totals)
            first = segments + before
            before, kept = scan((own + every - 1) // every, totals)
            state = states + before
            if n < N and p == 0:
                store(first_segment + n, [first])
            for j in cutlass.range(RUN * p, cutlass.min(own, RUN * p + RUN), unroll=1):
                put(chunk_table, chunk + j, begin + j * C, cutlass.min(length - j * C, C), j)
            for j in cutlass.range(RUN * p, cutlass.min(own_segments, RUN * p + RUN), unroll=1):
                skipped, at = j * segment * C, segment_table + Int64(first + j) * 6
                place = (begin + skipped, length - skipped, chunk + j * segment, state + j * segment // every)
                for i, x in enumerate((n, j, *place)):
                    store(at + i, [Int64(x)])
            chunks += total
            segments += more
            states += kept
        if p == 0 and thread == 0:
            store(first_segment + N, [segments])
        every = THREADS * cute.arch.grid_dim()[0]
        for i in cutlass.range(p * THREADS + thread, chunk_entries - chunks, every, unroll=1):
            begin = cutlass.min(end + i * C, Int64(T))
            none = begin - cutlass.min(begin + C, Int64(T))
            put(chunk_table, chunks + i, begin, none, 0)
        for i in cutlass.range(p * THREADS + thread, segment_entries - segments, every, unroll=1):
            store(segment_table + Int64(segments + i) * 6, [Int64(-1)])


@cute.jit
def put(chunk_table, chunk, *entry):
    for i, x in enumerate(entry):
        store(chunk_table + Int64(chunk) * 3 + i, [Int64(x)])


@cute.jit
def scan(x, totals):
    """The sum over the threads before this one, and over all."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    upto = x
    for d in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(upto, 1 << d, mask_and_clamp=0)
        upto += other if lane >= 1 << d else Int32(0)
    if lane == 31:
        store(totals + warp, [upto])
    cute.arch.sync_threads()
    before, total = upto - x, Int32(0)
    for w in cutlass.range_constexpr(THREADS // 32):
        of_w = load_one(totals + w)
        before += of_w if w < warp else Int32(0)
        total += of_w
    cute.arch.sync_threads()                                                   # totals may be written again
    return before, total


def build(c: TablesConfig, target: Target) -> cutedsl.Compiled:
    x = pointers(f"{c.dtype} int64 int64 int32")
    return cutedsl.compile(Tables(), *x, *[Int32(1)] * 7, cutedsl.fake_stream(), target=target)
