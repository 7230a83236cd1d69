"""bwd/walk: chunks of one segment of a sequence from the last to the first, one value head, 64 columns of dh, a state's
gradient.

  z^T = dh^T @ (b kg)^T + do^T @ (A_qk b)            dh^T (64, K) float32 in registers, bfloat16 where it is multiplied
  dv^T = z^T @ T'
  dh^T = dh^T 2^gc_last + do^T @ qg - dv^T @ kE

The operands are those of fwd/chain.py with b on the side of keys (configs.PrepareConfig.b_on_keys), transposed.
The rounded dh that leaves every two chunks goes to memory, as an image of bwd/grads' shared memory.

A segment is what fwd/chain.py has for one.  Where sequences are cut, `carry` walks first, from zero to what a segment
adds to dh; the transposed M of the forward is what it multiplies dh by, and common/cute/compose.py puts both together.

  warps  role  does
  0-3    WALK  all products, from registers and shared memory; dv and dh to global memory
  4      LOAD  a tile by one bulk copy, rows of do in pieces of 16 bytes

  pipeline, barrier  arrivals                                  waits  says
  full, each stage   1 of LOAD with the bytes of the tile; 32  WALK   a chunk is there
                     of LOAD, each lane with its pieces of do
  empty, each stage  4 of WALK, a lane of each warp            LOAD   no warp reads the stage any more
  CHAIN              128                                       WALK   dv and dh are in shared memory, the dv before last
                                                                      was read; the dh before has gone

  shared memory: configs.WalkConfig.struct; at K = 128 a stage has a tile of 29 KiB and do 4.5; dv twice 4.5, dh 16 KiB;
  at K = 64 the tile 17 and dh 8
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from ...common.cute.barriers import initialise
from ...common.cute.copies import allocate, field_at
from ...common.cute.rings import advance
from ...common.cute.segments import WalkPlace, begins_sequence, place_of_segment
from ...common.cute.tile import C
from ..configs import COLUMNS, LOAD_WARP, PITCH_V
from ..parts.state import Walker, multiply, register_mma, round_to, rounded
from ..parts.wgmma import accumulator, narrow_standing_view, narrow_view, view, wide_view

KE, QG = range(2)                            # halves of the tile's KQ


class Walk(Walker):
    """`announces`: others are told, `announce(s, number)`, when dv and dh of 64 tokens are in memory."""

    back = True
    announces = False

    @cute.kernel
    def kernel(self, x):
        c = self.c
        strip, head, p = cute.arch.block_idx()
        n, begin, left, chunk, state = place_of_segment(c, x, p, x.chunks, x.segments, x.segment)
        first = begins_sequence(c, x, p)
        if n >= 0 and not (cutlass.const_expr(c.carry) and first):
            s = allocate(c.struct)
            if cute.arch.thread_idx()[0] == 0:
                initialise(s, c.pipelines)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            tokens = cutlass.min(left, x.segment * C)
            first_v = (begin * x.HV + head) * c.V + strip * COLUMNS
            steps = (tokens + C - 1) // C
            if cute.arch.warp_idx() == LOAD_WARP:
                self.load(x, s, x.do, s.do, first_v, tokens, chunk, head, steps, False)
            else:
                place = WalkPlace(p, n, first, chunk, state, head, strip, first_v, tokens)
                self.walk(x, s, place, Int32(0), Int32(0), Int32(0))

    @cute.jit
    def walk(self, x, s, place, stage, phase, before):
        """WALK: from the state's gradient behind the last chunk to that before the first.  The ring is at a stage;
        returns where it is then.  `before`: dv and dh of so many times 64 tokens were announced."""
        c, head, strip = self.c, place.head, place.strip
        S = self.state.zero()
        if cutlass.const_expr(c.walk == "segments"):
            self.state.load(x.dht, place.p * x.HV + head, strip, c.V, False, S)
        elif cutlass.const_expr(c.dht):
            self.state.load(x.dht, place.n * x.HV + head, strip, c.V, c.v_first, S)
        first_dh = (Int64(place.state) * x.HV + head) * (c.K * c.V)
        stage, phase = self.go(x, S, s, place, first_dh, stage, phase, before)
        if cutlass.const_expr(c.carry):
            self.state.store(x.dh0, place.p * x.HV + head, strip, c.V, False, S)
        elif cutlass.const_expr(c.dh0 is not None) and place.first:
            self.state.store(x.dh0, place.n * x.HV + head, strip, c.V, c.v_first, S)
        return stage, phase

    @cute.jit
    def go(self, x, S, s, place, first_dh, stage, phase, before):
        """From chunk to chunk."""
        c, tokens, steps = self.c, place.tokens, place.steps
        operand, thread_place = self.state.operand(S), self.state.thread_place(place.first_v)
        for j in cutlass.range(steps, unroll=1):
            i = steps - 1 - j
            tile = s.tiles + stage * self.tile.bytes
            leaves = (i & 1) == 1 or j == 0                                    # two chunks, or the last one
            rows_of_dv = s.do
            if cutlass.const_expr(not c.carry):
                rows_of_dv = s.dv + (i & 1) * (C * PITCH_V)
                if leaves:
                    self.state.put_state(s.state, operand)
            cute.arch.mbarrier_wait(s.full + stage, phase)
            do = self.of_words(self.state.load_v(s.do + stage * (C * PITCH_V)))
            z = self.begin(S, operand, do, tile)
            if cutlass.const_expr(not c.carry):                                # beside the products
                self.state.meet()                                              # dh is there, and dv of the chunk before
                if leaves:
                    self.send(x, s, place, i, first_dh, stage, phase)
                if j == 1:
                    self.state.store_o(x.dv, s.dv, thread_place, i + 1, x.HV, tokens - (i + 1) * C)
                if j > 1:
                    self.state.store_o(x.dv, s.dv, thread_place, i + 1, x.HV)
                if cutlass.const_expr(self.announces):
                    if leaves and j > 0:
                        self.announce(s, before + place.pairs - 1 - (i + 1 >> 1))
            self.end(S, operand, z, tile, rows_of_dv)
            # redundant: but where states are carried: else the group has met behind its reads of do
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(s.empty + stage)
            stage, phase = advance(stage, phase, c.stages)
        if cutlass.const_expr(not c.carry):
            if steps > 0:
                self.state.meet()
                self.state.store_o(x.dv, s.dv, thread_place, 0, x.HV, tokens)
            self.state.was_sent()
            if cutlass.const_expr(self.announces):
                if steps > 0:
                    self.announce(s, before + place.pairs - 1)
        return stage, phase

    def send(self, x, s, place, i, first_dh, stage, phase):
        """Begin to store dh that leaves chunk i, whose tile lies in a stage of the ring."""
        to = x.dh + (first_dh + Int64(i >> 1) * x.HV * (self.c.K * self.c.V))
        self.state.send_state(to, place.strip, s.state)

    def begin(self, S, operand, do, tile):
        """The products of a chunk that no other one waits for: z, and what do adds to dh."""
        standing = OperandMajorMode.MN
        mma, mma_C = register_mma(C, OperandMajorMode.K), register_mma(C, standing)
        # z^T = dh^T @ (b kg)^T + do^T @ (A_qk b)
        z = accumulator(mma, (COLUMNS, C))
        kg = field_at(tile, self.tile.KG)
        multiply(mma, z, operand, wide_view(kg, C, self.c.K), accumulate=False)
        multiply(mma_C, z, do, narrow_standing_view(tile + self.tile.A_qk.offset), accumulate=True, fenced=True)
        warpgroup.commit_group()
        # redundant: it waits for nothing; without it ptxas waits for z before S decays
        warpgroup.wait_group(1)
        self.state.decay(S, tile)
        multiply(register_mma(self.c.K, standing), S, do, self.rows(tile, QG), accumulate=True)
        # redundant: its place; otherwise they belong to the next group, which is waited for as well
        warpgroup.commit_group()
        return z

    def end(self, S, operand, z, tile, rows_of_dv):
        """From z of a chunk to dh that enters it, also rounded, and to dv in shared memory."""
        c = self.c
        mma, mma_S = register_mma(C, OperandMajorMode.K), register_mma(c.K, OperandMajorMode.MN)
        warpgroup.wait_group(1)
        # dv^T = z^T @ T'
        dv = accumulator(mma, (COLUMNS, C))
        multiply(mma, dv, rounded(mma, z, C), narrow_view(tile + self.tile.TB.offset), accumulate=False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        # dh^T -= dv^T @ kE
        found = rounded(mma, dv, C)
        words = cute.recast_tensor(cute.coalesce(found), Uint32)
        negative = self.of_words([words[w] ^ Uint32(0x80008000) for w in range(8)])
        multiply(mma_S, S, negative, self.rows(tile, KE), accumulate=True)
        warpgroup.commit_group()
        if not c.carry:
            self.state.put_rows(rows_of_dv, found)
        warpgroup.wait_group(0)
        round_to(operand, S)

    def of_words(self, words):
        """An operand (64, C) of registers, in words of two."""
        mma = register_mma(C, OperandMajorMode.K)
        operand = cute.make_rmem_tensor(mma.make_fragment_A(mma.partition_shape_A((COLUMNS, C))).shape, BFloat16)
        flat = cute.recast_tensor(cute.coalesce(operand), Uint32)
        for w in range(8):
            flat[w] = words[w]
        return operand

    def rows(self, tile, half: int):
        """(K, C): kE or qg, transposed."""
        both = view(tile, SmemLayoutAtomKind.MN_SW128, (self.c.K, 2 * C), (1, 0))
        return cute.local_tile(both, (self.c.K, C), (0, half))


build = Walk.build
