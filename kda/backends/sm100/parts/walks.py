"""Which sequences, heads and segments a cluster walks over, and where they lie.

A walk is a sequence and a value head, or, where sequences are cut (`cut`), one of 2 segments - 1 of them: each segment
of the sequence is walked over once, and each but the first a second time, from the identity, for the transition M.
Clusters have equal shares of all chunks of these walks, in pieces (common/cute/share.py).  Where what a backward reads
is kept (`keeps`), sequences are found in the table of segments.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from ...common.cute import fast, share
from ...common.cute.copies import TYPES, field_at, in_global, load, load_one, store
from ...common.cute.gate import HeadRows
from ...common.cute.segments import locate_segment, locate_sequence, place_of_segment
from ...common.cute.tile import C
from ..configs import CTAS, GROUPS, ITEM, OF_CHAIN, FusedConfig, PieceField, ShareField, record_tile


class WalkPiece(NamedTuple):
    """A part of a walk, or all of it."""

    walk: Any                                # the walk's number among those of its head
    head: Any
    skipped: Any                             # chunks of the walk before the piece
    chunks: Any
    enters: Any                              # whether another cluster has begun the walk (PieceField)
    leaves: Any                              # whether another goes on with it


class LocatedWalk(NamedTuple):
    begin: Any                               # its first token
    tokens: Any
    n: Any                                   # its sequence
    segment: Any
    is_transition: Any

    def piece(self, piece):
        """Return what the walk would be if a piece were all of it."""
        skipped = piece.skipped * C
        return self._replace(
            begin=self.begin + skipped, tokens=cutlass.min(self.tokens - skipped, piece.chunks * C)
        )


def walks_of_sequence(c, x):
    return 2 * x.segments - 1 if c.cut else Int32(1)


def walks_of_head(c, x):
    return x.N * walks_of_sequence(c, x)


def sequence(c, x, n):
    """Return the first token of a sequence, and its tokens."""
    if c.keeps:
        return place_of_segment(c, x, n, x.chunks, 1, 0)[1:3]
    return locate_sequence(c.offsets, x, n)


def locate_walk(c, x, walk):
    n, segment, is_transition = walk, Int32(0), False
    if c.cut:
        n = walk // walks_of_sequence(c, x)
        segment = walk - n * walks_of_sequence(c, x)
        is_transition = segment >= x.segments
        segment -= (x.segments - 1) * Int32(is_transition)
    begin, tokens = sequence(c, x, n)
    if c.cut:
        begin, tokens = locate_segment(begin, tokens, segment, x.segments, C)
    return LocatedWalk(begin, tokens, n, segment, is_transition)


def kept_places(c, x, piece):
    """Return the numbers of a piece's first chunk, and of the first state that enters two of its chunks, among all that
    are kept."""
    chunk, state = place_of_segment(c, x, piece.walk, x.chunks, 1, 0)[3:]
    return chunk + piece.skipped, state + ((piece.skipped + 1) >> 1)


def end_of_sequences(c, x):
    """Return the first token behind all packed sequences."""
    begin, tokens = sequence(c, x, x.N - 1)
    return begin + tokens


def number_of_cta():
    """Return the number of a CTA among all of the grid, and how many there are."""
    (x, y, z), (X, Y, Z) = cute.arch.block_idx(), cute.arch.grid_dim()
    return (z * Y + y) * X + x, X * Y * Z


def chunks_of(tokens):
    return (tokens + C - 1) >> C.bit_length() - 1


def cluster_index(c):
    """Return the number of a cluster: a grid that keeps has one CTA of each cluster in a row."""
    x, y, z = cute.arch.block_idx()
    return z * cute.arch.grid_dim()[1] + y if c.keeps else x // CTAS


def cluster_count(c):
    x, y, z = cute.arch.grid_dim()
    return y * z if c.keeps else x // CTAS


class Share(share.Share):
    """Which pieces of walks are a cluster's.  Of a sequence that is cut, transitions lie behind all other walks."""

    fields = ShareField

    def __init__(self, config: FusedConfig):
        self.c = config

    def published(self, shared):
        return field_at(shared, self.c.struct.share)

    @cute.jit
    def publish(self, x, shared, cluster, clusters):
        """Publish the share of a cluster, by one warp, and what would take registers from chunk to chunk if it were
        constant.  No share is empty but the last ones: a state is always left by the cluster before."""
        field, slots = self.published(shared), self.slots_of_head(x)
        all_slots = Int64(slots) * x.HV
        shares = cutlass.max(cutlass.min(Int64(clusters), all_slots), Int64(1))
        begin, end = [Int32(cutlass.min(n * all_slots // shares, all_slots)) for n in (cluster, cluster + 1)]
        slot = self.publish_slots(x, field, slots, begin, end)
        if cute.arch.lane_idx() == 0:
            store(field + ShareField.CLUSTER, [cluster])
            of_sequence = Int32(0) if self.c.packed else self.slots_of_sequence(x, Int32(0))[0]
            store(field + ShareField.OF_SEQUENCE, [of_sequence, Int32(0)])     # all is there, for wider loads
            self.put_nothing(shared, slot, cluster)

    def put_nothing(self, shared, slot, item):
        """One lane publishes the empty piece that all begin with."""
        nowhere = Int32(PieceField.NOWHERE)
        for who in range(OF_CHAIN + GROUPS):
            store(self.field(shared, who), [slot, Int32(0), Int32(0), Int32(0)])
            store(self.field(shared, who) + PieceField.CHUNKS, [Int32(0), nowhere, nowhere, item])
        store(field_at(shared, self.c.struct.tokens), [Int32(0)])

    def cluster(self, shared):
        return load_one(self.published(shared) + ShareField.CLUSTER)

    def chunks(self, shared):
        """Return how many chunks the share has."""
        field = self.published(shared)
        return load_one(field + ShareField.END) - load_one(field + ShareField.BEGIN)

    def field(self, shared, who):
        """Return where the fields of a piece lie: CHAIN's, of which there are OF_CHAIN, or that of a group."""
        return field_at(shared, self.c.struct.pieces) + who * PieceField.COUNT

    @cute.jit
    def find(self, x, shared, before, who):
        """One warp finds the piece behind another one."""
        field, of_share = self.field(shared, before), self.published(shared)
        slot, walk, head, item = [
            load_one(field + place) for place in (PieceField.NEXT, PieceField.WALK, PieceField.HEAD, PieceField.ITEM)
        ]
        piece = self.piece(x, shared, slot, walk, head)
        following, _ = self.after(of_share, slot, piece.chunks)
        # redundant: the first meeting in `put`, for CHAIN, which writes another field than it has read
        self.put(shared, who, [following, *piece, item])

    @cute.jit
    def find_without_tokens(self, x, shared, before, who):
        """One warp finds the next of the cluster's walks without tokens, which are in no share."""
        item = load_one(self.field(shared, before) + PieceField.ITEM)
        items, found, way = walks_of_head(self.c, x) * x.HV, Int32(0), Int32(PieceField.NOWHERE)
        while way == PieceField.NOWHERE and item < items:
            other, tokens = item + cute.arch.lane_idx() * cluster_count(self.c), Int32(1)
            if other < items:
                tokens = locate_walk(self.c, x, other // x.HV).tokens
            without = cute.arch.vote_ballot_sync(tokens == 0)
            item += 32 * cluster_count(self.c)
            if without != 0:
                way = Int32(PieceField.FROM_MEMORY)
                found = item + (cute.arch.popc((without & -without) - 1) - 32) * cluster_count(self.c)
                item = found + cluster_count(self.c)
        # redundant: the first meeting in `put`, which writes another field than was read
        self.put(shared, who, [Int32(0), found // x.HV, found % x.HV, Int32(0), Int32(0), way, way, item])

    def put(self, shared, who, fields):
        cute.arch.sync_warp()                                                  # all lanes have read
        with cute.arch.elect_one():
            for first in range(0, PieceField.COUNT, 4):
                store(self.field(shared, who) + first, fields[first : first + 4])
        cute.arch.sync_warp()                                                  # all may read

    def found(self, shared, who):
        """Return what was found."""
        field = self.field(shared, who)
        return WalkPiece(*[load_one(field + place) for place in range(PieceField.WALK, PieceField.ITEM)])

    def head(self, shared, who):
        """Return the head of that alone: not kept from chunk to chunk."""
        return load_one(self.field(shared, who) + PieceField.HEAD)

    def skipped(self, shared, who):
        """Return the chunks before the piece, likewise."""
        return load_one(self.field(shared, who) + PieceField.SKIPPED)

    def slots_of_sequence(self, x, n):
        """Return its slots, and the chunks of one of its segments."""
        chunks = chunks_of(sequence(self.c, x, n)[1])
        if not self.c.cut:
            return chunks, chunks
        segment = (chunks + x.segments - 1) // x.segments
        return 2 * chunks - segment, segment

    @cute.jit
    def slots_of_head(self, x):
        slots = Int32(0)
        if cutlass.const_expr(self.c.packed):
            for n in cutlass.range(cute.arch.lane_idx(), x.N, 32, unroll=4):
                slots += self.slots_of_sequence(x, n)[0]
            for far in (16, 8, 4, 2, 1):
                slots += cute.arch.shuffle_sync_bfly(slots, far)
        else:
            slots = x.N * self.slots_of_sequence(x, Int32(0))[0]
        return slots

    @cute.jit
    def sequence_with(self, x, slot):
        """The sequence that has a slot of a head, and its first slot; a warp looks at 32 of them at a time."""
        first, before, found = Int32(0), Int32(0), Int32(-1)
        while found < 0:
            n = first + cute.arch.lane_idx()
            until = Int32(0)
            if n < x.N:
                until = self.slots_of_sequence(x, n)[0]
            for far in (1, 2, 4, 8, 16):
                less = cute.arch.shuffle_sync_up(until, far, mask_and_clamp=0)
                until += less if cute.arch.lane_idx() >= far else Int32(0)
            until += before
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(until <= slot))
            ends = cute.arch.shuffle_sync(until, cutlass.max(passed - 1, 0))
            before = ends if passed > 0 else before
            if passed < 32:
                found = first + passed
            first += 32
        return found, before

    @cute.jit
    def walk_at(self, x, slot, slots, of_sequence):
        """The walk that has a slot, its head, and the slot of its chunk 0.  If sequences are not packed, each has
        `of_sequence` slots."""
        head = slot // slots
        of_head = slot - head * slots
        if cutlass.const_expr(self.c.packed):
            n, before = self.sequence_with(x, of_head)
        else:
            n = of_head // of_sequence
            before = n * of_sequence
        walk, first = n, head * slots + before
        if cutlass.const_expr(self.c.cut):
            chunks = chunks_of(sequence(self.c, x, n)[1])
            segment = self.slots_of_sequence(x, n)[1]
            skipped = of_head - before
            behind = skipped >= chunks                                         # in a transition: the first has none
            number = (skipped - (chunks - segment) if behind else skipped) // segment
            first += number * segment + (chunks - segment if behind else Int32(0))
            walk = n * walks_of_sequence(self.c, x) + number + (x.segments - 1 if behind else Int32(0))
        return walk, head, first

    @cute.jit
    def extent(self, x, slot, slots):
        walk, _, first = self.walk_at(x, slot, slots, self.slots_of_sequence(x, Int32(0))[0])
        return locate_walk(self.c, x, walk).tokens, first

    @cute.jit
    def piece(self, x, shared, slot, walk, head):
        """The piece at a slot.  Packed, it is only looked up where it may be a part of a walk: else it is the next walk
        that has tokens, behind another one."""
        if cutlass.const_expr(not self.c.packed):
            return self.look_up(x, shared, slot)
        field = self.published(shared)
        begin, resume, limit = [
            load_one(field + place) for place in (ShareField.BEGIN, ShareField.RESUME, ShareField.LIMIT)
        ]
        skipped, chunks, enters, leaves = [Int32(0)] * 4
        is_part = slot >= limit                                                # or may be
        for edge in (begin, resume):
            is_part = is_part or slot == edge
        if is_part:
            walk, head, skipped, chunks, enters, leaves = self.look_up(x, shared, slot)
        while chunks == 0:                                                     # the walk has no tokens
            walk += 1
            if walk == walks_of_head(self.c, x):
                walk = Int32(0)
                head += 1
            chunks = chunks_of(locate_walk(self.c, x, walk).tokens)
        return WalkPiece(walk, head, skipped, chunks, enters, leaves)

    @cute.jit
    def look_up(self, x, shared, slot):
        field = self.published(shared)
        slots, end, of_sequence = [
            load_one(field + place) for place in (ShareField.SLOTS, ShareField.END, ShareField.OF_SEQUENCE)
        ]
        walk, head, first = self.walk_at(x, slot, slots, of_sequence)
        skipped = slot - first
        left, within = chunks_of(locate_walk(self.c, x, walk).tokens) - skipped, end - slot
        return WalkPiece(walk, head, skipped, cutlass.min(left, within), Int32(slot > first), Int32(left > within))


class WorkItem:
    """The piece of a walk that a group of PREPARE works on: where its rows begin, and numbers.  They lie in shared
    memory: there are no registers to keep them from chunk to chunk."""

    def __init__(self, config: FusedConfig, team):
        self.c, self.team = config, team

    def field(self, shared, field):
        """Return a pointer to a field of this group's item."""
        first = shared + (self.c.struct.items.offset + field.offset)
        return cute.recast_ptr(first + self.team.number() * ITEM.bytes, dtype=TYPES[field.dtype])

    @cute.jit
    def publish(self, shared, tokens, head_rows, tiles):
        """Called by one warp with the rows of the piece's head; all have to meet before they read it."""
        with cute.arch.elect_one():
            store(self.field(shared, ITEM.q), [head_rows.q.toint(), head_rows.k.toint()])
            store(self.field(shared, ITEM.g), [head_rows.g.toint(), head_rows.beta.toint()])
            store(self.field(shared, ITEM.bias), [head_rows.bias.toint()])
            if cutlass.const_expr(tiles is not None):
                store(self.field(shared, ITEM.tiles), [tiles.toint()])
            store(self.field(shared, ITEM.tokens), [tokens])
            store(self.field(shared, ITEM.rate), [head_rows.rate])
            store(self.field(shared, ITEM.scale), [head_rows.scale, head_rows.lower_bound])

    def chunks(self, shared):
        self.team.refresh_place(shared)
        return chunks_of(load_one(self.field(shared, ITEM.tokens)))

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
