"""How a group of a CTA's warps makes a chunk for CHAIN, of fwd/fused.py: rows, then operands and pairs in its tile.

`OneProduct`, of a bounded gate with l2norms, and `InBlocks`, of any other, do the same steps:

  begin      of a piece of a walk
  rows       q, k and decays of the chunk in registers, and what warps know of each other's
  operands   to the tile, when the group may write there; pairs
  finish     pairs are there, for the warp that inverts: of PREPARE, or INVERSE in clusters of four
  wait       by INVERSE, for that
  tile_is_whole   by an inverter of PREPARE, before the tile leaves: all else is there, too

Rows come from memory, or from where the group had them copied to (parts/rows.py).
"""

from __future__ import annotations

from collections import namedtuple

import cutlass
import cutlass.cute as cute

from ...common.cute.copies import load
from ...common.cute.tile import GROUP_ROWS, LEAST_BUSY, WARP_ROWS
from ..configs import FusedConfig
from .chunk import ChunkMaker
from .rows import RequestedByChannel, RequestedByRow
from .teams import GROUP_INVERSE, WHOLE_GROUP, WHOLE_GROUP_INVERSE

INVERTER = 0                                 # the warp of a group that computes the inverse, but in clusters of four
Work = namedtuple("Work", "rank group base X Y sums A_kk columns b places")   # a group and its memory


@cute.jit
def store_b(c, team, b, beta):
    """Store b before rows meet, if keys are multiplied by it: b of the chunk before, which may still be read, has
    another place.  Otherwise the inverse of that chunk reads its b from the same place."""
    if cutlass.const_expr(c.b_on_keys):
        if team.warp() == LEAST_BUSY:
            b[cute.arch.lane_idx()] = beta


def form_of(config: FusedConfig, chunk: ChunkMaker):
    return InBlocks(config, chunk) if config.prepare.in_blocks else OneProduct(config, chunk)


class OneProduct:
    def __init__(self, config: FusedConfig, chunk: ChunkMaker):
        self.c, self.staged, self.helped = config.prepare, config.staged, config.helped
        self.chunk, self.team = chunk, chunk.team
        self.requested = RequestedByChannel(self.c, self.team)

    def begin(self, x, of, begin, head):
        """Nothing."""

    @cute.jit
    def rows(self, x, of, at, rows, beta):
        if cutlass.const_expr(self.staged):
            qn, kn, gc = self.requested.load_rows(self.requested.found(at, of.X, of.Y), rows, 1, 1)
        else:
            qn, kn, gc = self.chunk.gate.load_rows(at, rows, x.H, x.HV)
        store_b(self.c, self.team, of.b, beta)
        self.chunk.gate.sum_over_warps(gc, of.sums, self.c.K // 32 * cute.arch.lane_idx())
        return qn, kn, gc

    @cute.jit
    def operands(self, x, of, tile, rows, qn, kn, gc):
        of_k = None
        if cutlass.const_expr(self.c.b_on_keys):
            of_k = load(of.b + WARP_ROWS * self.team.warp(), WARP_ROWS)
        self.chunk.pairs.one_product(qn, kn, gc, of.sums, of.X, of.Y, tile, x.lower_bound, of_k)
        if self.team.warp() < 4:
            core = self.chunk.tensor_core
            acc = core.accumulator()
            core.one_product(acc, of.X, of.Y, 0)
            core.store_pairs(acc, of.A_kk, of.b, tile, None, rows, 0)

    @cute.jit
    def finish(self, of):
        if self.team.warp() < 4:
            if cutlass.const_expr(not self.helped):
                self.team.meet_first_four()
            else:
                # redundant: INVERSE has its own proxy fence before the copy; the documented use is one per writer
                cute.arch.fence_proxy("async.shared", space="cta")             # A_qk is in the tile
                GROUP_INVERSE.arrive(of.group)

    @cute.jit
    def tile_is_whole(self, of):
        cute.arch.sync_warp()                                                  # all else was waited for

    @cute.jit
    def operands_were_read(self):
        self.team.meet()

    @cute.jit
    def wait(self, group):
        GROUP_INVERSE.sync(group)


class InBlocks:
    def __init__(self, config: FusedConfig, chunk: ChunkMaker):
        self.c, self.staged, self.helped = config.prepare, config.staged, config.helped
        self.chunk, self.team = chunk, chunk.team
        self.requested = RequestedByRow(self.c, self.team, chunk.tensor_core, chunk.tile)

    @cute.jit
    def begin(self, x, of, begin, head):
        if cutlass.const_expr(self.c.bias):
            self.chunk.rows.store_bias(self.chunk.gate.rows_of_head(x, begin, head), of.sums)
            self.team.meet()                                                   # dt_bias is there

    @cute.jit
    def rows(self, x, of, at, rows, beta):
        made = self.chunk.rows
        if cutlass.const_expr(self.staged):
            raw = self.requested.fetch(self.requested.found(at, of.X, of.Y), rows, 1, 1)
        else:
            raw = made.fetch(at, rows, x.H, x.HV)
        store_b(self.c, self.team, of.b, beta)
        qn, kn, decays = made.prepare(*raw, rows, at, of.sums)
        made.blocks(qn, kn, decays, of.sums, of.X, of.Y)
        return qn, kn, decays

    @cute.jit
    def operands(self, x, of, tile, rows, qn, kn, decays):
        core, made = self.chunk.tensor_core, self.chunk.rows
        core.X, core.Y, core.of_16, core.pairs_to = of.X, of.Y, tile, (of.A_kk, of.b, tile, None, rows, 0)
        gc, of_k = made.make_sums(decays, of.sums, of.Y, x.lower_bound), None
        if cutlass.const_expr(self.c.b_on_keys):
            of_k = load(of.b + made.first_row(), GROUP_ROWS)
        made.across_blocks(qn, kn, gc, of.sums, of.X, tile, of.Y, tile, of_k)

    @cute.jit
    def finish(self, of):
        # redundant: for INVERSE, which has its own proxy fence before the copy; an INVERTER has it before it waits
        cute.arch.fence_proxy("async.shared", space="cta")                     # A_qk, kE and qg are in the tile
        if cutlass.const_expr(self.helped):
            WHOLE_GROUP_INVERSE.arrive(of.group)
        elif self.team.warp() != INVERTER:                                     # it has A_kk, and goes on
            WHOLE_GROUP.arrive(of.group)

    @cute.jit
    def tile_is_whole(self, of):
        WHOLE_GROUP.sync(of.group)

    def operands_were_read(self):
        """All have met since."""

    @cute.jit
    def wait(self, group):
        WHOLE_GROUP_INVERSE.sync(group)
