"""bwd/walk and bwd/grads in one grid: the first CTAs walk over sequences, or over their segments, a value head at a
time, and compute gradients when no walk is left; all others compute gradients from the beginning.

An item of grads, 64 tokens of a value head, is added to a queue in memory when the walk has stored its dv and dh, and
CTAs remove items in the order in which they were added: L2 still has dv, dh and do if walks are not far ahead.  CTAs
that walk have the lower indices and never wait for another CTA, so every item comes, on any number of SMs.  An item has
the same bits in every CTA.

If this backward made the tiles, it does not need them after the walk, and dh of an item lies over the item's two tiles:
a walk stores dh when both are in shared memory.  r may lie in the memory of dq: LOAD stores dq of an item when MATH has
read the item's r.

  CTA                 warps; K = V = 64  role     does
  walks               0-7    0-3         WALK     as in bwd/walk: a warpgroup has 64 columns of dh
                      8, 9   4           LOAD     each brings do of a strip, the first one tiles as well
                      10     5           PUBLISH  adds items to the queue
  computes gradients  0-7    0-3         MATH     as in bwd/grads
                      8-11   4-7         LOAD     the same; its first thread removes items from the queue

Registers: as in bwd/grads, but 232 and 40 where dh lies over tiles.

LOAD goes from the tiles of one walk on to those of the CTA's next walk.

  pipeline, barrier      arrivals                             waits       says
  a CTA that walks:
  full, each stage       1 of LOAD with the bytes of the      WALK        a chunk is there
                         tile; 32 or 64 of LOAD, each lane
                         with its pieces of do
  empty, each stage      4 or 8 of WALK, a lane of each warp  LOAD        no warp reads the stage any more
  stored, each stage     4 or 8 of WALK, a lane of each warp  PUBLISH     dv and dh of 64 tokens are in memory
  published, each stage  1 of PUBLISH, a lane                 WALK        the queue has the item
  STRIP                  128, of each group                   WALK        dv and dh are in shared memory, the dv before
                                                                          last was read; the dh before has gone
  a CTA that computes gradients:
  values_full            128 of LOAD, each thread with its    MATH        do, dv, r, h and dh of a chunk are there
                         pieces of do, dv and r; 1 of LOAD
                         with the bytes of h and dh
  values_empty           4 or 8 of MATH, a lane of each warp  LOAD        all products and sums that read them are done
  rows_full, each stage  128 of LOAD, each thread             MATH        q, k, g and of_tokens are there
  rows_done, each stage  4 or 8 of MATH, a lane of each warp  LOAD        dq, dk and dg stand where q, k and g stood
  placed, each stage     1 of LOAD, a lane                    MATH, LOAD  where an item lies, or that there is none
  MATH                   128 or 256                           MATH        G is there; it was read; partial sums are
                                                                          there; projections are
  LOAD                   128                                  LOAD        rows are there

  shared memory: ReverseConfig.struct: as in bwd/grads; a CTA that walks has there (ReverseConfig.walker) 4 x (a tile of
  29 KiB and do 9), dv 18 and dh 32, at K = 64 4 x (17 and 4.5), 9 and 8
"""

import math
from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from ...common.cute.async_copies import bulk_store_often
from ...common.cute.barriers import initialise, mbarriers_among
from ...common.cute.copies import fields_at
from ...common.cute.entry import Entry
from ...common.cute.grads.queue import KIB, Publishing, QueueLoader, number_of_walks
from ...common.cute.rings import advance
from ...common.cute.tile import BF16, HALF
from ..configs import CHAIN_WARPS, COLUMNS
from ..parts.state import State
from ..reverse_config import STRIP, ReverseConfig
from .grads import Math
from .walk import Walk


