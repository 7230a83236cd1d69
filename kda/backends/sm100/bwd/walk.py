"""bwd/walk: chunks of one segment of a sequence from the last to the first, one value head, all of dh, a state's
gradient, which is the S of parts/state.py.

  dv = KT dh + A2^T do                       dv^T (V, 32) in tensor memory, so that dh comes as it lies
  dh = 2^gc_last dh + qg^T do - kE^T dv

Two products lie between a dh and the next one: A2^T do is computed ahead, qg^T do while dv is rounded.  The operands
are those of fwd/record.py.  The rounded dh that leaves every two chunks goes to memory.

A segment is what fwd/record.py has for one.  Where sequences are cut, `carry` walks first, from zero to what a segment
adds to dh; the transposed M of the forward is what it multiplies dh by, and common/cute/compose.py puts both together.

  warps  role  does
  0-7    WALK  dh rounded and decayed, dv rounded; dv and dh to memory.  warp 0: issues products
  8      LOAD  a tile by one bulk copy, rows of do in pieces of 16 bytes

  pipeline, barrier  arrivals                                  waits  says
  full, each stage   1 of LOAD with the bytes of the tile; 32  WALK   a chunk is there
                     of LOAD, each lane with its pieces of do
  empty, each stage  1 of WALK, a commit                       LOAD   no product reads the stage any more
  out                1 of WALK, a commit                       WALK   dv^T is there, dh rounded was read
  added              1 of WALK, a commit                       WALK   dh is that which enters the chunk; dv was read
  IMAGE_THERE        256                                       WALK   dh is rounded and decayed, the dv before was read
  ROWS_THERE         256                                       WALK   dv is in shared memory, out was read

  shared memory: configs.WalkConfig.struct; a stage has a tile of 29 KiB and do 8; dh rounded twice 32, dv 8;
  of K = V = 64 17 and 4, 16, 4
  tensor memory: configs.RecordColumns; all is allocated, so that columns begin at 0; of K = V = 64 a half
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common.cute.rings import advance
from ...common.cute.segments import WalkPlace, begins_sequence, place_of_segment
from ...common.cute.tile import C
from ..configs import IMAGE_THERE, ROWS_THERE, STATE_WARPS, WalkConfig
from ..parts import umma
from ..parts.state import Walker

QG = C * umma.ROW                            # bytes from -kE
A2 = C * 2                                   # bytes from T' - I


class Walk(Walker):
    """`announces`: others are told, `announce(s, number)`, when dv and dh of 64 tokens are in memory."""

    back = True
    announces = False

    def __init__(self, config: WalkConfig):
        super().__init__(config)
        K, V, steps = config.K, config.V, range(C // 16)
        self.ahead = umma.Product(V, C, umma.across(C), umma.along(C), steps)                    # do^T @ A2
        self.on_state = umma.Product(V, C, umma.across(K), umma.along(C), range(K // 16))        # dh^T @ KT^T
        self.added = umma.Product(K, V, umma.across(2 * C), umma.across(C), steps)               # qg^T @ do, -kE^T @ dv

    @cute.kernel
    def kernel(self, x):
        c, warp = self.c, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        _, head, p = cute.arch.block_idx()
        n, begin, left, chunk, state = place_of_segment(c, x, p, x.chunks, x.segments, x.segment)
        first = begins_sequence(c, x, p)
        if n >= 0 and not (cutlass.const_expr(c.carry) and first):
            s = self.set_up()
            if warp == 0:
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()                                           # mbarriers and tensor memory are there
            umma.fence_after_thread_sync()
            self.find_tensor_memory(s)
            tokens = cutlass.min(left, x.segment * C)
            place = WalkPlace(p, n, first, chunk, state, head, 0, (begin * x.HV + head) * c.V, tokens)
            if warp == STATE_WARPS:
                self.load(x, s, x.do, begin, tokens, chunk, head, place.steps)
            else:
                self.walk(x, s, place, Int32(0), Int32(0), Int32(0), Int32(0))
            cute.arch.sync_threads()                                           # tensor memory is unused
            if warp == 0:
                umma.free(c.allocated, self.begin)

    @cute.jit
    def walk(self, x, s, place, stage, phase, turn, before):
        """WALK: from the state's gradient behind the last chunk to that before the first.  The ring is at a stage, and
        the CTA has walked over `turn` chunks and announced `before` items; returns where the ring is then."""
        c, n = self.c, place.n * x.HV + place.head
        if cutlass.const_expr(c.walk == "segments"):
            self.enter(x.dht, place.p * x.HV + place.head, False)
        elif cutlass.const_expr(c.dht):
            self.enter(x.dht, n, c.v_first)
        else:
            self.enter_constant(False)
        stage, phase = self.go(x, s, place, stage, phase, turn, before)
        if cutlass.const_expr(c.carry):
            self.leave(x.dh0, place.p * x.HV + place.head, False)
        elif cutlass.const_expr(c.dh0 is not None) and place.first:
            self.leave(x.dh0, n, c.v_first)
        umma.fence_before_thread_sync()
        return stage, phase

    @cute.jit
    def go(self, x, s, place, stage, phase, turn, before):
        """From chunk to chunk."""
        c, warp, steps = self.c, cute.arch.make_warp_uniform(cute.arch.warp_idx()), place.steps
        if warp == 0 and steps > 0:
            self.issue_ahead(s, stage, phase)
        for j in cutlass.range(steps, unroll=1):
            i = steps - 1 - j
            image = s.S + (turn & 1) * (c.K * c.V)
            to = s.stages + stage * self.stage.bytes
            next_stage, next_phase = advance(stage, phase, c.stages)
            cute.arch.mbarrier_wait(s.full + stage, phase)
            cute.arch.mbarrier_wait(s.added, turn & 1 ^ 1)
            umma.fence_after_thread_sync()
            if cutlass.const_expr(not c.carry):
                if warp == 0:
                    self.wait_for_images()                                     # the other may be written again
            self.round_and_decay(s, image, to)
            umma.fence_before_thread_sync()
            IMAGE_THERE.sync()
            if warp == 0:
                umma.fence_after_thread_sync()
                with cute.arch.elect_one():
                    self.issue_on_state(s, stage, turn)
            if cutlass.const_expr(self.announces):                             # the item behind, beside products
                if (i & 1) == 1 and j > 0:
                    self.announce(s, before + place.pairs - 1 - (i + 1 >> 1))
            if warp == 0:
                if cutlass.const_expr(not c.carry):
                    if (i & 1) == 1 or j == 0:                                 # leaves two chunks, or the last one
                        self.send(x, s, place, i, image, next_stage, next_phase)
            cute.arch.mbarrier_wait(s.out, turn & 1)
            umma.fence_after_thread_sync()
            self.put_rows(self.begin + self.tmem.out, s.dv)
            ROWS_THERE.sync()
            if warp == 0:
                umma.fence_after_thread_sync()
                with cute.arch.elect_one():
                    tile = stage * self.stage.bytes
                    umma.multiply(self.added, self.begin + self.tmem.S, s.base_desc, tile, c.struct.dv.offset, True)
                    umma.commit(s.added)
                    umma.commit(s.empty + stage)
                if j + 1 < steps:
                    self.issue_ahead(s, next_stage, next_phase)
            if cutlass.const_expr(not c.carry):
                self.store_rows(x.dv, place.first_v, s.dv, i * C, place.tokens - i * C, x.HV)
            stage, phase = next_stage, next_phase
            turn += 1
        cute.arch.mbarrier_wait(s.added, turn & 1 ^ 1)
        umma.fence_after_thread_sync()
        if cutlass.const_expr(self.announces):
            if steps > 0:
                self.announce(s, before + place.pairs - 1)
        elif cutlass.const_expr(not c.carry):
            self.wait_for_last_image()
        return stage, phase

    def send(self, x, s, place, i, image, next_stage, next_phase):
        """A thread of warp 0 sends dh that leaves chunk i; the tile of the chunk before it comes to the next stage."""
        to = x.dh + ((Int64(place.state) + (i >> 1)) * x.HV + place.head) * (self.c.K * self.c.V)
        with cute.arch.elect_one():
            self.send_image(to, image)

    def issue_ahead(self, s, stage, phase):
        """Warp 0 issues do^T @ A2 of a chunk, once it is there."""
        cute.arch.mbarrier_wait(s.full + stage, phase)
        cute.arch.fence_proxy("async.shared", space="cta")                     # rows of do came by other copies
        tile = stage * self.stage.bytes
        of_do, of_A2 = tile + self.stage.rows.offset, tile + (self.tile.TA.offset + A2)
        with cute.arch.elect_one():
            umma.multiply(self.ahead, self.begin + self.tmem.out, s.base_desc, of_do, of_A2, False)

    def issue_on_state(self, s, stage, turn):
        """One thread issues the product that needs dh, then the one that only needs it decayed."""
        tile, image = stage * self.stage.bytes, self.c.struct.S.offset + (turn & 1) * self.image
        of_do = tile + self.stage.rows.offset
        umma.multiply(self.on_state, self.begin + self.tmem.out, s.base_desc, image, tile + self.tile.KT.offset, True)
        umma.commit(s.out)
        umma.multiply(self.added, self.begin + self.tmem.S, s.base_desc, tile + QG, of_do, True)


build = Walk.build
