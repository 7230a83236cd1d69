"""fwd/state and fwd/output of a step that records gradients: the chunks of one segment of a sequence in turn, one value
head, all of the state, which is the S of parts/state.py.

  X = v - kE S                        X^T and o^T lie next to each other in tensor memory (V, 2 x 32), so that S comes
  S = 2^gc_last S + KT^T X            as it lies, and so do r and o when X is multiplied by [T' - I | A2]^T
  r = X + (T' - I) X
  o = qg S + A2 X

Two products lie between a state and the next one: [X | o] starts as [v | 0] before S is known, and r and o are
computed after S.  It keeps r for the backward, and the rounded S that enters every two chunks.

A segment is a whole sequence, or a run of chunks if few heads would leave the chip idle.  Then `carry`
walks first, a CTA each: from zero to what a segment adds to a state, and, with v = 0, from the columns of 1 to those of
M (K, K), the matrix that it multiplies a state by, kept transposed.  It has no outputs; common/cute/compose.py makes
the states between segments of both.

  warps  role      does
  0-7    CHAIN     S rounded and decayed, X rounded; states to memory.  warp 0: issues products
  8-11   EPILOGUE  r and o, rounded, to memory: a quarter of the columns each
  12     LOAD      a tile by one bulk copy, rows of v in pieces of 16 bytes

  pipeline, barrier  arrivals                                  waits     says
  full, each stage   1 of LOAD with the bytes of the tile; 32  CHAIN     a chunk is there
                     of LOAD, each lane with its pieces of v
  empty, each stage  1 of CHAIN, a commit                      LOAD      no product reads the stage any more
  out                1 of CHAIN, a commit                      CHAIN     X^T is there, S rounded was read
  added              1 of CHAIN, a commit                      CHAIN     S is that which leaves the chunk
  done, each stage   1 of CHAIN, a commit                      EPILOGUE  r^T and o^T are there
  read, each stage   4 of EPILOGUE, a lane of each warp        CHAIN     they were read
  IMAGE_THERE        256                                       CHAIN     S is rounded and decayed
  ROWS_THERE         256                                       CHAIN     X is in shared memory, out was read

  shared memory: configs.RecordConfig.struct; a stage has a tile of 29 KiB and v 8; S rounded twice 32, X 8, r and o 16,
  [1 | 0] 4;  of K = V = 64 17 and 4, 16, 4, 8, 4
  tensor memory: configs.RecordColumns; all is allocated, so that columns begin at 0; of K = V = 64 a half
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from ...common.cute import fast
from ...common.cute.barriers import initialise
from ...common.cute.copies import copy_16_bytes, in_global, store
from ...common.cute.packed import rounded
from ...common.cute.rings import advance
from ...common.cute.segments import place_of_segment
from ...common.cute.tile import C, swizzle_128B
from ..configs import (
    EPILOGUE_WARPS,
    IMAGE_THERE,
    ROWS_THERE,
    STATE_WARPS,
    RecordConfig,
)
from ..parts import umma
from ..parts.state import Walker, store_transposed

OUT = 2 * C                                  # columns of tensor memory, from even chunks' [r; o] to odd ones'


class Record(Walker):
    back = False

    def __init__(self, config: RecordConfig):
        super().__init__(config)
        K, V, N = config.K, config.V, config.columns
        self.added = umma.Product(K, V, umma.across(C), umma.across(C), range(C // 16))          # KT^T @ X
        self.on_v = umma.Product(V, N, umma.across(C), umma.across(C), range(C // 16))           # v^T @ [1 | 0]
        self.on_state = umma.Product(V, N, umma.across(K), umma.along(2 * C), range(K // 16))    # S^T @ [-kE; qg]^T
        self.on_X = umma.Product(V, N, umma.across(C), umma.across(C), range(C // 16))           # X^T @ [T' - I; A2]^T

    @cute.kernel
    def kernel(self, x):
        c, warp = self.c, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        strip, head, p = cute.arch.block_idx()
        n, begin, left, chunk, state = place_of_segment(c, x, p, x.chunks, x.segments, x.segment)
        if n >= 0:
            s = self.set_up()
            if cute.arch.thread_idx()[0] == 0:
                initialise(s, c.epilogue_pipelines)
                cute.arch.mbarrier_init_fence()
            self.store_one(s.one)
            cute.arch.sync_threads()                                           # mbarriers and tensor memory are there
            umma.fence_after_thread_sync()
            self.find_tensor_memory(s)
            tokens = cutlass.min(left, x.segment * C)
            steps = (tokens + C - 1) // C
            of_M = cutlass.const_expr(c.carry) and strip > 0                   # this CTA walks for M
            if warp == STATE_WARPS + EPILOGUE_WARPS:
                self.load(x, s, x.v, begin, tokens, chunk, head, steps, not of_M)
            elif warp >= STATE_WARPS:
                if cutlass.const_expr(not c.carry):
                    self.write_results(x, s, (begin * x.HV + head) * c.V, tokens, steps, warp - STATE_WARPS)
            else:
                if cutlass.const_expr(c.walk == "segments"):
                    self.enter(x.h0, p * x.HV + head, False)
                elif cutlass.const_expr(c.h0 is not None):
                    self.enter(x.h0, n * x.HV + head, c.v_first)
                else:
                    self.enter_constant(of_M)
                self.walk(x, s, state, head, steps, of_M)
                if cutlass.const_expr(c.carry):
                    if of_M:
                        self.leave(x.M, p * x.HV + head, True)
                    else:
                        self.leave(x.ht, p * x.HV + head, False)
                elif cutlass.const_expr(c.ht) and tokens == left:              # the last of its sequence
                    self.leave(x.ht, n * x.HV + head, c.v_first)
                # redundant: where no state leaves, because rows of the last chunk, fenced as well, are read last
                umma.fence_before_thread_sync()
            cute.arch.sync_threads()                                           # tensor memory is unused
            if warp == 0:
                umma.free(c.allocated, self.begin)

    @cute.jit
    def store_one(self, to):
        """[1 | 0] (C, 2 C): a row of 128 bytes has 1 in its own column; for products behind `issue_v`'s fence."""
        row, piece = cute.arch.thread_idx()[0] >> 3, cute.arch.thread_idx()[0] & 7
        if row < C:
            values = [Float32(1.0) if piece * 8 + e == row else Float32(0.0) for e in range(8)]
            store(to + swizzle_128B(row, piece * 8, C) // 2, values)

    @cute.jit
    def walk(self, x, s, state, head, steps, of_M):
        """CHAIN: from chunk to chunk."""
        c, warp = self.c, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        of_state = c.K * c.V
        kept = x.h + (Int64(state) * x.HV + head) * of_state
        stage, phase = Int32(0), Int32(0)
        if warp == 0 and steps > 0:
            self.issue_v(s, Int32(0), stage, phase, of_M)
        for i in cutlass.range(steps, unroll=1):
            image = s.S + (i & 1) * of_state
            out = self.begin + self.tmem.out + (i & 1) * OUT
            cute.arch.mbarrier_wait(s.full + stage, phase)
            cute.arch.mbarrier_wait(s.added, i & 1 ^ 1)
            umma.fence_after_thread_sync()
            if cutlass.const_expr(not c.carry):
                if warp == 0:
                    self.wait_for_images()                                     # the other may be written again
            self.round_and_decay(s, image, s.stages + stage * self.stage.bytes)
            IMAGE_THERE.sync()
            if warp == 0:
                with cute.arch.elect_one():
                    self.issue_on_state(s, i, stage, out, of_M)
                    if cutlass.const_expr(not c.carry):
                        if i & 1 == 0:
                            self.send_image(kept + Int64(i >> 1) * x.HV * of_state, image)
            cute.arch.mbarrier_wait(s.out, i & 1)
            umma.fence_after_thread_sync()
            self.put_rows(out, s.X)
            ROWS_THERE.sync()
            next_stage, next_phase = advance(stage, phase, c.stages)
            if warp == 0:
                umma.fence_after_thread_sync()
                with cute.arch.elect_one():
                    self.issue_on_X(s, i, stage, out)
                if i + 1 < steps:
                    if cutlass.const_expr(not c.carry):
                        cute.arch.mbarrier_wait(s.read + (i + 1 & 1), i + 1 >> 1 & 1 ^ 1)
                        umma.fence_after_thread_sync()                         # what is in its columns was read
                    self.issue_v(s, i + 1, next_stage, next_phase, of_M)
            stage, phase = next_stage, next_phase
        if cutlass.const_expr(c.carry or c.ht):                                # else EPILOGUE has waited for more
            cute.arch.mbarrier_wait(s.added, steps & 1 ^ 1)
            umma.fence_after_thread_sync()
        if cutlass.const_expr(not c.carry):
            self.wait_for_last_image()

    @cute.jit
    def issue_v(self, s, i, stage, phase, of_M):
        """Warp 0 issues v^T @ [1 | 0] of chunk i, once it is there."""
        cute.arch.mbarrier_wait(s.full + stage, phase)
        cute.arch.fence_proxy("async.shared", space="cta")                     # rows of v came by other copies
        if not of_M:
            of_v = stage * self.stage.bytes + self.stage.rows.offset
            with cute.arch.elect_one():
                out = self.begin + self.tmem.out + (i & 1) * OUT
                umma.multiply(self.on_v, out, s.base_desc, of_v, self.c.struct.one.offset, False)

    @cute.jit
    def issue_on_state(self, s, i, stage, out, of_M):
        """One thread issues the product with the state."""
        image, tile = self.c.struct.S.offset + (i & 1) * self.image, stage * self.stage.bytes
        if of_M:
            umma.multiply(self.on_state, out, s.base_desc, image, tile, False)
        else:
            umma.multiply(self.on_state, out, s.base_desc, image, tile, True)
        umma.commit(s.out)

    def issue_on_X(self, s, i, stage, out):
        """One thread issues what the next state waits for, then r and o."""
        tile, of_X = stage * self.stage.bytes, self.c.struct.X.offset
        umma.multiply(self.added, self.begin + self.tmem.S, s.base_desc, tile + self.tile.KT.offset, of_X, True)
        umma.commit(s.added)
        if not self.c.carry:
            umma.multiply(self.on_X, out, s.base_desc, of_X, tile + self.tile.TA.offset, True)
            umma.commit(s.done + (i & 1))
        umma.commit(s.empty + stage)

    @cute.jit
    def write_results(self, x, s, element, tokens, steps, warp):
        """EPILOGUE: r and o of each chunk, V / 4 columns a warp."""
        N, V = self.c.columns, self.c.V
        lane, columns = cute.arch.lane_idx(), V // EPILOGUE_WARPS
        rows = 256 // columns                                                  # that a warp moves at once
        # Four pieces of each of eight rows; of lanes that move at once, rows are four apart, and so in other banks.
        row, column = (lane & 4) + (lane >> 3), columns * warp + (lane & 3) * 8
        if cutlass.const_expr(V == 64):                                        # two of sixteen; two apart
            row, column = (lane >> 4) * 8 + (lane & 6) + (lane >> 3 & 1), columns * warp + (lane & 1) * 8
        for i in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(s.done + (i & 1), i >> 1 & 1)
            umma.fence_after_thread_sync()
            out, words = self.begin + self.tmem.out + (i & 1) * OUT + warp * umma.WARP_LANES, []
            for half in cutlass.range_constexpr(columns // 16):
                words.append(rounded(umma.load_fragments(out + half * umma.HALF_LANES, N, Uint32)))
            umma.fence_before_thread_sync()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(s.read + (i & 1))
            for half in cutlass.range_constexpr(columns // 16):
                store_transposed(s.rows, words[half], columns * warp + 16 * half, N)
            cute.arch.sync_warp()                                              # the warp's columns are there
            for j in cutlass.range_constexpr(N // rows):
                token = i * C + row + rows * j % C
                if token < tokens:
                    to = (x.r if cutlass.const_expr(rows * j < C) else x.o).toint() + (element + column) * 2
                    source = s.rows + swizzle_128B(row + rows * j, column, N) // 2
                    copy_16_bytes(source, in_global(fast.row(to, token, x.HV * Int32(2 * V)), BFloat16))
            # redundant: lanes also meet in the next load, which does not order shared memory
            cute.arch.sync_warp()                                              # the warp's columns were read


build = Record.build