class StripState(State):
    """What one of the warpgroups of WALK does."""

    often = True

    def strip(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // CHAIN_WARPS

    def thread(self):
        return cute.arch.thread_idx()[0] & 32 * CHAIN_WARPS - 1

    def warp(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) & CHAIN_WARPS - 1

    def meet(self):
        STRIP.sync(self.strip())

    def was_sent(self):
        """The copies of the state that this thread began are in memory, which PUBLISH is told next."""
        cute.arch.cp_async_bulk_wait_group(0)


class StripsWalk(Publishing, Walk):
    """WALK, LOAD and PUBLISH of a CTA that walks with all columns of dh."""

    def __init__(self, config: ReverseConfig):
        super().__init__(config.walk)
        self.state, self.walker, self.remade = StripState(config.walk), config.walker, config.remade

    def of_strip(self, s, strip):
        """Return the shared memory with the strip's own do, dv and state in the place of those of all strips."""
        fields = {name: (getattr(s, name), getattr(self.walker, name)) for name in ("do", "dv", "state")}
        return s._replace(**{n: pointer + strip * math.prod(field.shape[1:]) for n, (pointer, field) in fields.items()})

    @cute.jit
    def walk_all(self, x, s):
        """WALK."""
        strip = self.state.strip()
        s = self.of_strip(s, strip)
        stage, phase, before = Int32(0), Int32(0), Int32(0)
        for number in cutlass.range(self.first(), number_of_walks(self.c, x), x.walkers, unroll=1):
            place = self.locate(x, number, strip)
            stage, phase = self.walk(x, s, place, stage, phase, before)
            before += place.pairs

    def send(self, x, s, place, i, first_dh, stage, phase):
        if self.remade:
            self.send_over_tiles(x, s, place, i, stage, phase)
        else:
            super().send(x, s, place, i, first_dh, stage, phase)

    @cute.jit
    def send_over_tiles(self, x, s, place, i, stage, phase):
        """Begin to store dh that leaves chunk i over the tiles of its item, when both have been copied."""
        if self.state.thread() == 0:
            if i & 1 == 1:
                following, its_phase = advance(stage, phase, self.c.stages)
                cute.arch.mbarrier_wait(s.full + following, its_phase)
            half = COLUMNS * HALF
            for n, kib in enumerate(self.places_of_dh(x, place, i >> 1)):
                to = x.tiles + (Int64(kib) * KIB + place.strip * (BF16 * half))
                bulk_store_often(to, s.state + n * half, BF16 * half)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def load_all(self, x, s, strip):
        """LOAD, a warp for each strip."""
        rows = self.of_strip(s, strip).do
        stage, phase = Int32(0), Int32(0)
        for number in cutlass.range(self.first(), number_of_walks(self.c, x), x.walkers, unroll=1):
            place = self.locate(x, number, strip)
            stage, phase = self.load_on(
                x, s, x.do, rows, place.first_v, place.tokens, place.chunk, place.head, place.steps, False, strip == 0,
                stage, phase,
            )


class Reverse(Entry):
    def __init__(self, config: ReverseConfig):
        super().__init__(config)
        self.walk, self.loader, self.math = StripsWalk(config), QueueLoader(config), Math(config.grads)

    @cute.kernel
    def kernel(self, x):
        c = self.c
        shared = SmemAllocator().allocate_array(Uint8, c.shared, byte_alignment=1024)
        s = fields_at(shared, c.struct)
        if cute.arch.thread_idx()[0] == 0:
            initialise(s, c.pipelines)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        walks, warp = cute.arch.block_idx()[0] < x.walkers, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        of_math, of_load = c.registers
        if warp < c.grads.math_warps:
            cute.arch.setmaxregister_increase(of_math)
            if walks:
                self.walk.walk_all(x, self.of_walker(shared, s))
                self.change()
            self.math.run(x, s)
        else:
            cute.arch.setmaxregister_decrease(of_load)
            if walks:
                of_walker = self.of_walker(shared, s)
                if warp < c.publisher:
                    self.walk.load_all(x, of_walker, warp - c.grads.math_warps)
                elif warp == c.publisher:
                    self.walk.publish_all(x, of_walker)
                self.change()
            self.loader.run(x, s)

    def of_walker(self, shared, s):
        """Return the shared memory of a CTA that walks."""
        found = fields_at(shared, self.c.walker)._asdict() | mbarriers_among(s, self.c.walker_pipelines)._asdict()
        return namedtuple("Walker", found)(**found)

    def change(self):
        """All warps go from walks to items, whose copies write where a walk has read and written."""
        # redundant: h and dh, which copies write, lie among tiles, which a walk only reads; dv and state lie elsewhere
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()


build = Reverse.build
