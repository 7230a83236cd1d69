"""MATH of grads between and after its products (common/cute/grads/rows.py), of two neighbouring tokens at a time: one
instruction computes both (common/cute/packed.py).

What is made with decays and needed again lies in tensor memory meanwhile, configs.GradsColumns, 16 tokens at a time:

  decays   2^x, and 2^-x or, where it is no logit in shared memory, what dA_log multiplies slopes or gains by
  slopes   what gradients of decays are multiplied by for those of logits, but for a constant: 0 of a floored decay
"""

import cutlass.cute as cute
from cutlass import Float32, Uint32

from ...common.cute import fast, packed
from ...common.cute.copies import load
from ...common.cute.fragments import store_matrices
from ...common.cute.grads.gate import FLOOR, GradGate
from ...common.cute.grads.places import EACH, HALVES, K_, STEPS, B, Q, raw_words
from ...common.cute.grads.rows import GradRows
from ...common.cute.training import STEP, TOKENS, GradsOptions
from ..configs import GradsColumns
from ..parts import umma

PAIRS = 4                                    # in a step: tokens 0 and 1 of both halves, then tokens 2 and 3
LEAST = -127.0                               # a sigmoid's least argument: 1 / (1 + 2^127) is 0, and 2^127 finite


def pairs_of(values):
    """Return pairs of neighbours."""
    return [packed.of_two(*values[i : i + 2]) for i in range(0, len(values), 2)]


def numbers_of(pairs):
    return [number for x in pairs for number in packed.both_of(x)]


class PairGate(GradGate):
    def __init__(self, config: GradsOptions):
        super().__init__(config)
        of_g = config.gate == "bounded" and "g" in config.rows.fields
        self.keeps_shares = config.rate and not of_g                           # for dA_log, in tensor memory

    def pairs_of_logits(self, x, rows, place, channel, b: int):
        """Return the logits of step b."""
        if "g" in self.c.rows.fields:
            return [packed.from_bf16(word) for word in raw_words(rows, b)]
        return pairs_of(self.logits(x, rows, place, channel, b))

    def log2_decays(self, logits, gates, r: int, lower_bound):
        """Return log2 of the decays from half r's logits, slopes, and if it `keeps_shares` those."""
        y = self.exponents(logits, gates.factor, gates.offsets[r])
        if self.c.gate == "bounded":
            e = packed.exp2(packed.negative(packed.at_least(y, LEAST)))
            sigmoids = packed.each("rcp.approx.ftz.f32", packed.plus(packed.constant(1.0), e))
            found = packed.times(packed.both(Float32(fast.LOG2_E) * lower_bound), sigmoids)
            slopes = packed.times(packed.times(e, sigmoids), sigmoids)
        elif self.c.gate == "softplus":
            e = packed.exp2(packed.negative(packed.each("abs.f32", y)))
            logs = packed.each("lg2.approx.ftz.f32", packed.plus(packed.constant(1.0), e))
            total = packed.plus(packed.at_least(y, 0.0), logs)
            found = packed.times(packed.both(-gates.rate), total)
            slopes = packed.exp2(packed.plus(y, packed.negative(total)))
        else:
            found, slopes = y, packed.constant(1.0)
        if not self.c.one_product:
            found = packed.at_least(found, FLOOR)
            slopes = packed.unless_equal(found, FLOOR, slopes)
        return found, slopes, self.shares(logits, found) if self.keeps_shares else None

    def shares(self, logits, found):
        """Return what slopes of a bounded gate are multiplied by for dA_log, or gains of another one."""
        if self.c.gate == "bounded":
            return packed.each("min.NaN.xorsign.abs.f32", logits, f", {packed.immediate(fast.LARGEST)}")
        return packed.unless_equal(found, FLOOR, found)

    def exponents(self, logits, factor, offset):
        if self.c.bias:
            return packed.fused(logits, packed.both(factor), packed.both(offset))
        return packed.times(logits, packed.both(factor))


