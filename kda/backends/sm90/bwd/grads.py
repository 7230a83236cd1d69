"""bwd/grads: gradients of q, k, g and beta of one chunk of 64 tokens and one value head, from both walks' results, by
the formulas of common/cute/grads/rows.py.

Channels are the rows of every product, so that a sum over tokens stays among four lanes.  In shared memory 16 tokens
are permuted: position 8 b + 2 a + e holds token 4 a + 2 b + e, and lane a of four has four neighbours.

  warps, registers; K = V = 64   role  does
  0-7    232        0-3    232   MATH  a warpgroup has 64 channels: 32 elements a thread of each of three accumulators;
                                       two make G1 and G2, a single one makes both
  8-11   40         4-7    24    LOAD  brings what comes next, norms and beta of its tokens, takes away what was made

With blocks of 8 tokens, or one gate per head, MATH has 240 registers and LOAD 24.

  pipeline, barrier      arrivals                             waits       says
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

  shared memory: configs.GradsConfig.struct: do, dv, r 3 x 16 KiB, h, dh 2 x 32, rows 2 x 48, G 16 (partial sums later);
  of K = V = 64 3 x 8, 2 x 8, 2 x 24 and 16, of which two CTAs fit on an SM
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from ...common.cute import fast
from ...common.cute.barriers import initialise
from ...common.cute.copies import allocate, store
from ...common.cute.entry import Entry
from ...common.cute.grads.load import Loader, place_of, there_is, tile_at
from ...common.cute.grads.places import EACH, HALVES, STEPS
from ...common.cute.grads.rows import GradRows
from ...common.cute.training import CHANNELS, TOKEN_FACTORS, TOKENS
from ..configs import GradsConfig
from ..parts.state import register_mma
from ..parts.wgmma import accumulator, issue, view, wide_view

MADE_G, READ_G, MADE_SUMS, READ_SUMS = range(4)         # what MATH's warpgroups tell each other


def product_mma(of_a=OperandMajorMode.K):
    source, along = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, (CHANNELS, TOKENS, 16), source, of_a, along))


def issue_product(acc, a, b, of_a=OperandMajorMode.K, fenced: bool = True):
    """acc = a @ b^T of views in shared memory, in no group yet; acc is untouched since a fence, or unused."""
    mma = product_mma(of_a)
    part = mma.get_slice(0)
    issue(mma, acc, mma.make_fragment_A(part.partition_A(a)), mma.make_fragment_B(part.partition_B(b)), False, fenced)


class Math(GradRows):
    """MATH: a warpgroup for each panel of channels.  Two make G1 and G2, one each; one makes both."""

    states_stand = True
    loads_ahead = True

    def panel(self):
        """The warpgroup, where there are two."""
        if self.c.panels == 1:
            return 0
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) >> 2

    def part(self):
        """The warp of its warpgroup."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3

    def lane_again(self):
        return fast.again(self.lane())

    @cute.jit
    def run(self, x, s):
        """From item to item, until no item is left."""
        i = Int32(0)
        self.tell(READ_SUMS)                                                   # there are none yet
        while there_is(s, i):
            self.item(x, s, place_of(s, i), i)
            i += 1
        self.hear(READ_SUMS)

    def ask_again(self, s, i, place, channel):
        """Return where the item lies out of shared memory: from its beginning on, registers would be spilled for it."""
        return place_of(s, i), channel

    def item(self, x, s, place, i):
        c, channel, first = self.c, self.first_channel(), self.panel()
        cute.arch.mbarrier_wait(s.values_full, i & 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        G = [accumulator(product_mma(), (TOKENS, TOKENS)) for _ in range(2 // c.panels)]
        up1, up2, down = [accumulator(product_mma(), (CHANNELS, TOKENS)) for _ in range(3)]
        do, dv, r = [wide_view(values, TOKENS, c.V) for values in (s.do, s.dv, s.r)]
        for n in range(len(G)):
            rows = wide_view(tile_at(s.do, (first + n) * (TOKENS * c.V)), TOKENS, c.V)
            issue_product(G[n], rows, r, fenced=n > 0)
        warpgroup.commit_group()
        h, dh = [self.own_channels(states) for states in (s.h, s.dh)]
        issue_product(up1, h, do, OperandMajorMode.MN)
        issue_product(up2, h, dv, OperandMajorMode.MN)
        # redundant: its place; otherwise they belong to the next group, which is waited for as well
        warpgroup.commit_group()
        parameters = self.gate.parameters(x, place[1], channel)                # products hide these loads
        warpgroup.wait_group(1)
        self.hear(READ_SUMS)
        for n in range(len(G)):
            self.store_G(s, G[n], first + n)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.tell(MADE_G)

        cute.arch.mbarrier_wait(s.rows_full + (i & 1), i >> 1 & 1)
        gates = self.gate.of_channels(*parameters)
        through_state = self.sums_of_states(s)                                 # these would wait behind products of up
        of_tokens, rows = self.places(s, i)
        Qu, Ku, Kd = [self.operand() for _ in range(3)]
        powers, ratio = self.operands(x, place, rows, channel, of_tokens, gates, Qu, Ku, Kd)
        issue_product(down, dh, r, OperandMajorMode.MN)                        # now there are registers for it
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.give_back(s.values_empty)
        self.enter_up(up1, up2, ratio)
        through = self.enter_down(down, Kd, ratio, through_state)
        self.hear(MADE_G)
        self.sweeps(x, s, up1, up2, down, Qu, Ku, Kd, ratio)
        self.tell(READ_G)
        self.finish(x, s, place, i, channel, rows, of_tokens, powers, through, up1, up2, down, Qu, Ku, Kd)

    def finish(
        self, x, s, place, i, channel, rows, of_tokens, powers, through, up1, up2, down, Qu, Ku, Kd
    ):
        """From accumulators to results, in the place of the item's rows.  Warpgroups tell each other what they have
        done long before the other waits for it."""
        if self.c.panels == 1:
            return super().finish(
                x, s, place, i, channel, rows, of_tokens, powers, through, up1, up2, down, Qu, Ku, Kd
            )
        gains, (to, sums) = self.gains_and_sums(x, s, of_tokens, powers, up1, up2, down, Qu, Ku, Kd)
        place, channel = self.ask_again(s, i, place, channel)
        # from L1 again: from the item's beginning on, registers would be spilled for them
        parameters, logit = self.gate.parameters(x, place[1], channel), self.logit_of_beta(x, *place[1:])
        shares = [self.over_channels(of_lane) for of_lane in sums]
        self.hear(READ_G)
        for n in range(len(shares)):
            store(to + n * TOKENS, shares[n])
        if not self.c.per_head:
            self.tell(MADE_SUMS)
        gates = self.gate.of_channels(*parameters)
        self.store_dg(x, s, place, rows[-1], gains, gates, through, channel)
        if self.c.per_head:
            self.tell(MADE_SUMS)
        self.hear(MADE_SUMS)
        self.project_apart(x, s, i, logit, *place[1:])
        if self.c.per_head:
            self.store_dg_of_heads(x, s, *place[1:])
        self.tell(READ_SUMS)
        self.c.panel_meets.sync(self.panel_again())                            # projections are there
        self.store_dq_dk(x, s, rows, of_tokens, powers, up1, up2, down)
        self.give_back(s.rows_done + (i & 1))
        return None

    @cute.jit
    def project_apart(self, x, s, i, logit, head, begin, tokens):
        """What `project` does, by each warpgroup for itself; the first stores dbeta."""
        thread, token = self.thread() & 2 * TOKENS - 1, self.thread() - TOKENS
        through_b = s.through_b[thread & TOKENS - 1]
        if cutlass.const_expr(self.c.norm):
            factor = s.of_tokens[(i & 1) * (TOKEN_FACTORS * TOKENS) + thread]
            total = self.over_warps(s, thread)
            total += through_b if thread >= TOKENS else Float32(0.0)
            self.own_projected(s)[thread] = total * factor * factor
        if token >= 0 and token < cutlass.min(tokens, TOKENS):
            self.store_dbeta(x, s, i, token, through_b, logit, head, begin)

    def own_projected(self, s):
        """Where a warpgroup has projections: behind partial sums, in what it alone overwrites with G."""
        behind = self.c.math_warps * len(self.c.sums) * TOKENS
        return cute.recast_ptr(s.G, dtype=Float32) + (self.panel_again() * (TOKENS * TOKENS // 2) + behind)

    def projections(self, s):
        if self.c.panels == 1:
            return super().projections(s)
        return self.own_projected(s) + EACH * (self.lane() & 3)

    def panel_again(self):
        return self.thread() // (2 * TOKENS)

    def tell(self, what: int):
        """Tell the other warpgroup that this one has done it; before the next, `hear` of the same."""
        if self.c.panels > 1:
            self.c.panels_meet.arrive(2 * (what & 1) + (self.panel_again() ^ 1))

    def hear(self, what: int):
        """Wait until both have; what one alone waits for but G is in `GradRows.finish`."""
        if self.c.panels > 1:
            self.c.panels_meet.sync(2 * (what & 1) + self.panel_again())
        elif what == MADE_G:
            self.warps.sync()

    def own_channels(self, states):
        """(64, V) of a state that lies as (V, K)."""
        half = tile_at(states, self.panel() * (self.c.V * CHANNELS))
        return view(half, SmemLayoutAtomKind.MN_SW128, (CHANNELS, self.c.V), (1, 0))

    def operand(self, tokens: int = TOKENS):
        mma = register_mma(TOKENS, OperandMajorMode.K)
        return cute.make_rmem_tensor(mma.partition_shape_A((CHANNELS, tokens)), BFloat16)

    def own_rows_of_state(self, step: int):
        lane = cute.arch.lane_idx()
        piece, row = 2 * self.part() + (lane >> 3 & 1), (lane >> 4) * 8 + (lane & 7)
        offset = self.panel() * (self.c.V * CHANNELS) + row * 64 + (piece ^ row & 7) * 8
        return offset + step * (16 * 64)

    def sweeps(self, x, s, up1, up2, down, Qu, Ku, Kd, ratio):
        """Blocks of tokens upward to rows below them, and downward to rows above."""
        K, standing = OperandMajorMode.K, OperandMajorMode.MN
        mma, mma_down = register_mma(TOKENS, K), register_mma(TOKENS, standing)
        lying, stood = [], []
        for n in range(2):
            G = s.G + n * (TOKENS * TOKENS)
            rows = wide_view(G, TOKENS, TOKENS)
            columns = view(G, SmemLayoutAtomKind.MN_SW128, (TOKENS, TOKENS), (1, 0))
            lying.append(mma.make_fragment_B(mma.get_slice(0).partition_B(rows)))
            stood.append(mma_down.make_fragment_B(mma_down.get_slice(0).partition_B(columns)))
        last, blocks = self.blocks - 1, range(self.blocks)
        beside = self.c.panels > 1                                             # otherwise another CTA issues meanwhile

        def issue_up(n: int):
            of_keys = self.block_of(Kd, n)
            warpgroup.fence()
            self.issue_block(mma, up1, of_keys, lying[0], n)
            self.issue_block(mma, up2, of_keys, lying[1], n)
            warpgroup.commit_group()

        def issue_down(n: int):
            of_q, of_k = self.block_of(Qu, n), self.block_of(Ku, n)
            warpgroup.fence()
            self.issue_block(mma_down, down, of_q, stood[0], n)
            self.issue_block(mma_down, down, of_k, stood[1], n)
            warpgroup.commit_group()

        issue_up(0)
        issue_down(last)
        for n in range(last):                                                  # rescaled beside the other's product
            onward = [[ratio[r][n + 1] if n < block else x.one for block in blocks] for r in range(HALVES)]
            back = [[ratio[r][last - n] if block < last - n else x.one for block in blocks] for r in range(HALVES)]
            warpgroup.wait_group(int(beside))
            self.times_blocks(up1, onward)
            self.times_blocks(up2, onward)
            if beside:
                issue_up(n + 1)
                warpgroup.wait_group(1)
            self.times_blocks(down, back)
            if not beside:
                issue_up(n + 1)
            issue_down(last - 1 - n)
        warpgroup.wait_group(0)

    def times_blocks(self, acc, factors):
        """Multiply by factors of each block, of both halves.  All of an accumulator, what is done times 1: of one that
        changed in part ptxas makes another, and then every product waits for the one before."""
        flat = cute.coalesce(acc)
        for b in range(STEPS):
            each = [self.of_lane(of_half[b * self.each : (b + 1) * self.each]) for of_half in factors]
            for j in range(8):
                flat[8 * b + j] = flat[8 * b + j] * each[j // 2 % 2]

    def issue_block(self, mma, acc, operand, b, block: int):
        """acc += operand @ b^T of a block's tokens."""
        step = block // self.each
        mma.set(warpgroup.Field.ACCUMULATE, True)
        a = operand[None, None, step if self.each == 1 else 0]
        cute.gemm(mma, acc, a, b[None, None, step], acc)


class Grads(Entry):
    def __init__(self, config: GradsConfig):
        self.c = config
        self.loader, self.math = Loader(config), Math(config)

    @cute.kernel
    def kernel(self, x):
        s = allocate(self.c.struct)
        if cute.arch.thread_idx()[0] == 0:
            initialise(s, self.c.pipelines)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        of_math, of_load = self.c.registers
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < self.c.math_warps:
            cute.arch.setmaxregister_increase(of_math)
            self.math.run(x, s)
        else:
            cute.arch.setmaxregister_decrease(of_load)
            self.loader.run(x, s)


build = Grads.build
