"""A chunk's operands on Hopper: common/cute/{gate,pairs,inverse} put together, and the product of its rows by wgmma.

fwd/prepare.py makes one chunk with a CTA, fwd/fused.py one after the other with a group of a CTA's warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...common.cute.copies import field_at, store, words_of
from ...common.cute.fragments import accumulator_places, store_matrices, times
from ...common.cute.gate import Gate
from ...common.cute.inverse import Inverse
from ...common.cute.pairs import ACROSS, PairMaker, add_level, causal_pair, counts, keep_blocks, store_A_kk
from ...common.cute.rows import Rows
from ...common.cute.tile import PITCH_A, C, swizzle_64B
from ..configs import PrepareConfig, tile
from .wgmma import accumulator, issue, wide_view

PAIRS = (2 * C, C)                           # rows of [k; q] and of k
ROWS = 16                                    # a warp's rows of a product


def pairs_mma():
    source, along_K = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, (*PAIRS, 16), source, along_K, along_K))


def multiply(acc, x, y, fenced: bool = False):
    """Issues acc = x @ y^T, both (rows, K) in shared memory."""
    mma = pairs_mma()
    part = mma.get_slice(0)
    issue(mma, acc, mma.make_fragment_A(part.partition_A(x)), mma.make_fragment_B(part.partition_B(y)), False, fenced)


def wait_for_products():
    warpgroup.commit_group()
    warpgroup.wait_group(0)


def multiply_and_wait(acc, x, y):
    multiply(acc, x, y)
    wait_for_products()


class TensorCore:
    """For common/cute/pairs.py; for rows.py, too, if it is told where operands lie (`X`, `Y` and `of_16`) and where
    pairs go (`pairs_to`).  `shared`: what blocks have lies in Y, and kE and qg where those of 16 rows were."""

    def __init__(self, config: PrepareConfig, team, tile, shared: bool):
        self.c, self.team, self.tile, self.shared = config, team, tile, shared

    def accumulator(self):
        return accumulator(pairs_mma(), PAIRS)

    def one_product(self, acc, X, Y, phase):
        self.multiply(acc, X, Y, C)

    def issue_one_product(self, acc, X, Y):
        self.issue(acc, X, Y, C)
        warpgroup.commit_group()

    def level(self, acc, X, level: int, phase):
        found = self.accumulator()
        self.multiply(found, X, X, 2 * C)
        add_level(acc, found, level, self.team.thread())

    def levels(self, acc):
        """Each was added when it was made."""

    @cute.jit
    def issue_blocks(self):
        """Pairs within blocks of 8 rows, by warps 0 to 3."""
        if self.team.warp() < 4:
            found = self.accumulator()
            self.multiply(found, self.X, self.Y, C)
            if cutlass.const_expr(self.shared):
                self.team.product_is_there()
            self.store_pairs(found, *self.pairs_to, 0)

    @cute.jit
    def issue_across(self):
        """Issue the products across blocks of 8 and of 16."""
        if self.team.warp() < 4:
            of_8, of_16 = self.accumulator(), self.accumulator()
            self.issue(of_8, self.X, self.X, 2 * C, fenced=True)
            self.issue(of_16, self.of_16, self.of_16, 2 * C, fenced=True)
            wait_for_products()
            keep_blocks(of_8, of_16, 2, accumulator_places(self.team.thread()))
            self.store_pairs(of_8, *self.pairs_to, ACROSS)

    def wait(self, number: int):
        """For operands that were read: nothing is written where they are before all have met."""
        if self.shared:
            if number == 0:
                self.team.wait_for_product()
            else:
                self.team.meet()

    wait_until_read = wait

    def multiply(self, acc, X, Y, rows_of_Y: int):
        self.issue(acc, X, Y, rows_of_Y)
        wait_for_products()

    def issue(self, acc, X, Y, rows_of_Y: int, fenced: bool = False):
        K = self.c.K
        y = cute.local_tile(wide_view(Y, rows_of_Y, K), (C, K), (0, 0))
        multiply(acc, wide_view(X, 2 * C, K), y, fenced)

    @cute.jit
    def store_pairs(self, acc, A_kk, b, tile, kept_A_qk, tokens, stride, number: cutlass.Constexpr = None):
        """Store A_kk to shared memory, and A_qk to the tile and where it is kept: the pairs that count in product
        `number`.  Called by warps 0 to 3."""
        if self.team.warp() < 2:
            store_A_kk(acc, A_kk, b, self.team.thread(), self.c.b_on_keys, number)
        else:
            to, places = field_at(tile, self.tile.A_qk), accumulator_places(self.team.thread())
            for i in cutlass.range_constexpr(0, cute.size(acc), 2):
                row, column = places[i]
                row, pair = row - C, causal_pair(acc, places, i)
                if cutlass.const_expr(self.c.b_on_keys):
                    pair = [pair[0] * b[column], pair[1] * b[column + 1]]
                if counts(row, column, number):
                    store(to + swizzle_64B(row, column) // 2, pair)
                    if cutlass.const_expr(self.c.kept_C):
                        if row < tokens:
                            store(kept_A_qk + (row * stride + column), pair)

    @cute.jit
    def store_causal(self, acc, A_kk, b, tile):
        """What `store_pairs` does of the one product, in fewer instructions: A_kk with whatever stands on its diagonal
        and above it, which no inverse reads, and A_qk in matrices of 8 x 8, of which a lane's words are masked."""
        warp, thread = self.team.warp(), self.team.thread()
        row, column = thread >> 2 & 7, (thread & 3) * 2                        # in such a matrix
        if warp < 2:
            first, to = warp * ROWS + row, A_kk + ((warp * ROWS + row) * PITCH_A + column)
            of_rows = [b[first], b[first + 8]] if cutlass.const_expr(not self.c.b_on_keys) else None
            for i in cutlass.range_constexpr(0, C // 2, 2):
                below, right = i // 2 % 2 * 8, i // 4 * 8
                of_pair = [b[column + right + n] if self.c.b_on_keys else of_rows[below // 8] for n in range(2)]
                store(to + (below * PITCH_A + right), times([acc[i], acc[i + 1]], of_pair))
        else:
            words = []
            for i in cutlass.range_constexpr(0, C // 2, 2):
                pair = [acc[i], acc[i + 1]]
                if cutlass.const_expr(self.c.b_on_keys):
                    pair = times(pair, [b[column + i // 4 * 8 + n] for n in range(2)])
                words += words_of(pair)
            # masks: of a matrix on the diagonal, and of one that lies on it or above it but for warp 3
            diagonal = Uint32(0xFFFFFFFF) if column < row else (Uint32(0xFFFF) if column == row else Uint32(0))
            of_last = Uint32(0xFFFFFFFF) if warp == 3 else Uint32(0)
            masks = {(0, 0): diagonal | of_last, (1, 0): None, (0, 1): of_last, (1, 1): diagonal | of_last,
                     (0, 2): diagonal & of_last, (1, 2): of_last, (0, 3): Uint32(0), (1, 3): diagonal & of_last}
            words = [w if masks[n % 2, n // 2] is None else w & masks[n % 2, n // 2] for n, w in enumerate(words)]
            to, of_lane = field_at(tile, self.tile.A_qk), (warp - 2) * ROWS + (thread & 15)
            for half in cutlass.range_constexpr(2):
                place = swizzle_64B(of_lane, half * ROWS + (thread >> 4 & 1) * 8) // 2
                store_matrices(to + place, words[4 * half : 4 * half + 4])


class ChunkMaker:
    def __init__(self, config: PrepareConfig, team, shared: bool = False):
        self.c, self.team, self.tile = config, team, tile(config.K)
        self.tensor_core = TensorCore(config, team, self.tile, shared)
        self.gate = Gate(config, team)
        self.pairs = PairMaker(config, team, self.gate, self.tensor_core, self.tile, buffers=2)
        self.rows = Rows(config, team, self.tensor_core, self.tile)
        self.inverse = Inverse(bool(config.kept_C), swizzle_64B)
