"""The short convolution of a layer with its SiLU, and the way back.  One thread owns channels and walks along tokens.

  z[t] = bias + sum_j w[3 - j] x[t - j], j = 0 .. 3      y[t] = z[t] sigmoid(z[t])

x is (tokens, C), w (C, 4). A token reaches back to the first token of its own sequence, then into `state` (N, 3, C),
the inputs that came before, or into zeros. Tokens lie in rows of T, each a sequence; or `starts` and `numbers`
(tokens,) give the first token and the number of each token's sequence, a first token of `tokens` where there is none:
its outputs and gradients are zero.

Every input is read once a direction, but for the three rows before or behind those of a program.
"""

import triton
import triton.language as tl

from ..parts.gate import sigmoid

UNROLL: tl.constexpr = tl.constexpr(4)       # rows whose loads are issued before the first is used
NEVER: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def first_of(starts, t, tokens, T):
    """Returns the first token of the sequence of t; past all tokens there is no sequence."""
    if starts is None:
        first = tl.where(t < tokens, t // T * T, NEVER)
    else:
        first = tl.load(starts + t, mask=t < tokens, other=NEVER)
    return first


@triton.jit
def number_of(numbers, t, tokens, T):
    if numbers is None:
        number = t // T
    else:
        number = tl.load(numbers + t, mask=t < tokens, other=0)
    return number


@triton.jit
def row(x, t, tokens, c, C):
    """Loads channels c of token t in the dtype in memory; zeros outside."""
    return tl.load(x + t.to(tl.int64) * C + c, mask=(t >= 0) & (t < tokens) & (c < C), other=0.0)


@triton.jit
def tap(x, t, j: tl.constexpr, first, state, number, c, C):
    """Returns what stands j tokens before t in its sequence; x is what stands there in memory."""
    value = tl.where(t - j >= first, x, 0.0)
    if state is not None:
        if (t >= first) & (t - j < first):
            value = tl.load(state + (number.to(tl.int64) * 3 + (3 + t - j - first)) * C + c, mask=c < C, other=0.0)
            value = value.to(tl.float32)
    return value


@triton.jit
def weights(weight, c, C):
    """Loads the four rows of weights, that of the oldest token first."""
    w = ()
    for j in tl.static_range(4):
        w = w + (tl.load(weight + c * 4 + j, mask=c < C, other=0.0).to(tl.float32),)
    return w


@triton.jit
def bias_of(bias, c, C, BC: tl.constexpr):
    b = tl.zeros((BC,), tl.float32)
    if bias is not None:
        b = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    return b


@triton.jit
def rows_before(x, t, tokens, c, C):
    """Loads the three rows before token t, the latest first, as float32."""
    x1 = row(x, t - 1, tokens, c, C).to(tl.float32)
    x2 = row(x, t - 2, tokens, c, C).to(tl.float32)
    x3 = row(x, t - 3, tokens, c, C).to(tl.float32)
    return x1, x2, x3


@triton.jit
def convolve(
    x, weight, bias, state, starts, numbers, y, tokens, T, C, rows,
    BC: tl.constexpr,
):
    """Computes y; a program has `rows` rows, a multiple of UNROLL, of BC channels."""
    blocks = tl.cdiv(C, BC)
    t0 = tl.program_id(0) // blocks * rows
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    w = weights(weight, c, C)
    b = bias_of(bias, c, C, BC)
    x1, x2, x3 = rows_before(x, t0, tokens, c, C)
    for r in range(0, rows, UNROLL):
        new = ()
        for u in tl.static_range(UNROLL):
            new = new + (row(x, t0 + r + u, tokens, c, C),)
        for u in tl.static_range(UNROLL):
            t = t0 + r + u
            first, number = first_of(starts, t, tokens, T), number_of(numbers, t, tokens, T)
            x0 = new[u].to(tl.float32)
            z = b + w[3] * tap(x0, t, 0, first, state, number, c, C)
            z += w[2] * tap(x1, t, 1, first, state, number, c, C)
            z += w[1] * tap(x2, t, 2, first, state, number, c, C)
            z += w[0] * tap(x3, t, 3, first, state, number, c, C)
            out = tl.where(t >= first, z * sigmoid(z), 0.0)
            tl.store(y + t.to(tl.int64) * C + c, out.to(y.dtype.element_ty), mask=(t < tokens) & (c < C))
            x3, x2, x1 = x2, x1, x0


@triton.jit
def silu_slope(z):
    s = sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


@triton.jit
def convolve_bwd(
    x, weight, bias, state, starts, numbers, dy, dx, shares, tokens, T, C, rows,
    BC: tl.constexpr,
):
    """Computes dx, and for each run of `rows` tokens its share of dw and of the bias's gradient: (runs, 4 or 5, C)."""
    blocks = tl.cdiv(C, BC)
    run = tl.program_id(0) // blocks
    t0 = run * rows
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    w = weights(weight, c, C)
    b = bias_of(bias, c, C, BC)
    x1, x2, x3 = rows_before(x, t0, tokens, c, C)
    d1, d2, d3 = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    first1, first2 = first_of(starts, t0, tokens, T), first_of(starts, t0, tokens, T)
    dw0, dw1, dw2 = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    dw3, db = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for r in range(0, rows + UNROLL, UNROLL):
        new, slopes = (), ()
        for u in tl.static_range(UNROLL):
            new = new + (row(x, t0 + r + u, tokens, c, C),)
            slopes = slopes + (row(dy, t0 + r + u, tokens, c, C),)
        for u in tl.static_range(UNROLL):
            t = t0 + r + u
            first, number = first_of(starts, t, tokens, T), number_of(numbers, t, tokens, T)
            x0 = new[u].to(tl.float32)
            y0 = tap(x0, t, 0, first, state, number, c, C)
            y1 = tap(x1, t, 1, first, state, number, c, C)
            y2 = tap(x2, t, 2, first, state, number, c, C)
            y3 = tap(x3, t, 3, first, state, number, c, C)
            z = b + w[3] * y0
            z += w[2] * y1
            z += w[1] * y2
            z += w[0] * y3
            d0 = tl.where(t >= first, slopes[u].to(tl.float32) * silu_slope(z), 0.0)
            # What token t - 3 adds to itself and to those behind it, if they are of its sequence.
            e = w[3] * d3 + w[2] * tl.where(t - 3 >= first2, d2, 0.0)
            e += w[1] * tl.where(t - 3 >= first1, d1, 0.0)
            e += w[0] * tl.where(t - 3 >= first, d0, 0.0)
            mine = (t - 3 >= t0) & (t - 3 < t0 + rows) & (t - 3 < tokens)
            tl.store(dx + (t - 3).to(tl.int64) * C + c, e.to(dx.dtype.element_ty), mask=mine & (c < C))
            slope = tl.where(t < t0 + rows, d0, 0.0)
            dw3 += slope * y0
            dw2 += slope * y1
            dw1 += slope * y2
            dw0 += slope * y3
            db += slope
            x3, x2, x1 = x2, x1, x0
            d3, d2, d1 = d2, d1, d0
            first2, first1 = first1, first
    given: tl.constexpr = 4 if bias is None else 5
    share = shares + run.to(tl.int64) * given * C + c
    tl.store(share, dw0, mask=c < C)
    tl.store(share + C, dw1, mask=c < C)
    tl.store(share + 2 * C, dw2, mask=c < C)
    tl.store(share + 3 * C, dw3, mask=c < C)
    if bias is not None:
        tl.store(share + 4 * C, db, mask=c < C)


@triton.jit
def convolve_state_bwd(
    x, weight, bias, state, cu_seqlens, dy, dstate, tokens, T, C,
    BC: tl.constexpr,
):
    """Computes dstate (N, 3, C): the gradient that the first three tokens of each sequence give to its state."""
    blocks = tl.cdiv(C, BC)
    n = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    if cu_seqlens is None:
        first, end = n * T, n * T + T
    else:
        first, end = tl.load(cu_seqlens + n).to(tl.int32), tl.load(cu_seqlens + n + 1).to(tl.int32)
    w = weights(weight, c, C)
    b = bias_of(bias, c, C, BC)
    before = state + n.to(tl.int64) * 3 * C + c
    s = ()
    for i in tl.static_range(3):
        s = s + (tl.load(before + i * C, mask=c < C, other=0.0).to(tl.float32),)
    for i in tl.static_range(3):
        s = s + (row(x, first + i, end, c, C).to(tl.float32),)
    d = ()
    for p in tl.static_range(3):
        z = b + w[0] * s[p] + w[1] * s[p + 1] + w[2] * s[p + 2] + w[3] * s[p + 3]
        d = d + (row(dy, first + p, end, c, C).to(tl.float32) * silu_slope(z),)
    out = dstate + n.to(tl.int64) * 3 * C + c
    tl.store(out, (w[0] * d[0]).to(dstate.dtype.element_ty), mask=c < C)
    tl.store(out + C, (w[1] * d[0] + w[0] * d[1]).to(dstate.dtype.element_ty), mask=c < C)
    tl.store(out + 2 * C, (w[2] * d[0] + w[1] * d[1] + w[0] * d[2]).to(dstate.dtype.element_ty), mask=c < C)
