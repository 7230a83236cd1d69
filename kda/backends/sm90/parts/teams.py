"""The eight warps that make a chunk: which thread and warp of them one is, and where they meet."""

import cutlass.cute as cute

from ...common.cute.tile import WARPS
from ..configs import FIRST_FOUR, FIRST_PRODUCER, GROUP, GROUP_FIRST_FOUR, GROUP_PRODUCT


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
