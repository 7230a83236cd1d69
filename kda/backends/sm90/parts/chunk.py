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
from ...common.cute.pairs import Pairs, add_level, causal_pair, keep_blocks, store_A_kk
from ...common.cute.rows import Rows
from ...common.cute.tile import C, swizzle_64B
from ..configs import PrepareConfig, tile
from .views import wide_view
from .wgmma import accumulator, issue

PAIRS = (2 * C, C)                           # rows of [k; q] and of k


@cute.jit
def pairs_mma():
    source, along_K = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, (*PAIRS, 16), source, along_K, along_K))


@cute.jit
def multiply_and_wait(acc, x, y, fenced: cutlass.Constexpr = False):
    """acc = x @ y^T, both (rows, K) in shared memory."""
    mma = pairs_mma()
    part = mma.get_slice(0)
    issue(mma, acc, mma.make_fragment_A(part.partition_A(x)), mma.make_fragment_B(part.partition_B(y)), False, fenced)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


class TensorCore:
    """For common/cute/pairs.py; for rows.py, too, if `acc`, where pairs are gathered, `X` and `Y` are set."""

    def __init__(self, config: PrepareConfig, team):
        self.c, self.team = config, team

    @cute.jit
    def accumulator(self):
        return accumulator(pairs_mma(), PAIRS)

    @cute.jit
    def one_product(self, acc, X, Y, phase):
        self.multiply(acc, X, Y, C)

    @cute.jit
    def level(self, acc, X, level: cutlass.Constexpr, phase):
        found = self.accumulator()
        self.multiply(found, X, X, 2 * C)
        add_level(acc, found, level, self.team.thread())

    @cute.jit
    def levels(self, acc):
        """Each was added when it was made."""

    @cute.jit
    def issue_blocks(self):
        """Pairs within blocks of 8 rows, by warps 0 to 3."""
        if self.team.warp() < 4:
            self.multiply(self.acc, self.X, self.Y, C)
            keep_blocks(self.acc, self.acc, 0, accumulator_places(self.team.thread()))

    @cute.jit
    def issue_across(self):
        """Those across blocks of 8 and of 16, of operands in X and in Y."""
        if self.team.warp() < 4:
            for number, buffer in ((1, self.X), (2, self.Y)):
                found = self.accumulator()
                self.multiply(found, buffer, buffer, 2 * C, fenced=True)
                keep_blocks(self.acc, found, number, accumulator_places(self.team.thread()))

    def wait(self, number: int):
        """For operands that were read: nothing is written where they are before all have met."""

    @cute.jit
    def multiply(self, acc, X, Y, rows_of_Y: cutlass.Constexpr, fenced: cutlass.Constexpr = False):
        K = self.c.K
        y = cute.local_tile(wide_view(Y, rows_of_Y, K), (C, K), (0, 0))
        multiply_and_wait(acc, wide_view(X, 2 * C, K), y, fenced)


class ChunkMaker:
    def __init__(self, config: PrepareConfig, team):
        self.c, self.team, self.tile = config, team, tile(config.K)
        self.tensor_core = TensorCore(config, team)
        self.gate = Gate(config, team)
        self.pairs = Pairs(config, team, self.gate, self.tensor_core, self.tile, buffers=2)
        self.rows = Rows(config, team, self.tensor_core, self.tile)
        self.inverse = Inverse(bool(config.kept_C), swizzle_64B)

    @cute.jit
    def store_pairs(self, acc, A_kk, b, tile, kept_A_qk, tokens, stride):
        """By warps 0 to 3: A_kk to shared memory, A_qk to the tile, and to where it is kept."""
        if self.team.warp() < 2:
            store_A_kk(acc, A_kk, b, self.team.thread(), self.c.b_on_keys)
        else:
            to, at = field_at(tile, self.tile.A_qk), accumulator_places(self.team.thread())
            for i in cutlass.range_constexpr(0, cute.size(acc), 2):
                row, column = at[i]
                row, pair = row - C, causal_pair(acc, at, i)
                if cutlass.const_expr(self.c.b_on_keys):
                    pair = [pair[0] * b[column], pair[1] * b[column + 1]]
                store(to + swizzle_64B(row, column) // 2, pair)
                if cutlass.const_expr(self.c.kept_C):
                    if row < tokens:
                        store(kept_A_qk + (row * stride + column), pair)
