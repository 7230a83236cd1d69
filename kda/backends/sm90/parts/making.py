"""How a group of a CTA's warps makes a chunk for CHAIN, of fwd/fused.py: rows, then operands and pairs in its tile.

`OneProduct`, of a bounded gate with l2norms, and `InBlocks`, of any other, do the same steps:

  begin      of a piece of a walk
  rows       q, k and decays of the chunk in registers, and what warps know of each other's
  operands   of pairs, and their product; of the state to the tile, when the group may write there (`acquire`)
  finish     what a warp has made is there, for the one that completes the inverse
  wait       by that one, of PREPARE or, in clusters of four, INVERSE: all has been made

Rows come from memory, or (`Requested`) by way of shared memory: a warp requests its own ones as soon as the products of
the chunk before have read X and Y, where they lie until the operands of their chunk take that place.  `InvertersAhead`:
only the warps that compute the inverse, which come to their rows last, request them, each in those rows of X that no
other warp's part of the product reads; all others load theirs, while they wait for the inverse.
"""

import functools
from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Uint8, Uint32
from cutlass.cute.nvgpu import warpgroup

from ...common.cute.async_copies import copy_16_bytes_later
from ...common.cute.copies import compute_words_now, load, load_one, store
from ...common.cute.gate import Gate, beta_from, load_beta
from ...common.cute.rows import Rows, put
from ...common.cute.tile import BF16, GROUP_ROWS, HALF, LEAST_BUSY, WARP_ROWS, C
from ..configs import WHOLE_GROUP, WHOLE_GROUP_INVERSE, FusedConfig
from .chunk import ChunkMaker
from .piece import ScaledGate

INVERTERS = 2                                # the warps of a group that compute the inverse, but in clusters of four:
LAST_INVERTER = INVERTERS - 1                # each has 16 rows of A_kk, and this one completes it
PIECE = 16                                   # bytes
# A group and its memory; `raw`: where requested rows lie, q and k, and g.
Work = namedtuple("Work", "rank group base X Y sums A_kk columns b raw gate places")


@cute.jit
def loaded_beta(team, x, head_rows, rows):
    """What memory has for beta of the chunk's rows, in the warp that has the least to do."""
    loaded = x.beta.dtype(0.0)
    if team.warp() == LEAST_BUSY:
        loaded = load_beta(head_rows.beta, rows, x.HV, cute.arch.lane_idx())
    return loaded


@cute.jit
def store_b(c, team, b, loaded, rows):
    """Store b before rows meet, if keys are multiplied by it: b of the chunk before, which may still be read, has
    another place.  Otherwise the inverse of that chunk reads its b from the same place."""
    if cutlass.const_expr(c.b_on_keys):
        if team.warp() == LEAST_BUSY:
            b[cute.arch.lane_idx()] = beta_from(loaded, c.beta, rows, cute.arch.lane_idx())


def compute_now(kept, place, words):
    """What goes to a place later.  NVVM would compute it there, and hold what it is made of until then."""
    compute_words_now(words)
    kept.append((place, words))


def form_of(config: FusedConfig, chunk: ChunkMaker):
    if config.prepare.in_blocks:
        return InBlocks(config, chunk)
    return InvertersAhead(config, chunk) if config.inverters_ahead else OneProduct(config, chunk)


class Form:
    """The end of a chunk, which is the same."""

    @cute.jit
    def finish(self, work):
        # redundant: who completes the inverse has a proxy fence before the copy; the documented use is one per writer
        cute.arch.fence_proxy("async.shared", space="cta")                     # A_qk, kE and qg are in the tile
        if cutlass.const_expr(self.helped):
            WHOLE_GROUP_INVERSE.arrive(work.group)
        elif self.team.warp() != LAST_INVERTER:
            WHOLE_GROUP.arrive(work.group)

    def wait(self, group):
        (WHOLE_GROUP_INVERSE if self.helped else WHOLE_GROUP).sync(group)


