"""A chunk's operands on Hopper: common/cute/{gate,pairs,inverse} put together, and the product of its rows by wgmma.

fwd/prepare.py makes one chunk with a CTA, fwd/fused.py one after the other with a group of a CTA's warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...common.cute.copies import field_at, store
from ...common.cute.fragments import accumulator_places
from ...common.cute.gate import Gate
from ...common.cute.inverse import Inverse
from ...common.cute.pairs import ACROSS, PairMaker, add_level, causal_pair, counts, keep_blocks, store_A_kk
from ...common.cute.rows import Rows
from ...common.cute.tile import C, swizzle_64B
from ..configs import PrepareConfig, tile
from .wgmma import accumulator, issue, wide_view

PAIRS = (2 * C, C)                           # rows of [k; q] and of k


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


class ChunkMaker:
    def __init__(self, config: PrepareConfig, team, shared: bool = False):
        self.c, self.team, self.tile = config, team, tile(config.K)
        self.tensor_core = TensorCore(config, team, self.tile, shared)
        self.gate = Gate(config, team)
        self.pairs = PairMaker(config, team, self.gate, self.tensor_core, self.tile, buffers=2)
        self.rows = Rows(config, team, self.tensor_core, self.tile)
        self.inverse = Inverse(bool(config.kept_C), swizzle_64B)
