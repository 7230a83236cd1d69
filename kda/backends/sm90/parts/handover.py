"""How tiles go from the groups of a cluster that make them to the CTAs that walk: one, or two.

Of one CTA or two (`OwnStages`): all make tiles, and one walks for each 64 columns.  A stage has one producer: of two,
chunk c is in stage c mod 4, which group (c >> 1) & 1 of CTA c & 1 fills in place; one bulk copy brings it to the same
stage of the neighbour, if that walks.  Of one, chunk c is in stage c mod 2, which is that of group c & 1.

Of four (`RelayedStages`): CTAs 0 and 1 walk and have one group, CTAs 2 and 3 have two, with two tiles each; each of
these six makes a sixth of all chunks. A tile is copied into stage c mod 4 of CTAs 0 and 1; one that walks reads the
tile of its own group where it is made. Warps without another role help: INVERSE, one for each group, so that a group
goes on to its next chunk; RELAY, which gives credit for the stages of its CTA, so that no warp of CHAIN looks at
another CTA; and LOAD and STORE (parts/values.py).

  chunk      0  1  2  3  4  5  6  7  8  9  10 11 12 ..
  CTA        2  3  2  3  0  1  2  3  2  3  0  1  2
  group      0  0  1  1  0  0  0  0  1  1  0  0  0
  its tile   0  0  0  0  0  0  1  1  1  1  0  0  0
  stage      0  1  2  3  0  1  2  3  0  1  2  3  0          in CTAs 0 and 1

Where tiles are kept for a backward, the warp that hands one over also copies it to memory, and is one more of those
that `empty` waits for: it arrives when that copy has read the tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32

from ...common.cute.async_copies import bulk_copy_to_neighbour, bulk_store
from ...common.cute.copies import in_global
from ...common.cute.rings import phase_of, stage_of
from ..configs import GROUPS, INVERSE, RING, TILES, WALKING, FusedConfig, tile


def is_complete(mbarrier, phase):
    """Return 1 if a phase of that parity has ended, or 0."""
    return cute.arch.inline_ptx(
        "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p;}",
        write_only_types=[Int32], read_only_args=[mbarrier.toint().to(Uint32), phase],
    )


def wait_unless(complete, mbarrier, phase):
    """Wait for the phase, unless `is_complete` has found it.  All lanes go one way: for ptxas as well, which else would
    take no uniform registers from here on."""
    cute.arch.inline_ptx(
        "{.reg .pred p; setp.ne.b32 p, {$r0}, 0; @p bra.uni THERE; "
        "AGAIN: mbarrier.try_wait.parity.shared.b64 p, [{$r1}], {$r2}, 10000000; @p bra.uni THERE; bra.uni AGAIN; "
        "THERE: }", read_only_args=[complete, mbarrier.toint().to(Uint32), phase],
    )


class OwnStages:
    def __init__(self, config: FusedConfig):
        self.c, self.layout, self.group = config, tile(config.prepare.K), config.group
        self.step = self.stages = config.makers    # from a chunk of a group to its next one, and of a stage

    def place(self, rank, group):
        """Return the place of a group among all groups of the cluster."""
        return self.c.ctas * group + rank

    def place_of_all(self, n, rank, group):
        """Return the place of a group among the groups of all clusters; n is the number of this cluster."""
        return (n * self.c.ctas + rank) * GROUPS + group

    def first(self, rank, group, before):
        """Return the first chunk of a piece that a group makes, when `before` chunks came before the piece."""
        return (self.place(rank, group) - before) & self.stages - 1

    def turn(self, c):
        """Return how many chunks a group has made before chunk c."""
        return c >> self.stages.bit_length() - 1

    def tile(self, base, rank, group, turn):
        """Return where the group makes its tile."""
        return base

    def wait_for_inverse(self, ring, group, turn):
        """A group has completed it before its warps meet at sums of the next chunk."""

    @cute.jit
    def acquire(self, ring, rank, group, turn, inverter):
        """The group may overwrite that tile."""
        empty = ring.empty + self.place(rank, group)
        if cutlass.const_expr(self.c.keeps):
            if inverter and turn > 0:
                was_kept(empty)
        cute.arch.mbarrier_wait(empty, turn & 1 ^ 1)

    @cute.jit
    def hand_over(self, ring, tile, group, rank, kept_at):
        """The tile to each CHAIN, and to where it is kept, by one warp."""
        full = ring.full + self.place(rank, group)
        with cute.arch.elect_one():
            if cutlass.const_expr(self.c.walking == self.c.ctas):
                cute.arch.mbarrier_arrive(full)
                if cutlass.const_expr(self.c.ctas == 2):
                    self.copy(tile, full, rank ^ 1)
            elif rank == 0:
                cute.arch.mbarrier_arrive(full)
            else:
                self.copy(tile, full, Int32(0))
            if cutlass.const_expr(self.c.keeps):
                keep(kept_at, tile, self.layout.end)

    def copy(self, tile, full, neighbour):
        # redundant: its release, not the arrival; the copy itself brings everything the neighbour reads
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.layout.end, peer_cta_rank_in_cluster=neighbour)
        bulk_copy_to_neighbour(tile, tile + self.layout.bytes, self.layout.end, full, neighbour)

    def until_own(self, rank, walked):
        """A stage alone says where its tile is."""
        return 0

    def tile_of(self, s, stage, rank, until):
        if self.c.ctas == 1:
            return s.groups + stage * self.group.bytes
        return s.groups + ((stage >> 1) * self.group.bytes + ((stage ^ rank) & 1) * self.layout.bytes)

    def after(self, until):
        return until

    def hand_back(self, ring, stage):
        """A warp of CHAIN has read the tile."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if self.c.ctas == 1:
                cute.arch.mbarrier_arrive(ring.empty + stage)
            else:
                cute.arch.mbarrier_arrive(ring.empty + stage, peer_cta_rank_in_cluster=stage & 1)


