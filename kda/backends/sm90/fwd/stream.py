"""fwd/gate to fwd/output in one kernel, for few heads: some CTAs make tiles, and others walk over the chunks of one
sequence and value head, each with 64 columns of its state.  A step of a walk is two chunks of 32 rows (parts/steps.py):
a state has half as many steps to go as in fwd/fused.py, each with two products that wait for each other.

Tiles go through memory, and are read while L2 has them.  CTAs that make tiles have the lower indices and wait for
nobody, so CTAs that walk always find what they wait for, on any number of SMs.

  CTA           warps     role     does
  makes tiles   0, 1      INVERSE  one for each group: the inverses of both chunks, and the step's way to memory
                2, 3      ROWS     the same: b of each chunk, and its rows of q, k and g to shared memory
                4-11      PREPARE  every so many-th step: one chunk after the other, and what joins them
                12-19     PREPARE  the same
  walks         0-3       CHAIN    all products of the state
                4         LOAD     tiles of a step by bulk copies, when they are there
                5         VALUES   rows of v, in pieces of 16 bytes
                6         STORE    rows of o

While INVERSE has the second chunk, its group joins what does not need that inverse.  ROWS brings the next step's first
rows to X and Y when the products have read them, and a second chunk's rows to where its tile will be, when the step
before has left it.

Steps are made in the order of their numbers in walks, of all walks in turn; first groups make earlier ones than second
groups, whose rows are brought when the first group of their CTA has made a chunk: so first steps are there sooner.

  pipeline, barrier      arrivals                         waits           says
  a CTA that makes tiles:
  solved, each group     1 of INVERSE, a lane             PREPARE         TB is there; it needs A_kk and b no more
  taken, each group      1 of INVERSE, a lane             PREPARE, ROWS   the copy to memory has read the tiles
  begun, each group      1 of PREPARE 0, a lane           ROWS            of the second group: it has made a chunk
  rows, 2 of each group  32 of ROWS, each lane with its   PREPARE         rows and b of a chunk of the step are there
                         pieces of q, k and g; 1 of
                         ROWS, a lane, when b is there
  GROUP                  256, of each group               PREPARE         as at prepare's sync_threads; dt_bias is
                                                                          there; operands of pairs were read
  WHOLE_GROUP_INVERSE    288, of each group               PREPARE,        all but TB is there, for INVERSE
                                                          INVERSE
  READ                   288, of each group               PREPARE, ROWS   operands of pairs of the whole step were read
  SCALED                 288, of each group               PREPARE,        kE and qg of both chunks of the step are there
                                                          INVERSE
  JOINED                 288, of each group               PREPARE,        the step's tiles are there, all but lam_a
                                                          INVERSE         lam_b, and zeros for TB_b
  GROUP_PRODUCT          192, of each group               warps 0 to 3,   in blocks of 8 rows: Y was read, where 6 and 7
                                                          6 and 7 of      write
                                                          PREPARE
  a CTA that walks:
  full, each stage       1 of LOAD with the bytes of the  CHAIN           tiles and v are there
                         copies; 32 of VALUES, each lane
                         with its pieces of v
  read, each stage       4 of CHAIN, a lane of each warp  LOAD, VALUES    both were read
  written, each o        4 of CHAIN, a lane of each warp  STORE           o is in shared memory
  taken, each o          1 of STORE, a lane               CHAIN           it was read

A flag in memory, `ready`, says that the tiles of a step are there: INVERSE sets it.

CHAIN's products have the state, or X, in registers, and issuing one waits until the tensor core has begun it.  So P and
O are issued in blocks of 16 channels, and all else is done between two of them:

  S        wait for the next step's tiles         P        round S, a block ahead of its product; o to shared memory
  o        wait for a place for it                O        X = v - P, decay S

The last step has P and O behind it, too, which nobody reads, and the state times ones.

Registers: 96 of all that make tiles; 240 of CHAIN, 56 of the other warps of its CTA.

  shared memory, K = 128
    makes tiles  configs.StreamConfig.group: twice two tiles of 29 KiB, 37 of operands, sums and A_kk (41 in blocks of 8
                 rows), and 2 of G                                                                      195 KiB, or 203
    walks        configs.StreamConfig.walker: 3 x (two tiles and 9 of v), 2 x 9 of o, 128 ones          220 KiB
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from ...common.cute import fast
from ...common.cute.async_copies import arrive_when_copied, bulk_copy, bulk_store
from ...common.cute.barriers import initialise
from ...common.cute.copies import field_at, fields_at, store
from ...common.cute.entry import Entry, permit_early_launch, wait_for_the_kernel_before
from ...common.cute.gate import beta_from, load_beta
from ...common.cute.rings import advance, phase_of, stage_of
from ...common.cute.segments import clear_tokens, locate_segment, place_of_segment
from ...common.cute.tile import LEAST_BUSY, WARPS, C
from ..configs import (
    COLUMNS,
    FIRST_PRODUCER,
    GROUPS,
    JOINED,
    OUTPUTS,
    PITCH_V,
    READ,
    SCALED,
    STREAM_LOAD,
    STREAM_STAGES,
    STREAM_STORE,
    STREAM_VALUES,
    TOKENS,
    StreamConfig,
)
from ..parts.chunk import ChunkMaker
from ..parts.making import Work, bring_rows, form_of
from ..parts.state import decay_block, own_decays
from ..parts.steps import PARTS, StepJoiner, StepState
from ..parts.teams import MakerGroup

O_THERE = 4                                  # the block of P behind which o of the step before is there
P_THERE = 3                                  # the block of O behind which P is there


class StreamStep(NamedTuple):
    """A step of a walk."""

    number: Any                              # its number among all steps that are made
    head: Any
    begin: Any                               # its first token
    tokens: Any
    place: Any                               # the index of its tiles and of its flag, among those of all steps


class Divisor(NamedTuple):
    """A positive number, by which others that are not negative are divided with a product."""

    number: Any
    reciprocal: Any                          # 2^32 times, rounded down: quotients are found, or one less

    def divide(self, n):
        """Quotient and remainder."""
        quotient = fast.high_word(n, self.reciprocal)
        rest = n - quotient * self.number
        more = Int32(rest >= self.number)
        return quotient + more, rest - more * self.number


def divisor(number):
    return Divisor(number, (Uint32(0xFFFFFFFF) // Uint32(number)).to(Int32))


class AllSteps(NamedTuple):
    """All steps, if all sequences had T tokens, and what their numbers are divided by."""

    items: Any
    walks: Divisor
    heads: Divisor
    segments: Divisor | None                 # where sequences are cut


def place_of_step(n, first_chunk, step, head, HV):
    """Return a step's place in memory: each sequence begins with a step of its own."""
    return ((n + first_chunk >> 1) + step) * HV + head


