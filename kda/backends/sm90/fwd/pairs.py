"""fwd/intra and fwd/wy of a chunk of 2 C = 64 rows between its halves: columns 0 .. C-1 of rows C .. 2C-1 of the
tensors that are kept for a backward.

  [A_kk / b; A_qk] = KQ of the second half @ (KG of the first)^T      one product, of tiles (configs.tile)
  A_inv = -Y A_kk X                                                   X, Y: the halves' own A_inv, as they are kept

  warps  do
  0      brings the tiles' parts by one bulk copy each, rows of X and Y in pieces of 16 bytes
  0-3    the product;  warps 0, 1 hold A_kk, warps 2, 3 A_qk
  0, 1   A_inv, 16 columns each

  pipeline, barrier  arrivals                                            waits       says
  full               1 of warp 0 with the bytes of the tiles' parts; 32  all         operands are there
                     of warp 0, each lane with its pieces of X and Y
  A_KK_THERE         64                                                  warps 0, 1  A_kk is there

  shared memory: configs.PairsConfig.struct; at K = 128 KQ 16 KiB, KG 8, X and Y 5, A_kk 4.5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from ...common.cute.async_copies import arrive_when_copied, bulk_copy, copy_16_bytes_later
from ...common.cute.barriers import initialise
from ...common.cute.copies import allocate, both_halves, load, load_one, store
from ...common.cute.entry import Entry
from ...common.cute.fragments import load_matrices, mma_tf32, tf32s
from ...common.cute.gate import beta_of_row
from ...common.cute.segments import locate_second_half
from ...common.cute.tile import PITCH_A, C
from ..configs import A_KK_THERE, PITCH_KEPT, PairsConfig, tile
from ..parts.chunk import PAIRS, multiply_and_wait, pairs_mma
from ..parts.wgmma import accumulator, wide_view

KEPT_C = 2 * C                               # columns of what is kept


class Pairs(Entry):
    def __init__(self, config: PairsConfig):
        self.c = config
        self.tile = tile(config.K)

    @cute.kernel
    def kernel(self, x):
        K = self.c.K
        head, y, z = cute.arch.block_idx()
        chunk, begin, tokens = locate_second_half(self.c.packed, x, y, z)
        if tokens > 0:
            s = allocate(self.c.struct)
            if cute.arch.thread_idx()[0] == 0:
                initialise(s, self.c.pipelines)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            to = (begin * x.HV + head) * KEPT_C                                # the second half's first row
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            if warp == 0:
                self.load(x, s, x.A_inv + to, chunk, tokens, head)
            row = warp % 2 * 16 + cute.arch.lane_idx() // 4                    # and row + 8: what this thread has of A
            b = [beta_of_row(x.beta + (begin * x.HV + head), self.c.beta, tokens, x.HV, row + r) for r in (0, 8)]
            cute.arch.mbarrier_wait(s.full, 0)
            acc = accumulator(pairs_mma(), PAIRS)
            multiply_and_wait(acc, wide_view(s.KQ, 2 * C, K), wide_view(s.KG, C, K))
            A = cute.coalesce(acc)
            if warp < 2:
                column = cute.arch.lane_idx() % 4 * 2
                for i in cutlass.range_constexpr(0, C // 2, 2):
                    of_row = b[i // 2 % 2]
                    element = (row + i // 2 % 2 * 8) * PITCH_A + i // 4 * 8 + column
                    store(s.A_kk + element, [A[i] * of_row, A[i + 1] * of_row])
                A_KK_THERE.sync()
                found = self.inverse(s.A_kk, s.X, s.Y, warp)
                for m in cutlass.range_constexpr(2):
                    self.keep(x.A_inv + to, found[m], 16 * m, 16 * warp, tokens, x.HV)
            else:
                self.keep(x.A_qk + to, [A[i] for i in range(C // 2)], 16 * (warp - 2), 0, tokens, x.HV)

    def load(self, x, s, A_inv, chunk, tokens, head):
        """Begin the copies of both halves' operands.  Called by warp 0."""
        tile, lane = x.tiles + (Int64(chunk) * x.HV + head) * self.tile.bytes, cute.arch.lane_idx()
        of_KQ, of_KG = self.tile.KQ.bytes, self.tile.KG.bytes
        with cute.arch.elect_one():
            # redundant: its release, not the arrival; this thread has written nothing
            cute.arch.mbarrier_arrive_and_expect_tx(s.full, of_KQ + of_KG)
            bulk_copy(s.KQ, tile, of_KQ, s.full)
            before = tile - Int64(x.HV) * self.tile.bytes + self.tile.KG.offset
            bulk_copy(s.KG, before, of_KG, s.full)
        for i in range(C // 8):
            row, column = 8 * i + lane // 4, lane % 4 * 8
            token = cutlass.min(row, tokens - 1)                       # past the end: a row that counts for nothing
            first = A_inv + ((row - C) * (x.HV * KEPT_C) + column)
            copy_16_bytes_later(first.toint(), s.X + (row * PITCH_KEPT + column))
            second = A_inv + (token * (x.HV * KEPT_C) + C + column)
            copy_16_bytes_later(second.toint(), s.Y + (row * PITCH_KEPT + column))
        arrive_when_copied(s.full)

    def inverse(self, A_kk, X, Y, warp):
        """-Y A_kk X, 16 columns, first of 16 rows, then of the others.  (A_kk X)^T = X^T A_kk^T comes out as the other
        operand of the product with Y, where rows of A_kk X, that is columns of Y, are counted in pairs."""
        lane = cute.arch.lane_idx()
        row, pair = lane // 4, lane % 4 * 2
        AX = [[Float32(0.0)] * 4 for _ in range(4)]                            # 8 rows of A_kk X each
        of_X = X + ((lane % 8 + lane // 16 * 8) * PITCH_KEPT + 16 * warp + lane // 8 % 2 * 8)
        for step in range(4):
            if step % 2 == 0:
                words = load_matrices(of_X + step * 8 * PITCH_KEPT, transposed=True)
            (a, c), (b, d) = both_halves(words[step % 2 * 2]), both_halves(words[step % 2 * 2 + 1])
            for n in range(4):
                of_A = load(A_kk + ((8 * n + row) * PITCH_A + 8 * step + pair), 2)
                AX[n] = mma_tf32(AX[n], [a, b, c, d], tf32s(of_A[0], of_A[1]))
        found = []
        for m in range(2):
            YAX = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
            for step in range(2 * m + 2):                                      # right of that Y is zero
                of_Y = Y + ((16 * m + row) * PITCH_KEPT + 8 * step + pair)
                words = [load_one(cute.recast_ptr(of_Y + r * PITCH_KEPT, dtype=Uint32)) for r in (0, 8)]
                (a, c), (b, d) = both_halves(words[0]), both_halves(words[1])
                for n in range(2):
                    YAX[n] = mma_tf32(YAX[n], [a, b, c, d], tf32s(AX[step][2 * n], AX[step][2 * n + 1]))
            found.append([-YAX[n][i] for n in range(2) for i in range(4)])
        return found

    @cute.jit
    def keep(self, to, values, row, column, tokens, HV):
        """16 rows of so many columns, as lanes of a warp hold them."""
        row, column = row + cute.arch.lane_idx() // 4, column + cute.arch.lane_idx() % 4 * 2
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < tokens:
                for n in cutlass.range_constexpr(len(values) // 4):
                    i = 4 * n + 2 * r
                    store(to + ((row + 8 * r) * (HV * KEPT_C) + column + 8 * n), [values[i], values[i + 1]])


build = Pairs.build
