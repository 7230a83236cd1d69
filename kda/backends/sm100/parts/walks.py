"""Which sequences, heads and segments a cluster walks over, and where they lie.

An item is a walk and a value head; clusters take items in turn, or, where what a backward reads is kept (`keeps`), have
one each.  A walk is a sequence, or, where sequences are cut
(`cut`), one of the 2 segments - 1 walks over a sequence's segments: the first segment is walked over once, each other
segment a second time, from the identity, for the transition M.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from ...common.cute import fast
from ...common.cute.copies import TYPES, in_global, load, load_one, store
from ...common.cute.gate import HeadRows
from ...common.cute.segments import locate_segment, locate_sequence, place_of_segment
from ...common.cute.tile import C
from ..configs import CTAS, ITEM, FusedConfig, record_tile


def first_item(c, HV):
    """Return the walk and the value head that a cluster begins with."""
    if c.keeps:
        _, head, walk = cute.arch.block_idx()
        return walk, head
    item = cute.arch.block_idx()[0] // CTAS
    return item // HV, item % HV


@cute.jit
def next_item(c: cutlass.Constexpr, walk, head, HV):
    if cutlass.const_expr(c.keeps):
        return cute.arch.grid_dim()[2], head                                   # no other
    head += cute.arch.grid_dim()[0] // CTAS
    while head >= HV:
        walk, head = walk + 1, head - HV
    return walk, head


def locate_walk(c, x, walk):
    """Return a walk's first token and tokens, sequence and segment, and whether this is a transition's walk."""
    if c.keeps:
        n, begin, tokens, _, _ = place_of_segment(c, x, walk, x.chunks, 1, 0)
        return begin, tokens, n, Int32(0), False
    n, segment, is_transition = walk, Int32(0), False
    if c.cut:
        n = walk // (2 * x.segments - 1)
        number = walk - n * (2 * x.segments - 1)
        segment, is_transition = number + 1 >> 1, (number & 1) < cutlass.min(number, 1)
    begin, tokens = locate_sequence(c.offsets, x, n)
    if c.cut:
        begin, tokens = locate_segment(begin, tokens, segment, x.segments, C)
    return begin, tokens, n, segment, is_transition


def kept_places(c, x, walk):
    """Return the numbers of a walk's first chunk and state among all that are kept."""
    return place_of_segment(c, x, walk, x.chunks, 1, 0)[3:]


def end_of_sequences(c, x):
    """Return the first token behind all packed sequences."""
    if c.keeps:
        begin, tokens = locate_walk(c, x, x.N - 1)[:2]
    else:
        begin, tokens = locate_sequence(c.offsets, x, x.N - 1)
    return begin + tokens


def number_of_cta():
    """Return the number of a CTA among all of the grid, and how many there are."""
    (x, y, z), (X, Y, Z) = cute.arch.block_idx(), cute.arch.grid_dim()
    return (z * Y + y) * X + x, X * Y * Z


def chunks_of(tokens):
    return (tokens + C - 1) >> C.bit_length() - 1


class WorkItem:
    """The sequence and value head that a group of PREPARE works on: where its rows begin, and numbers.  They lie in
    shared memory: there are no registers to keep them from chunk to chunk."""

    def __init__(self, config: FusedConfig, team):
        self.c, self.team = config, team

    def field(self, shared, field):
        """Return a pointer to a field of this group's item."""
        first = shared + (self.c.struct.items.offset + field.offset)
        return cute.recast_ptr(first + self.team.number() * ITEM.bytes, dtype=TYPES[field.dtype])

    @cute.jit
    def publish(self, shared, walk, head, tokens, head_rows, tiles):
        """Called by all eight warps with the rows of the walk's head; they have to meet before they read it."""
        self.team.meet()                                                       # all have read the item before
        if self.team.warp() == 0:
            with cute.arch.elect_one():
                store(self.field(shared, ITEM.q), [head_rows.q.toint(), head_rows.k.toint()])
                store(self.field(shared, ITEM.g), [head_rows.g.toint(), head_rows.beta.toint()])
                store(self.field(shared, ITEM.bias), [head_rows.bias.toint()])
                if cutlass.const_expr(tiles is not None):
                    store(self.field(shared, ITEM.tiles), [tiles.toint()])
                store(self.field(shared, ITEM.walk), [walk, head])
                store(self.field(shared, ITEM.tokens), [tokens])
                store(self.field(shared, ITEM.rate), [head_rows.rate])
                store(self.field(shared, ITEM.scale), [head_rows.scale, head_rows.lower_bound])

    def chunks(self, shared):
        self.team.refresh_warp_index(shared)
        return chunks_of(load_one(self.field(shared, ITEM.tokens)))

    def walk_and_head(self, shared):
        self.team.refresh_warp_index(shared)
        return [load_one(self.field(shared, field)) for field in (ITEM.walk, ITEM.head)]

    def chunk(self, shared, chunk, H, HV):
        """Return the rows of one of its chunks, except beta's, and its tokens."""
        c, K = self.c, self.c.K
        of_qk, of_rest = load(self.field(shared, ITEM.q), 2), load(self.field(shared, ITEM.g), 1)
        rows = []
        for first, kind, elements in (
            (of_qk[0], "bfloat16", H * K), (of_qk[1], "bfloat16", H * K),
            (of_rest[0], c.g_dtype, HV * c.gate_width),
        ):
            dtype = TYPES[kind]
            rows.append(in_global(fast.row(first, chunk, elements * Int32(C * dtype.width // 8)), dtype))
        bias = in_global(load_one(self.field(shared, ITEM.bias)), Float32)
        numbers = (ITEM.tokens, ITEM.rate, ITEM.scale, ITEM.lower_bound)
        tokens, rate, scale, lower_bound = [load_one(self.field(shared, field)) for field in numbers]
        return HeadRows(*rows, None, rate, bias, scale, lower_bound), tokens

    def tile(self, shared, chunk, HV):
        """Return where the tile of that chunk is kept."""
        first = load_one(self.field(shared, ITEM.tiles))
        return in_global(fast.row(first, chunk, HV * Int32(record_tile(self.c.K).bytes)), Uint8)

    def beta(self, shared, chunk, HV):
        """Return beta of that chunk."""
        dtype = TYPES[self.c.beta_dtype]
        first = load_one(self.field(shared, ITEM.beta))
        return in_global(fast.row(first, chunk, HV * Int32(C * dtype.width // 8)), dtype)
