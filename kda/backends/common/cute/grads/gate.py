"""The gate of bwd/grads, by MATH: decays of logits, and gradients of logits of gradients of decays.

  g2 = log2 decay.  Where a block has 8 tokens it is at least FLOOR, and nothing goes on to the logit of one that is
  less: 2^FLOOR of what it hides is below what bfloat16 leaves of the rest.

g of bfloat16 lies in shared memory, and dg takes its place; of float32 MATH reads and writes rows in global memory, 32
bytes of each.  Of a gate per head MATH reads the token's logit in global memory; what a token's channels give to its dg
is summed over the lanes that share the token, then over warps, in one order (rows.store_dg_of_heads).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import fast
from ..copies import in_global, load_one, store, words_of
from ..fragments import store_matrices
from ..training import STEP, GradsOptions
from .places import EACH, HALVES, at_element, last_token, raw, within_tokens

FLOOR = -16.0                                # bits that a token of a block of 8 loses at most
LN_2 = 1.0 / fast.LOG2_E


class GradGate:
    def __init__(self, config: GradsOptions):
        self.c = config

    def of_channels(self, x, head, channel):
        """e^A_log, and dt_bias of both halves."""
        rate, bias = Float32(1.0), [Float32(0.0)] * HALVES
        if self.c.rate:
            rate = fast.finite(fast.exp2(load_one(x.A_log + head) * Float32(fast.LOG2_E)))
        if self.c.bias:
            if self.c.per_head:
                return rate, [load_one(x.dt_bias + head)] * HALVES
            bias = [load_one(x.dt_bias + (head * self.c.K + channel + 8 * r)) for r in range(HALVES)]
        return rate, bias

    def logits(self, x, rows, place, channel, b: int):
        """Return the logits of step b, in the order of `at_element`."""
        if self.c.per_head:
            return self.logits_of_heads(x, place, b)
        if self.c.wide_g:
            _, head, begin, tokens = place
            first, found = self.first_row(x.g, x, begin, head, channel), [None] * 8
            for t in range(EACH):
                row = fast.row(first, last_token(self.token(b, t), tokens), x.HV * Int32(4 * self.c.K))
                for r in range(HALVES):
                    found[at_element(0, r, t)] = load_one(in_global(row + 32 * r, Float32))
            return found
        return raw(rows, b)

    def logits_of_heads(self, x, place, b: int):
        """Return the same for a gate per head: both halves have the token's logit.  If addresses of all steps were kept
        from one time to the next, no registers would be left for products that do not wait for each other."""
        (_, head, begin, tokens), lane = place, fast.again(cute.arch.lane_idx())
        first, found = (x.g + (within_tokens(self.c, x, begin) * x.HV + head)).toint(), [None] * 8
        for t in range(EACH):
            token = last_token(STEP * b + t + EACH * (lane & 3), tokens)
            row = fast.row(first, token, x.HV * Int32(x.g.dtype.width // 8))
            logit = load_one(in_global(row, x.g.dtype)).to(Float32)
            for r in range(HALVES):
                found[at_element(0, r, t)] = logit
        return found

    @cute.jit
    def put(self, x, rows, place, channel, b: cutlass.Constexpr, dg):
        """The reverse."""
        if cutlass.const_expr(self.c.wide_g):
            _, head, begin, tokens = place
            first = self.first_row(x.dg, x, begin, head, channel)
            for t in cutlass.range_constexpr(EACH):
                if self.token(b, t) < tokens:
                    row = fast.row(first, self.token(b, t), x.HV * Int32(4 * self.c.K))
                    for r in cutlass.range_constexpr(HALVES):
                        store(in_global(row + 32 * r, Float32), [dg[at_element(0, r, t)]])
        else:
            store_matrices(rows + b * (STEP * 64), words_of(dg), transposed=True)

    def first_row(self, rows, x, begin, head, channel):
        return (rows + ((within_tokens(self.c, x, begin) * x.HV + head) * self.c.K + channel)).toint()

    def token(self, b: int, t: int):
        return STEP * b + t + EACH * (cute.arch.lane_idx() & 3)

    def log2_decay(self, logit, rate, bias, lower_bound):
        """Return log2 of the decay from a logit, or from a given decay; in blocks of 8 it is at least FLOOR."""
        found = logit * Float32(fast.LOG2_E)
        if self.c.gate == "bounded":
            found = fast.reciprocal(Float32(1.0) + fast.exp2((logit + bias) * (Float32(-fast.LOG2_E) * rate)))
            found = (Float32(fast.LOG2_E) * lower_bound) * found
        if self.c.gate == "softplus":
            y = (logit + bias) * Float32(fast.LOG2_E)
            e = fast.exp2(fast.distance(y, Float32(0.0)))
            found = -rate * (fast.at_least(y, 0.0) + fast.log2(Float32(1.0) + e))
        return found if self.c.one_product else fast.at_least(found, FLOOR)

    def slopes(self, x, rate):
        """What `backward` leaves out of the gradients of logits and of A_log."""
        if self.c.gate == "bounded":
            to_logit = x.lower_bound * rate
            return to_logit, to_logit
        return -rate if self.c.gate == "softplus" else Float32(1.0), Float32(LN_2)

    @cute.jit
    def backward(self, logit, bias, rate, lower_bound, gain, counts):
        """Return the gradients of the logit and of A_log from that of a decay, but for constants (`slopes`).  They are
        zero for a decay that was floored."""
        if cutlass.const_expr(self.c.gate == "bounded"):
            logit = fast.bounded(logit) + bias
            slope, sigmoid = self.sigmoid_slope(logit * (Float32(fast.LOG2_E) * rate))
            slope = slope * gain
            if cutlass.const_expr(not self.c.one_product):
                g2 = fast.at_least((Float32(fast.LOG2_E) * lower_bound) * sigmoid, FLOOR)
                slope = slope if g2 != Float32(FLOOR) else Float32(0.0)
            slope = slope if counts else Float32(0.0)
            return slope, slope * logit
        g2 = self.log2_decay(logit, rate, bias, lower_bound)
        gain = gain if counts and g2 != Float32(FLOOR) else Float32(0.0)
        slope = gain
        if cutlass.const_expr(self.c.gate == "softplus"):
            _, sigmoid = self.sigmoid_slope((logit + bias) * Float32(fast.LOG2_E))
            slope = gain * sigmoid
        return slope, gain * g2

    @cute.jit
    def sigmoid_slope(self, x):
        """sigmoid(y) sigmoid(-y), and sigmoid(y), of x = log2(e) y."""
        e = fast.exp2(fast.distance(x, Float32(0.0)))
        s = fast.reciprocal(Float32(1.0) + e)
        return e * s * s, (s if x >= Float32(0.0) else e * s)
