"""The eight warps that make a chunk, where they are all warps of a CTA: which thread and warp of them one is, and where
they meet."""

import cutlass.cute as cute

from .configs import FIRST_FOUR


class WholeCta:
    def thread(self):
        return cute.arch.thread_idx()[0]

    def warp(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx())

    def meet(self):
        cute.arch.sync_threads()

    meet_for_product = meet

    def meet_first_four(self):
        FIRST_FOUR.sync()
