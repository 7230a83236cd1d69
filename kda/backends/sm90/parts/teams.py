"""The eight warps that make a chunk, where they are a group of several in a CTA."""

import cutlass.cute as cute

from ...common.cute.tile import WARPS
from ..configs import FIRST_PRODUCER, GROUP, GROUP_PRODUCT


class MakerGroup:
    """One of the groups that follow CHAIN's warps."""

    def thread(self):
        return cute.arch.thread_idx()[0] - 32 * FIRST_PRODUCER & 32 * WARPS - 1

    def warp(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_PRODUCER & WARPS - 1

    def number(self):
        return (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_PRODUCER) >> 3

    def meet(self):
        GROUP.sync(self.number())

    meet_for_product = meet

    def product_is_there(self):
        GROUP_PRODUCT.arrive(self.number())

    def wait_for_product(self):
        GROUP_PRODUCT.sync(self.number())