def locate_steps(c, x, n, segment, step, head):
    """First token and tokens of a sequence, or of a segment, and where one of its steps is in memory."""
    _, begin, tokens, chunk, _ = place_of_segment(c.chain, x, n, x.chunks, 1, 0)
    if c.cut:
        skipped, tokens = locate_segment(Int32(0), tokens, segment, x.segments, TOKENS)
        begin, step = begin + skipped, step + skipped // TOKENS
    return begin, tokens, place_of_step(n, chunk, step, head, x.HV)


class StreamMaker:
    """PREPARE and INVERSE."""

    def __init__(self, config: StreamConfig):
        self.c, self.struct, self.staged = config, config.group, config.staged
        self.team = MakerGroup()
        self.chunk = ChunkMaker(config.prepare, self.team, shared=True)
        self.form, self.tile = form_of(config, self.chunk), self.chunk.tile
        self.steps = StepJoiner(config.prepare.K, self.team, self.chunk.tensor_core)

    def work_of(self, shared, group):
        """Where a group works."""
        base = shared + group * self.struct.bytes
        fields = [field_at(base, getattr(self.struct, name)) for name in ("X", "Y", "sums", "A_kk", "columns", "b")]
        return Work(Int32(0), group, base, *fields, fields[:2], None, None)

    def of_half(self, work, half):
        """Where a group works at a chunk of its step: rows of the second one are brought to where its tile will be."""
        pairs = (self.struct.X, self.tile.KQ), (self.struct.Y, self.tile.KG)
        raw = [field_at(work.base + half * (self.tile.bytes + of_tile.offset - first.offset), first)
               for first, of_tile in pairs]
        return work._replace(raw=raw, b=work.b + half * C)

    def all_steps(self, x):
        walks, items = x.N * x.HV, (x.T + TOKENS - 1) // TOKENS
        if self.c.cut:
            walks, items = walks * x.segments, (items + x.segments - 1) // x.segments
        return AllSteps(items * walks, divisor(walks), divisor(x.HV), divisor(x.segments) if self.c.cut else None)

    def first(self, x, group):
        return x.makers * group + cute.arch.block_idx()[0]

    @cute.jit
    def find(self, x, every, number):
        """A group's next step that has tokens, from this number on; without tokens: there is none."""
        by = x.makers * GROUPS
        head, begin, tokens, place = Int32(0), Int64(0), Int32(0), Int32(0)
        while tokens <= 0 and number < every.items:
            step, walk = every.walks.divide(number)
            n, head = every.heads.divide(walk)
            segment = Int32(0)
            if cutlass.const_expr(self.c.cut):
                n, segment = every.segments.divide(n)
            first, length, place = locate_steps(self.c, x, n, segment, step, head)
            begin, tokens = first + step * TOKENS, cutlass.min(length - step * TOKENS, TOKENS)
            if tokens <= 0:
                number += by
        return StreamStep(number, head, begin, tokens, place)

    @cute.jit
    def produce(self, x, shared):
        """A group: its steps."""
        group = self.team.number()
        work = self.work_of(shared, group)
        a = work.base
        b = a + self.tile.bytes
        every, before, turn = self.all_steps(x), Int32(0), Int32(0)
        item = self.find(x, every, self.first(x, group))
        begun, solved = field_at(shared, self.struct.begun), field_at(work.base, self.struct.solved)
        G = field_at(work.base, self.struct.G)
        while item.tokens > 0:
            self.form.begin(x, work, item.begin, item.head)
            for half in cutlass.range(2, unroll=1):
                if item.tokens > half * C:
                    self.make(x, self.of_half(work, half), item, half, before, turn)
                    if group == 0 and before == 0 and self.team.warp() == LEAST_BUSY:
                        with cute.arch.elect_one():
                            # redundant: its release, not the arrival; it orders nothing
                            cute.arch.mbarrier_arrive(begun)
                    before += 1
                else:
                    # redundant: its acquire, not the wait, behind which ROWS has the step before
                    self.wait_for_rows(work, half, turn)
                    self.steps.clear(tile=b)
                    cute.arch.mbarrier_wait(solved, before & 1 ^ 1)
            READ.arrive(group)
            joined = self.steps.begin(a, b, G)
            # redundant: INVERSE has its own proxy fence before each copy; the documented use is one per writer
            cute.arch.fence_proxy("async.shared", space="cta")
            SCALED.arrive(group)
            following = self.find(x, every, item.number + x.makers * GROUPS)
            cute.arch.mbarrier_wait(solved, before & 1 ^ 1)
            self.steps.finish(a, b, G, *joined)
            # redundant: INVERSE has its own proxy fence before the copy; the documented use is one per writer
            cute.arch.fence_proxy("async.shared", space="cta")
            JOINED.arrive(group)
            item, turn = following, turn + 1

    @cute.jit
    def make(self, x, work, item, half, before, turn):
        """A chunk of a step, when so many chunks and steps were made."""
        tile, rows = work.base + half * self.tile.bytes, cutlass.min(item.tokens - half * C, C)
        head_rows = self.chunk.gate.rows_of_head(x, item.begin + half * C, item.head)
        self.wait_for_rows(work, half, turn)
        _, rows_made = self.form.rows(x, work, head_rows, rows)
        if half > 0:
            cute.arch.mbarrier_wait(field_at(work.base, self.struct.solved), before & 1 ^ 1)
        self.form.operands(x, work, tile, rows, partial(self.wait_for_tiles, work, half, turn), *rows_made)
        self.form.finish(work)

    @cute.jit
    def wait_for_tiles(self, work, half, turn):
        """The step before has left its tiles: ROWS has waited for that before it brought rows of a second chunk."""
        if half == 0:
            cute.arch.mbarrier_wait(field_at(work.base, self.struct.taken), turn & 1 ^ 1)

    def wait_for_rows(self, work, half, turn):
        cute.arch.mbarrier_wait(field_at(work.base, self.struct.rows) + half, turn & 1)

    @cute.jit
    def bring(self, x, shared, group):
        """ROWS, one warp: b of each chunk, and its rows, if they go through shared memory."""
        work = self.work_of(shared, group)
        every, turn, lane = self.all_steps(x), Int32(0), cute.arch.lane_idx()
        if group > 0 and self.find(x, every, self.first(x, 0)).tokens > 0:
            cute.arch.mbarrier_wait(field_at(shared, self.struct.begun), 0)
        item = self.find(x, every, self.first(x, group))
        while item.tokens > 0:
            # redundant: the wait for the first group, which orders nothing; without it, first steps come later
            for half in cutlass.range(2, unroll=1):
                if half > 0:
                    cute.arch.mbarrier_wait(field_at(work.base, self.struct.taken), turn & 1 ^ 1)
                arrival = field_at(work.base, self.struct.rows) + half
                if item.tokens > half * C:
                    head_rows = self.chunk.gate.rows_of_head(x, item.begin + half * C, item.head, of_gate=False)
                    to, rows = self.of_half(work, half), cutlass.min(item.tokens - half * C, C)
                    beta = load_beta(head_rows.beta, rows, x.HV, lane)
                    if cutlass.const_expr(self.staged):
                        bring_rows(self.c.prepare, head_rows, rows, x.H, x.HV, *to.raw)
                    to.b[lane] = beta_from(beta, self.c.prepare.beta, rows, lane)
                arrive_when_copied(arrival)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(arrival)
            item, turn = self.find(x, every, item.number + x.makers * GROUPS), turn + 1
            READ.sync(group)

    @cute.jit
    def invert(self, x, shared, group):
        """INVERSE, one warp."""
        work = self.work_of(shared, group)
        a, solved = work.base, field_at(work.base, self.struct.solved)
        every = self.all_steps(x)
        item = self.find(x, every, self.first(x, group))
        while item.tokens > 0:
            for half in cutlass.range((item.tokens + C - 1) // C, unroll=1):
                TB = field_at(a + half * self.tile.bytes, self.tile.TB)
                self.chunk.inverse.zeros(work.columns, TB)                     # A2 may have been there
                self.form.wait(group)                                          # A_kk is there
                self.chunk.inverse.solve(work.A_kk, work.columns, TB, None, work.b + half * C)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(solved)
            SCALED.sync(group)
            self.copy(x, work, item, 0, self.tile.KG.offset)
            JOINED.sync(group)
            self.steps.complete(a, a + self.tile.bytes)
            self.copy(x, work, item, self.tile.KG.offset, self.tile.end)
            self.hand_over(x, work, item)
            item = self.find(x, every, item.number + x.makers * GROUPS)

    def copy(self, x, work, item, begin: int, end: int):
        """Copy these bytes of both tiles of a step to memory."""
        # redundant: before the first copy, whose bytes PREPARE has written; the documented use is one per writer
        cute.arch.fence_proxy("async.shared", space="cta")
        # redundant: before the first copy, whose bytes this warp has not written
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for tile in range(2):
                skipped = tile * self.tile.bytes + begin
                to = x.tiles + (Int64(item.place) * (2 * self.tile.bytes) + skipped)
                bulk_store(to, work.base + skipped, end - begin)
            # redundant: behind the first copy, which would join the group of the second one
            cute.arch.cp_async_bulk_commit_group()

    def hand_over(self, x, work, item):
        """A step, when its tiles are in memory."""
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.mbarrier_arrive(field_at(work.base, self.struct.taken))
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.store(x.ready + item.place, Int32(1), sem="release", scope="gpu")

    def clear(self, x, end):
        """Clears o of tokens outside every sequence, a row of a head per warp."""
        warp = self.first(x, self.team.number()) * WARPS + self.team.warp()
        clear_tokens(x, self.c.chain.V, Int32(end) + warp, x.makers * (GROUPS * WARPS), 0, x.HV)


class StreamWalk(NamedTuple):
    """The walk of a CTA."""

    sequence: Any                            # sequence, or segment among those of all
    segment: Any                             # segment of its sequence
    head: Any
    strip: Any                               # strip of the state, or of M
    of_M: Any                                # from the identity, with v = 0
    first: Any                               # element of v and o, or of the response
    tokens: Any
    place: Any                               # the place of its first step

    @property
    def steps(self):
        return (self.tokens + TOKENS - 1) // TOKENS


class StreamWalker:
    """CHAIN, LOAD, VALUES and STORE."""

    def __init__(self, config: StreamConfig):
        self.stream, self.c, self.struct, self.state = config, config.chain, config.walker, StepState(config.chain)
        self.tile = self.state.tile
        self.bytes = 2 * self.tile.bytes             # bytes of a step
        self.both = self.c.strips + self.c.K // COLUMNS                       # CTAs of a segment, but the first

    @cute.jit
    def walk_of(self, x):
        number, c = cute.arch.block_idx()[0] - x.makers, self.c
        of_all, segment, of_M = c.strips, Int32(0), False
        if cutlass.const_expr(self.stream.cut):
            of_all = c.strips + (x.segments - 1) * self.both
        walk = number // of_all
        strip = number - walk * of_all
        n = walk // x.HV
        head = walk - n * x.HV
        sequence, columns = n, Int32(c.V)
        if cutlass.const_expr(self.stream.cut):
            if strip >= c.strips:                                              # not the first segment
                segment = (strip - c.strips) // self.both + 1
                strip = strip - c.strips - (segment - 1) * self.both
            sequence, of_M = n * x.segments + segment, strip >= c.strips
            if of_M:
                strip, columns = strip - c.strips, Int32(c.K)
        begin, tokens, place = locate_steps(self.stream, x, n, segment, 0, head)
        first = (begin * x.HV + head) * columns + strip * COLUMNS
        return StreamWalk(sequence, segment, head, strip, of_M, first, tokens, place)

    def field(self, shared, name):
        return field_at(shared, getattr(self.struct, name))

    @cute.jit
    def chain(self, x, shared, walk):
        S = self.state.zero()
        self.enter(x, S, walk)
        operand = self.state.operand(S)
        P, O, X = self.state.accumulators()
        full, rows_of_v = self.field(shared, "full"), self.field(shared, "v")
        stage, phase = Int32(0), Int32(0)
        if walk.steps > 0:
            cute.arch.mbarrier_wait(full, 0)
            self.state.issue_P(P, operand, S, shared, lambda block: None)
            self.issue_O(O, operand, S, P, X, shared, rows_of_v, field_at(shared, self.tile.decay))
        for i in cutlass.range(walk.steps, unroll=1):
            this_stage, output = stage, stage_of(i, OUTPUTS)
            step = shared + this_stage * self.bytes
            self.state.issue_S(S, X, step, 0)
            if i + 1 < walk.steps:                                             # behind the last step: that again
                stage, phase = advance(stage, phase, STREAM_STAGES)
            ahead = shared + stage * self.bytes
            decay = field_at(ahead, self.tile.decay)
            if i + 1 == walk.steps:                                            # and the state is left as it is
                decay = self.field(shared, "ones")
            cute.arch.mbarrier_wait(full + stage, phase)
            self.state.issue_S(S, X, step, 1)
            warpgroup.commit_group()
            cute.arch.mbarrier_wait(self.field(shared, "taken") + output, phase_of(i, OUTPUTS) ^ 1)
            self.state.issue_o(O, X, step)
            warpgroup.wait_group(1)
            self.state.issue_P(P, operand, S, ahead, partial(self.beside_P, shared, O, this_stage, output))
            self.issue_O(O, operand, S, P, X, ahead, rows_of_v + stage * (TOKENS * PITCH_V), decay)
        warpgroup.wait_group(0)
        self.leave(x, S, walk)

    def beside_P(self, shared, O, stage, output, block):
        """o of the step before to STORE, when it is there, and its stage back."""
        part = block - O_THERE
        if part == 0:
            warpgroup.wait_group(block + 1)                                    # all but the blocks of P
        if 0 <= part < PARTS:
            self.state.put_outputs(self.field(shared, "o") + output * (TOKENS * PITCH_V), O, part)
        if part == PARTS - 2:
            self.hand_over(self.field(shared, "read") + stage)
        if part == PARTS - 1:
            self.hand_over(self.field(shared, "written") + output)

    def issue_O(self, O, operand, S, P, X, step, rows_of_v, decay):
        """O of a step, and beside it X and the decay of the state, both of which S waits for."""
        v, d = None, own_decays(decay, 0)

        def beside(block):                                                     # with what the block before has loaded
            nonlocal v, d
            part, values, decays = block - P_THERE, v, d
            if block + 1 < self.state.blocks:
                d = own_decays(decay, block + 1)
            if 0 <= part + 1 < PARTS:
                v = self.state.load_values(rows_of_v, part + 1)
            if part == 0:
                warpgroup.wait_group(block + 1)                                # all but the blocks of O
            if 0 <= part < PARTS:
                self.state.subtract(X, P, values, part)
            decay_block(S, decays, block)

        self.state.issue_O(O, operand, step, beside)

    def hand_over(self, barrier):
        """A warp of CHAIN has read, or written, what the barrier says."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def enter(self, x, S, walk):
        """The state of a walk's first token."""
        c, number = self.c, walk.sequence * x.HV + walk.head
        if cutlass.const_expr(not self.stream.cut):
            if cutlass.const_expr(c.h0):
                self.state.load(x.h0, number, walk.strip, c.V, c.v_first, S)
        else:
            if cutlass.const_expr(c.h0):
                if walk.segment == 0:
                    self.state.load(x.h0, walk.sequence // x.segments * x.HV + walk.head, walk.strip, c.V, c.v_first, S)
            if walk.of_M:
                self.state.identity(S, walk.strip)

    @cute.jit
    def leave(self, x, S, walk):
        """The state after its last token."""
        c, number = self.c, walk.sequence * x.HV + walk.head
        if cutlass.const_expr(not self.stream.cut):
            if cutlass.const_expr(c.ht):
                self.state.store(x.ht, number, walk.strip, c.V, c.v_first, S)
        elif walk.of_M:
            self.state.store(x.M, number, walk.strip, c.K, True, S)
        else:
            self.state.store(x.ht, number, walk.strip, c.V, False, S)

    @cute.jit
    def load_tiles(self, x, shared, walk):
        """LOAD, one warp: the flag of a step is looked at ahead of its stage."""
        full, read = self.field(shared, "full"), self.field(shared, "read")
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(walk.steps, unroll=1):
            place = walk.place + i * x.HV
            with cute.arch.elect_one():
                ready = Int32(0)
                while ready == 0:
                    ready = cute.arch.load(x.ready + place, Int32, sem="acquire", scope="gpu")
                # redundant: to the simulator, copies write tiles and copies read them; the flag between is no copy
                cute.arch.fence_proxy("async.global")
            cute.arch.mbarrier_wait(read + stage, phase ^ 1)
            with cute.arch.elect_one():
                # redundant: its release, not the arrival; this thread has written nothing
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * self.tile.end)
                to, source = shared + stage * self.bytes, x.tiles + Int64(place) * self.bytes
                for tile in cutlass.range_constexpr(2):
                    skipped = tile * self.tile.bytes
                    bulk_copy(to + skipped, source + skipped, self.tile.end, full + stage)
            stage, phase = advance(stage, phase, STREAM_STAGES)

    @cute.jit
    def load_values(self, x, shared, walk):
        """VALUES, one warp.  Zeros of M's walk stay where they are."""
        full, read = self.field(shared, "full"), self.field(shared, "read")
        stage, phase = Int32(0), Int32(0)
        if cutlass.const_expr(self.stream.cut):
            if walk.of_M:
                zeros = cute.recast_ptr(self.field(shared, "v"), dtype=Uint32) + 4 * cute.arch.lane_idx()
                for word in cutlass.range(0, STREAM_STAGES * TOKENS * PITCH_V // 2, 128, unroll=1):
                    store(zeros + word, [Uint32(0)] * 4)
        for i in cutlass.range(walk.steps, unroll=1):
            cute.arch.mbarrier_wait(read + stage, phase ^ 1)
            if cutlass.const_expr(not self.stream.cut):
                self.request_values(x, shared, walk, stage, i)
            elif walk.of_M:
                cute.arch.mbarrier_arrive(full + stage)
            else:
                self.request_values(x, shared, walk, stage, i)
            stage, phase = advance(stage, phase, STREAM_STAGES)

    def request_values(self, x, shared, walk, stage, i):
        for half in range(2):
            rows = self.field(shared, "v") + (stage * TOKENS + half * C) * PITCH_V
            self.state.request_rows(x.v, rows, walk.first, i * TOKENS + half * C, walk.tokens, x.HV)
        arrive_when_copied(self.field(shared, "full") + stage)

    @cute.jit
    def store(self, x, shared, walk):
        """STORE, one warp."""
        written, taken = self.field(shared, "written"), self.field(shared, "taken")
        for i in cutlass.range(walk.steps, unroll=1):
            place = stage_of(i, OUTPUTS)
            cute.arch.mbarrier_wait(written + place, phase_of(i, OUTPUTS))
            for half in cutlass.range_constexpr(2):
                rows = self.field(shared, "o") + (place * TOKENS + half * C) * PITCH_V
                self.store_rows(x, rows, walk, i * TOKENS + half * C)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(taken + place)


    @cute.jit
    def store_rows(self, x, rows, walk, begin):
        """Rows of o, or of the response."""
        if cutlass.const_expr(not self.stream.cut):
            self.state.store_rows(x.o, rows, walk.first, begin, walk.tokens, x.HV)
        elif walk.of_M:
            self.state.store_rows(x.response, rows, walk.first, begin, walk.tokens, x.HV, self.c.K)
        else:
            self.state.store_rows(x.o, rows, walk.first, begin, walk.tokens, x.HV)


class Stream(Entry):
    def __init__(self, config: StreamConfig):
        self.c = config
        self.maker, self.walker = StreamMaker(config), StreamWalker(config)

    @cute.kernel
    def kernel(self, x):
        if cutlass.const_expr(self.c.cut):
            permit_early_launch()                                              # compose may start: all CTAs are there
        if cutlass.const_expr(self.c.pdl):
            wait_for_the_kernel_before()
        shared = SmemAllocator().allocate_array(Uint8, self.c.shared, byte_alignment=1024)
        makes = cute.arch.block_idx()[0] < x.makers
        if cute.arch.thread_idx()[0] == 0:
            self.initialise(shared, makes)
            cute.arch.mbarrier_init_fence()
        if cute.arch.thread_idx()[0] < self.c.prepare.K:
            if not makes:
                store(field_at(shared, self.c.walker.ones) + cute.arch.thread_idx()[0], [Float32(1.0)])
        cute.arch.sync_threads()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if makes:
            if warp < GROUPS:
                self.maker.invert(x, shared, warp)
            elif warp < FIRST_PRODUCER:
                self.maker.bring(x, shared, warp - GROUPS)
            else:
                self.maker.produce(x, shared)
                if cutlass.const_expr(self.c.chain.packed):
                    _, begin, tokens, _, _ = place_of_segment(self.c.chain, x, x.N - 1, 0, 1, 0)
                    self.maker.clear(x, begin + tokens)
        else:
            walk = self.walker.walk_of(x)
            if warp < FIRST_PRODUCER:
                cute.arch.setmaxregister_increase(self.c.registers[0])
                self.walker.chain(x, shared, walk)
            else:
                cute.arch.setmaxregister_decrease(self.c.registers[1])
                if warp == STREAM_LOAD:
                    self.walker.load_tiles(x, shared, walk)
                elif warp == STREAM_VALUES:
                    self.walker.load_values(x, shared, walk)
                elif warp == STREAM_STORE:
                    self.walker.store(x, shared, walk)

    @cute.jit
    def initialise(self, shared, makes):
        if makes:
            for group in cutlass.range_constexpr(GROUPS):
                initialise(fields_at(shared + group * self.c.group.bytes, self.c.group), self.c.group_pipelines)
        else:
            for pipeline in self.c.walker_pipelines:
                initialise(fields_at(shared, self.c.walker), (pipeline,))


build = Stream.build
