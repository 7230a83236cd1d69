"""Where sequences and their segments lie: tokens, chunks and kept states."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .configs import ChunkTable, SegmentTable
from .copies import load_one
from .tile import C


@cute.jit
def place_of_segment(c: cutlass.Constexpr, x, p, chunks, segments, segment):
    """Sequence, first token, tokens from there to the sequence's end, first chunk and first kept state of segment p; a
    row of T tokens has so many `segments` of `segment` chunks, and `chunks` chunks."""
    every = c.every
    if cutlass.const_expr(c.packed):
        entry = x.segment_table + SegmentTable.WIDTH * p
        names = SegmentTable
        columns = names.SEQUENCE, names.TOKEN, names.TOKENS_LEFT, names.CHUNK, names.STATE
        n, begin, left, chunk, state = [load_one(entry + column) for column in columns]
        n, left, chunk, state = Int32(n), Int32(left), Int32(chunk), Int32(state)
    else:
        n = p // segments
        skipped = (p - n * segments) * segment
        begin, left, chunk = Int64(n) * x.T + skipped * C, x.T - skipped * C, n * chunks + skipped
        state = n * ((chunks + every - 1) // every) + skipped // every
    return n, begin, left, chunk, state


@cute.jit
def begins_sequence(c: cutlass.Constexpr, x, p):
    """Return whether a sequence begins with segment p."""
    number = p % x.segments
    if cutlass.const_expr(c.packed):
        number = Int32(load_one(x.segment_table + SegmentTable.WIDTH * p + SegmentTable.NUMBER))
    return number == 0


@cute.jit
def locate_chunk(packed: cutlass.Constexpr, x, y, z):
    """Return the number of the chunk that CTA (y, z) has, its first token, its tokens and its number in its sequence.
    A chunk of tokens that belong to no sequence has minus so many."""
    chunk = z * cute.arch.grid_dim()[1] + y
    begin, tokens, number = Int64(0), Int32(0), y
    if cutlass.const_expr(packed):
        if chunk < x.chunks:
            entry = x.chunk_table + ChunkTable.WIDTH * chunk
            begin, tokens = load_one(entry + ChunkTable.TOKEN), Int32(load_one(entry + ChunkTable.TOKENS))
            number = Int32(load_one(entry + ChunkTable.NUMBER))
    else:
        begin, tokens = Int64(z) * x.T + y * C, cutlass.min(x.T - y * C, C)
    return chunk, begin, tokens, number


@cute.jit
def locate_second_half(packed: cutlass.Constexpr, x, y, z):
    """Return what `locate_chunk` does, less the number in the sequence, for the CTA that has the second half of a chunk
    of 64 tokens: of two neighbours in the table at most one is a second half."""
    chunk, begin, tokens = Int32(0), Int64(0), Int32(0)
    if cutlass.const_expr(packed):
        first = 2 * (z * cute.arch.grid_dim()[1] + y)
        for i in cutlass.range_constexpr(2):
            entry = x.chunk_table + ChunkTable.WIDTH * (first + i)
            if first + i < x.chunks:
                if load_one(entry + ChunkTable.NUMBER) & 1 == 1:
                    chunk, begin = first + i, load_one(entry + ChunkTable.TOKEN)
                    tokens = Int32(load_one(entry + ChunkTable.TOKENS))
    else:
        number = 2 * y + 1
        chunk, begin = z * ((x.T + C - 1) // C) + number, Int64(z) * x.T + number * C
        tokens = cutlass.min(x.T - number * C, C)
    return chunk, begin, tokens


@cute.jit
def locate_sequence(packed: cutlass.Constexpr, x, n):
    """First token of a sequence, and tokens."""
    begin, tokens = Int64(n) * x.T, x.T
    if cutlass.const_expr(packed):
        begin = load_one(x.cu_seqlens + n).to(Int64)
        tokens = Int32(load_one(x.cu_seqlens + n + 1).to(Int64) - begin)
    return begin, tokens


@cute.jit
def locate_segment(begin, tokens, segment, segments, unit: cutlass.Constexpr):
    """First token and tokens of one of a sequence's segments, which have equally many units of so many tokens, a power
    of two; the last ones have fewer."""
    length = ((tokens + unit - 1 >> unit.bit_length() - 1) + segments - 1) // segments * unit
    first = cutlass.min(segment * length, tokens)
    return begin + first, cutlass.min(tokens - first, length)
