"""The sequence and value head that a group of PREPARE works on, in shared memory: where its rows begin, and numbers.

There are no registers to keep them from chunk to chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common.cute import fast
from ...common.cute.copies import TYPES, in_global, load, load_one, store
from ...common.cute.gate import HeadRows
from ...common.cute.tile import C
from ..configs import ITEM, FusedConfig
from .walks import chunks_of


class WorkItem:
    def __init__(self, config: FusedConfig, team):
        self.c, self.team = config, team

    @cute.jit
    def field(self, shared, field: cutlass.Constexpr):
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

    @cute.jit
    def chunks(self, shared):
        self.team.refresh_warp_index(shared)
        return chunks_of(load_one(self.field(shared, ITEM.tokens)))

    @cute.jit
    def walk_and_head(self, shared):
        self.team.refresh_warp_index(shared)
        return [load_one(self.field(shared, field)) for field in (ITEM.walk, ITEM.head)]

    @cute.jit
    def chunk(self, shared, chunk, H, HV):
        """Return the rows of one of its chunks, except beta's, and its tokens."""
        c, K = self.c, self.c.K
        of_qk, of_rest = load(self.field(shared, ITEM.q), 2), load(self.field(shared, ITEM.g), 1)
        rows = []
        for first, kind, elements in (
            (of_qk[0], "bfloat16", H * K), (of_qk[1], "bfloat16", H * K),
            (of_rest[0], c.g_dtype, HV * K),
        ):
            dtype = TYPES[kind]
            rows.append(in_global(fast.row(first, chunk, elements * Int32(C * dtype.width // 8)), dtype))
        bias = in_global(load_one(self.field(shared, ITEM.bias)), Float32)
        numbers = (ITEM.tokens, ITEM.rate, ITEM.scale, ITEM.lower_bound)
        tokens, rate, scale, lower_bound = [load_one(self.field(shared, field)) for field in numbers]
        return HeadRows(*rows, None, rate, bias, scale, lower_bound), tokens

    @cute.jit
    def beta(self, shared, chunk, HV):
        """Return beta of that chunk."""
        dtype = TYPES[self.c.beta_dtype]
        first = load_one(self.field(shared, ITEM.beta))
        return in_global(fast.row(first, chunk, HV * Int32(C * dtype.width // 8)), dtype)
