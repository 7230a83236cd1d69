"""Walks that outnumber the clusters: which pieces of them a cluster walks, and in what order.

The chunks of all walks lie end to end, head by head, and are cut into as many equal shares as there are clusters.  A
walk that a cut goes through is walked by two clusters (one longer than a share, by more), and its state crosses in
float32 through memory, so that no bit depends on where the cuts lie.

  chunks      a a a a a a b b b b b b c c c c c c d d d d d d
  shares      [0             ][1            ][2           ]
  cluster 1 walks  c's first part  ..  then all that lies within its share  ..  b's second part last

What another cluster goes on with is walked first and what another has begun is walked last: where no walk is longer
than a share, the state is there before anyone waits for it.  Nobody waits for a cluster of a higher index.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .copies import load_one, store
from .tile import C


def chunks_of(tokens):
    return (tokens + C - 1) // C


class Share:
    """A slot is a chunk of a walk.  A subclass has `extent(x, slot, slots)`, of the walk with a slot: its tokens, and
    the slot of its chunk 0.  The walks of a head have `slots` slots."""

    fields: Any                              # places of SLOTS, BEGIN, END, RESUME and LIMIT in what is published

    @cute.jit
    def publish_slots(self, x, share, slots, begin, end):
        """Publish four slots: where the share begins and ends, where the walk ends that it begins within, and where the
        walk begins that it ends within.  Return the slot of the first piece.  Called by one warp."""
        resume, limit = begin, end
        if begin < end:
            tokens, first = self.extent(x, begin, slots)
            resume = cutlass.min(first + chunks_of(tokens), end) if first < begin else begin
            tokens, first = self.extent(x, end - 1, slots)
            limit = first if first >= begin and first + chunks_of(tokens) > end else end
        if cute.arch.lane_idx() == 0:
            store(share, [slots, begin, end, resume])
            store(share + self.fields.LIMIT, [limit])
        return first_slot(begin, end, resume, limit)

    @cute.jit
    def first(self, share):
        """The slot of the first piece; where all that is left is to be walked; slots so far."""
        fields = self.fields
        begin, end, resume, limit = [
            load_one(share + field) for field in (fields.BEGIN, fields.END, fields.RESUME, fields.LIMIT)
        ]
        return first_slot(begin, end, resume, limit), end - begin

    @cute.jit
    def after(self, share, slot, chunks):
        """Return the slot of the piece behind that at `slot`, of so many chunks, and whether to look it up."""
        begin, resume, limit = [
            load_one(share + field) for field in (self.fields.BEGIN, self.fields.RESUME, self.fields.LIMIT)
        ]
        far = slot >= limit
        following = resume if far else slot + chunks
        last = following >= limit
        return begin if last else following, far or last


@cute.jit
def first_slot(begin, end, resume, limit):
    slot = resume if resume < end else begin
    return limit if limit < end else slot


class Crossing:
    """The state that leaves a share, for the cluster behind: pieces of 16 bytes, those of a warp next to each other,
    and a flag that says that all of them are there."""

    def __init__(self, strips: int, size: int):
        self.strips, self.size = strips, size

    def place(self, x, cluster, rank):
        return x.edges + (Int64(cluster * self.strips + rank) * self.size + 4 * cute.arch.thread_idx()[0])

    @cute.jit
    def hand_over(self, x, cluster, rank, team):
        """The state is there, once all of the team have stored."""
        team.sync()                                                            # all have stored
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.store(x.crossed + (cluster * self.strips + rank), Int32(1), sem="release", scope="gpu")

    @cute.jit
    def wait(self, x, cluster, rank, team):
        """Wait until it is there, for all of the team."""
        if cute.arch.thread_idx()[0] == 0:
            crossed = Int32(0)
            while crossed == 0:
                crossed = cute.arch.load(x.crossed + (cluster * self.strips + rank), Int32, sem="acquire", scope="gpu")
        team.sync()                                                            # all may read
