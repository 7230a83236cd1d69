"""bwd/walk and bwd/grads in one grid, as on Hopper (sm90/bwd/reverse.py): the first CTAs walk over sequences, or over
their segments, a value head at a time, and compute gradients when no walk is left; all others compute gradients from
the beginning.

An item of grads, 64 tokens of a value head, is added to a queue in memory when the walk has stored its dv and dh, and
CTAs remove items in the order in which they were added: L2 still has dv, dh and do if walks are not far ahead.  CTAs
that walk have the lower indices and never wait for another CTA, so every item comes, on any number of SMs.  An item has
the same bits in every CTA.

If this backward made the tiles, dh of an item lies over the item's two tiles, and r may lie in the memory of dq, which
LOAD stores when MATH has read the item's r.

  CTA                 warps  registers  role     does
  walks               0-7    224        WALK     as in bwd/walk
                      8      56         LOAD     tiles and rows of do, from one walk on to the CTA's next walk
                      9      56         PUBLISH  adds items to the queue
  computes gradients  0-7    224        MATH     as in bwd/grads
                      8-11   56         LOAD     the same; its first thread removes items from the queue

  pipeline, barrier      arrivals                          waits       says
  a CTA that walks:
  full, each stage       1 of LOAD with the bytes of the   WALK        a chunk is there
                         tile; 32 of LOAD, each lane with
                         its pieces of do
  empty, each stage      1 of WALK, a commit               LOAD        no product reads the stage any more
  out                    1 of WALK, a commit               WALK        dv^T is there, dh rounded was read
  added                  1 of WALK, a commit               WALK        dh is that which enters the chunk; dv was read
  stored, each stage     8 of WALK, a lane of each warp    PUBLISH     dv and dh of 64 tokens are in memory
  published, each stage  1 of PUBLISH, a lane              WALK        the queue has the item
  IMAGE_THERE            256                               WALK        dh is rounded and decayed, the dv before was read
  ROWS_THERE             256                               WALK        dv is in shared memory, out was read
  a CTA that computes gradients:
  values_full            128 of LOAD, each thread with     MATH        do, dv, r, h and dh of a chunk are there
                         its pieces of do, dv and r; 1 of
                         LOAD with the bytes of h and dh
  values_empty           8 of MATH, a lane of each warp    LOAD        all products and sums that read them are done
  rows_full, each stage  128 of LOAD, each thread          MATH        q, k, g and of_tokens are there
  rows_done, each stage  8 of MATH, a lane of each warp    LOAD        dq, dk and dg stand where q, k and g stood
  placed, each stage     1 of LOAD, a lane                 MATH, LOAD  where an item lies, or that there is none
  products, each stage   1 of MATH, a commit               MATH        first: G is in tensor memory; second: products of
                                                                       states are
  MATH                   256                               MATH        G is there; it was read; partial sums are there;
                                                                       projections are
  LOAD                   128                               LOAD        rows are there

  shared memory: ReverseConfig.struct: as in bwd/grads, 224 KiB and small fields; a CTA that walks has there
  (WalkConfig.memory) 4 x (a tile of 29 KiB and do 8), dh rounded twice 32, dv 8: 220 KiB, or three stages where rows of
  g are not in shared memory
  tensor memory: all 512 columns, allocated once: a walk has configs.RecordColumns, gradients GradsColumns
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from ...common.cute.async_copies import bulk_store
from ...common.cute.barriers import mbarriers_among
from ...common.cute.copies import fields_at
from ...common.cute.grads.queue import KIB, Publishing, QueueLoader, number_of_walks
from ...common.cute.tile import BF16, HALF
from ..parts import umma
from ..reverse_config import ReverseConfig
from .grads import GradsEntry, Math, Reloaded
from .load import PanelLoader
from .walk import Walk


class PublishedWalk(Publishing, Walk):
    """WALK and LOAD of a CTA that walks."""

    def __init__(self, config: ReverseConfig):
        super().__init__(config.walk)
        self.remade = config.remade

    @cute.jit
    def walk_all(self, x, s):
        """WALK."""
        umma.fence_after_thread_sync()                                         # tensor memory is there
        self.find_tensor_memory(s)
        stage, phase, turn, before = Int32(0), Int32(0), Int32(0), Int32(0)
        for number in cutlass.range(self.first(), number_of_walks(self.c, x), x.walkers, unroll=1):
            place = self.locate(x, number, 0)
            stage, phase = self.walk(x, s, place, stage, phase, turn, before)
            turn += place.steps
            before += place.pairs

    def send(self, x, s, place, i, image, next_stage, next_phase):
        if self.remade:
            self.send_over_tiles(x, s, place, i, image, next_stage, next_phase)
        else:
            super().send(x, s, place, i, image, next_stage, next_phase)

    @cute.jit
    def send_over_tiles(self, x, s, place, i, image, next_stage, next_phase):
        """A thread of warp 0 sends dh that leaves chunk i over the tiles of its item, when both have been copied."""
        if i & 1 == 1:
            cute.arch.mbarrier_wait(s.full + next_stage, next_phase)
        half = HALF * self.c.K
        with cute.arch.elect_one():
            for n, kib in enumerate(self.places_of_dh(x, place, i >> 1)):
                bulk_store(x.tiles + Int64(kib) * KIB, image + n * half, BF16 * half)
            cute.arch.cp_async_bulk_commit_group()

    def announce(self, s, number):
        cute.arch.cp_async_bulk_wait_group(0)                                  # dh is in memory
        super().announce(s, number)

    @cute.jit
    def load_all(self, x, s):
        """LOAD, one warp."""
        stage, phase = Int32(0), Int32(0)
        for number in cutlass.range(self.first(), number_of_walks(self.c, x), x.walkers, unroll=1):
            place = self.locate(x, number, 0)
            stage, phase = self.load_on(
                x, s, x.do, place.first_v, place.tokens, place.chunk, place.head, place.steps, True, stage, phase
            )


class QueuePanelLoader(QueueLoader, PanelLoader):
    """LOAD of a CTA that computes gradients."""


class Reverse(GradsEntry):
    def __init__(self, config: ReverseConfig):
        super().__init__(config)
        self.walk, self.loader, self.math = PublishedWalk(config), QueuePanelLoader(config), Math(config.grads)

    @cute.kernel
    def kernel(self, x):
        shared = SmemAllocator().allocate_array(Uint8, self.c.shared, byte_alignment=1024)
        s = self.fields(shared)
        self.set_up(x, shared, s)
        walks, warp = cute.arch.block_idx()[0] < x.walkers, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        reloaded, (of_math, of_load) = Reloaded(x, s), self.c.grads.registers
        if warp < self.c.grads.math_warps:
            cute.arch.setmaxregister_increase(of_math)
            if walks:
                self.walk.walk_all(x, self.of_walker(shared, s))
                self.change()
            self.math.run(reloaded, s)
        else:
            cute.arch.setmaxregister_decrease(of_load)
            if walks:
                if warp == self.c.loader:
                    self.walk.load_all(x, self.of_walker(shared, s))
                elif warp == self.c.publisher:
                    self.walk.publish_all(x, self.of_walker(shared, s))
                self.change()
            self.loader.run(reloaded, s)

    def of_walker(self, shared, s):
        """Return the shared memory of a CTA that walks."""
        found = fields_at(shared, self.c.walker)._asdict()
        found |= mbarriers_among(s, self.c.walker_pipelines)._asdict() | dict(base_desc=s.base_desc)
        return namedtuple("Walker", found)(**found)

    def change(self):
        """All warps go from walks to items, whose copies write where a walk has read and written."""
        # redundant: where h and dh, which copies write, lie among four stages; of three, dh rounded begins in dh
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()


build = Reverse.build
