"""bwd/grads: gradients of q, k, g and beta of one chunk of 64 tokens and one value head, from both walks' results, by
the formulas of common/cute/grads/rows.py, of two tokens at a time (rows.py).

Products of values and states are UMMA's, with the channels (of G: tokens, of 128 channels twice) as rows.  Products of
the chunk's tokens with each other use mma.sync, with operands and accumulators in registers: between two blocks of
16 tokens an accumulator is rescaled, which in tensor memory would take a load and a store.  Of the 64 lanes that two
warps share a warp has 16 in turn: their fragments are those of a warpgroup on Hopper.  Of 64 channels a warp is alone
with 32 lanes: products have 16, among them do r^T, and in the others lie dv r^T and what is put aside.

  warps, registers; K = V = 64   role  does
  0-7    224        0-3    224   MATH  a warp has 16 channels: 32 elements a thread of each of three accumulators;
                                       warp 0 issues UMMA's products
  8-11   56         4-7    32    LOAD  brings what comes next, norms and beta of its tokens, takes away what was made

  pipeline, barrier      arrivals                             waits       says
  values_full            128 of LOAD, each thread with its    MATH        do, dv, r, h and dh of a chunk are there
                         pieces of do, dv and r; 1 of LOAD
                         with the bytes of h and dh
  values_empty           4 or 8 of MATH, a lane of each warp  LOAD        all products and sums that read them are done
  rows_full, each stage  128 of LOAD, each thread             MATH        q, k, g and of_tokens are there
  rows_done, each stage  4 or 8 of MATH, a lane of each warp  LOAD        dq, dk and dg stand where q, k and g stood
  placed, each stage     1 of LOAD, a lane                    MATH, LOAD  where an item lies, or that there is none
  products, each stage   1 of MATH, a commit                  MATH        first: G is in tensor memory; second: products
                                                                          of states are
  MATH                   128 or 256                           MATH        G is there; it was read; partial sums are
                                                                          there; projections are
  LOAD                   128                                  LOAD        rows are there

  shared memory: configs.GradsConfig.struct: do, dv, r 3 x 16 KiB, h, dh 2 x 32, rows 2 x 48, G 16 (partial sums later)
  tensor memory: configs.GradsColumns, 480 columns; all 512 are allocated, so that they begin at 0
  K = V = 64: do, dv, r 3 x 8, h, dh 2 x 8, rows 2 x 24; 256 columns, wherever they begin; two CTAs fit on an SM
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8, Uint32
from cutlass.memory import SmemAllocator

from ...common.cute.barriers import initialise
from ...common.cute.copies import field_at, in_global, load_one, store
from ...common.cute.entry import Entry
from ...common.cute.fragments import load_matrices, mma_bf16
from ...common.cute.grads.load import place_of, there_is
from ...common.cute.grads.places import HALVES, STEPS
from ...common.cute.training import TOKENS
from ..configs import GradsConfig
from ..parts import umma
from .load import PanelLoader
from .rows import PairRows

TENSORS = GradsConfig.arguments.tensor_names()


class Reloaded:
    """The kernel's arguments; addresses of tensors come out of shared memory wherever they are used.  Parameters
    ptxas loads once, and then keeps in local memory."""

    def __init__(self, x, s):
        self.x, self.s = x, s

    def __getattr__(self, name):
        given = getattr(self.x, name)
        if name not in TENSORS:
            return given
        return in_global(load_one(self.s.tensors + TENSORS.index(name)), given.dtype)


class Math(PairRows):
    """MATH: eight warps, or four, with 16 channels each.  Each of four is alone with the 32 lanes of tensor memory that
    it can access: rows of products have 16 of them, and what is put aside the others."""

    states_stand = False
    loads_ahead = False

    def __init__(self, config: GradsConfig):
        super().__init__(config)
        K, rows, steps = config.K, umma.along(2 * TOKENS), range(config.V // umma.STEP)
        self.columns, self.alone = config.tmem, config.panels == 1
        self.of_G = umma.Product(TOKENS if self.alone else 2 * TOKENS, TOKENS, rows, umma.along(TOKENS), steps)
        self.of_h = umma.Product(K, TOKENS, umma.along(K), rows, steps)
        self.of_dh = umma.Product(K, TOKENS, umma.along(K), umma.along(TOKENS), steps)

    @cute.jit
    def run(self, x, s):
        """From item to item, until no item is left; then tensor memory is given back: `finish` of the last item has met
        all warps since they read it."""
        i = Int32(0)
        while there_is(s, i):
            self.item(x, s, i)
            i += 1
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            umma.free(self.c.allocated, umma.first_column(self.c, s))

    def refresh(self, s):
        """Reload the thread's number from shared memory, so that ptxas cannot hoist what follows from it out of the
        loop over items, where there are no registers for it."""
        self.number = load_one(s.threads + cute.arch.thread_idx()[0]).to(Int32) & 32 * self.c.math_warps - 1

    def thread(self):
        return self.number

    def lane(self):
        return self.number & 31

    def warp(self):
        return cute.arch.make_warp_uniform(self.number >> 5)

    def quarter(self):
        """Return which quarter of the lanes of tensor memory the warp can access."""
        return self.warp() & 3

    def half(self):
        """Return which half of those lanes is the warp's."""
        return self.warp() >> 2

    def panel(self):
        return 0 if self.alone else self.quarter() >> 1

    def part(self):
        return self.warp() if self.alone else (self.quarter() & 1) * 2 + self.half()

    @cute.jit
    def item(self, x, s, i):
        self.refresh(s)
        self.tmem = s.tmem
        cute.arch.mbarrier_wait(s.values_full, i & 1)
        if self.warp() == 0:
            self.issue_products(s)
        through_state = self.sums_of_states(s)
        cute.arch.mbarrier_wait(s.products, i & 1)
        umma.fence_after_thread_sync()
        if cutlass.const_expr(self.alone):
            self.store_G(s, *self.accumulators(self.columns.G), 0)
            self.store_G(s, *self.accumulators(self.columns.G + umma.HALF_LANES), 1)
        else:
            self.store_G(s, *self.accumulators(self.columns.G), self.panel())

        cute.arch.mbarrier_wait(s.rows_full + (i & 1), i >> 1 & 1)
        self.refresh(s)
        place, channel = self.ask_again(s, i)
        gates = self.gate.of_channels(*self.gate.parameters(x, place[1], channel))
        of_tokens, rows = self.places(s, i)
        Qu, Ku, Kd = [self.operand() for _ in range(3)]
        powers, ratio = self.operands(x, place, rows, channel, of_tokens, gates, Qu, Ku, Kd)
        self.put_aside(Qu, Ku, Kd)
        cute.arch.mbarrier_wait(s.products + 1, i & 1)
        umma.fence_after_thread_sync()
        self.give_back(s.values_empty)
        up1, up2 = self.accumulators(self.columns.up1, 2)
        self.enter_up(up1, up2, ratio)
        self.warps.sync()                                                      # G is there
        self.refresh(s)
        (Kd,) = self.put_back(self.columns.Kd)
        self.sweep_up(s, up1, up2, Kd, ratio)
        (down,) = self.accumulators(self.columns.down)
        through = self.enter_down(down, Kd, ratio, through_state)
        Qu, Ku = self.put_back(self.columns.Qu, 2)
        self.sweep_down(s, down, Qu, Ku, ratio)
        self.finish(x, s, place, i, channel, rows, of_tokens, powers, through, up1, up2, down, Qu, Ku, Kd)

    def ask_again(self, s, i, *known):
        return place_of(s, i), self.first_channel()

    def put_aside(self, Qu, Ku, Kd):
        """Store these to tensor memory: ptxas would make operands where they are multiplied, and keep their inputs."""
        for columns, operand in ((self.columns.Qu, Qu), (self.columns.Ku, Ku), (self.columns.Kd, Kd)):
            words = cute.recast_tensor(operand, Uint32)
            umma.store_fragments(self.lanes() + columns, [words[w] for w in range(TOKENS // 4)])
        umma.wait_for_stores()

    def put_back(self, columns: int, count: int = 1):
        """Return operands that were put aside next to each other."""
        found, each = umma.load_fragments(self.lanes() + columns, count * TOKENS // 2, Uint32), TOKENS // 4
        operands = [self.operand() for _ in range(count)]
        for n in range(count):
            words = cute.recast_tensor(operands[n], Uint32)
            for w in range(each):
                words[w] = found[n * each + w]
        return operands

    def issue_products(self, s):
        """Warp 0 issues an item's products: its values are there, and the results of the item before were read."""
        struct, columns, to = self.c.struct, self.columns, umma.first_column(self.c, s)
        do, r = struct.do_dv.offset, struct.r.offset
        dv = do + TOKENS * umma.ROW
        umma.fence_after_thread_sync()
        with cute.arch.elect_one():
            cute.arch.fence_proxy("async.shared", space="cta")                 # LOAD's copies, for products
            umma.multiply(self.of_G, to + columns.G, s.base_desc, do, r, False)
            if cutlass.const_expr(self.alone):
                umma.multiply(self.of_G, to + (columns.G + umma.HALF_LANES), s.base_desc, dv, r, False)
            umma.commit(s.products)
            umma.multiply(self.of_h, to + columns.up1, s.base_desc, struct.h.offset, do, False)
            umma.multiply(self.of_h, to + columns.up2, s.base_desc, struct.h.offset, dv, False)
            umma.multiply(self.of_dh, to + columns.down, s.base_desc, struct.dh.offset, r, False)
            umma.commit(s.products + 1)

    def lanes(self):
        """Return the address of the 16 lanes of tensor memory where the warp has its rows of products."""
        if self.alone:
            return umma.first_column(self.c, self) + self.warp() * umma.WARP_LANES
        return self.quarter() * umma.WARP_LANES + self.half() * (umma.WARP_LANES // 2)

    def accumulators(self, columns: int, count: int = 1):
        """Return the warp's 16 rows of products that lie next to each other."""
        found, each = umma.load_fragments(self.lanes() + columns, count * TOKENS), TOKENS // 2
        accs = [cute.make_rmem_tensor(each, Float32) for _ in range(count)]
        for n in range(count):
            for j in range(each):
                accs[n][j] = found[n * each + j]
        return accs

    def operand(self, tokens: int = TOKENS):
        return cute.make_rmem_tensor(tokens // 2, BFloat16)

    def own_rows_of_state(self, step: int):
        lane = self.lane()
        row = 64 * self.panel() + 16 * self.part() + (lane & 15)
        offset = row * 64 + ((lane >> 4) ^ (row & 7)) * 8
        return (offset ^ (step & 3) * 16) + (step >> 2) * (self.c.K * 64)

    def sweep_up(self, s, up1, up2, Kd, ratio):
        """Add blocks of tokens to those below them, the first one first; what goes on decays."""
        for n in range(self.blocks):
            of_keys, step = self.words_of_block(Kd, n), n // self.each
            for b in range(step, STEPS):
                self.add(up1, b, of_keys, self.square_of_G(s, 0, b, step, False))
                self.add(up2, b, of_keys, self.square_of_G(s, 1, b, step, False))
            for b in range((n + 1) // self.each, STEPS):
                self.rescale((up1, up2), b, ratio, n + 1, range(n + 1, self.blocks))

    def sweep_down(self, s, down, Qu, Ku, ratio):
        """Add blocks of tokens to those above them, the last one first."""
        for m in range(self.blocks):
            n = self.blocks - 1 - m
            of_q, of_k, step = self.words_of_block(Qu, n), self.words_of_block(Ku, n), n // self.each
            for b in range(step + 1):
                self.add(down, b, of_q, self.square_of_G(s, 0, step, b, True))
                self.add(down, b, of_k, self.square_of_G(s, 1, step, b, True))
            for b in range((n - 1) // self.each + 1):
                self.rescale((down,), b, ratio, n, range(n))

    def words_of_block(self, operand, block: int):
        """Return four words of a step's operand, of which one block counts."""
        step = block if self.each == 1 else 0
        words = cute.recast_tensor(self.block_of(operand, block), Uint32)
        return [words[4 * step + w] for w in range(4)]

    def square_of_G(self, s, n: int, i: int, j: int, transposed: bool):
        """Load 16 x 16 elements of G1 or G2, rows of step i and columns of step j, as two operands of mma.sync: B^T of
        rows, or, transposed, of columns."""
        lane = self.lane()
        first, second = lane >> 4, lane >> 3 & 1
        half, piece = (second, first) if transposed else (first, second)
        row = half * 8 + (lane & 7)
        offset = row * 64 + (piece ^ (row & 7)) * 8
        found = load_matrices(s.G + ((offset ^ j * 16) + (n * TOKENS * TOKENS + i * umma.STEP * 64)), transposed)
        return [found[:2], found[2:]]

    def add(self, acc, b: int, a, square):
        """Add a @ square to acc, for the 16 tokens of step b."""
        for half in range(2):
            first = 8 * b + 4 * half
            found = mma_bf16([acc[first + j] for j in range(4)], a, square[half])
            for j in range(4):
                acc[first + j] = found[j]

    def rescale(self, accs, b: int, ratio, n: int, counts):
        """Multiply step b of accumulators, those blocks that count, by the n-th factor from middle to middle."""
        factors = []
        for r in range(HALVES):
            of_blocks = [ratio[r][n] if b * self.each + e in counts else Float32(1.0) for e in range(self.each)]
            factors.append(self.of_lane(of_blocks))
        for acc in accs:
            self.times_step(acc, b, factors)


class GradsEntry(Entry):
    """A kernel whose CTAs compute gradients, with `loader` and `math`."""

    @cute.jit
    def set_up(self, x, shared, s):
        """Set up mbarriers and tensor memory, and what is read again and again from shared memory."""
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if thread == 0:
            initialise(s, self.c.pipelines)
            cute.arch.mbarrier_init_fence()
            for n, name in enumerate(TENSORS):
                store(s.tensors + n, [getattr(x, name).toint()])
            store(s.base_desc, [(shared.toint().to(Uint32) & 0x3FFFF) >> 4])
        if warp < self.math.c.math_warps:
            store(s.threads + thread, [thread])
        if warp == 0:
            umma.allocate(s.tmem, self.math.c.allocated)
        cute.arch.sync_threads()

    def fields(self, shared):
        """Return pointers to what lies in shared memory, by name."""
        struct = self.c.struct
        found = {name: field_at(shared, field) for name, field in struct.fields.items()}
        do = found.pop("do_dv")
        found |= dict(do=do, dv=do + TOKENS * 64)
        return namedtuple("Shared", found)(**found)


class Grads(GradsEntry):
    def __init__(self, config: GradsConfig):
        super().__init__(config)
        self.loader, self.math = PanelLoader(config), Math(config)

    @cute.kernel
    def kernel(self, x):
        shared = SmemAllocator().allocate_array(Uint8, self.c.shared, byte_alignment=1024)
        s = self.fields(shared)
        self.set_up(x, shared, s)
        x, (of_math, of_load) = Reloaded(x, s), self.c.registers
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < self.c.math_warps:
            cute.arch.setmaxregister_increase(of_math)
            self.math.run(x, s)
        else:
            cute.arch.setmaxregister_decrease(of_load)
            self.loader.run(x, s)


build = Grads.build
