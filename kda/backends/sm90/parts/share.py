"""Walks that outnumber the clusters: which pieces of them a cluster walks, and in what order.

The chunks of all walks lie end to end, head by head and sequence by sequence, and are cut into as many equal shares as
there are clusters.  A walk that a cut goes through is walked by two clusters (one longer than a share, by more), and
its state crosses in float32 through memory, so that no bit depends on where the cuts lie.

  chunks      a a a a a a b b b b b b c c c c c c d d d d d d
  shares      [0             ][1            ][2           ]
  cluster 1 walks  c's first part  ..  then all that lies within its share  ..  b's second part last

What another cluster goes on with is walked first and what another has begun is walked last: where no walk is longer
than a share, the state is there before anyone waits for it.  Nobody waits for a cluster of a higher index.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...common.cute.configs import SegmentTable
from ...common.cute.copies import load, load_one, store
from ...common.cute.segments import place_of_segment
from ...common.cute.tile import C
from ..configs import COLUMNS, ChainConfig, ShareField


class PlaceOfPiece(NamedTuple):
    """The place of a piece of a walk in what is kept for a backward."""

    number: Any                              # number of its first chunk among all of a head
    skipped: Any                             # chunks of the walk before it
    state: Any                               # number of the walk's first kept state


def chunks_of(tokens):
    return (tokens + C - 1) // C


class Share:
    def __init__(self, config: ChainConfig):
        self.c = config

    @cute.jit
    def publish(self, x, share, cluster, clusters):
        """Publish four slots, a slot being a chunk of a walk: where the share begins and ends, where the walk ends that
        it begins within, and where the walk begins that it ends within.  Called by one warp."""
        slots = self.slots_of_head(x)
        all_slots = Int64(slots) * x.HV
        begin, end = Int32(cluster * all_slots // clusters), Int32((cluster + 1) * all_slots // clusters)
        resume, limit = begin, end
        if begin < end:
            _, _, _, tokens, first, _ = self.walk_at(x, begin, slots)
            resume = cutlass.min(first + chunks_of(tokens), end) if first < begin else begin
            _, _, _, tokens, first, _ = self.walk_at(x, end - 1, slots)
            limit = first if first >= begin and first + chunks_of(tokens) > end else end
        if cute.arch.lane_idx() == 0:
            store(share, [slots, begin, end, resume])
            store(share + ShareField.LIMIT, [limit])

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
    def first(self, share):
        """The slot of the first piece; where all that is left is to be walked; slots so far."""
        begin, end, resume, limit = [
            load_one(share + field) for field in (ShareField.BEGIN, ShareField.END, ShareField.RESUME, ShareField.LIMIT)
        ]
        slot = resume if resume < end else begin
        return limit if limit < end else slot, end - begin

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

    @cute.jit
    def after(self, share, slot, chunks):
        """Return the slot of the piece behind that at `slot`, of so many chunks, and whether to look it up."""
        begin, resume, limit = [
            load_one(share + field) for field in (ShareField.BEGIN, ShareField.RESUME, ShareField.LIMIT)
        ]
        far = slot >= limit
        following = resume if far else slot + chunks
        last = following >= limit
        return begin if last else following, far or last


class Crossing:
    """The state that leaves a share, for the cluster behind: pieces of 16 bytes, those of a warp next to each other,
    and a flag that says that all of them are there."""

    def __init__(self, config: ChainConfig):
        self.strips, self.size = config.strips, COLUMNS * config.K

    def place(self, x, cluster, rank):
        return x.edges + (Int64(cluster * self.strips + rank) * self.size + 4 * cute.arch.thread_idx()[0])

    @cute.jit
    def leave(self, x, cluster, rank, S, team):
        flat, place = cute.coalesce(S), self.place(x, cluster, rank)
        for i in cutlass.range_constexpr(0, cute.size(flat), 4):
            store(place + 128 * i, [flat[i + j] for j in range(4)])
        team.sync()                                                            # all have stored
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.store(x.crossed + (cluster * self.strips + rank), Int32(1), sem="release", scope="gpu")

    @cute.jit
    def enter(self, x, cluster, rank, S, team):
        if cute.arch.thread_idx()[0] == 0:
            crossed = Int32(0)
            while crossed == 0:
                crossed = cute.arch.load(x.crossed + (cluster * self.strips + rank), Int32, sem="acquire", scope="gpu")
        team.sync()                                                            # all may read
        flat, place = cute.coalesce(S), self.place(x, cluster, rank)
        for i in cutlass.range_constexpr(0, cute.size(flat), 4):
            values = load(place + 128 * i, 4)
            for j in cutlass.range_constexpr(4):
                flat[i + j] = values[j]
