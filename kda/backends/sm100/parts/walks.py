"""Which sequences, heads and segments a cluster walks over, and where they lie.

An item is a walk and a value head; clusters take items in turn.  A walk is a sequence, or, where sequences are cut
(`cut`), one of the 2 segments - 1 walks over a sequence's segments: the first segment is walked over once, each other
segment a second time, from the identity, for the transition M.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.cute import fast
from ...common.cute.copies import TYPES, in_global, load, load_one, store
from ...common.cute.gate import HeadRows
from ...common.cute.segments import locate_segment, locate_sequence
from ...common.cute.tile import C
from ..configs import CTAS, ITEM, FusedConfig


def first_item(HV):
    """Return the walk and the value head that a cluster begins with."""
    item = cute.arch.block_idx()[0] // CTAS
    return item // HV, item % HV


@cute.jit
def next_item(walk, head, HV):
    head += cute.arch.grid_dim()[0] // CTAS
    while head >= HV:
        walk, head = walk + 1, head - HV
    return walk, head


def locate_walk(c, x, walk):
    """Return a walk's first token and tokens, sequence and segment, and whether this is a transition's walk."""
    n, segment, is_transition = walk, Int32(0), False
    if c.cut:
        n = walk // (2 * x.segments - 1)
        number = walk - n * (2 * x.segments - 1)
        segment, is_transition = number + 1 >> 1, (number & 1) < cutlass.min(number, 1)
    begin, tokens = locate_sequence(c.offsets, x, n)
    if c.cut:
        begin, tokens = locate_segment(begin, tokens, segment, x.segments, C)
    return begin, tokens, n, segment, is_transition


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
    def publish(self, shared, walk, head, tokens, head_rows):
        """Called by all eight warps with the rows of the walk's head; they have to meet before they read it."""
        self.team.meet()                                                       # all have read the item before
        if self.team.warp() == 0:
            with cute.arch.elect_one():
                store(self.field(shared, ITEM.q), [head_rows.q.toint(), head_rows.k.toint()])
                store(self.field(shared, ITEM.g), [head_rows.g.toint(), head_rows.beta.toint()])
                store(self.field(shared, ITEM.bias), [head_rows.bias.toint()])
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

    def beta(self, shared, chunk, HV):
        """Return beta of that chunk."""
        dtype = TYPES[self.c.beta_dtype]
        first = load_one(self.field(shared, ITEM.beta))
        return in_global(fast.row(first, chunk, HV * Int32(C * dtype.width // 8)), dtype)
