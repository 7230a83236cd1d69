"""fwd/gate, fwd/intra and fwd/wy of one chunk of C = 32 rows and one value head, into one tile (configs.tile): formulas
are those of common/cute/gate.py, pairs.py and inverse.py; of K = 128 channels and a gate for which one product is not
enough, those of rows.py.

  warps  do
  0-7    rows, sums, operands
  0-3    the product;  warps 0, 1 hold A_kk, warps 2, 3 A_qk
  0      the inverse
  4-7    zeros right of the diagonal blocks of A_qk and A_inv, if those are kept

Kept tensors have a row per token, (tokens, HV, kept_C).  This chunk is half of one of 64, and `pairs` adds the block
between the halves.

A program without a chunk sets its share of the rows of o that belong to no sequence to zero.

  pipeline, barrier  arrivals        waits         says
  sync_threads       256             PREPARE       the sums of each warp's rows are there; those before each warp; both
                                                   operands (by halving: of each level; in blocks of 8 rows: within
                                                   them, that they were read, across them)
  FIRST_FOUR         128             warps 0 to 3  A_kk is there

  shared memory: configs.PrepareConfig.struct; at K = 128 operands 16 + 8 KiB (any gate: twice 16), sums 5 (in blocks of
  8 rows: 10, and 6 of what blocks have), A_kk 4.5, TB 2
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from ...common.cute.copies import allocate, copy_16_bytes, field_at, load, store
from ...common.cute.entry import ChunkEntry
from ...common.cute.gate import beta_of_row
from ...common.cute.rows import put
from ...common.cute.teams import WholeCta
from ...common.cute.tile import GROUP_ROWS, WARP_ROWS, WARPS, C, swizzle_64B
from ..configs import PrepareConfig
from ..parts.chunk import ChunkMaker


class Prepare(ChunkEntry):
    def __init__(self, config: PrepareConfig):
        self.c = config
        self.chunk = ChunkMaker(config, WholeCta())

    def warp(self):
        return cute.arch.warp_idx()

    @cute.jit
    def make(self, x, chunk, begin, tokens, number, head):
        c = self.c
        s = allocate(c.struct)
        tile = x.tiles + (Int64(chunk) * x.HV + head) * self.chunk.tile.bytes

        head_rows = self.chunk.gate.rows_of_head(x, begin, head)
        if cute.arch.warp_idx() == 0:
            s.b[cute.arch.lane_idx()] = beta_of_row(head_rows.beta, c.beta, tokens, x.HV, cute.arch.lane_idx())
        kept_C, A_qk, A_inv = c.kept_C, x.A_qk, x.A_inv
        if cutlass.const_expr(kept_C):                                         # to where the diagonal block is kept
            of_block = (begin * x.HV + head) * kept_C + (number * C & kept_C - C)
            A_qk, A_inv = A_qk + of_block, A_inv + of_block
        pairs_to = (s.A_kk, s.b, tile, A_qk, tokens, x.HV * kept_C)
        if cutlass.const_expr(c.in_blocks):
            self.make_in_blocks(x, s, head_rows, tile, tokens, pairs_to)
        else:
            self.make_whole(x, s, head_rows, tile, tokens, pairs_to)
        if cute.arch.warp_idx() < 4:
            self.chunk.team.meet_first_four()
            if cute.arch.warp_idx() == 0:
                self.chunk.inverse.solve(s.A_kk, s.columns, s.TB, s.X, None if c.b_on_keys else s.b)
                self.store_inverse(s.TB, s.X, tile, A_inv, tokens, x.HV * kept_C)
        elif cutlass.const_expr(kept_C > C):
            if number & 1 == 0:
                self.clear_right(A_qk, A_inv, tokens, x.HV * kept_C)

    @cute.jit
    def make_whole(self, x, s, head_rows, tile, tokens, pairs_to):
        """Operands to the tile, and pairs of rows."""
        c, d, of_k = self.c, self.c.K // 32 * cute.arch.lane_idx(), None
        acc = self.chunk.tensor_core.accumulator()
        rows = self.chunk.gate.load_rows(head_rows, tokens, x.H, x.HV)
        if cute.arch.warp_idx() == WARPS - 1:
            self.chunk.inverse.zeros(s.columns, s.TB)
        if cutlass.const_expr(not c.one_product):
            self.chunk.pairs.qk_diagonal(*rows[:2], s.A_kk)
        self.chunk.gate.sum_over_warps(rows[2], s.sums, d)
        if cutlass.const_expr(c.b_on_keys):
            of_k = load(s.b + WARP_ROWS * self.chunk.team.warp(), WARP_ROWS)
        if cutlass.const_expr(c.one_product):
            pairs = self.chunk.pairs
            pairs.one_product(*rows, s.sums, s.X, s.Y, x.lower_bound, of_k, functools.partial(put, tile))
            pairs.store_decay(tile, s.sums)
            pairs.meet_for_product()
            if cute.arch.warp_idx() < 4:
                self.chunk.tensor_core.one_product(acc, s.X, s.Y, 0)
        else:
            self.chunk.pairs.by_halving(*rows, s.sums, s.X, s.A_kk, tile, acc, 0, of_k)
        if cute.arch.warp_idx() < 4:
            self.chunk.tensor_core.store_pairs(acc, *pairs_to)

    @cute.jit
    def make_in_blocks(self, x, s, head_rows, tile, tokens, pairs_to):
        """The same, of any gate and 128 channels."""
        c, rows, core, of_k = self.c, self.chunk.rows, self.chunk.tensor_core, None
        core.X, core.Y, core.of_16, core.pairs_to = s.X, s.Y, s.Y, pairs_to
        raw = rows.fetch(head_rows, tokens, x.H, x.HV)
        if cutlass.const_expr(c.bias):
            rows.store_bias(head_rows, s.sums)
            self.chunk.team.meet()                                             # dt_bias is there
        qn, kn, decays = rows.prepare(*raw, tokens, head_rows, s.sums)
        if cute.arch.warp_idx() == WARPS - 1:
            self.chunk.inverse.zeros(s.columns, s.TB)
        rows.blocks(qn, kn, decays, s.sums, s.X, s.Y)
        gc = rows.make_sums(decays, s.sums, s.of_blocks, x.lower_bound)
        if cutlass.const_expr(c.b_on_keys):
            of_k = load(s.b + rows.first_row(), GROUP_ROWS)
        rows.across_blocks(qn, kn, gc, s.sums, s.X, s.Y, s.of_blocks, tile, of_k)

    @cute.jit
    def clear_right(self, A_qk, A_inv, tokens, stride):
        """Zeros right of the diagonal blocks of a first half, by warps 4 to 7."""
        thread = cute.arch.thread_idx()[0] - 128
        row, column = thread >> 2, (thread & 3) * 8
        if row < tokens:
            for kept in (A_qk, A_inv):
                store(kept + (row * stride + C + column), [Float32(0.0)] * 8)

    @cute.jit
    def store_inverse(self, TB, whole, tile, A_inv, tokens, stride):
        """TB to the tile, A_inv to where it is kept, by one warp."""
        lane = cute.arch.lane_idx()
        to = field_at(tile, self.chunk.tile.TB)
        cute.arch.sync_warp()                                                  # TB is there
        for i in cutlass.range_constexpr(C * C // 32 // 8):
            piece = i * 32 + lane
            copy_16_bytes(TB + piece * 8, to + piece * 8)
            if cutlass.const_expr(self.c.kept_C):
                row, column = piece >> 2, (piece & 3) * 8
                if row < tokens:
                    copy_16_bytes(whole + swizzle_64B(row, column) // 2, A_inv + (row * stride + column))


build = Prepare.build
