"""Walk and grads in one grid, what lies between an arch's bwd/walk and its bwd/grads: CTAs that walk add items of grads
to a queue in memory, and CTAs that compute gradients remove them.  `one_grid.Queue` says what its elements are."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..async_copies import bulk_copy
from ..copies import load_one, store
from ..one_grid import Queue
from ..segments import WalkPlace, begins_sequence, place_of_segment
from ..tile import BF16, HALF, C
from ..training import TOKENS
from .load import Loader

KIB = 1024


def number_of_walks(c, x):
    """Return how many walks there are: the last entries of a table of segments may be none."""
    return load_one(x.first_segment + x.N) * x.HV if c.packed and c.cut else x.walks


class Publishing:
    """What is the same of every walk in one grid with grads: where it lies, and PUBLISH.  A subclass has `c`, a walk's
    configuration, the Struct of a `tile`, and `remade`: whether dh of an item lies over the item's tiles."""

    announces = True

    def first(self):
        return cute.arch.block_idx()[0]

    def locate(self, x, number, strip):
        """Return the place of one strip of walk `number`."""
        p = number // x.HV
        head = number - p * x.HV
        segments, segment = (x.segments, x.segment) if self.c.cut else (1, 0)
        n, begin, tokens, chunk, state = place_of_segment(self.c, x, p, (x.T + C - 1) // C, segments, segment)
        first = True
        if self.c.cut:
            tokens, first = cutlass.min(tokens, segment * C), begins_sequence(self.c, x, p)
        first_v = (begin * x.HV + head) * self.c.V + strip * HALF
        return WalkPlace(p, n, first, chunk, state, head, strip, first_v, tokens)

    @cute.jit
    def places_of_dh(self, x, place, pair):
        """Return the KiB from the tiles to each 64 channels of dh that leaves the walk's item `pair`: they lie over one
        of its tiles each, the second behind all tiles if the item has but one."""
        size = self.tile.bytes // KIB
        tile = (place.chunk + 2 * pair) * x.HV + place.head
        places = [tile * size]
        if cutlass.const_expr(self.c.K > HALF):
            behind = x.spare + (place.n * x.HV + place.head) * (BF16 * HALF * self.c.V // KIB)
            places += [(tile + x.HV) * size if 2 * pair + 1 < place.steps else behind]
        return places

    def announce(self, s, number):
        """Tell PUBLISH that this warp's part of dv and dh is in memory, of the CTA's item with this number."""
        turn = number & 1
        # redundant: in the simulator, to which a warp's lanes are one; here all lanes have stored when one arrives
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            # redundant: in the simulator, none of whose schedules lets PUBLISH fall two items behind; its order is not
            # wanted, only its phase
            cute.arch.mbarrier_wait(s.published + turn, number >> 1 & 1 ^ 1)
            cute.arch.mbarrier_arrive(s.stored + turn)

    # redundant: the wait of `announce`, which the DSL places here
    @cute.jit
    def publish_all(self, x, s):
        """PUBLISH, one warp: items from the last of a walk to the first."""
        before = Int32(0)
        for walk in cutlass.range(self.first(), number_of_walks(self.c, x), x.walkers, unroll=1):
            place = self.locate(x, walk, 0)
            for j in cutlass.range(place.pairs, unroll=1):
                turn, item = before & 1, (place.state + place.pairs - 1 - j) * x.HV + place.head
                cute.arch.mbarrier_wait(s.stored + turn, before >> 1 & 1)
                with cute.arch.elect_one():
                    if cutlass.const_expr(self.remade):
                        places = self.places_of_dh(x, place, place.pairs - 1 - j)
                        store(x.places_of_dh + item * len(places), places)
                    number = cute.arch.atomic_add(x.queue + Queue.ADDED, Int32(1), sem="relaxed", scope="gpu")
                    cute.arch.store(x.queue + (Queue.ITEMS + number), item + 1, sem="release", scope="gpu")
                    # redundant: its release, not the arrival; WALK reads nothing that PUBLISH has written
                    cute.arch.mbarrier_arrive(s.published + turn)
                before += 1


class QueueLoader(Loader):
    """LOAD of grads, whose items come from the queue.  The configuration has those of `walk` and `grads`."""

    def __init__(self, config):
        super().__init__(config.grads)
        self.walk, self.remade = config.walk, config.remade

    def items(self, x):
        """Return how many items walks add to the queue."""
        if not self.c.packed:
            return x.items
        last = number_of_walks(self.walk, x) // x.HV - 1
        _, _, tokens, _, state = place_of_segment(self.walk, x, last, 0, 1, 0)
        return (state + (tokens + TOKENS - 1) // TOKENS) * x.HV

    @cute.jit
    def item(self, x, i, items):
        """Wait for item i of this CTA."""
        item = cute.arch.atomic_add(x.queue + Queue.REMOVED, Int32(1), sem="relaxed", scope="gpu")
        if item < items:
            element = x.queue + (Queue.ITEMS + item)
            item = Int32(0)
            while item == 0:
                item = cute.arch.load(element, Int32, sem="acquire", scope="gpu")
            # redundant: to the simulator, a copy writes dh and a copy reads it; the queue between is no copy
            cute.arch.fence_proxy("async.global")
            item -= 1
        return item

    def states(self, x, s):
        return super().states(x, s)[: 1 if self.remade else 2]

    def load_other_states(self, x, s, chunk, head):
        if self.remade:
            half, panels = HALF * self.c.V, self.c.panels
            places = x.places_of_dh + (chunk * x.HV + head) * panels
            kibs = [cute.arch.load(places + n, Int32, sem="relaxed", scope="gpu") for n in range(panels)]
            for n in range(panels):
                bulk_copy(s.dh + n * half, x.tiles + Int64(kibs[n]) * KIB, BF16 * half, s.values_full)

    def first_outside(self, x, i, items):
        return items + cute.arch.block_idx()[0]