def keep(to, tile, size):
    """Copy the tile to memory.  Called by one thread."""
    bulk_store(to, tile, size)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def was_kept(empty):
    """The copy to memory has read the tile, by the warp that began it."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.mbarrier_arrive(empty)


class MakerOfTile(NamedTuple):
    """The maker of a chunk."""

    rank: Any
    group: Any
    turn: Any                                # so many chunks it has made before


class RelayedStages:
    def __init__(self, config: FusedConfig):
        self.c, self.layout, self.makers = config, tile(config.prepare.K), config.makers
        self.step, self.stages = self.makers, RING

    def place(self, rank, group):
        return WALKING * group + rank

    def place_of_all(self, n, rank, group):
        return n * self.makers + self.place(rank, group)

    @cute.jit
    def maker(self, c):
        turn, place = c // self.makers, c - c // self.makers * self.makers
        rank, group = WALKING + (place & 1), place >> 1
        if place >= WALKING * GROUPS:
            rank, group = place & 1, Int32(0)
        return MakerOfTile(rank, group, turn)

    @cute.jit
    def first_of_all(self, rank, group):
        """The first chunk of all that a group makes."""
        return 2 * group + rank - WALKING if rank >= WALKING else rank + WALKING * GROUPS

    def first(self, rank, group, before):
        return (self.first_of_all(rank, group) + self.makers - before % self.makers) % self.makers

    def turn(self, c):
        return c // self.makers

    @cute.jit
    def second(self, rank, turn):
        """0, or 1, of the group's tiles."""
        return turn & 1 if rank >= WALKING else Int32(0)

    @cute.jit
    def tile(self, base, rank, group, turn):
        """The second tiles of a CTA lie behind its second group."""
        size, second = self.c.group.bytes, Int32(0)
        if self.second(rank, turn) == 1:
            second = 2 * size + group * (self.layout.bytes - size)
        return base + second

    def wait_for_inverse(self, ring, group, turn):
        """INVERSE needs A_kk and b of the chunk before no more."""
        cute.arch.mbarrier_wait(ring.solved + group, turn & 1 ^ 1)

    @cute.jit
    def acquire(self, ring, rank, group, turn, inverter):
        times = turn >> 1 if rank >= WALKING else turn                         # that this tile was made before
        cute.arch.mbarrier_wait(ring.empty + (TILES * group + self.second(rank, turn)), times & 1 ^ 1)

    @cute.jit
    def inverts(self, rank, warp):
        """The group that a warp is INVERSE of, or -1."""
        group = warp - INVERSE                                                 # the warp's group in a CTA that walks
        if rank >= WALKING:
            group = warp
        return group if group >= 0 and group < (GROUPS if rank >= WALKING else 1) else Int32(-1)

    @cute.jit
    def hand_over(self, s, ring, tile, c, group, rank, turn, places):
        """The tile of chunk c to both CHAINs, and to where it is kept, which the group has said, by one warp."""
        stage = stage_of(c, RING)
        full, to = ring.full + stage, s.stages + stage * self.layout.bytes
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.solved + group)
        cute.arch.mbarrier_wait(ring.credit + group, turn & 1)
        with cute.arch.elect_one():
            if cutlass.const_expr(self.c.keeps):
                keep(in_global(places[self.second(rank, turn)], Uint8), tile, self.layout.end)
            for walking in cutlass.range_constexpr(WALKING):
                if rank == walking:
                    cute.arch.mbarrier_arrive(full)
                else:
                    bulk_copy_to_neighbour(tile, to, self.layout.end, full, walking)
        if cutlass.const_expr(self.c.keeps):
            was_kept(ring.empty + (TILES * group + self.second(rank, turn)))

    def until_own(self, rank, walked):
        """Return how many chunks come before the next one that this CTA, which walks, makes itself."""
        return self.first(rank, 0, walked)

    @cute.jit
    def tile_of(self, s, stage, rank, until):
        offset = self.c.struct.stages.offset + stage * self.layout.bytes
        if until == 0:                                                         # the tile of the group of this CTA
            offset = Int32(0)
        return s.groups + offset

    @cute.jit
    def after(self, until):
        """`until_own` a chunk later."""
        return (Int32(self.makers) if until == 0 else until) - 1

    def hand_back(self, ring, stage):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.read + stage)

    @cute.jit
    def relay(self, ring, rank, chunks):
        """RELAY, one warp: that tiles were read, to their makers, and that stages are free, to who fills them next."""
        for c in cutlass.range(chunks, unroll=1):
            stage = stage_of(c, RING)
            if c >= RING:
                cute.arch.mbarrier_wait(ring.read + stage, phase_of(c, RING) ^ 1)
                self.give_back(ring, self.maker(c - RING))
            maker = self.maker(c)
            if maker.rank != rank:
                with cute.arch.elect_one():
                    # redundant: its release, not the arrival; the copy itself brings everything CHAIN reads
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, self.layout.end)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.credit + maker.group, peer_cta_rank_in_cluster=maker.rank)

    def give_back(self, ring, maker):
        number = self.second(maker.rank, maker.turn)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + (TILES * maker.group + number), peer_cta_rank_in_cluster=maker.rank)
