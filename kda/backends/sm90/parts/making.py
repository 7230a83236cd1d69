"""How a group of a CTA's warps makes a chunk for CHAIN, of fwd/fused.py: rows, then operands and pairs in its tile.

`OneProduct`, of a bounded gate with l2norms, and `InBlocks`, of any other, do the same steps:

  begin      of a piece of a walk
  rows       q, k and decays of the chunk in registers, and what warps know of each other's
  operands   to the tile, when the group may write there; pairs
  finish     what a warp has made is there, for the one that completes the inverse
  wait       by that one, of PREPARE or, in clusters of four, INVERSE: all has been made

Rows come from memory, or (`Requested`) by way of shared memory: a warp requests its own ones as soon as the products of
the chunk before have read X and Y, where they lie until the operands of their chunk take that place.
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ...common.cute.async_copies import copy_16_bytes_later
from ...common.cute.copies import load
from ...common.cute.gate import Gate
from ...common.cute.rows import Rows
from ...common.cute.tile import GROUP_ROWS, LEAST_BUSY, WARP_ROWS, C
from ..configs import GROUP_FIRST_FOUR, GROUP_INVERSE, WHOLE_GROUP, WHOLE_GROUP_INVERSE, FusedConfig
from .chunk import ChunkMaker

INVERTERS = 2                                # the warps of a group that compute the inverse, but in clusters of four:
LAST_INVERTER = INVERTERS - 1                # each has 16 rows of A_kk, and this one completes it
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

    def begin(self, x, work, begin, head):
        """Nothing."""

    def rows(self, x, work, head_rows, rows, beta):
        if self.staged:
            qn, kn, gc = self.requested.load_rows(self.requested.found(head_rows, work.X, work.Y), rows, 1, 1)
        else:
            qn, kn, gc = self.chunk.gate.load_rows(head_rows, rows, x.H, x.HV)
        store_b(self.c, self.team, work.b, beta)
        self.chunk.gate.sum_over_warps(gc, work.sums, self.c.K // 32 * cute.arch.lane_idx())
        return qn, kn, gc

    @cute.jit
    def operands(self, x, work, tile, rows, qn, kn, gc):
        of_k = None
        if cutlass.const_expr(self.c.b_on_keys):
            of_k = load(work.b + WARP_ROWS * self.team.warp(), WARP_ROWS)
        self.chunk.pairs.one_product(qn, kn, gc, work.sums, work.X, work.Y, tile, x.lower_bound, of_k)
        if self.team.warp() < 4:
            core = self.chunk.tensor_core
            acc = core.accumulator()
            core.one_product(acc, work.X, work.Y, 0)
            core.store_pairs(acc, work.A_kk, work.b, tile, None, rows, 0)

    @cute.jit
    def finish(self, work):
        if self.team.warp() < 4:
            if cutlass.const_expr(self.helped):
                # redundant: INVERSE has its own proxy fence before the copy; the documented use is one per writer
                cute.arch.fence_proxy("async.shared", space="cta")             # A_qk is in the tile
                GROUP_INVERSE.arrive(work.group)
            elif self.team.warp() != LAST_INVERTER:
                # redundant: that one has a proxy fence before the copy; the documented use is one per writer
                cute.arch.fence_proxy("async.shared", space="cta")             # A_qk, or a half of TB, is in the tile
                GROUP_FIRST_FOUR.arrive(work.group)

    def operands_were_read(self):
        self.team.meet()

    def wait(self, group):
        (GROUP_INVERSE if self.helped else GROUP_FIRST_FOUR).sync(group)


class InBlocks:
    def __init__(self, config: FusedConfig, chunk: ChunkMaker):
        self.c, self.staged, self.helped = config.prepare, config.staged, config.helped
        self.chunk, self.team = chunk, chunk.team
        self.requested = RequestedByRow(self.c, self.team, chunk.tensor_core, chunk.tile)

    def begin(self, x, work, begin, head):
        if self.c.bias:
            self.chunk.rows.store_bias(self.chunk.gate.rows_of_head(x, begin, head), work.sums)
            self.team.meet()                                                   # dt_bias is there

    def rows(self, x, work, head_rows, rows, beta):
        maker = self.chunk.rows
        if self.staged:
            raw = self.requested.fetch(self.requested.found(head_rows, work.X, work.Y), rows, 1, 1)
        else:
            raw = maker.fetch(head_rows, rows, x.H, x.HV)
        store_b(self.c, self.team, work.b, beta)
        qn, kn, decays = maker.prepare(*raw, rows, head_rows, work.sums)
        maker.blocks(qn, kn, decays, work.sums, work.X, work.Y)
        return qn, kn, decays

    def operands(self, x, work, tile, rows, qn, kn, decays):
        core, maker = self.chunk.tensor_core, self.chunk.rows
        core.X, core.Y, core.of_16, core.pairs_to = work.X, work.Y, tile, (work.A_kk, work.b, tile, None, rows, 0)
        gc, of_k = maker.make_sums(decays, work.sums, work.Y, x.lower_bound), None
        if self.c.b_on_keys:
            of_k = load(work.b + maker.first_row(), GROUP_ROWS)
        maker.across_blocks(qn, kn, gc, work.sums, work.X, tile, work.Y, tile, of_k)

    @cute.jit
    def finish(self, work):
        # redundant: who completes the inverse has a proxy fence before the copy; the documented use is one per writer
        cute.arch.fence_proxy("async.shared", space="cta")                     # A_qk, kE and qg are in the tile
        if cutlass.const_expr(self.helped):
            WHOLE_GROUP_INVERSE.arrive(work.group)
        elif self.team.warp() != LAST_INVERTER:
            WHOLE_GROUP.arrive(work.group)

    def operands_were_read(self):
        """All have met since."""

    def wait(self, group):
        (WHOLE_GROUP_INVERSE if self.helped else WHOLE_GROUP).sync(group)


PIECE = 8                                    # elements of 16 bytes


class Requested:
    """Rows that each warp finds where it had them copied to."""

    def row_within(self, row, tokens):
        return row

    def request(self, head_rows, tokens, H, HV, X, Y):
        """Past the end of a chunk of so many tokens: its last row."""
        K, lane, first = self.c.K, cute.arch.lane_idx(), WARP_ROWS * self.team.warp()
        for source, heads, to in ((head_rows.q, H, X), (head_rows.k, H, X + C * K), (head_rows.g, HV, Y)):
            for j in range(WARP_ROWS * K // (32 * PIECE)):
                row, column = first + (lane + 32 * j) // (K // PIECE), lane % (K // PIECE) * PIECE
                address = source + (cutlass.min(row, tokens - 1) * (heads * K) + column)
                copy_16_bytes_later(address.toint(), to + (row * K + column))
        cute.arch.cp_async_commit_group()

    def found(self, head_rows, X, Y):
        """Where rows are that were requested, when they are there."""
        cute.arch.cp_async_wait_group(0)
        # redundant: in the simulator, where a warp waits as a whole; the manual lets each lane wait for its own copies
        cute.arch.sync_warp()
        return head_rows._replace(q=X, k=X + C * self.c.K, g=Y)


class RequestedByChannel(Requested, Gate):
    """Requested rows in the layout of Gate."""


class RequestedByRow(Requested, Rows):
    """Requested rows in the layout of Rows."""

    def load_row(self, pointer, row, heads):
        source = cute.recast_ptr(pointer, dtype=Uint32) + (row * (self.c.K // 2) + self.first_channel() // 2)
        words = load(source, self.pairs)
        return [words[i] for i in range(self.pairs)]
