"""A token by itself: log2 decay, beta, l2norm; and back.  float32 in and out.

  softplus gate   g2 = -log2(e) e^A softplus(x)             x = g + dt_bias
  bounded gate    g2 = log2(e) lower_bound sigmoid(e^A x)
  given           g2 = log2(e) g

g2 is never below FLOOR: 2^FLOOR is nothing in float32, and sums of a chunk stay finite for any gate, -inf too.
e^A and e^A x are kept finite, so that a saturated gate has the gradient 0.
"""

import triton
import triton.language as tl

from .fast import exp2, reciprocal

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
FLOOR: tl.constexpr = tl.constexpr(-127.0)
NORM_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def at_least(x, low):
    """Returns the larger one, and keeps a nan."""
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, high):
    """Returns the smaller one, and keeps a nan."""
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite(x):
    return at_most(at_least(x, -LARGEST), LARGEST)


@triton.jit
def rate_of(A_log, head, RATE: tl.constexpr):
    """Returns e^A, or 1 where there is no A_log."""
    if RATE:
        rate = finite(exp2(tl.load(A_log + head).to(tl.float32) * LOG2_E))
    else:
        rate = 1.0
    return rate


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(-LOG2_E * x))


@triton.jit
def sigmoid_slope(x):
    """Returns sigmoid(x) sigmoid(-x)."""
    e = exp2(-LOG2_E * tl.abs(x))
    s = reciprocal(1.0 + e)
    return e * s * s


@triton.jit
def log1p(e):
    """Returns log(1 + e) for e in [0, 1]: twice atanh(s) with s = e / (2 + e) <= 1/3, a series good to float32."""
    s = e * reciprocal(2.0 + e)
    t = s * s
    p = 1.0 / 13.0
    p = p * t + 1.0 / 11.0
    p = p * t + 1.0 / 9.0
    p = p * t + 1.0 / 7.0
    p = p * t + 1.0 / 5.0
    p = p * t + 1.0 / 3.0
    return 2.0 * s * (p * t + 1.0)


@triton.jit
def softplus(x):
    return at_least(x, 0.0) + log1p(exp2(-LOG2_E * tl.abs(x)))


@triton.jit
def log2_decay(x, rate, lower_bound, GATE: tl.constexpr):
    """Returns g2 of logits (bias added), or of given decays."""
    if GATE == "given":
        g2 = LOG2_E * x
    elif GATE == "softplus":
        g2 = -LOG2_E * (rate * softplus(x))
    else:
        g2 = (LOG2_E * lower_bound) * sigmoid(rate * x)
    return at_least(g2, FLOOR)


@triton.jit
def step_size(beta, BETA: tl.constexpr):
    if BETA == "given":
        b = beta
    elif BETA == "sigmoid":
        b = sigmoid(beta)
    else:
        b = 2.0 * sigmoid(beta)
    return b


@triton.jit
def inverse_norm(sum_of_squares):
    return tl.rsqrt(sum_of_squares + NORM_EPS)


@triton.jit
def log2_decay_bwd(dg2, x, rate, lower_bound, GATE: tl.constexpr):
    """Returns the logits' gradients, and the terms of the gradient of A_log; dg2 is that of the natural-log decay."""
    if GATE == "softplus":
        dx = -(rate * (sigmoid(x) * dg2))
        of_A = -(finite(rate * softplus(x)) * dg2)
    else:
        y = finite(rate * x)
        dy = dg2 * (lower_bound * sigmoid_slope(y))
        dx = dy * rate
        of_A = dy * y
    return dx, of_A
