"""The gate of bwd/grads, by MATH: decays of logits, and gradients of logits of gradients of decays.

  g2 = log2 decay.  Where a block has 8 tokens it is at least FLOOR, and nothing goes on to the logit of one that is
  less: 2^FLOOR of what it hides is below what bfloat16 leaves of the rest.

g of bfloat16 lies in shared memory, and dg takes its place; of float32 MATH reads and writes rows in global memory, 32
bytes of each.  Of a gate per head MATH reads the token's logit in global memory; what a token's channels give to its dg
is summed over the lanes that share the token, then over warps, in one order (rows.store_dg_of_heads).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import fast
from ..copies import floats_of, in_global, load_one, store, words_of
from ..fragments import store_matrices
from ..training import STEP, GradsOptions
from .places import EACH, HALVES, at_element, last_token, raw, raw_words

FLOOR = -16.0                                # bits that a token of a block of 8 loses at most
LN_2 = 1.0 / fast.LOG2_E
SLOWEST, FASTEST = 2.0**-115, 2.0**120       # factors of logits: with less an infinite one is not infinite any more


class ChannelGates(NamedTuple):
    """The gates of a lane's channels: log2(e) times a sigmoid's or softplus' argument is logit * factor + offset."""

    rate: Any                                # e^A_log
    bias: Any                                # dt_bias of both halves
    factor: Any                              # log2(e), of a bounded gate times the rate
    offsets: Any                             # the biases times that, finite


class GradGate:
    def __init__(self, config: GradsOptions):
        self.c = config

    def parameters(self, x, head, channel):
        """Load A_log, and dt_bias of channels `channel` and 8 further."""
        A_log, bias = Float32(0.0), [Float32(0.0)] * HALVES
        if self.c.rate:
            A_log = load_one(x.A_log + head)
        if self.c.bias and self.c.per_head:
            bias = [load_one(x.dt_bias + head)] * HALVES
        elif self.c.bias:
            bias = [load_one(x.dt_bias + (head * self.c.K + channel + 8 * r)) for r in range(HALVES)]
        return A_log, bias

    def of_channels(self, A_log, bias):
        """ChannelGates of `parameters`."""
        rate, factor = Float32(1.0), Float32(fast.LOG2_E)
        if self.c.rate:
            rate = fast.finite(fast.exp2(A_log * factor))
        if self.c.gate == "bounded":
            factor = fast.clamped(factor * rate, Float32(FASTEST), Float32(SLOWEST))
        return ChannelGates(rate, bias, factor, [fast.bounded(y * factor) for y in bias] if self.c.bias else bias)

    def finite_logits(self, x, rows, place, channel, b: int):
        """Return the logits of step b for `backward`, which multiplies those of a bounded gate by slopes of 0."""
        if self.c.gate != "bounded":
            return self.logits(x, rows, place, channel, b)
        if self.c.per_head or self.c.wide_g:
            return [fast.bounded(logit) for logit in self.logits(x, rows, place, channel, b)]
        return floats_of([fast.bounded_pair(word) for word in raw_words(rows, b)])

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
                    logit = load_one(in_global(row + 32 * r, Float32))
                    found[at_element(0, r, t)] = self.of_token(logit, self.token(b, t), tokens)
            return found
        return raw(rows, b)

    def logits_of_heads(self, x, place, b: int):
        """Return the same for a gate per head: both halves have the token's logit.  If addresses of all steps were kept
        from one time to the next, no registers would be left for products that do not wait for each other."""
        (_, head, begin, tokens), lane = place, fast.again(cute.arch.lane_idx())
        first, found = (x.g + (begin * x.HV + head)).toint(), [None] * 8
        for t in range(EACH):
            token = STEP * b + t + EACH * (lane & 3)
            row = fast.row(first, last_token(token, tokens), x.HV * Int32(x.g.dtype.width // 8))
            logit = self.of_token(load_one(in_global(row, x.g.dtype)).to(Float32), token, tokens)
            for r in range(HALVES):
                found[at_element(0, r, t)] = logit
        return found

    @cute.jit
    def of_token(self, logit, token, tokens):
        """A logit out of global memory; in shared memory LOAD has ended them."""
        return logit if token < tokens else Float32(self.c.of_no_token)

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
        return (rows + ((begin * x.HV + head) * self.c.K + channel)).toint()

    def token(self, b: int, t: int):
        return STEP * b + t + EACH * (cute.arch.lane_idx() & 3)

    def exponent(self, logit, gates, r: int):
        """Return log2(e) times the argument of half r's sigmoid or softplus."""
        product = logit * gates.factor
        return product + gates.offsets[r] if self.c.bias else product

    def log2_decay(self, logit, gates, r: int, lower_bound):
        """Return log2 of the decay from half r's logit, or from a given decay; in blocks of 8 it is at least FLOOR."""
        found = y = self.exponent(logit, gates, r)
        if self.c.gate == "bounded":
            found = (Float32(fast.LOG2_E) * lower_bound) * fast.reciprocal(Float32(1.0) + fast.exp2(-y))
        if self.c.gate == "softplus":
            e = fast.exp2(fast.negative(y))
            found = -gates.rate * (fast.at_least(y, 0.0) + fast.log2(Float32(1.0) + e))
        return found if self.c.one_product else fast.at_least(found, FLOOR)

    def of_rate(self, of_A, of_bias, gates, r: int):
        """Return the gradient of A_log, but for a constant, from the sums over tokens of what `backward` returns."""
        return of_A + gates.bias[r] * of_bias if self.c.gate == "bounded" and self.c.bias else of_A

    def slopes(self, x, rate):
        """What `backward` leaves out of the gradients of logits and of A_log."""
        if self.c.gate == "bounded":
            to_logit = x.lower_bound * rate
            return to_logit, to_logit
        return -rate if self.c.gate == "softplus" else Float32(1.0), Float32(LN_2)

    @cute.jit
    def backward(self, logit, gates, r: cutlass.Constexpr, lower_bound, gain):
        """Return the gradients of half r's logit and of A_log from that of a decay, but for constants (`slopes`); of a
        bounded gate, what the logit without its bias gives to A_log.  They are zero for a decay that was floored."""
        y = self.exponent(logit, gates, r)
        if cutlass.const_expr(self.c.gate == "bounded"):
            slope, sigmoid = self.sigmoid_slope(y)
            slope = slope * gain
            if cutlass.const_expr(not self.c.one_product):
                g2 = fast.at_least((Float32(fast.LOG2_E) * lower_bound) * sigmoid, FLOOR)
                slope = slope if g2 != Float32(FLOOR) else Float32(0.0)
            return slope, slope * logit
        g2 = self.log2_decay(logit, gates, r, lower_bound)
        gain = gain if g2 != Float32(FLOOR) else Float32(0.0)
        slope = gain
        if cutlass.const_expr(self.c.gate == "softplus"):
            _, sigmoid = self.sigmoid_slope(y)
            slope = gain * sigmoid
        return slope, gain * g2

    @cute.jit
    def sigmoid_slope(self, x):
        """sigmoid(y) sigmoid(-y), and sigmoid(y), of x = log2(e) y."""
        e = fast.exp2(fast.negative(x))
        s = fast.reciprocal(Float32(1.0) + e)
        return e * s * s, (s if x >= Float32(0.0) else e * s)
