"""Where sequences and their segments lie: tokens, chunks, kept states, checkpoints; and tokens of no sequence, whose
rows of o become zero: a warp clears a row of one head at a time."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .configs import ChunkTable, SegmentTable
from .copies import load_one, store
from .tile import WARP_ROWS, C


def place_of_segment(c, x, p, chunks, segments, segment):
    """Sequence, first token, tokens from there to the sequence's end, first chunk and first kept state of segment p; a
    row of T tokens has so many `segments` of `segment` chunks, and `chunks` chunks."""
    every = c.every
    if c.packed:
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


class WalkPlace(NamedTuple):
    """What is walked over back: 64 columns of a value head in a segment of a sequence, or all of them."""

    p: Any                                   # the segment among those of all
    n: Any                                   # its sequence
    first: Any                               # whether the sequence begins with it
    chunk: Any                               # its first chunk
    state: Any                               # its first kept state
    head: Any
    strip: Any
    first_v: Any                             # its first element of do and dv
    tokens: Any

    @property
    def steps(self):
        return (self.tokens + C - 1) // C

    @property
    def pairs(self):
        """Chunks of bwd/grads."""
        return (self.tokens + 2 * C - 1) // (2 * C)


def begins_sequence(c, x, p):
    """Return whether a sequence begins with segment p."""
    number = p % x.segments
    if c.packed:
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


def locate_sequence(packed: bool, x, n):
    """First token of a sequence, and tokens."""
    begin, tokens = Int64(n) * x.T, x.T
    if packed:
        begin = load_one(x.cu_seqlens + n).to(Int64)
        tokens = Int32(load_one(x.cu_seqlens + n + 1).to(Int64) - begin)
    return begin, tokens


def locate_segment(begin, tokens, segment, segments, unit: int):
    """First token and tokens of one of a sequence's segments, which have equally many units of so many tokens, a power
    of two; the last ones have fewer."""
    length = ((tokens + unit - 1 >> unit.bit_length() - 1) + segments - 1) // segments * unit
    first = cutlass.min(segment * length, tokens)
    return begin + first, cutlass.min(tokens - first, length)


@cute.jit
def place_of_checkpoint(c: cutlass.Constexpr, x, first, i, steps):
    """The element of the pool where the state that enters chunk i of a walk begins, chunk 0 of which is number `first`;
    -1: it is not stored."""
    place = Int64(-1)
    if cutlass.const_expr(c.checkpoints is not None):
        if i < steps:
            place = load_one(x.place + (first + i))
    return place


def clear_row(x, V: int, token, head):
    lane_columns = V // 32
    row = x.o + (Int64(token) * x.HV + head) * V
    store(row + cute.arch.lane_idx() * lane_columns, [Float32(0.0)] * lane_columns)


@cute.jit
def clear_chunk(x, V: cutlass.Constexpr, begin, tokens, head, warp):
    """Clear rows of one head of a chunk's tokens; warp `warp` of a CTA that has a chunk clears those that it makes."""
    for r in cutlass.range_constexpr(WARP_ROWS):
        row = warp * WARP_ROWS + r
        if row < tokens:
            clear_row(x, V, begin + row, head)


@cute.jit
def clear_tokens(x, V: cutlass.Constexpr, first, warps, head, heads):
    """Clear rows of some heads, from `head` on, of every `warps`-th token from `first` to the last of all."""
    for token in cutlass.range(first, x.T, warps, unroll=1):
        for h in cutlass.range(head, head + heads, unroll=1):
            clear_row(x, V, token, h)
