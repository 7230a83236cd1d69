"""fwd/state and fwd/output: the chunks of one segment of a sequence in turn, one value head, 64 columns of the state.
Formulas and products are those of parts/state.py.

A segment is a whole sequence, or a run of chunks if few heads would leave the chip idle.  Then `carry`
walks first: from zero to what a segment adds to a state, and, with v = 0, from the columns of 1 to those of M (K, K),
the matrix that it multiplies a state by, kept transposed.  It has no outputs; common/cute/compose.py makes the states
between segments of both.

  warps  role   does
  0-3    CHAIN  all products, from registers and shared memory; o to global memory
  4      LOAD   a tile (configs.tile) by one bulk copy, rows of v in pieces of 16 bytes: bulk copies of rows would be
                issued by one lane after the other, 50 clocks each

  pipeline, barrier  arrivals                                  waits  says
  full, each stage   1 of LOAD with the bytes of the tile; 32  CHAIN  a chunk is there
                     of LOAD, each lane with its pieces of v
  empty, each stage  4 of CHAIN, a lane of each warp           LOAD   no warp reads the stage any more
  CHAIN              128                                       CHAIN  o (r, and the state) is in shared memory, the o
                                                                      before last was read

The bottleneck is the state's path from chunk to chunk: S rounded, P, v - P rounded, v_new, S.  While P and O are
computed, o of the previous chunk is written; o's other product is queued behind S.

  shared memory: configs.ChainConfig.struct; at K = 128 a stage has a tile of 29 KiB and v 4.5; o twice 4.5 KiB
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common.cute.barriers import initialise
from ...common.cute.copies import allocate
from ...common.cute.rings import advance
from ...common.cute.segments import place_of_checkpoint, place_of_segment
from ...common.cute.tile import C
from ..configs import CHAIN, COLUMNS, LOAD_WARP, PITCH_V
from ..parts.state import Walker


class Chain(Walker):
    back = False

    @cute.kernel
    def kernel(self, x):
        c = self.c
        strip, head, p = cute.arch.block_idx()
        n, begin, left, chunk, state = place_of_segment(c, x, p, x.chunks, x.segments, x.segment)
        tokens = cutlass.min(left, x.segment * C)
        last = tokens == left                                                  # the last segment of its sequence
        if n >= 0 and not (cutlass.const_expr(c.carry and not c.recorded) and last):
            s = allocate(c.struct)
            if cute.arch.thread_idx()[0] == 0:
                initialise(s, c.pipelines)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            first_v = (begin * x.HV + head) * c.V + strip * COLUMNS
            steps = (tokens + C - 1) // C
            of_M = c.carry and strip >= c.V // COLUMNS
            if cute.arch.warp_idx() == LOAD_WARP:
                self.load(x, s, x.v, s.v, first_v, tokens, chunk, head, steps, of_M)
            else:
                S = self.state.zero()
                self.enter(x, S, n, p, head, strip, of_M)
                first_h = (Int64(state) * x.HV + head) * (c.K * c.V)
                self.walk(x, S, s, first_v, first_h, strip, tokens, steps, of_M, chunk, head)
                self.leave(x, S, n, p, head, strip, last, of_M)

    @cute.jit
    def enter(self, x, S, n, p, head, strip, of_M):
        """The state of the segment's first token."""
        c = self.c
        if cutlass.const_expr(c.walk == "segments"):
            self.state.load(x.h0, p * x.HV + head, strip, c.V, False, S)
        elif cutlass.const_expr(c.h0):
            self.state.load(x.h0, n * x.HV + head, strip, c.V, c.v_first, S)
        if of_M:
            self.state.identity(S, strip - c.V // COLUMNS)

    @cute.jit
    def leave(self, x, S, n, p, head, strip, last, of_M):
        """The state after the segment's last token."""
        c = self.c
        if cutlass.const_expr(c.carry):
            if of_M:
                self.state.store(x.M, p * x.HV + head, strip - c.V // COLUMNS, c.K, True, S)
            else:
                self.state.store(x.ht, p * x.HV + head, strip, c.V, False, S)
        elif cutlass.const_expr(c.ht) and last:
            self.state.store(x.ht, n * x.HV + head, strip, c.V, c.v_first, S)

    @cute.jit
    def walk(self, x, S, s, first_v, first_h, strip, tokens, steps, of_M, first_chunk, head):
        """CHAIN: from chunk to chunk."""
        c = self.c
        rows_of_o = s.o if cutlass.const_expr(c.has_o) else s.v
        rows_of_r = s.r if cutlass.const_expr(c.has_r) else s.v
        operand, thread_place = self.state.operand(S), self.state.thread_place(first_v)
        stage, phase = Int32(0), Int32(0)
        place = place_of_checkpoint(self.c, x, first_chunk, Int32(0), steps)
        for i in cutlass.range(steps, unroll=1):
            tile = s.tiles + stage * self.tile.bytes
            if cutlass.const_expr(c.has_r):
                if i % c.every == 0:
                    self.state.put_state(s.state, operand)
            elif cutlass.const_expr(c.h):
                if i % c.every == 0:
                    self.state.store(self.kept_state(x, first_h, i), 0, strip, c.V, c.v_first, S)
            elif cutlass.const_expr(c.checkpoints is not None):
                if place >= 0:
                    self.state.store(x.pool + place, head, strip, c.V, c.v_first, S)
                place = place_of_checkpoint(self.c, x, first_chunk, i + 1, steps)     # in time for the next chunk
            cute.arch.mbarrier_wait(s.full + stage, phase)
            words_of_v = self.state.load_v(s.v + stage * (C * PITCH_V), zero=of_M)   # v before o: waited for first
            PO = self.state.issue_PO(operand, tile)
            if cutlass.const_expr(c.has_r):
                CHAIN.sync()                                                   # so is the state
                if i % c.every == 0:
                    self.state.send_state(self.kept_state(x, first_h, i), strip, s.state)
            if cutlass.const_expr(not c.carry) and i > 0:
                if cutlass.const_expr(not c.has_r):
                    CHAIN.sync()                                               # o of the chunk before is there
                self.store_rows(x, rows_of_o, rows_of_r, thread_place, i - 1)
            half = (i & 1) * (C * PITCH_V)
            of_o = self.state.update(S, operand, PO, tile, words_of_v, rows_of_r + half)
            self.state.put_o(rows_of_o + half, of_o, PO)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(s.empty + stage)
            stage, phase = advance(stage, phase, c.stages)
        if cutlass.const_expr(not c.carry) and steps > 0:
            CHAIN.sync()
            self.store_rows(x, rows_of_o, rows_of_r, thread_place, steps - 1, tokens - (steps - 1) * C)
        if cutlass.const_expr(c.has_r):
            cute.arch.cp_async_bulk_wait_group(0, read=True)                   # the copy has read the last state

    def store_rows(self, x, rows_of_o, rows_of_r, thread_place, i, tokens=None):
        """o and r of chunk i."""
        if self.c.has_o:
            self.state.store_o(x.o, rows_of_o, thread_place, i, x.HV, tokens)
        if self.c.has_r:
            self.state.store_o(x.r, rows_of_r, thread_place, i, x.HV, tokens)

    def kept_state(self, x, first, i):
        """Where the state that enters chunk i goes."""
        return x.h + (first + Int64(i // self.c.every) * x.HV * (self.c.K * self.c.V))


build = Chain.build
