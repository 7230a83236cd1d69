"""The products of a chunk's rows with each other by UMMA, results in tensor memory; operands: common/cute/rows.py."""

import cutlass.cute as cute
from cutlass import Float32

from ...common.cute.copies import load_one
from ...common.cute.fragments import accumulator_places
from ...common.cute.pairs import keep_blocks
from ...common.cute.tile import C
from ..configs import FusedConfig, OperandsConfig
from . import umma
from .teams import wait

BLOCKS_OF_8, BLOCKS_OF_16 = 1, 2             # numbers of products across them; 0 is the one of X and Y


class TensorCore:
    """`base_desc` and `done`, an mbarrier for a commit, are set for every chunk.  A subclass says where operands lie,
    X, Y and `tile` bytes behind `operands()`, and which columns of tensor memory are whose."""

    X: int
    Y: int
    tile: int

    def __init__(self, K: int, team):
        self.team = team
        self.within = umma.Product(2 * C, C, umma.along(2 * C), umma.along(C), range(K // 16))        # X @ Y^T
        self.across = umma.Product(2 * C, C, umma.along(2 * C), umma.along(2 * C), range(K // 16))    # [k; q] @ k^T

    def accumulator(self):
        return cute.make_rmem_tensor(C // 2, Float32)

    def one_product(self, acc, phase):
        """Warps 0 to 3 compute [k; q] @ k^T under decays."""
        self.issue_blocks()
        self.take_one_product(acc, phase)

    def take_one_product(self, acc, phase):
        """What was issued."""
        self.wait(phase)
        self.load(acc, 0)

    @cute.jit
    def issue_blocks(self):
        """Warp 0 issues the product of X and Y."""
        if self.team.warp() == 0:
            operands = self.operands()
            with cute.arch.elect_one():
                umma.multiply(self.within, self.columns(0), self.base_desc, operands + self.X, operands + self.Y, False)
                umma.commit(self.done)

    @cute.jit
    def issue_across(self):
        """Warp 0 issues the products across blocks, of operands in X and in the tile."""
        if self.team.warp() == 0:
            operands = self.operands()
            with cute.arch.elect_one():
                for number, operand in ((BLOCKS_OF_8, self.X), (BLOCKS_OF_16, self.tile)):
                    to = self.columns(number)
                    umma.multiply(self.across, to, self.base_desc, operands + operand, operands + operand, False)
                umma.commit(self.done)

    def wait(self, phase):
        wait(self.done, phase)
        umma.fence_after_thread_sync()

    def wait_until_read(self, phase):
        """Wait until operands may be replaced; results are not looked at."""
        wait(self.done, phase)

    def gather(self, acc):
        """Warps 0 to 3 take what counts of the products within blocks of 8 rows and across those of 8 and 16."""
        places = accumulator_places(self.team.thread())
        for number in range(3):
            found = self.accumulator()
            self.load(found, number)
            keep_blocks(acc, found, number, places)

    def load(self, acc, number: int):
        found = umma.load_fragments(self.columns(number) + self.team.warp() * umma.WARP_LANES, C)
        for i in range(C // 2):
            acc[i] = found[i]


class TensorCoreOfGroup(TensorCore):
    """The products of a group of fwd/fused.py; `done` is the group's `pairs_done`."""

    def __init__(self, config: FusedConfig, team):
        super().__init__(config.K, team)
        self.group, self.regions = config.memory.group, config.tmem
        self.X, self.Y, self.tile = self.group.X.offset, self.group.Y.offset, self.group.tile.offset

    def operands(self):
        return self.team.number() * self.group.bytes

    def columns(self, number: int):
        """Return the columns of tensor memory for a product; the first of KT's are for KT."""
        if number == 0:
            return self.regions.pairs + self.team.number() * C
        return self.regions.KT + number * C + self.team.number() * self.regions.OF_KT


class TensorCoreOfCta(TensorCore):
    """The products of a CTA of fwd/operands.py; `tmem` is set, too: it points to where its tensor memory begins."""

    def __init__(self, config: OperandsConfig, team):
        super().__init__(config.K, team)
        self.X, self.Y, self.tile = config.struct.X.offset, config.struct.Y.offset, config.struct.tile.offset

    def operands(self):
        return 0

    def columns(self, number: int):
        return load_one(self.tmem) + number * C
