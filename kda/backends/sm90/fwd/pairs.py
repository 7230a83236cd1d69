"""fwd/intra and fwd/wy of a chunk of 2 C = 64 rows between its halves: columns 0 .. C-1 of rows C .. 2C-1 of what is
kept for a backward.

  [A_kk / b; A_qk] = KQ of the second half @ (KG of the first)^T      one product, of tiles (common/cute/tile.py)
  A_inv = -Y A_kk X                                                   X, Y: the halves' own A_inv, as they are kept

  warps  do
  0      brings the tiles' parts by one bulk copy each, rows of X and Y in pieces of 16 bytes
  0-3    the product;  warps 0, 1 hold A_kk, warps 2, 3 A_qk
  0, 1   A_inv, 16 columns each

  barrier  arrivals              says
  full     1 and the bytes of the tiles' parts; 32, a lane's pieces of X and Y: operands are there
  1        64                    A_kk is there

  shared memory of K = 128: KQ 16 KiB, KG 8, X and Y 5, A_kk 4.5
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute.async_copies import arrive_when_copied, bulk_copy, copy_16_bytes_later
from ...common.cute.chunk import mma_tf32, step_size, tf32s
from ...common.cute.copies import both_halves, load, load_one, load_transposed, pointers, store
from ...common.cute.order import after_the_kernel_before
from ...common.cute.tile import PAD, C, Tile
from ..configs import PITCH_KEPT, PairsConfig
from ..parts.product import accumulator
from ..parts.rows import PAIRS, multiply, product
from ..parts.views import wide_view

KEPT = 2 * C                                 # columns of what is kept


class Pairs:
    def __init__(self, config: PairsConfig):
        self.c = config
        self.tile = Tile(config.K)

    @cute.jit
    def __call__(
        self, tiles: cute.Pointer, beta: cute.Pointer, A_qk: cute.Pointer, A_inv: cute.Pointer, table: cute.Pointer,
        T: Int32, chunks: Int32, HV: Int32, grid_y: Int32, grid_z: Int32, stream,
    ):  # fmt: skip
        self.kernel(tiles, beta, A_qk, A_inv, table, T, chunks, HV).launch(
            grid=(HV, grid_y, grid_z), block=(self.c.threads, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, tiles: cute.Pointer, beta: cute.Pointer, A_qk: cute.Pointer, A_inv: cute.Pointer, table: cute.Pointer,
        T: Int32, chunks: Int32, HV: Int32,
    ):  # fmt: skip
        K = self.c.K
        head, y, z = cute.arch.block_idx()
        after_the_kernel_before()
        chunk, begin, rows = self.place(y, z, table, T, chunks)
        if rows > 0:
            smem = SmemAllocator()
            KQ = smem.allocate_array(BFloat16, 2 * C * K, byte_alignment=1024)
            KG = smem.allocate_array(BFloat16, C * K, byte_alignment=1024)
            X = smem.allocate_array(BFloat16, C * PITCH_KEPT, byte_alignment=16)
            Y = smem.allocate_array(BFloat16, C * PITCH_KEPT, byte_alignment=16)
            A_kk = smem.allocate_array(Float32, C * PAD, byte_alignment=16)
            full = smem.allocate_array(Int64, 1)
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_init(full, 33)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            to = (begin * HV + head) * KEPT                                    # the second half's first row
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            if warp == 0:
                self.load(tiles, A_inv + to, KQ, KG, X, Y, full, chunk, rows, head, HV)
            row = warp % 2 * 16 + cute.arch.lane_idx() // 4                    # and row + 8: what this thread has of A
            b = [step_size(beta + (begin * HV + head), self.c.beta, rows, HV, row + r) for r in (0, 8)]
            cute.arch.mbarrier_wait(full, 0)
            acc = accumulator(product(), PAIRS)
            multiply(acc, wide_view(KQ, 2 * C, K), wide_view(KG, C, K))
            A = cute.coalesce(acc)
            if warp < 2:
                column = cute.arch.lane_idx() % 4 * 2
                for i in cutlass.range_constexpr(0, C // 2, 2):
                    of_row = b[i // 2 % 2]
                    at = (row + i // 2 % 2 * 8) * PAD + i // 4 * 8 + column
                    store(A_kk + at, [A[i] * of_row, A[i + 1] * of_row])
                cute.arch.barrier(barrier_id=1, number_of_threads=64)
                found = self.inverse(A_kk, X, Y, warp)
                for m in cutlass.range_constexpr(2):
                    self.keep(A_inv + to, found[m], 16 * m, 16 * warp, rows, HV)
            else:
                self.keep(A_qk + to, [A[i] for i in range(C // 2)], 16 * (warp - 2), 0, rows, HV)

    @cute.jit
    def place(self, y, z, table, T, chunks):
        """Number, first token and tokens of a second half: of two neighbours in the table at most one is."""
        chunk, begin, rows = Int32(0), Int64(0), Int32(0)
        if cutlass.const_expr(self.c.packed):
            first = 2 * (z * cute.arch.grid_dim()[1] + y)
            for i in cutlass.range_constexpr(2):
                entry = table + 3 * (first + i)
                if first + i < chunks:
                    if load_one(entry + 2) & 1 == 1:
                        chunk, begin, rows = first + i, load_one(entry), Int32(load_one(entry + 1))
        else:
            number = 2 * y + 1
            chunk, begin = z * ((T + C - 1) // C) + number, Int64(z) * T + number * C
            rows = cutlass.min(T - number * C, C)
        return chunk, begin, rows

    @cute.jit
    def load(self, tiles, A_inv, KQ, KG, X, Y, full, chunk, rows, head, HV):
        tile, lane = tiles + (Int64(chunk) * HV + head) * self.tile.bytes, cute.arch.lane_idx()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.tile.DECAY)
            bulk_copy(KQ, tile, self.tile.KG, full)
            before = tile - Int64(HV) * self.tile.bytes + self.tile.KG
            bulk_copy(KG, before, self.tile.DECAY - self.tile.KG, full)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(C // 8):
            row, column = 8 * i + lane // 4, lane % 4 * 8
            own = cutlass.min(row, rows - 1)                           # past the end: a row that counts for nothing
            copy_16_bytes_later((A_inv + ((row - C) * (HV * KEPT) + column)).toint(), X + (row * PITCH_KEPT + column))
            copy_16_bytes_later((A_inv + (own * (HV * KEPT) + C + column)).toint(), Y + (row * PITCH_KEPT + column))
        arrive_when_copied(full)

    @cute.jit
    def inverse(self, A_kk, X, Y, warp):
        """-Y A_kk X, 16 columns, first of 16 rows, then of the others.  (A_kk X)^T = X^T A_kk^T comes out as the other
        operand of the product with Y, where rows of A_kk X, that is columns of Y, are counted in pairs."""
        lane = cute.arch.lane_idx()
        row, pair = lane // 4, lane % 4 * 2
        AX = [[Float32(0.0)] * 4 for _ in range(4)]                            # 8 rows of A_kk X each
        of_X = X + ((lane % 8 + lane // 16 * 8) * PITCH_KEPT + 16 * warp + lane // 8 % 2 * 8)
        for step in cutlass.range_constexpr(4):
            if cutlass.const_expr(step % 2 == 0):
                words = load_transposed(of_X + step * 8 * PITCH_KEPT)
            (a, c), (b, d) = both_halves(words[step % 2 * 2]), both_halves(words[step % 2 * 2 + 1])
            for n in cutlass.range_constexpr(4):
                of_A = load(A_kk + ((8 * n + row) * PAD + 8 * step + pair), 2)
                AX[n] = mma_tf32(AX[n], [a, b, c, d], tf32s(of_A[0], of_A[1]))
        found = []
        for m in cutlass.range_constexpr(2):
            YAX = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
            for step in cutlass.range_constexpr(2 * m + 2):                    # right of that Y is zero
                of_Y = Y + ((16 * m + row) * PITCH_KEPT + 8 * step + pair)
                words = [load_one(cute.recast_ptr(of_Y + r * PITCH_KEPT, dtype=Uint32)) for r in (0, 8)]
                (a, c), (b, d) = both_halves(words[0]), both_halves(words[1])
                for n in cutlass.range_constexpr(2):
                    YAX[n] = mma_tf32(YAX[n], [a, b, c, d], tf32s(AX[step][2 * n], AX[step][2 * n + 1]))
            found.append([-YAX[n][i] for n in range(2) for i in range(4)])
        return found

    @cute.jit
    def keep(self, to, values, row, column, rows, HV):
        """16 rows of so many columns, as lanes of a warp hold them."""
        row, column = row + cute.arch.lane_idx() // 4, column + cute.arch.lane_idx() % 4 * 2
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < rows:
                for n in cutlass.range_constexpr(len(values) // 4):
                    i = 4 * n + 2 * r
                    store(to + ((row + 8 * r) * (HV * KEPT) + column + 8 * n), [values[i], values[i + 1]])


def build(c: PairsConfig, target: Target) -> cutedsl.Compiled:
    x = pointers(f"uint8 {c.beta_dtype} bfloat16 bfloat16 int64")
    return cutedsl.compile(Pairs(c), *x, *[Int32(1)] * 5, cutedsl.fake_stream(), target=target)
