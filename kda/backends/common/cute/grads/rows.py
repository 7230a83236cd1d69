"""MATH of bwd/grads between and after its products, which are an arch's (bwd/grads.py), and the formulas of both:

  The delta rule writes r_i = v_i - k_i^T S (v_new = b r); dv is the gradient of v;  h enters the chunk, dh
  leaves it.
  x = gc - a, a = gc in the middle of the token's block;  |x| is at most the decay of half a block.  For an unbounded
  gate blocks have 8 tokens instead of 16, and decays a floor (gate.py).

  Qu = scale qn 2^x    Ku = -kn 2^x    Kd = b kn 2^-x                      bfloat16, registers: channels x tokens
  G1 = tril(do r^T)    G2 = strict_tril(dv r^T)                            bfloat16, shared memory: tokens x tokens
  up1 = h do^T + Kd G1^T;  up2 = h dv^T + Kd G2^T;  down = dh r^T + Qu G1 + Ku G2
                       each block of tokens relative to its own middle: what passes to the next is times 2^(a' - a)
  dqn = scale 2^x up1;  dkn = b 2^-x down - 2^x up2
  dg2[t] = sum_(i >= t) (Qu up1 + Ku up2 - Kd down)_i + sum_all Kd 2^(gc_last - a) dh r^T + 2^gc_last sum_V h dh
                       of the rounded operands: what row i gains, row j loses
  b db is the mean of sum_K Kd down and of sum_V dv r, the diagonal of dv r^T; a given b counts as 2^-40 at least
  dq = (dqn - qn (qn . dqn)) / |q|, dk alike with kn . dkn = sum_V dv r + kn . (-2^x up2);  dg and dbeta go on through
                       the gate and the sigmoid

A lane's elements of an accumulator (channels, tokens) are those of fragments of mma.sync (places.at_element); products
leave them in registers.  `of_tokens` has 1 / |q|, 1 / |k| and b of each token.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint32

from .. import fast
from ..copies import both_halves, compute_words_now, floats_of, load, load_one, store, words_of
from ..fragments import load_matrices, mma_bf16, store_matrices
from ..training import STEP, TOKEN_FACTORS, TOKENS, GradsOptions
from .gate import GradGate
from .load import tile_at
from .places import EACH, HALVES, K_, SMALLEST_B, STEPS, B, Q, at_element, neighbour, raw


class GradRows:
    """MATH but its products: a warp has 16 channels of a panel of 64, `part()` of `panel()`.

    An arch says which, and has

      operand(tokens)                      registers of an operand: 64 channels of so many tokens
      own_rows_of_state(step)              elements to a lane's row of four 8 x 8 matrices of a state, of the warp's
                                           channels and 16 columns
      states_stand                         whether the rows of a state are columns, not channels
      loads_ahead                          whether sums over channels hide the last loads, which takes registers
    """

    states_stand: bool
    loads_ahead: bool

    def __init__(self, config: GradsOptions):
        self.c, self.gate = config, GradGate(config)
        self.warps = config.math
        self.blocks, self.each = TOKENS // config.block, STEP // config.block  # blocks of a chunk, and of a step

    def refresh(self, s):
        """Before steps of an item: where an arch forgets which thread this is, it asks again."""

    def ask_again(self, s, i, place, channel):
        """What is known of the item and of the lane's channels, before the last steps."""
        return place, channel

    def thread(self):
        return cute.arch.thread_idx()[0]

    def lane(self):
        return cute.arch.lane_idx()

    def lane_again(self):
        """The lane, where what follows from it is computed in each item: kept from one to the next, it is spilled."""
        return self.lane()

    def warp(self):
        return cute.arch.warp_idx()

    def first_channel(self):
        """The lane's of half 0."""
        lane = self.lane()
        return 64 * self.panel() + 16 * self.part() + lane // 4

    def places(self, s, i):
        """An item's factors of a lane's tokens; its rows of q, k and g."""
        lane, c = self.lane(), self.c
        of_tokens = s.of_tokens + (i & 1) * (TOKEN_FACTORS * TOKENS) + EACH * (lane & 3)
        rows = [tile_at(cute.recast_ptr(s.rows, dtype=BFloat16), ((i & 1) * c.rows.bytes + f.offset) // 2)
                + self.own_matrices() for f in c.rows.fields.values()]
        return of_tokens, rows

    def give_back(self, barrier):
        """This warp has read, or written, all that it has to."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def sums_of_states(self, s):
        """sum_V h dh of both halves' channels, by mma.sync: its diagonal."""
        lane = self.lane()
        first = [Float32(0.0)] * 4
        second = [Float32(0.0)] * 4
        for step in cutlass.range_constexpr(self.c.V // 16):
            offset = self.own_rows_of_state(step)
            a, b = [load_matrices(state + offset, transposed=self.states_stand) for state in (s.h, s.dh)]
            first = mma_bf16(first, a, [b[0], b[2]])
            second = mma_bf16(second, a, [b[1], b[3]])
        odd = lane & 4 != 0
        found = [first[1] if odd else first[0], second[3] if odd else second[2]]
        return [cute.arch.shuffle_sync(y, (lane & 28) + (lane >> 3)) for y in found]

    def finish(
        self, x, s, place, i, channel, rows, of_tokens, powers, through, up1, up2, down, Qu, Ku, Kd
    ):
        """From accumulators to results, in the place of the item's rows."""
        self.warps.sync()                                                      # G was read
        self.refresh(s)
        gains, sums = self.gains_and_sums(x, s, of_tokens, powers, up1, up2, down, Qu, Ku, Kd)
        if not self.loads_ahead:
            self.share_sums(*sums)
        place, channel = self.ask_again(s, i, place, channel)
        # from L1 again: from the item's beginning on, registers would be spilled for them
        parameters, logit = self.gate.parameters(x, place[1], channel), self.logit_of_beta(x, *place[1:])
        if self.loads_ahead:
            self.share_sums(*sums)
        self.warps.sync()                                                      # partial sums are there
        self.refresh(s)
        self.project(x, s, i, logit, *place[1:])
        gates = self.gate.of_channels(*parameters)
        self.store_dg(x, s, place, rows[-1], gains, gates, through, channel)
        self.warps.sync()                                                      # projections are there
        self.refresh(s)
        if self.c.per_head:
            self.store_dg_of_heads(x, s, *place[1:])
        self.store_dq_dk(x, s, rows, of_tokens, powers, up1, up2, down)
        self.give_back(s.rows_done + (i & 1))

    def own_matrices(self):
        """Elements to where this lane's row of four 8 x 8 matrices begins, in block 0 of rows of tokens."""
        lane = self.lane()
        row, piece = (lane >> 4) * 8 + (lane & 7), 2 * self.part() + (lane >> 3 & 1)
        return self.panel() * (TOKENS * 64) + row * 64 + (piece ^ lane & 7) * 8

    @cute.jit
    def store_G(self, s, G, n):
        """What is causal of G1 (n = 0) or G2, rounded; and the diagonal of dv r^T."""
        lane, part = self.lane_again(), self.part()
        flat = cute.coalesce(G)
        tokens = [STEP * part + 4 * (lane >> 3) + 2 * r + (lane >> 2 & 1) for r in range(HALVES)]
        if n == 1:
            odd = lane & 4 != 0
            for r in cutlass.range_constexpr(HALVES):
                found = Float32(0.0)
                for b in cutlass.range_constexpr(STEPS):
                    diagonal = flat[8 * b + 6 * r + 1] if odd else flat[8 * b + 6 * r]
                    found = diagonal if part == b else found
                if (lane & 3) == lane >> 3:
                    s.through_b[tokens[r]] = found
        diagonal = [self.up_to(tokens[w % 2] - STEP * part - n - EACH * (lane & 3) - w // 2 * 2) for w in range(4)]
        row = STEP * part + (lane >> 3 & 1) * 8 + (lane & 7)
        to = s.G + (n * (TOKENS * TOKENS) + row * 64)
        for b in cutlass.range_constexpr(STEPS):
            before, some = self.all_if(b < part), self.all_if(b <= part)
            words = words_of([flat[8 * b + j] for j in range(8)])
            causal = [words[w] & (diagonal[w] | before) & some for w in range(4)]
            store_matrices(to + ((2 * b) ^ (lane >> 4) ^ (lane & 7)) * 8, causal)

    @cute.jit
    def all_if(self, holds):
        """Return all bits, or none."""
        return Uint32(0xFFFFFFFF) if holds else Uint32(0)

    @cute.jit
    def up_to(self, last):
        """Return the bits of a word's elements 0 and 1 that are at most the last one."""
        lower, upper = Uint32(0xFFFF) if last >= 0 else Uint32(0), Uint32(0xFFFF0000) if last >= 1 else Uint32(0)
        return lower | upper

    @cute.jit
    def operands(self, x, place, rows, channel, of_tokens, gates, Qu, Ku, Kd):
        """Fills Qu, Ku and Kd; returns 2^x, and factors from middle to middle of both halves: 2^a_0, 2^(a_(b+1) - a_b),
        .. , and from the last one to 2^gc_last."""
        words = [cute.recast_tensor(cute.coalesce(operand), Uint32) for operand in (Qu, Ku, Kd)]
        powers, middle, total = [None] * 32, [[], []], [[], []]
        for b in cutlass.range_constexpr(STEPS):
            q, k = [raw(of_tensor, b) for of_tensor in rows[:2]]
            g = self.gate.logits(x, rows[-1], place, channel, b)
            of_q, of_k, of_b = self.factors(x, of_tokens, b)
            products = [[None] * 8 for _ in words]
            decays = [None] * EACH
            for r in cutlass.range_constexpr(HALVES):
                gates_differ = r == 0 or not self.c.per_head
                if cutlass.const_expr(gates_differ):
                    sums = []
                    for t in cutlass.range_constexpr(EACH):
                        g2 = self.gate.log2_decay(g[at_element(0, r, t)], gates, r, x.lower_bound)
                        sums.append(g2 + sums[-1] if cutlass.const_expr(t > 0) else g2)
                    before, halves, wholes = self.place_in_block(sums[-1])
                middle[r] += halves
                total[r] += wholes
                for t in cutlass.range_constexpr(EACH):
                    j = at_element(0, r, t)
                    if cutlass.const_expr(gates_differ):
                        from_middle = sums[t] + before
                        decays[t] = fast.exp2(from_middle), fast.exp2(-from_middle)
                    up, down = decays[t]
                    kn = k[j] * of_k[t]
                    powers[8 * b + j] = up
                    products[0][j], products[1][j], products[2][j] = q[j] * of_q[t] * up, kn * -up, kn * down * of_b[t]
            for n in cutlass.range_constexpr(3):
                packed = words_of(products[n])
                compute_words_now(packed)
                for w in cutlass.range_constexpr(4):
                    words[n][4 * b + w] = packed[w]
        return powers, self.ratios(middle, total)

    def ratios(self, middle, total):
        """Factors from middle to middle, of the sums of each block's first half, and of all of it."""
        ratio = []
        for r in range(HALVES):
            steps = [middle[r][0]]
            for b in range(1, self.blocks):
                steps.append((total[r][b - 1] - middle[r][b - 1]) + middle[r][b])
            steps.append(total[r][-1] - middle[r][-1])
            ratio.append([fast.exp2(step) for step in steps])
        return ratio

    @cute.jit
    def place_in_block(self, of_lane):
        """What lies between the middle of its block and a lane's four tokens (negative before it); of each block of the
        step, the sums of its first half, and of all of it."""
        a = self.lane() & 3
        beside = neighbour(of_lane, 1)
        if cutlass.const_expr(self.c.block == STEP):
            half = of_lane + beside
            other = neighbour(half, 2)
            before = beside if a == 3 else Float32(0.0)
            before = -of_lane if a == 1 else before
            before = -half if a == 0 else before
            return before, [half if a < 2 else other], [half + other]
        first, whole = of_lane if a & 1 == 0 else beside, of_lane + beside
        before = -of_lane if a & 1 == 0 else Float32(0.0)
        of_first, of_whole = neighbour(first, 2), neighbour(whole, 2)
        halves = [first if a < 2 else of_first, of_first if a < 2 else first]
        return before, halves, [whole if a < 2 else of_whole, of_whole if a < 2 else whole]

    @cute.jit
    def of_lane(self, values):
        """Return the value of the lane's block among the values of a step's blocks."""
        if cutlass.const_expr(len(values) == 1):
            return values[0]
        return values[0] if self.lane() & 2 == 0 else values[1]

    def enter_up(self, up1, up2, ratio):
        """h do^T and h dv^T, counted from the first block's middle."""
        for acc in (up1, up2):
            self.times_halves(acc, [ratio[r][0] for r in range(HALVES)])

    def enter_down(self, down, Kd, ratio, through_state):
        """dh r^T, counted from the last block's middle; returns what passes through the state to every token's gate."""
        through, flat = [], cute.coalesce(down)
        of_step = [self.sums_of_step(Kd, flat, b) for b in range(STEPS)]
        for r in range(HALVES):
            factor, found = ratio[r][self.blocks], Float32(0.0)
            for n in range(STEPS):
                b, factors = STEPS - 1 - n, []
                for m in range(self.each):
                    factors.insert(0, factor)
                    factor = factor * ratio[r][b * self.each + self.each - 1 - m]
                found += of_step[b][r] * self.of_lane(factors)
            found += neighbour(found, 1)
            found += neighbour(found, 2)
            through.append(found + factor * through_state[r])                  # now it is 2^gc_last
        self.times_halves(down, [ratio[r][self.blocks] for r in range(HALVES)])
        return through

    def sums_of_step(self, Kd, flat, b: int):
        """What a lane has of sums over step b of an operand times an accumulator, of both halves."""
        weight, of_halves = self.unpacked(Kd, b), [Float32(0.0)] * HALVES
        for j in range(8):
            of_halves[j // 2 % 2] = of_halves[j // 2 % 2] + weight[j] * flat[8 * b + j]
        return of_halves

    def times_halves(self, acc, factors):
        """Multiply the channels of both halves by `factors`."""
        flat = cute.coalesce(acc)
        for b in range(STEPS):
            for j in range(8):
                flat[8 * b + j] = flat[8 * b + j] * factors[j // 2 % 2]

    def unpacked(self, operand, b: int):
        """Step b of an operand."""
        words = cute.recast_tensor(cute.coalesce(operand), Uint32)
        return floats_of([words[4 * b + w] for w in range(4)])

    def block_of(self, operand, block: int):
        """The operand of a step of which one block counts: half of its tokens, those of two lanes of four, may not."""
        if self.each == 1:
            return operand
        step = self.operand(STEP)
        words, to = [cute.recast_tensor(cute.coalesce(y), Uint32) for y in (operand, step)]
        for w in range(4):
            word = words[4 * (block // 2) + w]
            to[w] = self.of_lane([word, Uint32(0)] if block % 2 == 0 else [Uint32(0), word])
        return step

    def gains_and_sums(self, x, s, of_tokens, powers, up1, up2, down, Qu, Ku, Kd):
        """What each token's gate gains of its row; and for `share_sums`, where in shared memory the lane's share is,
        and what the lane has of training.GradsOptions.sums."""
        to, gains, wanted = self.place_of_sums(s), [None] * 32, self.c.sums
        flat = [cute.coalesce(acc) for acc in (up1, up2, down)]
        words = [cute.recast_tensor(cute.coalesce(operand), Uint32) for operand in (Qu, Ku, Kd)]
        sums = [[Float32(0.0)] * (TOKENS // EACH) for _ in wanted]
        for b in range(STEPS):
            for w in range(4):                                                 # two tokens of a channel at a time
                weight = [both_halves(of_operand[4 * b + w]) for of_operand in words]
                for e in range(2):
                    i, t = 8 * b + 2 * w + e, w // 2 * 2 + e
                    of_weight = [of_pair[e].bitcast(Float32) for of_pair in weight]
                    row = [of_weight[n] * flat[n][i] for n in range(3)]
                    gains[i] = (row[0] + row[1]) - row[2]
                    for n in range(len(wanted)):
                        sums[n][EACH * b + t] = sums[n][EACH * b + t] + row[n - len(wanted)]
        return gains, (to, sums)

    def place_of_sums(self, s):
        lane = self.lane()
        of_warp = cute.recast_ptr(s.G, dtype=Float32) + self.warp() * (len(self.c.sums) * TOKENS)
        return of_warp + ((lane >> 3) * STEP + EACH * (lane & 3) + (lane >> 1 & 2))

    def share_sums(self, to, sums):
        """Store what a warp's 16 channels have of sums in shared memory, where G was: (warps, sums, tokens)."""
        for n, of_lane in enumerate(sums):
            store(to + n * TOKENS, self.over_channels(of_lane))

    def factors(self, x, of_tokens, b: int):
        """scale / |q|, 1 / |k| and b of a lane's tokens of step b."""
        of_q, of_k, of_b = [load(of_tokens + (f * TOKENS + STEP * b), EACH) for f in (Q, K_, B)]
        return [of_q[t] * x.scale for t in range(EACH)], of_k, of_b

    def gradients_of_rows(self, flat, i: int, up, factors, t: int):
        """Element i of up1 and of down become those of dqn / |q| and dkn / |k|."""
        of_q, of_k, of_b = factors
        flat[0][i] = flat[0][i] * up * of_q[t]
        flat[2][i] = (flat[2][i] * fast.reciprocal(up) * of_b[t] - flat[1][i] * up) * of_k[t]

    @cute.jit
    def over_channels(self, values):
        """Sums over lanes that are a multiple of 4 apart: a lane keeps an eighth of the values, in order."""
        lane = self.lane()
        for far in (16, 8, 4):
            width, upper, mine = len(values) // 2, lane & far, []
            for i in cutlass.range_constexpr(width):
                kept = values[i + width] if upper != 0 else values[i]
                sent = values[i] if upper != 0 else values[i + width]
                mine.append(kept + neighbour(sent, far))
            values = mine
        return values

    @cute.jit
    def logit_of_beta(self, x, head, begin, tokens):
        """Load the one whose dbeta this thread computes in `project`, which does not wait for it then."""
        logit, token = Float32(0.0), self.thread() - TOKENS
        if cutlass.const_expr(self.c.beta != "given"):
            if token >= 0 and token < cutlass.min(tokens, TOKENS):
                logit = load_one(x.beta + ((begin + token) * x.HV + head)).to(Float32)
        return logit

    @cute.jit
    def project(self, x, s, i, logit, head, begin, tokens):
        """qn . dqn / |q|^2 and kn . dkn / |k|^2 of each token, by the first 128 threads; dbeta, where b db is the mean
        of its sums over K and over V: one errs more with equal keys, the other with ordinary ones."""
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
                self.store_dbeta(x, s, i, token, through_b, logit, head, begin)

    @cute.jit
    def store_dbeta(self, x, s, i, token, through_b, logit, head, begin):
        """dbeta of a token, by one thread."""
        element = (begin + token) * x.HV + head
        over_K = self.over_warps(s, self.c.sums.index("b") * TOKENS + token)
        b_db = Float32(0.5) * (over_K + through_b)
        if cutlass.const_expr(self.c.beta == "given"):
            b = s.of_tokens[((i & 1) * TOKEN_FACTORS + B) * TOKENS + token]
            db = (over_K if b == SMALLEST_B else b_db) * fast.reciprocal(b)
        else:
            db = b_db * fast.sigmoid(-logit)
        store(x.dbeta + element, [db])

    def over_warps(self, s, place):
        """The sum over all channels that stands at `place` of each warp's."""
        partial, total = cute.recast_ptr(s.G, dtype=Float32) + place, Float32(0.0)
        for w in range(self.c.math_warps):
            total += partial[w * (len(self.c.sums) * TOKENS)]
        return total

    @cute.jit
    def store_dg(self, x, s, place, rows, gains, gates, through, channel):
        chunk, head, _, _ = place
        a = self.lane() & 3
        number = chunk * x.HV + head
        later, of_A, of_bias = through, [Float32(0.0)] * HALVES, [Float32(0.0)] * HALVES
        to_logit, to_A = self.gate.slopes(x, gates.rate)
        for n in cutlass.range_constexpr(STEPS):
            b = STEPS - 1 - n
            logits, dg = self.gate.finite_logits(x, rows, place, channel, b), [None] * 8
            for r in cutlass.range_constexpr(HALVES):
                sums = [None] * EACH
                for m in cutlass.range_constexpr(EACH):
                    t = EACH - 1 - m
                    gain = gains[at_element(b, r, t)]
                    sums[t] = gain + sums[t + 1] if cutlass.const_expr(m > 0) else gain
                after, later[r] = self.after_tokens(a, later[r], sums[0])
                for t in cutlass.range_constexpr(EACH):
                    j = at_element(0, r, t)
                    slope, share = self.gate.backward(
                        logits[j], gates, r, x.lower_bound, sums[t] + after
                    )
                    of_A[r] = of_A[r] + share
                    of_bias[r] = of_bias[r] + slope
                    dg[j] = slope * to_logit
            if cutlass.const_expr(self.c.per_head):
                self.share_dg(s, b, dg)
            else:
                self.gate.put(x, rows, place, channel, b, dg)
        self.store_shares(x, a, number, channel, of_A, of_bias, gates, to_A, to_logit)

    @cute.jit
    def after_tokens(self, a, later, of_lane):
        """Add up what follows four tokens of lane `a` of four, whose sum is `of_lane`, and what follows the step
        before."""
        beside = neighbour(of_lane, 1)
        half = of_lane + beside
        other = neighbour(half, 2)
        after = later + (beside if a & 1 == 0 else Float32(0.0)) + (other if a < 2 else Float32(0.0))
        return after, later + (half + other)

    @cute.jit
    def store_shares(self, x, a, number, channel, of_A, of_bias, gates, to_A, to_logit):
        """The shares of dA_log and ddt_bias of an item of that number."""
        for r in cutlass.range_constexpr(HALVES):
            of_rate = self.gate.of_rate(of_A[r], of_bias[r], gates, r)
            of_both = (x.of_A_log, of_rate, to_A, self.c.rate), (x.of_dt_bias, of_bias[r], to_logit, self.c.bias)
            for to, share, factor, wanted in of_both:
                if cutlass.const_expr(wanted):
                    share += neighbour(share, 1)
                    share += neighbour(share, 2)
                    if a == 0:
                        store(to + (Int64(number) * self.c.share_pitch + channel + 8 * r), [share * factor])

    @cute.jit
    def share_dg(self, s, b: cutlass.Constexpr, dg):
        """Sums of step b over a warp's 16 channels, for `store_dg_of_heads`."""
        lane, sums = self.lane(), [None] * EACH
        of_warp = s.dg_of_warps + self.warp() * TOKENS                         # which all lanes find together
        for t in cutlass.range_constexpr(EACH):
            total = dg[at_element(0, 0, t)] + dg[at_element(0, 1, t)]
            for far in (16, 8, 4):
                total += neighbour(total, far)
            sums[t] = total
        if lane < EACH:
            store(of_warp + (STEP * b + EACH * lane), sums)

    @cute.jit
    def store_dg_of_heads(self, x, s, head, begin, tokens):
        """dg of a gate per head: the sums of all warps, always in one order."""
        thread = self.thread()
        if thread < tokens:
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.c.math_warps):
                total += s.dg_of_warps[w * TOKENS + thread]
            store(x.dg + ((begin + thread) * x.HV + head), [total])

    def store_dq_dk(self, x, s, rows, of_tokens, powers, up1, up2, down):
        """Less what points along q and k, into the place of those."""
        projected, flat = self.projections(s), [cute.coalesce(acc) for acc in (up1, up2, down)]
        for b in range(STEPS):
            factors, of_step = self.factors(x, of_tokens, b), powers[8 * b : 8 * b + 8]
            for r in range(HALVES):
                for t in range(EACH):
                    j = at_element(0, r, t)
                    self.gradients_of_rows(flat, 8 * b + j, of_step[j], factors, t)
            for n in range(2):
                found = [flat[2 * n][8 * b + j] for j in range(8)]
                if self.c.norm:
                    y, along = raw(rows[n], b), load(projected + (n * TOKENS + STEP * b), EACH)
                    for r in range(HALVES):
                        for t in range(EACH):
                            j = at_element(0, r, t)
                            found[j] = found[j] - y[j] * along[t]
                store_matrices(rows[n] + b * (STEP * 64), words_of(found), transposed=True)

    def projections(self, s):
        """Where what `project` found lies, for a lane."""
        return s.projected + EACH * (self.lane() & 3)
