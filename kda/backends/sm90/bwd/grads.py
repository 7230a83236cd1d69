"""bwd/grads: the gradients of q, k, g and beta of one chunk of 64 tokens and one value head, of what two walks leave.

  r_i = v_i - k_i^T S is what the delta rule writes (v_new = b r), dv the gradient of v;  h enters the chunk, dh leaves
  it.
  x = gc - a, a = gc in the middle of the token's block;  |x| is at most the decay of half a block.  Of a gate that may
  lose any number of bits blocks have 8 tokens for 16, and decays a floor (gate.py).

  Qu = scale qn 2^x    Ku = -kn 2^x    Kd = b kn 2^-x                      bfloat16, registers: channels x tokens
  G1 = tril(do r^T)    G2 = strict_tril(dv r^T)                            bfloat16, shared memory: tokens x tokens
  up1 = h do^T + Kd G1^T;  up2 = h dv^T + Kd G2^T;  down = dh r^T + Qu G1 + Ku G2
                       each block of tokens counted from its own middle: what goes on to the next is times 2^(a' - a)
  dqn = scale 2^x up1;  dkn = b 2^-x down - 2^x up2
  dg2[t] = sum_(i >= t) (Qu up1 + Ku up2 - Kd down)_i + sum_all Kd 2^(gc_last - a) dh r^T + 2^gc_last sum_V h dh
                       of the operands as they were rounded: what row i gains, row j loses
  b db = sum_V dv r, the diagonal of dv r^T;  of a given b, which may be 0, db = sum_K kn 2^-x down
  dq = (dqn - qn (qn . dqn)) / |q|, dk alike with kn . dkn = b db + kn . (-2^x up2);  dg, dbeta through gate and sigmoid

Channels are the rows of every product, so that a sum over tokens stays among four lanes.  In shared memory 16 tokens
are permuted: position 8 b + 2 a + e holds token 4 a + 2 b + e, and lane a of four has four neighbours.

  warps  registers  role  does
  0-7    232        MATH  a warpgroup has 64 channels: 32 elements a thread of each of three accumulators
  8-11   40         LOAD  brings what comes next, norms and beta of its tokens, and takes away what was made

  pipeline        arrivals                        says
  values_full     128, of LOAD's copies;          do, dv, r, h and dh of a chunk are there
                  1 and the bytes of h and dh
  values_empty    8, a lane of each MATH warp     all products and sums that read them are done
  rows_full, 2    128, of LOAD                    q, k, g and of_tokens are there
  rows_done, 2    8, a lane of each MATH warp     dq, dk and dg stand where q, k and g stood
  MATH            256                             G is there;  it was read;  partial sums are there;  projections are
  LOAD            128                             rows are there

  shared memory: configs.GradsConfig.struct: do, dv, r 3 x 16 KiB, h, dh 2 x 32, rows 2 x 48, G 16 (partial sums later)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from kda.compile import cutedsl
from kda.compile.target import Target

from ...common.cute import entry, fast
from ...common.cute.async_copies import arrive_when_copied, bulk_copy, copy_16_bytes_later
from ...common.cute.barriers import NamedBarrier
from ...common.cute.copies import allocate, copy_16_bytes, floats, in_global, load, load_one, store, words_of
from ...common.cute.fragments import load_matrices, mma_bf16, store_matrices
from ...common.cute.tile import BF16
from ..configs import GRADS_WARPS, LOAD_WARPS, STEP, TOKEN_FACTORS, TOKENS, ChunkTable, GradsConfig
from ..parts.state import compute_words_now, register_mma
from ..parts.views import view, wide_view
from ..parts.wgmma import accumulator, issue
from .gate import Gate
from .places import EACH, HALVES, STEPS, at_element, last_token, neighbour, position, raw

MATH_REGISTERS, LOAD_REGISTERS = 232, 40
MATH = NamedBarrier(1, 32 * GRADS_WARPS)
LOAD = NamedBarrier(2, 32 * LOAD_WARPS)
LOADERS = 32 * LOAD_WARPS
CHANNELS = 64                                # of a warpgroup
Q, K_, B = range(TOKEN_FACTORS)


@cute.jit
def product_mma(of_a: cutlass.Constexpr = OperandMajorMode.K):
    source, along = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, (CHANNELS, TOKENS, 16), source, of_a, along))


@cute.jit
def tile_at(pointer, elements):
    """A pointer to where a swizzle begins anew."""
    return cute.make_ptr(BFloat16, (pointer + elements).toint(), pointer.memspace, assumed_align=1024)


@cute.jit
def issue_product(acc, a, b, of_a: cutlass.Constexpr = OperandMajorMode.K):
    """acc = a @ b^T of views in shared memory, in no group yet."""
    mma = product_mma(of_a)
    part = mma.get_slice(0)
    issue(mma, acc, mma.make_fragment_A(part.partition_A(a)), mma.make_fragment_B(part.partition_B(b)), False)


class Loader:
    """LOAD: four warps; a thread moves pieces of 16 bytes, 8 tokens apart."""

    def __init__(self, config: GradsConfig):
        self.c = config

    @cute.jit
    def thread(self):
        return cute.arch.thread_idx()[0] - 32 * GRADS_WARPS

    @cute.jit
    def run(self, x, s, place, first, step):
        """Brings values and rows of all items, one ahead of MATH, and takes results away."""
        i = Int32(0)
        if first < x.items:
            self.load_values(x, s, place(x, first))
            self.load_rows(x, s, place(x, first), Int32(0))
        for item in cutlass.range(first, x.items, step, unroll=1):
            if i > 0:
                self.store_results(x, s, place(x, item - step), i - 1)
            if item + step < x.items:
                following = place(x, item + step)
                self.ask_for_rows(x, s, following, i + 1)
                cute.arch.mbarrier_wait(s.values_empty, i & 1)
                self.load_values(x, s, following)
                cute.arch.cp_async_wait_group(1)
                self.make_factors(x, s, following, i + 1)
            i += 1
        if i > 0:
            self.store_results(x, s, place(x, first + (i - 1) * step), i - 1)

    @cute.jit
    def load_rows(self, x, s, at, i):
        self.ask_for_rows(x, s, at, i)
        cute.arch.cp_async_wait_group(0)
        self.make_factors(x, s, at, i)

    @cute.jit
    def load_values(self, x, s, at):
        chunk, head, begin, tokens = at
        K, V, begin = self.c.K, self.c.V, self.loaded(x, begin)
        for source, to in ((x.do, s.do), (x.dv, s.dv), (x.r, s.r)):
            self.load_tokens(source, (begin * x.HV + head) * V, x.HV * V, tokens, to)
        if self.thread() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(s.values_full, 2 * BF16 * V * K)
            of_state = (Int64(chunk) * x.HV + head) * (K * V)
            for source, to in ((x.h, s.h), (x.dh, s.dh)):
                bulk_copy(to, source + of_state, BF16 * V * K, s.values_full)
        arrive_when_copied(s.values_full)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_tokens(self, source, first, stride, tokens, to):
        """64 rows of 256 bytes; past the end the last one again."""
        thread = self.thread()
        for j in cutlass.range_constexpr(TOKENS // 8):
            row = last_token(thread // 16 + 8 * j, tokens)
            address = fast.row((source + first).toint() + (thread & 15) * 16, row, stride * Int32(2))
            copy_16_bytes_later(address, to + self.place_of_piece(j))

    @cute.jit
    def loaded(self, x, begin):
        """The first token that is read: an item of no sequence may begin behind all of them."""
        if cutlass.const_expr(self.c.packed):
            begin = cutlass.min(begin, Int64(x.T) - 1)
        return begin

    @cute.jit
    def place_of_piece(self, j: cutlass.Constexpr):
        """Elements to a thread's piece of token 8 j + thread / 16."""
        thread = self.thread()
        piece, row = thread & 15, position(thread >> 4) + (position(8 * (j & 1)) + STEP * (j >> 1))
        return (piece >> 3) * (TOKENS * 64) + row * 64 + (piece & 7 ^ row & 7) * 8

    @cute.jit
    def ask_for_rows(self, x, s, at, i):
        _, head, begin, tokens = at
        K, begin = self.c.K, self.loaded(x, begin)
        of_q = head // (x.HV // x.H) if cutlass.const_expr(self.c.grouped) else head
        rows = self.rows_at(s, i)
        for source, heads, own, field in (
            (x.q, x.H, of_q, "q"), (x.k, x.H, of_q, "k"), (x.g, x.HV, head, "g"),
        ):  # fmt: skip
            if cutlass.const_expr(field in self.c.rows.fields):
                self.load_tokens(source, (begin * heads + own) * K, heads * K, tokens, self.field(rows, field))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def rows_at(self, s, i):
        return s.rows + (i & 1) * self.c.rows.bytes

    @cute.jit
    def field(self, rows, name: cutlass.Constexpr):
        return tile_at(cute.recast_ptr(rows, dtype=BFloat16), getattr(self.c.rows, name).offset // 2)

    @cute.jit
    def make_factors(self, x, s, at, i):
        """1 / |q|, 1 / |k| and b of each token, 0 where there is none; the rows were waited for."""
        _, head, begin, tokens = at
        thread, token = self.thread(), self.thread() & TOKENS - 1
        real = token < tokens
        of_tokens = s.of_tokens + (i & 1) * (TOKEN_FACTORS * TOKENS)
        if thread < TOKENS:
            beta = load_one(x.beta + (self.loaded(x, begin) + last_token(token, tokens)) * x.HV + head).to(Float32)
            if cutlass.const_expr(self.c.beta != "given"):
                beta = fast.sigmoid(beta) * Float32(2.0 if self.c.beta == "2*sigmoid" else 1.0)
            of_tokens[B * TOKENS + token] = beta if real else Float32(0.0)
        LOAD.sync()                                                            # all threads' rows are there
        factor = Float32(1.0)
        if cutlass.const_expr(self.c.norm):
            row, total = position(token), [Float32(0.0)] * 4
            rows = self.field(self.rows_at(s, i), "q") + (thread >> 6) * (TOKENS * self.c.K) + row * 64
            for piece in cutlass.range_constexpr(self.c.K // 8):
                each = floats(load(rows + ((piece >> 3) * (TOKENS * 64) + (piece & 7 ^ row & 7) * 8), 8))
                for e in cutlass.range_constexpr(8):
                    total[e % 4] = total[e % 4] + each[e] * each[e]
            factor = fast.rsqrt((total[0] + total[1]) + (total[2] + total[3]) + Float32(fast.NORM_EPS))
        of_tokens[thread] = factor if real else Float32(0.0)
        cute.arch.mbarrier_arrive(s.rows_full + (i & 1))

    @cute.jit
    def store_results(self, x, s, at, i):
        """dq, dk and dg of an item, out of the place of its rows."""
        _, head, begin, tokens = at
        cute.arch.mbarrier_wait(s.rows_done + (i & 1), i >> 1 & 1)
        rows, thread = self.rows_at(s, i), self.thread()
        for to, field in ((x.dq, "q"), (x.dk, "k"), (x.dg, "g")):
            for j in cutlass.range_constexpr(TOKENS // 8 if field in self.c.rows.fields else 0):
                row = thread // 16 + 8 * j
                if row < tokens:
                    source = self.field(rows, field) + self.place_of_piece(j)
                    copy_16_bytes(source, self.row_of(to, begin, head, row, x.HV))
        if cutlass.const_expr(self.c.packed):
            self.clear(x, begin, -tokens, head)

    @cute.jit
    def row_of(self, to, begin, head, row, HV):
        """A thread's piece of a row of a result."""
        own = to + (begin * HV + head) * self.c.K + (self.thread() & 15) * 8
        size = to.dtype.width // 8
        return in_global(fast.row(own.toint(), row, HV * Int32(size * self.c.K)), to.dtype)

    @cute.jit
    def clear(self, x, begin, tokens, head):
        """Zeros where tokens are no sequence's; dv has them."""
        thread, zero = self.thread(), Float32(0.0)
        for to in (x.dq, x.dk, x.dg):
            for j in cutlass.range_constexpr(TOKENS // 8):
                row = thread // 16 + 8 * j
                if row < tokens:
                    store(self.row_of(to, begin, head, row, x.HV), [zero] * 8)
        if thread < tokens:
            store(x.dbeta + (begin + thread) * x.HV + head, [zero])


class Math:
    """MATH: two warpgroups, 64 channels each."""

    def __init__(self, config: GradsConfig):
        self.c, self.gate = config, Gate(config)
        self.blocks, self.each = TOKENS // config.block, STEP // config.block  # of a chunk, and of a step

    @cute.jit
    def thread(self):
        return cute.arch.thread_idx()[0]

    @cute.jit
    def group(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) >> 2

    @cute.jit
    def warp(self):
        """Of its warpgroup."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3

    @cute.jit
    def item(self, x, s, at, i):
        c = self.c
        _, head, begin, tokens = at
        lane, group = cute.arch.lane_idx(), self.group()
        channel = 64 * group + 16 * self.warp() + lane // 4                    # of half 0
        rate, bias = self.gate.of_channels(x, head, channel)

        cute.arch.mbarrier_wait(s.values_full, i & 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        G, up1, up2, down = [accumulator(product_mma(), (CHANNELS, TOKENS)) for _ in range(4)]
        do, dv, r = [wide_view(values, TOKENS, c.V) for values in (s.do, s.dv, s.r)]
        issue_product(G, wide_view(tile_at(s.do, group * (TOKENS * c.V)), TOKENS, c.V), r)
        warpgroup.commit_group()
        h, dh = [self.own_channels(states) for states in (s.h, s.dh)]
        issue_product(up1, h, do, OperandMajorMode.MN)
        issue_product(up2, h, dv, OperandMajorMode.MN)
        warpgroup.commit_group()
        through_state = self.sums_of_states(s)
        warpgroup.wait_group(1)
        self.store_G(s, G)

        cute.arch.mbarrier_wait(s.rows_full + (i & 1), i >> 1 & 1)
        of_tokens = s.of_tokens + (i & 1) * (TOKEN_FACTORS * TOKENS) + EACH * (lane & 3)
        rows = [tile_at(cute.recast_ptr(s.rows, dtype=BFloat16), ((i & 1) * c.rows.bytes + f.offset) // 2)
                + self.own_matrices() for f in c.rows.fields.values()]  # fmt: skip
        Qu, Ku, Kd = [self.operand() for _ in range(3)]
        xs, ratio = self.operands(x, at, rows, channel, of_tokens, rate, bias, Qu, Ku, Kd)
        issue_product(down, dh, r, OperandMajorMode.MN)                        # now there are registers for it
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.values_empty)
        through = self.enter(up1, up2, down, Kd, ratio, through_state)
        MATH.sync()                                                            # G is there
        self.sweeps(x, s, up1, up2, down, Qu, Ku, Kd, ratio)
        MATH.sync()                                                            # G was read
        gains = self.gains_and_sums(x, s, rows[1], xs, up1, up2, down, Qu, Ku, Kd)
        MATH.sync()                                                            # partial sums are there
        self.project(x, s, i, head, begin, tokens)
        self.store_dg(x, at, rows[-1], gains, rate, bias, through, channel)
        MATH.sync()                                                            # projections are there
        self.store_dq_dk(x, s, rows, of_tokens, xs, up1, up2, down)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.rows_done + (i & 1))

    @cute.jit
    def own_channels(self, states):
        """(64, V) of a state that lies as (V, K)."""
        half = tile_at(states, self.group() * (self.c.V * CHANNELS))
        return view(half, SmemLayoutAtomKind.MN_SW128, (CHANNELS, self.c.V), (1, 0))

    @cute.jit
    def own_matrices(self):
        """Elements to where this lane's row of four 8 x 8 matrices begins, in block 0 of rows of tokens."""
        lane = cute.arch.lane_idx()
        row, piece = (lane >> 4) * 8 + (lane & 7), 2 * self.warp() + (lane >> 3 & 1)
        return self.group() * (TOKENS * 64) + row * 64 + (piece ^ lane & 7) * 8

    @cute.jit
    def operand(self, tokens: cutlass.Constexpr = TOKENS):
        mma = register_mma(TOKENS, OperandMajorMode.K)
        return cute.make_rmem_tensor(mma.partition_shape_A((CHANNELS, tokens)), BFloat16)

    @cute.jit
    def sums_of_states(self, s):
        """sum_V h dh of both halves' channels, by mma.sync: its diagonal."""
        lane = cute.arch.lane_idx()
        piece = 2 * self.warp() + (lane >> 3 & 1)                              # of the warpgroup's channels, eight each
        row = (lane >> 4) * 8 + (lane & 7)
        own = self.group() * (self.c.V * CHANNELS) + row * 64 + (piece ^ row & 7) * 8
        first = [Float32(0.0)] * 4
        second = [Float32(0.0)] * 4
        for step in cutlass.range_constexpr(self.c.V // 16):
            here = own + step * (16 * 64)
            a, b = load_matrices(s.h + here, transposed=True), load_matrices(s.dh + here, transposed=True)
            first = mma_bf16(first, a, [b[0], b[2]])
            second = mma_bf16(second, a, [b[1], b[3]])
        odd = lane & 4 != 0
        found = [first[1] if odd else first[0], second[3] if odd else second[2]]
        return [cute.arch.shuffle_sync(y, (lane & 28) + (lane >> 3)) for y in found]

    @cute.jit
    def store_G(self, s, G):
        """What is causal of it, rounded; and the diagonal of dv r^T."""
        lane, warp, group = cute.arch.lane_idx(), self.warp(), self.group()
        flat = cute.coalesce(G)
        tokens = [STEP * warp + 4 * (lane >> 3) + 2 * r + (lane >> 2 & 1) for r in range(HALVES)]
        if group == 1:
            odd = lane & 4 != 0
            for r in cutlass.range_constexpr(HALVES):
                found = Float32(0.0)
                for b in cutlass.range_constexpr(STEPS):
                    own = flat[8 * b + 6 * r + 1] if odd else flat[8 * b + 6 * r]
                    found = own if warp == b else found
                if (lane & 3) == lane >> 3:
                    s.through_b[tokens[r]] = found
        last = [token - group - 4 * (lane & 3) for token in tokens]            # G2 is strict
        row = STEP * warp + (lane >> 3 & 1) * 8 + (lane & 7)
        to = s.G + (group * (TOKENS * TOKENS) + row * 64)
        for b in cutlass.range_constexpr(STEPS):
            causal = []
            for j in cutlass.range_constexpr(8):
                r, t = j // 2 % 2, j // 4 * 2 + j % 2
                causal.append(flat[8 * b + j] if STEP * b + t <= last[r] else Float32(0.0))
            store_matrices(to + ((2 * b) ^ (lane >> 4) ^ (lane & 7)) * 8, words_of(causal))
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def operands(self, x, at, rows, channel, of_tokens, rate, bias, Qu, Ku, Kd):
        """Fills Qu, Ku and Kd; returns x, and factors from middle to middle of both halves: 2^a_0, 2^(a_(b+1) - a_b),
        .. , and from the last one to 2^gc_last."""
        left = at[3] - EACH * (cute.arch.lane_idx() & 3)
        words = [cute.recast_tensor(cute.coalesce(operand), Uint32) for operand in (Qu, Ku, Kd)]
        xs, middle, total = [None] * 32, [[], []], [[], []]
        for b in cutlass.range_constexpr(STEPS):
            q, k = [raw(own, b) for own in rows[:2]]
            g = self.gate.logits(x, rows[-1], at, channel, b)
            of_q, of_k, of_b = [load(of_tokens + (f * TOKENS + STEP * b), EACH) for f in (Q, K_, B)]
            of_q = [of_q[t] * x.scale for t in range(EACH)]
            made = [[None] * 8 for _ in words]
            for r in cutlass.range_constexpr(HALVES):
                sums = []
                for t in cutlass.range_constexpr(EACH):
                    g2 = self.gate.log2_decay(g[at_element(0, r, t)], rate, bias[r], x.lower_bound)
                    g2 = g2 if STEP * b + t < left else Float32(0.0)
                    sums.append(g2 + sums[-1] if cutlass.const_expr(t > 0) else g2)
                before, halves, wholes = self.place_in_block(sums[-1])
                middle[r] += halves
                total[r] += wholes
                for t in cutlass.range_constexpr(EACH):
                    j = at_element(0, r, t)
                    from_middle = sums[t] + before
                    up, down = fast.exp2(from_middle), fast.exp2(-from_middle)
                    kn = k[j] * of_k[t]
                    xs[8 * b + j] = from_middle
                    made[0][j], made[1][j], made[2][j] = q[j] * of_q[t] * up, kn * -up, kn * down * of_b[t]
            for n in cutlass.range_constexpr(3):
                packed = words_of(made[n])
                compute_words_now(packed)
                for w in cutlass.range_constexpr(4):
                    words[n][4 * b + w] = packed[w]
        ratio = []
        for r in cutlass.range_constexpr(HALVES):
            steps = [middle[r][0]]
            for b in cutlass.range_constexpr(1, self.blocks):
                steps.append((total[r][b - 1] - middle[r][b - 1]) + middle[r][b])
            steps.append(total[r][-1] - middle[r][-1])
            ratio.append([fast.exp2(step) for step in steps])
        return xs, ratio

    @cute.jit
    def place_in_block(self, own):
        """What lies between the middle of its block and a lane's four tokens (negative before it); of each block of the
        step, the sums of its first half, and of all of it."""
        a = cute.arch.lane_idx() & 3
        beside = neighbour(own, 1)
        if cutlass.const_expr(self.c.block == STEP):
            half = own + beside
            other = neighbour(half, 2)
            before = beside if a == 3 else Float32(0.0)
            before = -own if a == 1 else before
            before = -half if a == 0 else before
            return before, [half if a < 2 else other], [half + other]
        first, whole = own if a & 1 == 0 else beside, own + beside
        before = -own if a & 1 == 0 else Float32(0.0)
        of_first, of_whole = neighbour(first, 2), neighbour(whole, 2)
        halves = [first if a < 2 else of_first, of_first if a < 2 else first]
        return before, halves, [whole if a < 2 else of_whole, of_whole if a < 2 else whole]

    @cute.jit
    def of_lane(self, values):
        """Of the values of a step's blocks, that of the lane's."""
        if cutlass.const_expr(len(values) == 1):
            return values[0]
        return values[0] if cute.arch.lane_idx() & 2 == 0 else values[1]

    @cute.jit
    def enter(self, up1, up2, down, Kd, ratio, through_state):
        """Products of states, counted from middles; returns what passes through the state to every token's gate."""
        through = []
        flat, of_step = [cute.coalesce(acc) for acc in (up1, up2, down)], []
        for b in cutlass.range_constexpr(STEPS):
            weight, of_halves = self.unpacked(Kd, b), [Float32(0.0)] * HALVES
            for j in cutlass.range_constexpr(8):
                of_halves[j // 2 % 2] = of_halves[j // 2 % 2] + weight[j] * flat[2][8 * b + j]
            of_step.append(of_halves)
        for r in cutlass.range_constexpr(HALVES):
            factor, found = ratio[r][self.blocks], Float32(0.0)
            for n in cutlass.range_constexpr(STEPS):
                b, factors = STEPS - 1 - n, []
                for m in cutlass.range_constexpr(self.each):
                    factors.insert(0, factor)
                    factor = factor * ratio[r][b * self.each + self.each - 1 - m]
                found += of_step[b][r] * self.of_lane(factors)
            found += neighbour(found, 1)
            found += neighbour(found, 2)
            through.append(found + factor * through_state[r])                  # now it is 2^gc_last
            for b in cutlass.range_constexpr(STEPS):
                for t in cutlass.range_constexpr(EACH):
                    j = at_element(b, r, t)
                    flat[0][j] = flat[0][j] * ratio[r][0]
                    flat[1][j] = flat[1][j] * ratio[r][0]
                    flat[2][j] = flat[2][j] * ratio[r][self.blocks]
        return through

    @cute.jit
    def unpacked(self, operand, b: cutlass.Constexpr):
        """Step b of an operand."""
        words, kept = cute.recast_tensor(cute.coalesce(operand), Uint32), cute.make_rmem_tensor(4, Uint32)
        for w in cutlass.range_constexpr(4):
            kept[w] = words[4 * b + w]
        return floats(cute.recast_tensor(kept, BFloat16))

    @cute.jit
    def sweeps(self, x, s, up1, up2, down, Qu, Ku, Kd, ratio):
        """Blocks of tokens upward to rows below them, and downward to rows above."""
        K, standing = OperandMajorMode.K, OperandMajorMode.MN
        mma, mma_down = register_mma(TOKENS, K), register_mma(TOKENS, standing)
        lying, stood = [], []
        for n in cutlass.range_constexpr(2):
            G = s.G + n * (TOKENS * TOKENS)
            rows = wide_view(G, TOKENS, TOKENS)
            columns = view(G, SmemLayoutAtomKind.MN_SW128, (TOKENS, TOKENS), (1, 0))
            lying.append(mma.make_fragment_B(mma.get_slice(0).partition_B(rows)))
            stood.append(mma_down.make_fragment_B(mma_down.get_slice(0).partition_B(columns)))
        flat = [cute.coalesce(acc) for acc in (up1, up2, down)]
        for n in cutlass.range_constexpr(self.blocks):
            last = self.blocks - 1 - n
            of_keys, of_q, of_k = self.block_of(Kd, n), self.block_of(Qu, last), self.block_of(Ku, last)
            warpgroup.fence()
            self.issue_block(mma, up1, of_keys, lying[0], n)
            self.issue_block(mma, up2, of_keys, lying[1], n)
            self.issue_block(mma_down, down, of_q, stood[0], last)
            self.issue_block(mma_down, down, of_k, stood[1], last)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            # All of each accumulator, what is done times 1: of one that changed in part ptxas makes another, and then
            # every product waits for the one before.
            if cutlass.const_expr(n + 1 < self.blocks):
                for b in cutlass.range_constexpr(STEPS):
                    own = range(b * self.each, (b + 1) * self.each)
                    onward, back = [], []
                    for r in cutlass.range_constexpr(HALVES):
                        onward.append(self.of_lane([ratio[r][n + 1] if n < block else x.one for block in own]))
                        back.append(self.of_lane([ratio[r][last] if block < last else x.one for block in own]))
                    for j in cutlass.range_constexpr(8):
                        flat[0][8 * b + j] = flat[0][8 * b + j] * onward[j // 2 % 2]
                        flat[1][8 * b + j] = flat[1][8 * b + j] * onward[j // 2 % 2]
                        flat[2][8 * b + j] = flat[2][8 * b + j] * back[j // 2 % 2]

    @cute.jit
    def block_of(self, operand, block: cutlass.Constexpr):
        """The operand of a step of which one block counts: half of its tokens, those of two lanes of four, may not."""
        if cutlass.const_expr(self.each == 1):
            return operand
        step = self.operand(STEP)
        words, to = [cute.recast_tensor(cute.coalesce(y), Uint32) for y in (operand, step)]
        for w in cutlass.range_constexpr(4):
            here = words[4 * (block // 2) + w]
            to[w] = self.of_lane([here, Uint32(0)] if block % 2 == 0 else [Uint32(0), here])
        return step

    @cute.jit
    def issue_block(self, mma, acc, operand, b, block: cutlass.Constexpr):
        """acc += operand @ b^T of a block's tokens."""
        step = block // self.each
        mma.set(warpgroup.Field.ACCUMULATE, True)
        own = operand[None, None, step if cutlass.const_expr(self.each == 1) else 0]
        cute.gemm(mma, acc, own, b[None, None, step], acc)

    @cute.jit
    def gains_and_sums(self, x, s, own_k, xs, up1, up2, down, Qu, Ku, Kd):
        """What each token's gate gains of its row; to shared memory, where G was, what a warp's 16 channels have of
        configs.GradsConfig.sums: (warps, sums, tokens)."""
        lane, gains, wanted = cute.arch.lane_idx(), [None] * 32, self.c.sums
        of_warp = cute.recast_ptr(s.G, dtype=Float32) + cute.arch.warp_idx() * (len(wanted) * TOKENS)
        to = of_warp + ((lane >> 3) * STEP + EACH * (lane & 3) + (lane >> 1 & 2))
        flat, sums = [cute.coalesce(acc) for acc in (up1, up2, down)], [[] for _ in wanted]
        for b in cutlass.range_constexpr(STEPS):
            weight = [self.unpacked(operand, b) for operand in (Qu, Ku, Kd)]
            of_block = [[weight[n][j] * flat[n][8 * b + j] for j in range(8)] for n in range(2)]
            if cutlass.const_expr("b" in wanted):                              # kn 2^-x: Kd less its b, which may be 0
                k, here = raw(own_k, b), range(8 * b, 8 * b + 8)
                of_block.append([k[j - 8 * b] * fast.exp2(-(xs[j] + x.zero)) * flat[2][j] for j in here])
            for t in cutlass.range_constexpr(EACH):
                i, j = at_element(0, 0, t), at_element(0, 1, t)
                for n in cutlass.range_constexpr(len(wanted)):
                    row = of_block[n - len(wanted)] if cutlass.const_expr(not self.c.norm) else of_block[n]
                    sums[n].append(row[i] + row[j])
            for j in cutlass.range_constexpr(8):
                gains[8 * b + j] = (of_block[0][j] + of_block[1][j]) - weight[2][j] * flat[2][8 * b + j]
        for n in cutlass.range_constexpr(len(wanted)):
            store(to + n * TOKENS, self.over_channels(sums[n]))
        return gains

    @cute.jit
    def over_channels(self, values):
        """Sums over lanes that are a multiple of 4 apart: a lane keeps an eighth of the values, in order."""
        lane = cute.arch.lane_idx()
        for far in (16, 8, 4):
            width, upper, mine = len(values) // 2, lane & far, []
            for i in cutlass.range_constexpr(width):
                kept = values[i + width] if upper != 0 else values[i]
                sent = values[i] if upper != 0 else values[i + width]
                mine.append(kept + neighbour(sent, far))
            values = mine
        return values

    @cute.jit
    def project(self, x, s, i, head, begin, tokens):
        """qn . dqn / |q|^2 and kn . dkn / |k|^2 of each token, by the first 128 threads; dbeta."""
        thread, token = self.thread(), self.thread() & TOKENS - 1
        if thread < 2 * TOKENS:
            through_b = s.through_b[token]
            of_k = thread >= TOKENS
            factor = s.of_tokens[(i & 1) * (TOKEN_FACTORS * TOKENS) + thread]
            if cutlass.const_expr(self.c.norm):
                total = self.over_warps(s, thread)
                total += through_b if of_k else Float32(0.0)
                s.projected[thread] = total * factor * factor
            if of_k and token < tokens:
                at = (begin + token) * x.HV + head
                if cutlass.const_expr(self.c.beta == "given"):
                    db = self.over_warps(s, self.c.sums.index("b") * TOKENS + token) * factor
                else:
                    db = through_b * fast.sigmoid(-load_one(x.beta + at).to(Float32))
                store(x.dbeta + at, [db])

    @cute.jit
    def over_warps(self, s, place):
        """The sum over all channels that stands at `place` of each warp's."""
        partial, total = cute.recast_ptr(s.G, dtype=Float32) + place, Float32(0.0)
        for w in cutlass.range_constexpr(GRADS_WARPS):
            total += partial[w * (len(self.c.sums) * TOKENS)]
        return total

    @cute.jit
    def store_dg(self, x, at, own, gains, rate, bias, through, channel):
        chunk, head, _, tokens = at
        a = cute.arch.lane_idx() & 3
        left, number = tokens - EACH * a, chunk * x.HV + head
        later, of_A, of_bias = through, [Float32(0.0)] * HALVES, [Float32(0.0)] * HALVES
        to_logit, to_A = self.gate.slopes(x, rate)
        for n in cutlass.range_constexpr(STEPS):
            b = STEPS - 1 - n
            logits, dg = self.gate.logits(x, own, at, channel, b), [None] * 8
            for r in cutlass.range_constexpr(HALVES):
                sums = [None] * EACH
                for m in cutlass.range_constexpr(EACH):
                    t = EACH - 1 - m
                    gain = gains[at_element(b, r, t)]
                    sums[t] = gain + sums[t + 1] if cutlass.const_expr(m > 0) else gain
                beside = neighbour(sums[0], 1)
                half = sums[0] + beside
                other = neighbour(half, 2)
                after = later[r] + (beside if a & 1 == 0 else Float32(0.0)) + (other if a < 2 else Float32(0.0))
                later[r] = later[r] + (half + other)
                for t in cutlass.range_constexpr(EACH):
                    j = at_element(0, r, t)
                    slope, share = self.gate.backward(
                        logits[j], bias[r], rate, x.lower_bound, sums[t] + after, STEP * b + t < left
                    )
                    of_A[r] = of_A[r] + share
                    of_bias[r] = of_bias[r] + slope
                    dg[j] = slope * to_logit
            self.gate.put(x, own, at, channel, b, dg)
        for r in cutlass.range_constexpr(HALVES):
            of_both = (x.of_A_log, of_A[r], to_A, self.c.rate), (x.of_dt_bias, of_bias[r], to_logit, self.c.bias)
            for to, share, factor, there in of_both:
                if cutlass.const_expr(there):
                    share += neighbour(share, 1)
                    share += neighbour(share, 2)
                    if a == 0:
                        share = share * factor if tokens > 0 else Float32(0.0)
                        store(to + (Int64(number) * self.c.K + channel + 8 * r), [share])

    @cute.jit
    def store_dq_dk(self, x, s, rows, of_tokens, xs, up1, up2, down):
        lane = cute.arch.lane_idx()
        flat = [cute.coalesce(acc) for acc in (up1, up2, down)]
        projected = s.projected + EACH * (lane & 3)
        for b in cutlass.range_constexpr(STEPS):
            q, k = [raw(own, b) for own in rows[:2]]
            of_q, of_k, of_b = [load(of_tokens + (f * TOKENS + STEP * b), EACH) for f in (Q, K_, B)]
            from_q, from_k = [load(projected + (f * TOKENS + STEP * b), EACH) for f in (Q, K_)]
            of_q = [of_q[t] * x.scale for t in range(EACH)]
            dq, dk = [None] * 8, [None] * 8
            for r in cutlass.range_constexpr(HALVES):
                for t in cutlass.range_constexpr(EACH):
                    j = at_element(0, r, t)
                    from_middle = xs[8 * b + j] + x.zero                       # exponentials are made again, not kept
                    up, down_ = fast.exp2(from_middle), fast.exp2(-from_middle)
                    dqn = flat[0][8 * b + j] * up * of_q[t]
                    dkn = (flat[2][8 * b + j] * (down_ * of_b[t]) - flat[1][8 * b + j] * up) * of_k[t]
                    if cutlass.const_expr(self.c.norm):
                        dqn = dqn - q[j] * from_q[t]
                        dkn = dkn - k[j] * from_k[t]
                    dq[j], dk[j] = dqn, dkn
            store_matrices(rows[0] + b * (STEP * 64), words_of(dq), transposed=True)
            store_matrices(rows[1] + b * (STEP * 64), words_of(dk), transposed=True)


class Grads(entry.Entry):
    def __init__(self, config: GradsConfig):
        self.c = config
        self.loader, self.math = Loader(config), Math(config)

    @cute.kernel
    def kernel(self, x):
        s = allocate(self.c.struct)
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(s.values_full, LOADERS + 1)
            cute.arch.mbarrier_init(s.values_empty, GRADS_WARPS)
            for stage in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(s.rows_full + stage, LOADERS)
                cute.arch.mbarrier_init(s.rows_done + stage, GRADS_WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < GRADS_WARPS:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            i = Int32(0)
            for item in cutlass.range(first, x.items, step, unroll=1):
                self.math.item(x, s, self.place(x, item), i)
                i += 1
        else:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            self.loader.run(x, s, self.place, first, step)

    @cute.jit
    def place(self, x, item):
        """Chunk, value head, first token and tokens of an item: heads of one chunk lie together."""
        chunk, head = item // x.HV, item % x.HV
        begin, tokens = Int64(0), Int32(0)
        if cutlass.const_expr(self.c.packed):
            begin = load_one(x.chunk_table + ChunkTable.WIDTH * chunk + ChunkTable.TOKEN)
            tokens = Int32(load_one(x.chunk_table + ChunkTable.WIDTH * chunk + ChunkTable.TOKENS))
        else:
            n = chunk // x.chunks
            number = chunk - n * x.chunks
            begin, tokens = Int64(n) * x.T + number * TOKENS, cutlass.min(x.T - number * TOKENS, TOKENS)
        return chunk, head, begin, tokens


def build(c: GradsConfig, target: Target) -> cutedsl.Compiled:
    return entry.compile(Grads, c, target)
