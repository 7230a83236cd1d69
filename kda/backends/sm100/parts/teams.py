"""The eight warps that make a chunk: which thread and warp of them one is, and where they meet."""

import cutlass.cute as cute
from cutlass import Uint32

from ...common.cute import teams
from ...common.cute.copies import field_at, load_one
from ...common.cute.tile import WARPS
from ..configs import FIRST_PRODUCER, GROUP, GROUP_FIRST_FOUR, GROUP_LAST_SIX, GROUP_TILE, FusedConfig
from . import umma


def place_of(warp):
    """Return the place of a warp among those of PREPARE: WARPS times its group, and its number there.  One group has
    the first and the last four warps, the other one those between, so that a scheduler that prefers the first warps of
    a CTA prefers no group."""
    quarter = warp - FIRST_PRODUCER >> 2
    return ((quarter ^ quarter >> 1) & 1) * WARPS + (quarter >> 1) * (WARPS // 2) + (warp & 3)


def place_again(c, shared):
    """Reload the place from shared memory, so that ptxas cannot hoist address arithmetic out of the loop over chunks,
    where there are no registers for it."""
    return cute.arch.make_warp_uniform(load_one(field_at(shared, c.struct.places) + cute.arch.warp_idx()))


def wait(mbarrier, phase):
    """Wait until a phase of that parity has ended: one instruction, if it has."""
    cute.arch.inline_ptx(
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [{$r0}], {$r1}, 10000000; @!p bra AGAIN;}",
        read_only_args=[mbarrier.toint().to(Uint32), phase],
    )


def arrive_at(mbarrier, cta):
    """One lane of a warp arrives once at the mbarrier of a CTA of the cluster."""
    cute.arch.inline_ptx(
        "{.reg .pred p; .reg .b32 to; elect.sync _|p, -1; mapa.shared::cluster.u32 to, {$r0}, {$r1}; "
        "@p mbarrier.arrive.shared::cluster.b64 _, [to];}", read_only_args=[mbarrier.toint().to(Uint32), cta],
    )


class WholeCta(teams.WholeCta):
    """The CTA of fwd/operands.py: barrier 0 is `sync_threads`."""

    def meet_for_product(self):
        """Meet before a product: from then on tensor memory is allocated, too."""
        self.meet()
        umma.fence_after_thread_sync()


class MakerGroup:
    """One of the groups that follow CHAIN's warps."""

    def __init__(self, config: FusedConfig):
        self.c = config
        # For every chunk its warps reload their place, where registers are too few for it.
        packed, any_gate = config.offsets is not None, not config.one_product
        self.reloads = (config.cut or packed or any_gate) if config.K == 128 else packed and any_gate

    def refresh_place(self, shared):
        """Set the warp's place before `warp` and `number` are used in a loop."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.place = place_again(self.c, shared) if self.reloads else place_of(warp)

    def thread(self):
        thread = cute.arch.thread_idx()[0]
        return (thread - 32 * FIRST_PRODUCER >> 8) * (16 * WARPS) + (thread & 16 * WARPS - 1)

    def warp(self):
        return self.place & WARPS - 1

    def number(self):
        return self.place >> 3

    def meet(self):
        GROUP.sync(self.number())

    def meet_for_product(self):
        """Meet before a product, which may overwrite what any warp has read from tensor memory."""
        umma.fence_before_thread_sync()
        GROUP.sync(self.number())
        umma.fence_after_thread_sync()

    def meet_first_four(self):
        GROUP_FIRST_FOUR.sync(self.number())

    def meet_last_six(self):
        GROUP_LAST_SIX.sync(self.number())

    @cute.jit
    def meet_for_tile(self, waits):
        """Meet where only `waits`, one warp, has to wait."""
        if waits:
            GROUP_TILE.sync(self.number())
        else:
            GROUP_TILE.arrive(self.number())

    def arrive_for_last_six(self):
        GROUP_LAST_SIX.arrive(self.number())
