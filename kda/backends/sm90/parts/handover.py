"""How tiles go from the groups of a cluster that make them to the two CTAs that walk.

Of two CTAs (`Pair`): both make tiles and both walk.  A stage has one producer: chunk c is in stage c mod 4, which group
(c >> 1) & 1 of CTA c & 1 fills in place; one bulk copy brings it to the neighbour's same stage.

Of four (`Four`): CTAs 0 and 1 walk and have one group, CTAs 2 and 3 have two.  Group g of CTA r makes chunks
6 t + r + 2 g, each in a tile of its own, and copies it into stage c mod 4 of CTAs 0 and 1; one that walks reads the
tile of its own group where it is made.  A warp that makes nothing there, RELAY, gives credit for the stages of its CTA,
so that no warp of CHAIN looks at another CTA.

  chunk      0  1  2  3  4  5  6  7  8  ..
  CTA        0  1  2  3  2  3  0  1  2
  group      0  0  0  0  1  1  0  0  0
  stage      0  1  2  3  0  1  2  3  0         in CTAs 0 and 1
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common.cute.async_copies import bulk_copy_to_neighbour
from ...common.cute.barriers import Ring, phase_of, stage_of
from ..configs import GROUPS, RING, WALKING, FusedConfig, tile


class Pair:
    def __init__(self, config: FusedConfig):
        self.c, self.tile, self.group = config, tile(config.prepare.K), config.group

    def ring(self, s):
        return Ring(s.full, s.empty)

    @cute.jit
    def initialise(self, ring):
        for stage in cutlass.range_constexpr(RING):
            cute.arch.mbarrier_init(ring.full + stage, 1)
            cute.arch.mbarrier_init(ring.empty + stage, 4 * WALKING)

    @cute.jit
    def place(self, rank, group):
        """Of a group among all those of the cluster."""
        return WALKING * group + rank

    @cute.jit
    def place_of_all(self, n, rank, group):
        """The same among those of all clusters, of which this is number n."""
        return (n * WALKING + rank) * GROUPS + group

    @cute.jit
    def first(self, place, made):
        """The first chunk of a piece that the group makes, before which so many chunks were made."""
        return (place - made) & RING - 1

    @cute.jit
    def acquire(self, ring, place, group, phase):
        """The group may overwrite its tile."""
        cute.arch.mbarrier_wait(ring.empty + place, phase ^ 1)

    @cute.jit
    def hand_over(self, s, ring, tile, c, place, group, rank, phase):
        """The tile of chunk c to both CHAINs, by one warp."""
        full, neighbour = ring.full + place, rank ^ 1
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)
            # redundant: its release, not the arrival; the copy itself brings everything the neighbour reads
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.tile.end, peer_cta_rank_in_cluster=neighbour)
            bulk_copy_to_neighbour(tile, tile + self.tile.bytes, self.tile.end, full, neighbour)

    @cute.jit
    def tile_of(self, s, c, stage, rank):
        return s.groups + ((stage >> 1) * self.group.bytes + ((stage ^ rank) & 1) * self.tile.bytes)

    @cute.jit
    def hand_back(self, ring, stage):
        """A warp of CHAIN has read the tile."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + stage, peer_cta_rank_in_cluster=stage & 1)


class Relayed(NamedTuple):
    """The mbarriers of a cluster of four."""

    full: Any                                # of each stage, in a CTA that walks
    read: Any                                # the same: CHAIN's warps have read it
    empty: Any                               # of each group, where it is: both CHAINs have read its last tile
    credit: Any                              # the same: the stage of its next tile is free in both


class Four:
    def __init__(self, config: FusedConfig):
        self.c, self.tile, self.makers = config, tile(config.prepare.K), config.makers

    def ring(self, s):
        return Relayed(s.full, s.read, s.empty, s.credit)

    @cute.jit
    def initialise(self, ring):
        for stage in cutlass.range_constexpr(RING):
            cute.arch.mbarrier_init(ring.full + stage, 1)
            cute.arch.mbarrier_init(ring.read + stage, 4)
        for group in cutlass.range_constexpr(GROUPS):
            cute.arch.mbarrier_init(ring.empty + group, WALKING)
            cute.arch.mbarrier_init(ring.credit + group, WALKING)

    @cute.jit
    def place(self, rank, group):
        return WALKING * group + rank

    @cute.jit
    def place_of_all(self, n, rank, group):
        return n * self.makers + self.place(rank, group)

    @cute.jit
    def first(self, place, made):
        return stage_of(place + self.makers - stage_of(made, self.makers), self.makers)

    @cute.jit
    def acquire(self, ring, place, group, phase):
        cute.arch.mbarrier_wait(ring.empty + group, phase ^ 1)

    @cute.jit
    def hand_over(self, s, ring, tile, c, place, group, rank, phase):
        stage = stage_of(c, RING)
        full, to = ring.full + stage, s.stages + stage * self.tile.bytes
        cute.arch.mbarrier_wait(ring.credit + group, phase)
        with cute.arch.elect_one():
            for walking in cutlass.range_constexpr(WALKING):
                if rank == walking:
                    cute.arch.mbarrier_arrive(full)
                else:
                    bulk_copy_to_neighbour(tile, to, self.tile.end, full, walking)

    @cute.jit
    def tile_of(self, s, c, stage, rank):
        offset = self.c.struct.stages.offset + stage * self.tile.bytes
        if stage_of(c, self.makers) == rank:                                         # of the group of this CTA
            offset = Int32(0)
        return s.groups + offset

    @cute.jit
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
                self.tell(ring.empty, stage_of(c - RING, self.makers))
            maker = stage_of(c, self.makers)
            if maker != rank:
                with cute.arch.elect_one():
                    # redundant: its release, not the arrival; the copy itself brings everything CHAIN reads
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, self.tile.end)
            self.tell(ring.credit, maker)

    @cute.jit
    def tell(self, barriers, place):
        """The group at a place among those of the cluster."""
        group = place >> 2
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers + group, peer_cta_rank_in_cluster=place - group * WALKING)
