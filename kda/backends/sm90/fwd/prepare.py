"""fwd/gate, fwd/intra and fwd/wy of one chunk of C = 32 rows and one value head, into one tile
(common/cute/tile.py): formulas and what each of the eight warps does are those of common/cute/chunk.py.

  warps  do, too
  4-7    zeros right of the diagonal blocks of A_qk and A_inv, where those are kept

What is kept has a row for each token, (tokens, HV, keep).  Of a chunk of 64 this one is a half, and `pairs` adds what
lies between halves.

A program without a chunk clears its share of the rows of o that are no sequence's.

  barrier  arrivals  says
  0        256       sums of decays of each warp's rows are there
  0        256       and those of the rows before them
  0        256       both operands are there
  1        128       A_kk is there

  shared memory of K = 128: operands 16 + 8 KiB (by halving twice 16), sums 5, A_kk 4.5, TB 2
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute.chunk import ChunkRows, step_size
from ...common.cute.copies import copy_16_bytes, load_one, pointers, store
from ...common.cute.order import after_the_kernel_before
from ...common.cute.tile import PAD, PITCH_X, ROWS, WARPS, C, in_narrow_rows
from ..configs import PrepareConfig
from ..parts.product import accumulator
from ..parts.rows import PAIRS, multiply, product
from ..parts.views import wide_view


class Prepare(ChunkRows):
    @cute.jit
    def __call__(
        self, q: cute.Pointer, k: cute.Pointer, g: cute.Pointer, beta: cute.Pointer, A_log: cute.Pointer,
        dt_bias: cute.Pointer, tiles: cute.Pointer, A_qk: cute.Pointer, A_inv: cute.Pointer, o: cute.Pointer,
        table: cute.Pointer, T: Int32, chunks: Int32, H: Int32, HV: Int32, scale: Float32, lower_bound: Float32,
        grid_y: Int32, grid_z: Int32, stream,
    ):  # fmt: skip
        self.kernel(
            q, k, g, beta, A_log, dt_bias, tiles, A_qk, A_inv, o, table, T, chunks, H, HV, scale, lower_bound
        ).launch(
            grid=(HV, grid_y, grid_z), block=(self.c.threads, 1, 1), min_blocks_per_mp=self.c.on_an_sm, stream=stream,
            preferred_smem_carveout=50)  # without it the DSL asks the driver

    @cute.kernel
    def kernel(
        self, q: cute.Pointer, k: cute.Pointer, g: cute.Pointer, beta: cute.Pointer, A_log: cute.Pointer,
        dt_bias: cute.Pointer, tiles: cute.Pointer, A_qk: cute.Pointer, A_inv: cute.Pointer, o: cute.Pointer,
        table: cute.Pointer, T: Int32, chunks: Int32, H: Int32, HV: Int32, scale: Float32, lower_bound: Float32,
    ):  # fmt: skip
        K = self.c.K
        head, y, z = cute.arch.block_idx()
        after_the_kernel_before()
        chunk = z * cute.arch.grid_dim()[1] + y
        begin, rows, number = self.place(chunk, y, z, table, T, chunks)
        if rows > 0:
            smem = SmemAllocator()
            rows_of_x = smem.allocate_array(BFloat16, 2 * C * K, byte_alignment=1024)   # [k; q] under a decay
            rows_of_y = smem.allocate_array(BFloat16, self.c.rows_of_y * K, byte_alignment=1024)
            sums = smem.allocate_array(Float32, (WARPS + 2) * K, byte_alignment=16)     # of warps' rows; row 0; all
            A_kk = smem.allocate_array(Float32, C * PAD, byte_alignment=16)
            columns = smem.allocate_array(Float32, C * PITCH_X, byte_alignment=16)      # of inverses
            TB = smem.allocate_array(BFloat16, C * C, byte_alignment=16)
            b = smem.allocate_array(Float32, C, byte_alignment=16)
            tile = tiles + (Int64(chunk) * HV + head) * self.tile.bytes

            q, k, g, beta, rate, bias = self.of_head(q, k, g, beta, A_log, dt_bias, begin, head, H, HV)
            if cute.arch.warp_idx() == 0:
                b[cute.arch.lane_idx()] = step_size(beta, self.c.beta, rows, HV, cute.arch.lane_idx())
            own = self.rows(q, k, g, rate, bias, rows, H, HV, scale, lower_bound)
            if cute.arch.warp_idx() == WARPS - 1:
                self.zeros(columns, TB)
            acc = accumulator(product(), PAIRS)
            if cutlass.const_expr(self.c.block):
                self.at_once(*own, sums, rows_of_x, rows_of_y, tile, lower_bound)
                if cute.arch.warp_idx() < 4:
                    self.products(acc, rows_of_x, rows_of_y, C)
            else:
                self.by_halving(*own, sums, rows_of_x, A_kk, tile, acc, 0)
            keep = self.c.keep
            if cutlass.const_expr(keep):                                       # to where the diagonal block is kept
                of_block = (begin * HV + head) * keep + (number * C & keep - C)
                A_qk, A_inv = A_qk + of_block, A_inv + of_block
            if cute.arch.warp_idx() < 4:
                self.matrices(acc, A_kk, b, tile, A_qk, rows, HV * keep)
                self.meet_first()
                if cute.arch.warp_idx() == 0:
                    self.inverse(A_kk, columns, TB, rows_of_x, b, tile, A_inv, rows, HV * keep)
            elif cutlass.const_expr(keep > C):
                if number & 1 == 0:
                    self.clear_right(A_qk, A_inv, rows, HV * keep)
        elif cutlass.const_expr(self.c.packed):
            self.clear(o, begin, -rows, head, HV)

    @cute.jit
    def products(self, acc, x, y, rows_of_y: cutlass.Constexpr, phase=0):
        K = self.c.K
        multiply(acc, wide_view(x, 2 * C, K), cute.local_tile(wide_view(y, rows_of_y, K), (C, K), (0, 0)))

    @cute.jit
    def accumulator(self):
        return accumulator(product(), PAIRS)

    @cute.jit
    def meet(self):
        """All eight."""
        cute.arch.sync_threads()

    @cute.jit
    def meet_first(self):
        """The first four."""
        cute.arch.barrier(barrier_id=1, number_of_threads=128)

    @cute.jit
    def place(self, chunk, y, z, table, T, chunks):
        """First token, tokens and number in its sequence of a chunk; in a row of T tokens that is y."""
        begin, rows, number = Int64(0), Int32(0), y
        if cutlass.const_expr(self.c.packed):
            if chunk < chunks:
                entry = table + 3 * chunk
                begin, rows, number = load_one(entry), Int32(load_one(entry + 1)), Int32(load_one(entry + 2))
        else:
            begin, rows = Int64(z) * T + y * C, cutlass.min(T - y * C, C)
        return begin, rows, number

    @cute.jit
    def clear(self, o, begin, rows, head, HV):
        """Zero where tokens are no sequence's."""
        V = self.c.V
        zero = [Float32(0.0)] * (V // 32)
        for r in cutlass.range_constexpr(ROWS):
            row = cute.arch.warp_idx() * ROWS + r
            if row < rows:
                store(o + ((begin + row) * HV + head) * V + cute.arch.lane_idx() * (V // 32), zero)

    @cute.jit
    def clear_right(self, A_qk, A_inv, rows, stride):
        """Zero right of the diagonal blocks of a first half, by warps 4 to 7."""
        thread = cute.arch.thread_idx()[0] - 128
        row, column = thread >> 2, (thread & 3) * 8
        if row < rows:
            for x in (A_qk, A_inv):
                store(x + (row * stride + C + column), [Float32(0.0)] * 8)

    @cute.jit
    def from_shared(self, TB, whole, tile, A_inv, rows, stride):
        """TB to the tile, A_inv to where it is kept, by one warp."""
        lane = cute.arch.lane_idx()
        to = cute.recast_ptr(tile + self.tile.TB, dtype=BFloat16)
        for i in cutlass.range_constexpr(C * C // 32 // 8):
            piece = i * 32 + lane
            copy_16_bytes(TB + piece * 8, to + piece * 8)
            if cutlass.const_expr(self.c.keep):
                row, column = piece >> 2, (piece & 3) * 8
                if row < rows:
                    copy_16_bytes(whole + in_narrow_rows(row, column) // 2, A_inv + (row * stride + column))


def build(c: PrepareConfig, target: Target) -> cutedsl.Compiled:
    x = pointers(f"bfloat16 bfloat16 {c.g_dtype} {c.beta_dtype} float32 float32 uint8 bfloat16 bfloat16 bfloat16 int64")
    numbers = [Int32(1)] * 4 + [Float32(1)] * 2 + [Int32(1)] * 2
    return cutedsl.compile(Prepare(c), *x, *numbers, cutedsl.fake_stream(), target=target)
