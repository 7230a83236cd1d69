"""Pieces of walks that a cluster has if walks outnumber the clusters (common/cute/share.py), and how a state in
registers crosses."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...common.cute import share
from ...common.cute.configs import SegmentTable
from ...common.cute.copies import load, load_one, store
from ...common.cute.segments import place_of_segment
from ...common.cute.share import chunks_of
from ...common.cute.tile import C
from ..configs import COLUMNS, ChainConfig, ShareField


class PlaceOfPiece(NamedTuple):
    """The place of a piece of a walk in what is kept for a backward."""

    number: Any                              # number of its first chunk among all of a head
    skipped: Any                             # chunks of the walk before it
    state: Any                               # number of the walk's first kept state


class Share(share.Share):
    fields = ShareField

    def __init__(self, config: ChainConfig):
        self.c = config

    @cute.jit
    def publish(self, x, share, cluster, clusters):
        """Publish a cluster's share, by one warp.  No share is empty but the last ones, so the cluster before leaves
        every state that is waited for: if sequences have no tokens, there may be fewer slots than clusters."""
        slots = self.slots_of_head(x)
        all_slots = Int64(slots) * x.HV
        begin, end = Int32(cluster * all_slots // clusters), Int32((cluster + 1) * all_slots // clusters)
        if cutlass.const_expr(self.c.packed):
            if all_slots < clusters:
                begin, end = [cutlass.min(n, Int32(all_slots)) for n in (cluster, cluster + 1)]
        self.publish_slots(x, share, slots, begin, end)

    def extent(self, x, slot, slots):
        _, _, _, tokens, first, _ = self.walk_at(x, slot, slots)
        return tokens, first

    def slots_of_head(self, x):
        if not self.c.packed:
            return x.N * x.chunks
        last = x.segment_table + SegmentTable.WIDTH * (x.N - 1)
        before, tokens = load_one(last + SegmentTable.CHUNK), load_one(last + SegmentTable.TOKENS_LEFT)
        return Int32(before) + chunks_of(Int32(tokens))

    def walk_at(self, x, slot, slots):
        """Value head, sequence, first token, tokens, the slot of chunk 0, and the number of the first kept state."""
        head = slot // slots
        of_head = slot - head * slots
        n = self.sequence_with(x, of_head) if self.c.packed else of_head // x.chunks
        _, begin, tokens, chunk, state = place_of_segment(self.c, x, n, x.chunks, 1, 0)
        return head, n, begin, tokens, head * slots + chunk, state

    @cute.jit
    def sequence_with(self, x, chunk):
        """The last of the sequences whose chunks do not begin behind this one; a warp looks at 32 of them at a time."""
        first, size = Int32(0), x.N
        while size > 1:
            step = (size + 31) // 32
            n = first + cute.arch.lane_idx() * step
            row = x.segment_table + SegmentTable.WIDTH * cutlass.min(n, x.N - 1)
            before = n < first + size and Int32(load_one(row + SegmentTable.CHUNK)) <= chunk
            first += (cute.arch.popc(cute.arch.vote_ballot_sync(before)) - 1) * step
            size = cutlass.min(step, x.N - first)
        return first

    @cute.jit
    def piece(self, x, share, slot, looked_up, head, n):
        """The piece at a slot: head, sequence, first token, tokens, whether another cluster has begun the walk, whether
        another goes on with it, and where in what is kept it lies.  Packed, it is only looked up where it may be a part
        of a walk: else it is the walk behind that of a head and sequence."""
        if cutlass.const_expr(not self.c.packed):
            return self.look_up(x, share, slot)
        begin, tokens, enters, leaves = Int64(0), Int32(0), Boolean(False), Boolean(False)
        kept = PlaceOfPiece(Int32(0), Int32(0), Int32(0))
        if looked_up:
            head, n, begin, tokens, enters, leaves, kept = self.look_up(x, share, slot)
        while tokens == 0:                                                     # the sequence has no tokens
            n += 1
            if n == x.N:
                n = Int32(0)
                head += 1
            _, begin, tokens, number, state = place_of_segment(self.c, x, n, x.chunks, 1, 0)
            kept = PlaceOfPiece(number, kept.skipped, state)
        return head, n, begin, tokens, enters, leaves, kept

    def look_up(self, x, share, slot):
        """A piece, as above."""
        slots, end = load_one(share + ShareField.SLOTS), load_one(share + ShareField.END)
        head, n, begin, tokens, first, state = self.walk_at(x, slot, slots)
        skipped = (slot - first) * C
        left, within = tokens - skipped, (end - slot) * C
        kept = PlaceOfPiece(slot - head * slots, slot - first, state)
        return head, n, begin + skipped, cutlass.min(left, within), slot > first, left > within, kept


class Crossing(share.Crossing):
    def __init__(self, config: ChainConfig):
        super().__init__(config.strips, COLUMNS * config.K)

    @cute.jit
    def leave(self, x, cluster, rank, S, team):
        flat, place = cute.coalesce(S), self.place(x, cluster, rank)
        for i in cutlass.range_constexpr(0, cute.size(flat), 4):
            store(place + 128 * i, [flat[i + j] for j in range(4)])
        self.hand_over(x, cluster, rank, team)

    @cute.jit
    def enter(self, x, cluster, rank, S, team):
        self.wait(x, cluster, rank, team)
        flat, place = cute.coalesce(S), self.place(x, cluster, rank)
        for i in cutlass.range_constexpr(0, cute.size(flat), 4):
            values = load(place + 128 * i, 4)
            for j in cutlass.range_constexpr(4):
                flat[i + j] = values[j]
