"""The product of a chunk's rows by UMMA, results in tensor memory: for common/cute/pairs.py."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...common.cute.pairs import add_level
from ...common.cute.tile import LEVELS, C
from ..configs import GROUP, Columns, K
from . import umma

ONE_PRODUCT = umma.Product(2 * C, C, umma.along(2 * C), umma.along(C), range(K // 16))
ONE_LEVEL = umma.Product(2 * C, C, umma.along(2 * C), umma.along(2 * C), range(K // 16))


class TensorCore:
    """`base_desc` and `done`, an mbarrier for a commit, are set for every chunk.  A subclass says where operands lie, X
    and Y bytes behind `operands()`, and which columns of tensor memory are whose."""

    X: int
    Y: int

    def __init__(self, team):
        self.team = team

    @cute.jit
    def accumulator(self):
        return cute.make_rmem_tensor(C // 2, Float32)

    @cute.jit
    def one_product(self, acc, X, Y, phase):
        to = self.columns(0)
        self.issue_and_wait(ONE_PRODUCT, to, self.Y, phase)
        self.load(acc, to)

    @cute.jit
    def level(self, acc, X, level: cutlass.Constexpr, phase):
        """Each level has its own columns, so that acc is needed only when the rows have left the registers."""
        self.issue_and_wait(ONE_LEVEL, self.columns(level), self.X, phase)

    @cute.jit
    def levels(self, acc):
        for level in cutlass.range_constexpr(LEVELS):
            found = self.accumulator()
            self.load(found, self.columns(level))
            add_level(acc, found, level, self.team.thread())
        umma.fence_before_thread_sync()

    @cute.jit
    def issue_and_wait(self, product: cutlass.Constexpr, to, y: cutlass.Constexpr, phase):
        """[k; q] @ k^T under decays, by warps 0 to 3."""
        operands = self.operands()
        if self.team.warp() == 0:
            with cute.arch.elect_one():
                umma.multiply(product, to, self.base_desc, operands + self.X, operands + y, False)
                umma.commit(self.done)
        cute.arch.mbarrier_wait(self.done, phase)
        # redundant: except for the last level, after which all are loaded
        umma.fence_after_thread_sync()

    @cute.jit
    def load(self, acc, columns):
        found = umma.load_fragments(columns + self.team.warp() * umma.WARP_LANES, C)
        for i in cutlass.range_constexpr(C // 2):
            acc[i] = found[i]


class TensorCoreOfGroup(TensorCore):
    """Of one of the groups of fwd/fused.py; `done` is its `pairs_done`."""

    X, Y = GROUP.X.offset, GROUP.Y.offset

    @cute.jit
    def operands(self):
        return self.team.number() * GROUP.bytes

    @cute.jit
    def columns(self, level: cutlass.Constexpr):
        """Of tensor memory, for the product of a level; `one_product` has those of level 0."""
        if cutlass.const_expr(level == 0):
            return Columns.pairs + self.team.number() * C
        return Columns.KT + (level - 1) * C + self.team.number() * K


class TensorCoreOfCta(TensorCore):
    """Of fwd/operands.py; `first`, where the CTA's columns of tensor memory begin, is set, too."""

    def __init__(self, config, team):
        super().__init__(team)
        self.X = config.struct.X.offset
        self.Y = config.struct.Y.offset if config.one_product else self.X

    @cute.jit
    def operands(self):
        return 0

    @cute.jit
    def columns(self, level: cutlass.Constexpr):
        return self.first + level * C