class PairRows(GradRows):
    """MATH but its products, of two tokens at a time; `lanes()` are the warp's of tensor memory."""

    columns: GradsColumns

    def __init__(self, config: GradsOptions):
        super().__init__(config)
        self.gate: PairGate = PairGate(config)

    def of_step(self, acc, b: int):
        """Return the pairs of step b of an accumulator."""
        return pairs_of([acc[8 * b + j] for j in range(8)])

    def put_step(self, acc, b: int, pairs):
        for j, y in enumerate(numbers_of(pairs)):
            acc[8 * b + j] = y

    def times_halves(self, acc, factors):
        for b in range(STEPS):
            self.times_step(acc, b, factors)

    def times_step(self, acc, b: int, factors):
        """Multiply step b of the channels of both halves by `factors`."""
        factors = [packed.both(y) for y in factors]
        self.put_step(acc, b, [packed.times(y, factors[w % HALVES]) for w, y in enumerate(self.of_step(acc, b))])

    def of_operand(self, operand, b: int):
        """Return the pairs of step b of an operand."""
        words = cute.recast_tensor(cute.coalesce(operand), Uint32)
        return [packed.from_bf16(words[PAIRS * b + w]) for w in range(PAIRS)]

    def signed_factors(self, x, of_tokens, b: int):
        """scale / |q|, -1 / |k| and -b of a lane's tokens of step b: with these signs no product has another one."""
        found = []
        for f in (Q, K_, B):
            of_lane = load(of_tokens + (f * TOKENS + STEP * b), EACH)
            found.append(pairs_of([of_lane[t] for t in range(EACH)]))
        of_q, of_k, of_b = found
        scale = packed.both(x.scale)
        return [packed.times(y, scale) for y in of_q], *([packed.negative(y) for y in z] for z in (of_k, of_b))

    def operands(self, x, place, rows, channel, of_tokens, gates, Qu, Ku, Kd):
        """Fill Qu, Ku and Kd; return no powers, which tensor memory has, and factors from middle to middle."""
        words = [cute.recast_tensor(cute.coalesce(operand), Uint32) for operand in (Qu, Ku, Kd)]
        middle, total = [[], []], [[], []]
        for b in range(STEPS):
            q, k = [raw_words(of_tensor, b) for of_tensor in rows[:2]]
            logits = self.gate.pairs_of_logits(x, rows[-1], place, channel, b)
            of_q, of_k, of_b = self.signed_factors(x, of_tokens, b)
            kept, of_half = [[None] * PAIRS for _ in range(4)], ()
            for r in range(HALVES):
                if r == 0 or not self.c.per_head:                              # else both have one gate
                    *of_half, halves, wholes = self.decays(x, logits[r::HALVES], gates, r)
                middle[r] += halves
                total[r] += wholes
                for to, pairs in zip(kept, of_half):
                    to[r::HALVES] = pairs
            up, down, slopes, shares = kept
            self.keep(self.columns.decays + 2 * STEP * b, up + (shares if self.gate.keeps_shares else down))
            self.keep(self.columns.slopes + STEP * b, slopes)
            for w in range(PAIRS):
                t = w // HALVES
                qn = packed.times(packed.from_bf16(q[w]), of_q[t])
                minus_kn = packed.times(packed.from_bf16(k[w]), of_k[t])
                words[0][PAIRS * b + w] = packed.to_bf16(packed.times(qn, up[w]))
                words[1][PAIRS * b + w] = packed.to_bf16(packed.times(minus_kn, up[w]))
                words[2][PAIRS * b + w] = packed.to_bf16(packed.times(packed.times(minus_kn, down[w]), of_b[t]))
        return None, self.ratios(middle, total)

    def decays(self, x, logits, gates, r: int):
        """Return 2^x, 2^-x, slopes and shares of half r of a step, and sums of its blocks as `place_in_block`."""
        found = [self.gate.log2_decays(y, gates, r, x.lower_bound) for y in logits]
        sums = []
        for g2, _, _ in found:
            for number in packed.both_of(g2):
                sums.append(number + sums[-1] if sums else number)
        before, halves, wholes = self.place_in_block(sums[-1])
        up, down = zip(*[packed.powers(packed.plus(y, packed.both(before))) for y in pairs_of(sums)])
        _, slopes, shares = zip(*found)
        return up, down, slopes, shares, halves, wholes

    def keep(self, columns: int, pairs):
        umma.store_fragments(self.lanes() + columns, numbers_of(pairs))

    def kept(self, columns: int, count: int = STEP):
        return pairs_of(umma.load_fragments(self.lanes() + columns, count))

    def powers(self, b: int):
        """Return 2^x and 2^-x of step b."""
        first = self.columns.decays + 2 * STEP * b
        if self.gate.keeps_shares:
            up = self.kept(first)
            return up, [packed.each("rcp.approx.ftz.f32", y) for y in up]
        found = self.kept(first, 2 * STEP)
        return found[:PAIRS], found[PAIRS:]

    def factors_of_A(self, rows, b: int):
        """Return what slopes of a bounded gate or gains of another one are multiplied by for dA_log."""
        if self.gate.keeps_shares:
            return self.kept(self.columns.decays + 2 * STEP * b + STEP)
        return [packed.from_bf16(fast.bounded_pair(word)) for word in raw_words(rows, b)]

    def sums_of_step(self, Kd, flat, b: int):
        weight, of_acc, found = self.of_operand(Kd, b), self.of_step(flat, b), []
        for r in range(HALVES):
            first = packed.times(weight[r], of_acc[r])
            found.append(packed.sum_of(packed.fused(weight[HALVES + r], of_acc[HALVES + r], first)))
        return found

    def gains_and_sums(self, x, s, of_tokens, powers, up1, up2, down, Qu, Ku, Kd):
        gains, sums = [], [[] for _ in self.c.sums]
        accs = [cute.coalesce(acc) for acc in (up1, up2, down)]
        for b in range(STEPS):
            (of_q, of_k, of_b), (up, inverse) = self.signed_factors(x, of_tokens, b), self.powers(b)
            flat, weights = [self.of_step(acc, b) for acc in accs], [self.of_operand(y, b) for y in (Qu, Ku, Kd)]
            for w in range(PAIRS):
                t = w // HALVES
                row = [packed.times(weight[w], of_acc[w]) for weight, of_acc in zip(weights, flat)]
                gains.append(packed.plus(packed.plus(row[0], row[1]), packed.negative(row[2])))
                for of_sum, y in zip(sums, row[-len(sums) :]):
                    if w % HALVES == 0:
                        of_sum.append(y)
                    else:
                        of_sum[-1] = packed.plus(of_sum[-1], y)
                of_up = [packed.times(of_acc[w], up[w]) for of_acc in flat[:2]]
                flat[0][w] = packed.times(of_up[0], of_q[t])
                of_down = packed.fused(packed.times(flat[2][w], inverse[w]), of_b[t], of_up[1])
                flat[2][w] = packed.times(of_down, of_k[t])
            self.put_step(accs[0], b, flat[0])
            self.put_step(accs[2], b, flat[2])
        return gains, (self.place_of_sums(s), [numbers_of(of_sum) for of_sum in sums])

    def store_dg(self, x, s, place, rows, gains, gates, through, channel):
        a, item = self.lane() & 3, place[0] * x.HV + place[1]
        of_A, of_bias = ([packed.constant(0.0)] * HALVES for _ in range(2))
        later, (to_logit, to_A) = through, self.gate.slopes(x, gates.rate)
        for b in reversed(range(STEPS)):
            slopes, dg = self.kept(self.columns.slopes + STEP * b), [None] * PAIRS
            for_A = self.factors_of_A(rows, b) if self.c.rate else None
            for r in range(HALVES):
                sums = []
                for pair in gains[PAIRS * b + r : PAIRS * (b + 1) : HALVES][::-1]:
                    for number in packed.both_of(pair)[::-1]:
                        sums.insert(0, number + sums[0] if sums else number)
                after, later[r] = self.after_tokens(a, later[r], sums[0])
                for w, y in zip(range(r, PAIRS, HALVES), pairs_of(sums)):
                    gain = packed.plus(y, packed.both(after))
                    slope = packed.times(slopes[w], gain)
                    if for_A is not None:
                        of_A[r] = packed.fused(slope if self.c.gate == "bounded" else gain, for_A[w], of_A[r])
                    if self.c.bias:
                        of_bias[r] = packed.plus(of_bias[r], slope)
                    dg[w] = packed.times(slope, packed.both(to_logit))
            self.put_dg(x, s, place, rows, channel, b, dg)
        umma.fence_before_thread_sync()                                        # warp 0 issues the next item's products
        of_A, of_bias = ([packed.sum_of(y) for y in of_both] for of_both in (of_A, of_bias))
        self.store_shares(x, a, item, channel, of_A, of_bias, gates, to_A, to_logit)

    def put_dg(self, x, s, place, rows, channel, b: int, dg):
        if self.c.per_head:
            self.share_dg(s, b, numbers_of(dg))
        elif self.c.wide_g:
            self.gate.put(x, rows, place, channel, b, numbers_of(dg))
        else:
            self.store_step(rows, b, dg)

    def store_step(self, rows, b: int, pairs):
        store_matrices(rows + b * (STEP * 64), [packed.to_bf16(y) for y in pairs], transposed=True)

    def store_dq_dk(self, x, s, rows, of_tokens, powers, up1, up2, down):
        projected = s.projected + EACH * (self.lane() & 3)
        for b in range(STEPS):
            for n, acc in enumerate((up1, down)):
                found = self.of_step(cute.coalesce(acc), b)
                if self.c.norm:
                    y, along = raw_words(rows[n], b), load(projected + (n * TOKENS + STEP * b), EACH)
                    less = [packed.negative(z) for z in pairs_of([along[t] for t in range(EACH)])]
                    found = [packed.fused(packed.from_bf16(y[w]), less[w // HALVES], found[w]) for w in range(PAIRS)]
                self.store_step(rows[n], b, found)
