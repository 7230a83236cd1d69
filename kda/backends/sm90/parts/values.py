"""Who moves rows of v and o between memory and the shared memory of a CTA that walks (fwd/fused.py).

In a cluster of two CHAIN does so itself (`MovedByChain`): it requests v three chunks ahead, and stores o of the chunk
before while the next product is computed. A cluster of four has warps without another role (`MovedByHelpers`): LOAD
brings v, which `full` counts beside the tile, and STORE takes o away, so that CHAIN's four warps never wait for each
other.

r of a chunk lies where its v was, and goes to memory as o does; only then v of a later chunk comes there.

Both say where o of a chunk goes (`place_of_o`), and what CHAIN does while [P; O] of a chunk is computed
(`beside_product`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.cute.async_copies import arrive_when_copied, copy_16_bytes_later
from ...common.cute.rings import phase_of, stage_of
from ...common.cute.tile import C
from ..configs import CHAIN, COLUMNS, OUTPUTS, PITCH_V, RING, FusedConfig
from .share import Share, chunks_of
from .state import State


class MovedByChain:
    """CHAIN itself."""

    early = True                             # v of a chunk is there before its tile is waited for

    def __init__(self, config: FusedConfig):
        self.c, self.state = config.chain, State(config.chain)

    def begin(self, x, s, first_v, tokens, walked):
        """Begin a piece of a walk and return the place of what this thread moves."""
        thread_place = self.state.thread_place(first_v)
        for i in range(RING - 1):
            self.request(x, s, thread_place, Int32(i), tokens, walked)
        self.wait_for_rows(RING - 2)
        return thread_place

    @cute.jit
    def beside_product(self, x, s, thread_place, ring, i, tokens, walked):
        if cutlass.const_expr(self.c.has_r):                                   # where r was, this thread's pieces
            self.wait_for_rows(RING - 3)
            if i > 0:
                self.store(x, s, thread_place, i - 1, walked)
            self.request(x, s, thread_place, i + RING - 1, tokens, walked)
        else:
            self.request(x, s, thread_place, i + RING - 1, tokens, walked)     # where all have read chunk i - 1
            self.wait_for_rows(RING - 2)
            if i > 0:
                self.store(x, s, thread_place, i - 1, walked)

    def store(self, x, s, thread_place, i, walked, tokens=None):
        """Store o and r of a chunk."""
        if self.c.has_o:
            self.state.store_o(x.o, s.o, thread_place, i, x.HV, tokens)
        if self.c.has_r:
            self.state.store_own(x.r, s.v + (walked + i & RING - 1) * (C * PITCH_V), thread_place, i, x.HV, tokens)

    def place_of_o(self, s, i, walked):
        return s.o + (i & 1) * (C * PITCH_V)

    def o_is_there(self, ring, c):
        """Do nothing: the threads that store o meet CHAIN's others before."""

    @cute.jit
    def end(self, x, s, thread_place, steps, tokens, walked):
        if steps > 0:
            CHAIN.sync()                                                       # o of the last chunk is there
            self.store(x, s, thread_place, steps - 1, walked, tokens - (steps - 1) * C)

    @cute.jit
    def request(self, x, s, thread_place, i, tokens, walked):
        """Requests rows of v of chunk i, if there is one: one group of copies either way."""
        if i * C < tokens:
            stage = s.v + ((walked + i & RING - 1) * (C * PITCH_V) + thread_place.within)
            for j in cutlass.range_constexpr(2):
                token = cutlass.min(i * C + 16 * j + thread_place.row, tokens - 1)  # past the end: it has no weight
                copy_16_bytes_later(self.state.row(x.v, thread_place.element, token, x.HV), stage + 16 * j * PITCH_V)
        cute.arch.cp_async_commit_group()

    def wait_for_rows(self, behind: int):
        """All four warps' rows of v of the next chunk are there, and of o of the last; so many chunks were requested
        behind."""
        cute.arch.cp_async_wait_group(behind)
        CHAIN.sync()


class MovedByHelpers:
    """LOAD and STORE."""

    early = False

    def __init__(self, config: FusedConfig):
        self.c, self.wrapped = config.chain, config.wrapped
        self.state, self.share = State(config.chain), Share(config.chain)

    def begin(self, x, s, first_v, tokens, walked):
        """LOAD has begun."""

    def beside_product(self, x, s, thread_place, ring, i, tokens, walked):
        c = walked + i
        cute.arch.mbarrier_wait(ring.taken + stage_of(c, OUTPUTS), phase_of(c, OUTPUTS) ^ 1)

    def place_of_o(self, s, i, walked):
        return s.o + stage_of(walked + i, OUTPUTS) * (C * PITCH_V)

    def o_is_there(self, ring, c):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.written + stage_of(c, OUTPUTS))

    def end(self, x, s, thread_place, steps, tokens, walked):
        """STORE goes on."""

    @cute.jit
    def help(self, x, s, ring, rank, begin, tokens, head, move: cutlass.Constexpr):
        """One warp, of all pieces that the cluster walks: `load` or `store`."""
        if cutlass.const_expr(not self.wrapped):
            move(x, s, ring, (begin * x.HV + head) * self.c.V + rank * COLUMNS, tokens, 0)
        else:
            slot, left = self.share.first(s.share)
            walked, n, looked_up = Int32(0), Int32(0), Boolean(True)
            while left > 0:
                head, n, begin, tokens, _, _, _ = self.share.piece(x, s.share, slot, looked_up, head, n)
                move(x, s, ring, (begin * x.HV + head) * self.c.V + rank * COLUMNS, tokens, walked)
                chunks = chunks_of(tokens)
                slot, looked_up = self.share.after(s.share, slot, chunks)
                left, walked = left - chunks, walked + chunks

    @cute.jit
    def load(self, x, s, ring, first_v, tokens, walked):
        for i in cutlass.range(chunks_of(tokens), unroll=1):
            c = walked + i
            stage = stage_of(c, RING)
            read = ring.stored if cutlass.const_expr(self.c.has_r) else ring.read
            cute.arch.mbarrier_wait(read + stage, phase_of(c, RING) ^ 1)       # v, or r, of four chunks before was read
            self.state.request_rows(x.v, s.v + stage * (C * PITCH_V), first_v, i * C, tokens, x.HV)
            arrive_when_copied(ring.full + stage)

    @cute.jit
    def store(self, x, s, ring, first_v, tokens, walked):
        for i in cutlass.range(chunks_of(tokens), unroll=1):
            c = walked + i
            place = stage_of(c, OUTPUTS)
            cute.arch.mbarrier_wait(ring.written + place, phase_of(c, OUTPUTS))
            stage = stage_of(c, RING)
            if cutlass.const_expr(self.c.has_o):
                self.state.store_rows(x.o, s.o + place * (C * PITCH_V), first_v, i * C, tokens, x.HV)
            if cutlass.const_expr(self.c.has_r):
                self.state.store_rows(x.r, s.v + stage * (C * PITCH_V), first_v, i * C, tokens, x.HV)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.taken + place)
                if cutlass.const_expr(self.c.has_r):
                    cute.arch.mbarrier_arrive(ring.stored + stage)