class OneProduct(Form):
    def __init__(self, config: FusedConfig, chunk: ChunkMaker):
        self.c, self.staged, self.helped = config.prepare, config.staged, config.helped
        self.chunk, self.team = chunk, chunk.team
        self.requested = (RequestedScaled if config.short else RequestedByChannel)(self.c, self.team)
        self.short = config.short

    def begin(self, x, work, begin, head):
        """Nothing."""

    def rows(self, x, work, head_rows, rows):
        """Also what memory has for beta (`loaded_beta`)."""
        loaded = loaded_beta(self.team, x, head_rows, rows)
        if self.staged:
            qn, kn, gc = self.requested.load_rows(self.requested.found(head_rows, *work.raw), rows, 1, 1)
        else:
            qn, kn, gc = self.chunk.gate.load_rows(head_rows, rows, x.H, x.HV)
        self.meet(work, gc, loaded, rows)
        return loaded, (qn, kn, gc)

    def request(self, x, work, head_rows, rows):
        self.requested.request(head_rows, rows, x.H, x.HV, *work.raw)

    def meet(self, work, gc, loaded, rows):
        store_b(self.c, self.team, work.b, loaded, rows)
        self.chunk.gate.sum_over_warps(gc, work.sums, self.c.K // 32 * cute.arch.lane_idx())

    @cute.jit
    def operands(self, x, work, tile, rows, acquire, qn, kn, gc):
        of_k, of_state = None, []
        if cutlass.const_expr(self.c.b_on_keys):
            of_k = load(work.b + WARP_ROWS * self.team.warp(), WARP_ROWS)
        put_later = functools.partial(compute_now, of_state)
        self.chunk.pairs.one_product(qn, kn, gc, work.sums, work.X, work.Y, x.lower_bound, of_k, put_later)
        self.chunk.pairs.meet_for_product()
        if self.team.warp() < 4:
            core = self.chunk.tensor_core
            acc = core.accumulator()
            core.issue_one_product(acc, work.X, work.Y)
            self.put_state(tile, of_state, acquire)
            warpgroup.wait_group(0)
            self.store_pairs(core, acc, work, tile, rows)
        else:
            self.put_state(tile, of_state, acquire)
            self.chunk.pairs.store_decay(tile, work.sums)

    def store_pairs(self, core, acc, work, tile, rows):
        if self.short:
            core.store_causal(acc, work.A_kk, work.b, tile)
        else:
            core.store_pairs(acc, work.A_kk, work.b, tile, None, rows, 0)

    def put_state(self, tile, of_state, acquire):
        """Operands of the state to the tile, when the group may write there."""
        acquire()
        for place, words in of_state:
            put(tile, place, words)

    def operands_were_read(self):
        self.team.meet()


class InvertersAhead(OneProduct):
    """A group whose warps 0 and 1 compute the inverse."""

    def __init__(self, config: FusedConfig, chunk: ChunkMaker):
        super().__init__(config, chunk)
        self.requested, self.gate = RequestedInX(self.c, self.team), ScaledGate(self.c, self.team)

    @cute.jit
    def begin(self, x, work, begin, head):
        """What is the same in all chunks of a head, which would take a register or a load of each chunk."""
        head_rows, channel = self.chunk.gate.rows_of_head(x, begin, head), self.team.thread()
        if cutlass.const_expr(self.c.bias):
            if channel < self.c.gate_width:
                store(work.gate + channel, [load_one(head_rows.bias + channel)])
        if channel == 0:
            store(work.gate + self.c.gate_width, [head_rows.rate])
        self.team.meet()                                                       # rate and dt_bias are there

    def rows(self, x, work, head_rows, rows):
        raw = self.fetch(x, work, head_rows, rows)
        loaded = loaded_beta(self.team, x, head_rows, rows)                    # rows do not wait for it
        rate, bias = load_one(work.gate + self.c.gate_width), work.gate
        qn, kn, gc = self.gate.prepare(*raw, head_rows._replace(rate=rate, bias=bias), rows)
        self.meet(work, gc, loaded, rows)
        return loaded, (qn, kn, gc)

    @cute.jit
    def fetch(self, x, work, head_rows, rows):
        raw = self.requested.nothing(x.g.dtype)
        if self.team.warp() < INVERTERS:
            raw = self.requested.fetch_requested(head_rows, rows, x.HV, work.X)
        else:
            raw = self.chunk.gate.fetch(head_rows, rows, x.H, x.HV)
        return raw

    @cute.jit
    def request(self, x, work, head_rows, rows):
        """The next rows of warps 0 and 1: the product has read X."""
        if self.team.warp() < INVERTERS:
            self.requested.request(head_rows, rows, x.H, x.HV, work.X, work.Y)


class InBlocks(Form):
    def __init__(self, config: FusedConfig, chunk: ChunkMaker):
        self.c, self.staged, self.helped = config.prepare, config.staged, config.helped
        self.chunk, self.team = chunk, chunk.team
        self.requested = RequestedByRow(self.c, self.team, chunk.tensor_core, chunk.tile)

    def begin(self, x, work, begin, head):
        if self.c.bias:
            self.chunk.rows.store_bias(self.chunk.gate.rows_of_head(x, begin, head), work.sums)
            self.team.meet()                                                   # dt_bias is there

    def rows(self, x, work, head_rows, rows):
        maker, loaded = self.chunk.rows, loaded_beta(self.team, x, head_rows, rows)
        if self.staged:
            raw = self.requested.fetch(self.requested.found(head_rows, *work.raw), rows, 1, 1)
        else:
            raw = maker.fetch(head_rows, rows, x.H, x.HV)
        store_b(self.c, self.team, work.b, loaded, rows)
        qn, kn, decays = maker.prepare(*raw, rows, head_rows, work.sums)
        maker.blocks(qn, kn, decays, work.sums, work.X, work.Y)
        return loaded, (qn, kn, decays)

    def request(self, x, work, head_rows, rows):
        self.requested.request(head_rows, rows, x.H, x.HV, *work.raw)

    def operands(self, x, work, tile, rows, acquire, qn, kn, decays):
        acquire()
        core, maker = self.chunk.tensor_core, self.chunk.rows
        core.X, core.Y, core.of_16, core.pairs_to = work.X, work.Y, tile, (work.A_kk, work.b, tile, None, rows, 0)
        gc, of_k = maker.make_sums(decays, work.sums, work.Y, x.lower_bound), None
        if self.c.b_on_keys:
            of_k = load(work.b + maker.first_row(), GROUP_ROWS)
        maker.across_blocks(qn, kn, gc, work.sums, work.X, tile, work.Y, tile, of_k)

    def operands_were_read(self):
        """All have met since."""


class Requested:
    """Rows that each warp finds where it had them copied to."""

    def row_within(self, row, tokens):
        return row

    def places(self, X, Y, g_dtype):
        """Where the warp's rows of q, k and g lie."""
        first = WARP_ROWS * self.c.K * self.team.warp()
        return X + first, X + (C * self.c.K + first), Y + first

    def request(self, head_rows, tokens, H, HV, X, Y):
        """Past the end of a chunk of so many tokens: its last row."""
        K, lane, first = self.c.K, cute.arch.lane_idx(), WARP_ROWS * self.team.warp()
        sources, places = head_rows[: 2 if self.c.per_head else 3], self.places(X, Y, head_rows.g.dtype)
        for source, heads, to in zip(sources, (H, H, HV), places):
            piece = 8 * PIECE // source.dtype.width                            # elements
            for j in range(WARP_ROWS * K // (32 * piece)):
                row, column = first + (lane + 32 * j) // (K // piece), lane % (K // piece) * piece
                address = source + (cutlass.min(row, tokens - 1) * (heads * K) + column)
                copy_16_bytes_later(address.toint(), to + self.behind(row - first, column, (lane + 32 * j) * piece))
        cute.arch.cp_async_commit_group()

    def behind(self, row, column, element):
        """Elements from the place of the warp's rows to one of them: two spellings of one number, of which ptxas spills
        less with this one in blocks of 8 rows, and with `element` otherwise."""
        return row * self.c.K + column

    def wait(self):
        cute.arch.cp_async_wait_group(0)
        # redundant: in the simulator, where a warp waits as a whole; the manual lets each lane wait for its own copies
        cute.arch.sync_warp()

    def found(self, head_rows, X, Y):
        """Where rows are that were requested, when they are there."""
        self.wait()
        return head_rows._replace(q=X, k=X + C * self.c.K, g=Y)


class RequestedByChannel(Requested, Gate):
    """Requested rows in the layout of Gate."""


class RequestedScaled(Requested, ScaledGate):
    """The same."""


class RequestedInX(RequestedByChannel):
    """Rows that a warp requested to those 16 of X that its part of the product reads: q and k in a half of their
    channels, g in the other, or behind them."""

    def places(self, X, Y, g_dtype):
        row = HALF * BF16
        q = cute.recast_ptr(X, dtype=Uint8) + 2 * C // 4 * row * self.team.warp()
        k = WARP_ROWS * self.c.K * BF16
        g = q + (2 * C * row if self.c.K > HALF else 2 * k)
        return (*(cute.recast_ptr(q + n, dtype=X.dtype) for n in (0, k)), cute.recast_ptr(g, dtype=g_dtype))

    def behind(self, row, column, element):
        return element

    def fetch_requested(self, head_rows, tokens, HV, X):
        """What Gate.fetch returns, when it is there."""
        self.wait()
        K, d = self.c.K, self.c.K // 32 * cute.arch.lane_idx()
        raw = [[self.load_words(place + (r * K + d)) for r in range(WARP_ROWS)]
               for place in self.places(X, None, head_rows.g.dtype)[: 2 if self.c.per_head else 3]]
        if self.c.per_head:
            rows = [cutlass.min(WARP_ROWS * self.team.warp() + r, tokens - 1) for r in range(WARP_ROWS)]
            raw.append([self.load_words_of_gate(head_rows.g, row * HV, d) for row in rows])
        return tuple(raw)

    def nothing(self, g_dtype):
        """The same, of zeros."""
        words = [Uint32(0)] * (self.c.K // HALF)
        of_g = [g_dtype(0.0)] if self.c.per_head else [Uint32(0)] * (self.c.K // HALF * g_dtype.width // 16)
        return tuple([of_row] * WARP_ROWS for of_row in (words, words, of_g))


class RequestedByRow(Requested, Rows):
    """Requested rows in the layout of Rows."""

    def load_row(self, pointer, row, heads):
        source = cute.recast_ptr(pointer, dtype=Uint32) + (row * (self.c.K // 2) + self.first_channel() // 2)
        words = load(source, self.pairs)
        return [words[i] for i in range(self.pairs)]
