"""The eight warps that make a chunk: which thread and warp of them one is, and where they meet."""

import cutlass.cute as cute

from ...common.cute.barriers import NamedBarrier
from ...common.cute.rows import SUM_CHANNELS
from ...common.cute.tile import WARPS
from ..configs import CHANNELS_OF_ROWS, FIRST_PRODUCER

# barrier 0 is sync_threads;  who meets there
FIRST_FOUR = NamedBarrier(1, 128)            # the first four of a CTA of eight warps
CHAIN = NamedBarrier(1, 128)                 # where there is one: CHAIN's warps
GROUP = NamedBarrier(2, 32 * WARPS, ids_per_group=2)
GROUP_FIRST_FOUR = NamedBarrier(3, 128, ids_per_group=2)
GROUP_INVERSE = NamedBarrier(6, 128 + 32, ids_per_group=1)   # its first four warps, and the one of its inverse
# Where pairs are made in blocks: of who makes their product, for those who write over Y; of all eight warps, which
# write to the tile till the end, for the one that inverts.
GROUP_PRODUCT = NamedBarrier(3, 128 + 32 * (CHANNELS_OF_ROWS // SUM_CHANNELS), ids_per_group=2)
WHOLE_GROUP = NamedBarrier(6, 32 * WARPS, ids_per_group=1)
WHOLE_GROUP_INVERSE = NamedBarrier(6, 32 * WARPS + 32, ids_per_group=1)
JOINED = NamedBarrier(8, 32 * WARPS + 32, ids_per_group=1)   # two chunks' tiles are those of a step


class WholeCta:
    @cute.jit
    def thread(self):
        return cute.arch.thread_idx()[0]

    @cute.jit
    def warp(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx())

    @cute.jit
    def meet(self):
        cute.arch.sync_threads()

    meet_for_product = meet

    @cute.jit
    def meet_first_four(self):
        FIRST_FOUR.sync()


class MakerGroup:
    """One of the groups that follow CHAIN's warps."""

    @cute.jit
    def thread(self):
        return cute.arch.thread_idx()[0] - 32 * FIRST_PRODUCER & 32 * WARPS - 1

    @cute.jit
    def warp(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_PRODUCER & WARPS - 1

    @cute.jit
    def number(self):
        return (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_PRODUCER) >> 3

    @cute.jit
    def meet(self):
        GROUP.sync(self.number())

    meet_for_product = meet

    @cute.jit
    def product_is_there(self):
        GROUP_PRODUCT.arrive(self.number())

    @cute.jit
    def wait_for_product(self):
        GROUP_PRODUCT.sync(self.number())

    @cute.jit
    def meet_first_four(self):
        # redundant: warp 0 has its own proxy fence before the copy; the documented use is one per writer
        cute.arch.fence_proxy("async.shared", space="cta")                     # A_qk is in the tile
        GROUP_FIRST_FOUR.sync(self.number())
