"""fwd/gate, fwd/intra and fwd/wy of one chunk and one value head in one pass.

  qn, kn, b, g2     l2norm, beta, gate (parts/gate.py);  gc = cumsum(g2)
  A_qk, A_kk        by halving (parts/halving.py), down to blocks of SPAN rows: any gate, every exponent <= 0
  A_inv             (I + A_kk)^-1 (parts/inverse.py)
  w, u              A_inv @ (b kn 2^gc), A_inv @ (b v);  qg = qn 2^gc;  kg = kn 2^(gc_last - gc)

One program a chunk and value head; K is walked in slices of BK and V in slices of BV, which cost registers.  What the
phases hand to each other (gc, kn 2^gc, A_kk) they find in memory, which is the SM's first cache by then: gc (chunks,
HV, C, K) and A_kk (chunks, HV, C, C) are scratch.  What is stored has a row for each token, (tokens, HV, ..), but for
gc_last (chunks, HV, K).
"""

import triton
import triton.language as tl

from ..parts.fast import exp2, times, times_both
from ..parts.gate import inverse_norm, log2_decay, rate_of, step_size
from ..parts.halving import FIRST, LEVELS, decay_to_cut, decay_to_middle, from_first, half_of_bound, quarters
from ..parts.inverse import inverse
from ..parts.memory import load_columns
from ..parts.sequences import chunk_place, clear_rows


@triton.constexpr_function
def AT_ONCE(K, BK, dtype):
    """Returns how many channels are loaded before the first are used; float32 would need twice as long to build."""
    return 2 * BK if dtype.primitive_bitwidth == 16 and K % (2 * BK) == 0 else BK


@triton.jit
def norms(q, k, stride, rows, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr):
    """Returns (C) 1 / |q|, 1 / |k| (1 without NORM) and normalised q . k."""
    TOGETHER: tl.constexpr = AT_ONCE(K, BK, q.dtype.element_ty)
    i = tl.minimum(tl.arange(0, C), rows - 1)[:, None]                         # rows that are not there: the last one
    qq = tl.zeros((C,), tl.float32)
    kk = tl.zeros((C,), tl.float32)
    qk = tl.zeros((C,), tl.float32)
    for first in tl.range(0, K, TOGETHER, num_stages=1):
        for k0 in tl.static_range(0, TOGETHER, BK):
            d = first + k0 + tl.arange(0, BK)[None, :]
            x = load_columns(q + i * stride + d, d, K, BK).to(tl.float32)
            y = load_columns(k + i * stride + d, d, K, BK).to(tl.float32)
            qk += tl.sum(x * y, 1)
            if NORM:
                qq += tl.sum(x * x, 1)
                kk += tl.sum(y * y, 1)
    qs = tl.full((C,), 1.0, tl.float32)
    ks = tl.full((C,), 1.0, tl.float32)
    if NORM:
        qs, ks = inverse_norm(qq), inverse_norm(kk)
    return qs, ks, qk * (qs * ks)


@triton.jit
def sum_gates(
    g, dt_bias, gc, rate, lower_bound, one, stride, rows, K: tl.constexpr, C: tl.constexpr, BG: tl.constexpr,
    RUN: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PER_HEAD: tl.constexpr,
):
    """Computes gc (C, K), sums of log2 decays over each run of RUN rows; PER_HEAD: all channels have the same.

    A thread has one channel and RUN rows, which it sums in registers.  Lanes go along channels because these are said
    to be neighbours, and have one each because `one` hides that rows of them begin at a multiple of 16 bytes.
    """
    r = RUN * tl.arange(0, C // RUN)[:, None] + tl.arange(0, RUN)[None, :]     # (C / RUN, RUN)
    for k0 in tl.range(0, K, BG, num_stages=1):
        d = k0 + tl.arange(0, BG)
        channel = tl.max_contiguous(d * one, BG)[:, None, None]
        offset = channel + r[None, :, :] * stride
        real = (d < K)[:, None, None] & (r < rows)[None, :, :]
        if PER_HEAD:
            x = tl.load(g + r * stride, mask=r < rows, other=0.0).to(tl.float32)[None, :, :]
            if BIAS:
                x += tl.load(dt_bias).to(tl.float32)
        else:
            x = tl.load(g + offset, mask=real, other=0.0).to(tl.float32)
            if BIAS:
                x += tl.load(dt_bias + d, mask=d < K, other=0.0).to(tl.float32)[:, None, None]
        g2 = log2_decay(x, rate, lower_bound, GATE).to(gc.dtype.element_ty)
        if PER_HEAD:
            g2 = tl.broadcast_to(g2, real.shape)
        offset = channel.to(tl.int64) + (r * K)[None, :, :]                    # rows are constants to add to 64 bits
        tl.store(gc + offset, tl.cumsum(g2, 2), mask=real)


@triton.jit
def decay_rows(
    q, k, gc, qg, kE, kg, gc_last, qs, ks, q_stride, stride, rows, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    RUN: tl.constexpr, SUMS_ONLY: tl.constexpr,
):
    """Computes gc over all rows out of its runs, and from it qg, kn 2^gc, kg and gc_last."""
    DOT: tl.constexpr = q.dtype.element_ty
    TOGETHER: tl.constexpr = AT_ONCE(K, BK, DOT)
    r = tl.arange(0, C)[:, None]
    i = tl.minimum(r, rows - 1)
    for first in tl.range(0, K, TOGETHER, num_stages=1):
        loaded = ()
        for k0 in tl.static_range(0, TOGETHER, BK):
            d = first + k0 + tl.arange(0, BK)[None, :]
            sums = load_columns(gc + i * K + d, d, K, BK)
            last = load_columns(gc + (rows - 1) * K + d, d, K, BK)
            x, y = sums, sums
            if not SUMS_ONLY:
                x = load_columns(q + i * q_stride + d, d, K, BK)
                y = load_columns(k + i * q_stride + d, d, K, BK)
            loaded = loaded + ((sums, last, x, y),)
        for s in tl.static_range(len(loaded)):
            sums, last, x, y = loaded[s]
            d = first + s * BK + tl.arange(0, BK)[None, :]
            real = (r < rows) & (d < K)
            for run in tl.static_range(RUN, C, RUN):
                end = tl.load(gc + (run - 1) * K + d, mask=(d < K) & (run < rows), other=0.0)
                sums += tl.where(i >= run, end, 0.0)
                last += end
            if RUN < C:
                tl.debug_barrier()                                             # all of the slice was read
                tl.store(gc + i * K + d, sums, mask=real & (r >= RUN))
            if not SUMS_ONLY:
                E = exp2(sums.to(tl.float32))
                y = y.to(tl.float32) * ks[:, None]
                tl.store(qg + i * stride + d, (x.to(tl.float32) * (qs[:, None] * E)).to(DOT), mask=real)
                tl.store(kE + i * stride + d, (y * E).to(DOT), mask=real)
                tl.store(kg + i * stride + d, (y * exp2((last - sums).to(tl.float32))).to(DOT), mask=real)
                tl.store(gc_last + d, last.to(tl.float32), mask=d < K)


@triton.jit
def operands(q, k, gc, step, rows, stride, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr):
    """Returns the operands of both products for one slice of K and one level, one pair for two.

    x has k in all rows and y has k in first halves and q in second ones, all under the decay to or from the cut: below
    the diagonal x @ y^T is then A_kk / b, and above it A_qk^T / scale.
    """
    i = tl.minimum(tl.arange(0, C), rows - 1)                                  # rows that are not there: the last one
    level = FIRST(SPAN) + step % (LEVELS(C) - FIRST(SPAN))
    d = step // (LEVELS(C) - FIRST(SPAN)) * BK + tl.arange(0, BK)[None, :]
    if 2 * SPAN == C:
        E = decay_to_middle(gc, i, d, rows, K, C, BK)
    else:
        E = decay_to_cut(gc, i, level, d, rows, K, BK)
    offset = i[:, None] * stride
    x = load_columns(k + offset + d, d, K, BK)
    y = load_columns(tl.where(((tl.arange(0, C) >> level) % 2 == 1)[:, None], q + offset, k + offset) + d, d, K, BK)
    return times(x, E), times(y, E)


@triton.jit
def block_operands(
    q, k, gc, qs, ks, half, k0, rows, stride, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
):
    """Returns normalised k and q under 2^x of their row in a diagonal block of SPAN rows, and k under 2^-x."""
    d = k0 + tl.arange(0, BK)[None, :]
    after, before = from_first(gc, half, d, rows, K, C, BK, SPAN)
    offset = tl.minimum(tl.arange(0, C), rows - 1)[:, None] * stride + d
    x, y = load_columns(k + offset, d, K, BK), load_columns(q + offset, d, K, BK)
    return times_both(x, ks[:, None], after), times_both(y, qs[:, None], after), times_both(x, ks[:, None], before)


@triton.jit
def block_products(
    q, k, gc, qs, ks, half, stride, rows, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns (C, C): the diagonal blocks of SPAN rows of A_kk / b and, transposed, A_qk / scale."""
    i = tl.arange(0, C)
    below = tl.zeros((C, C), tl.float32)
    above = tl.zeros((C, C), tl.float32)
    ka, qa, kb = block_operands(q, k, gc, qs, ks, half, 0, rows, stride, K, C, BK, SPAN)
    for k0 in tl.range(0, K, BK, num_stages=1):
        below = tl.dot(ka, tl.trans(kb), below, input_precision=PRECISION)
        above = tl.dot(kb, tl.trans(qa), above, input_precision=PRECISION)
        if k0 + BK < K:
            ka, qa, kb = block_operands(q, k, gc, qs, ks, half, k0 + BK, rows, stride, K, C, BK, SPAN)
    A = tl.where(i[:, None] > i[None, :], below, above)
    return tl.where((i // SPAN)[:, None] == (i // SPAN)[None, :], A, 0.0)


@triton.jit
def products(
    q, k, gc, qs, ks, lower_bound, stride, rows, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns (C, C): A_kk / b below the diagonal and A_qk^T / scale above it."""
    i = tl.arange(0, C)
    blocks = tl.zeros((C, C), tl.float32)
    if SPAN > 1:
        half = half_of_bound(lower_bound, SPAN)
        blocks = block_products(q, k, gc, qs, ks, half, stride, rows, K, C, BK, SPAN, PRECISION)
        tl.debug_barrier()                                                     # or gc stays in registers: they spill
    A = tl.zeros((C, C), tl.float32)
    levels: tl.constexpr = LEVELS(C) - FIRST(SPAN)
    steps: tl.constexpr = (K + BK - 1) // BK * levels
    x, y = operands(q, k, gc, 0, rows, stride, K, C, BK, SPAN)
    for step in tl.range(0, steps, num_stages=1):
        # x and y are handed from step to step, so that the next pair is made while this one is multiplied
        product = tl.dot(x, tl.trans(y), input_precision=PRECISION)
        if step < steps - 1:
            x, y = operands(q, k, gc, step + 1, rows, stride, K, C, BK, SPAN)
        A += tl.where(quarters(i, FIRST(SPAN) + step % levels), product, 0.0)
    return A * ks[:, None] * tl.where(i[:, None] > i[None, :], ks[None, :], qs[None, :]) + blocks


@triton.jit
def load_rows(x, d, stride, rows, D: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, C)[:, None]
    return tl.load(x + i * stride + d, mask=(i < rows) & (d < D), other=0.0)


@triton.jit
def multiply(X, x, y, stride, rows, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """Computes y = X @ x, with rows of D elements; y may be x.  Slices go in pairs: both are on their way at once."""
    i = tl.arange(0, C)[:, None]
    for d0 in tl.range(0, D, 2 * BD, num_stages=1):
        d = d0 + tl.arange(0, BD)[None, :]
        pair = (load_rows(x, d, stride, rows, D, C),)
        if D > BD:
            pair = pair + (load_rows(x, d + BD, stride, rows, D, C),)
        tl.debug_barrier()                                                     # all of both was read
        for s in tl.static_range(len(pair)):
            column = d + s * BD
            product = tl.dot(X, pair[s], input_precision=PRECISION).to(y.dtype.element_ty)
            tl.store(y + i * stride + column, product, mask=(i < rows) & (column < D))


@triton.jit
def prepare(
    q, k, v, g, beta, A_log, dt_bias, gc, q_norm, k_norm, A_qk, A_kk, A_inv, w, u, qg, kg, gc_last, o, chunk_table,
    T, chunks, H, HV, one, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    RUN: tl.constexpr, SPAN: tl.constexpr, GATE: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr,
    BETA: tl.constexpr, NORM: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, PER_HEAD: tl.constexpr,
):
    """A row of T tokens has `chunks` chunks.

    MODE  "forward": A_qk, w, u, qg, kg, gc_last.  "backward": A_inv and the norms too.  "saved": A_qk and A_inv are
          there, the rest is recomputed.  "sums": gc and the norms alone.
    A program without a chunk clears o, where it is given, in its share of the tokens past the last sequence.
    """
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    begin, rows = chunk_place(chunk, chunk_table, T, C, chunks)
    if chunk_table is not None:
        if rows <= 0:
            if o is not None:
                for v0 in tl.range(0, V, BV):
                    clear_rows(o, begin, -rows, head, HV, v0 + tl.arange(0, BV), V, C)
            return
    # From here on tensors begin at the chunk's first row of this head, and offsets are small.
    row, tile = begin * HV + head, chunk.to(tl.int64) * HV + head
    q += (begin * H + head // (HV // H)) * K
    k += (begin * H + head // (HV // H)) * K
    gc += tile * (C * K)
    i = tl.arange(0, C)
    valid = i < rows

    rate = rate_of(A_log, head, RATE)
    qs, ks, qk = norms(q, k, H * K, rows, K, C, BK, NORM)
    if NORM and MODE != "forward":
        tl.store(q_norm + row + i * HV, qs, mask=valid)
        tl.store(k_norm + row + i * HV, ks, mask=valid)
    WIDTH: tl.constexpr = 1 if PER_HEAD else K
    if BIAS:
        dt_bias += head * WIDTH
    sum_gates(
        g + row * WIDTH, dt_bias, gc, rate, lower_bound, one, HV * WIDTH, rows, K, C, BG, RUN, GATE, BIAS, PER_HEAD
    )
    tl.debug_barrier()
    if MODE == "sums":
        decay_rows(q, k, gc, qg, w, kg, gc_last, qs, ks, H * K, HV * K, rows, K, C, BK, RUN, True)
    else:
        matrices(q, k, v, beta, gc, A_qk, A_kk, A_inv, w, u, qg, kg, gc_last, qs, ks, qk, row, tile, rows, H, HV, scale,
                 lower_bound, K, V, C, BK, BV, RUN, SPAN, BETA, NORM, MODE, PRECISION)


@triton.jit
def matrices(
    q, k, v, beta, gc, A_qk, A_kk, A_inv, w, u, qg, kg, gc_last, qs, ks, qk, row, tile, rows, H, HV, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, RUN: tl.constexpr,
    SPAN: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Computes all matrices of one chunk from gc; q, k and gc begin at its first row."""
    i = tl.arange(0, C)
    valid = i < rows
    w += row * K
    decay_rows(q, k, gc, qg + row * K, w, kg + row * K, gc_last + tile * K, qs, ks, H * K, HV * K, rows, K, C, BK, RUN,
               False)
    tl.debug_barrier()                                                         # gc and, in w, kn 2^gc are there

    b = tl.load(beta + row + i * HV, mask=valid, other=0.0).to(tl.float32)
    b = tl.where(valid, step_size(b, BETA), 0.0)
    at_c = i[:, None] * (HV * C) + i[None, :]
    if MODE == "saved":
        X = tl.load(A_inv + row * C + at_c, mask=valid[:, None], other=0.0).to(tl.float32)
    else:
        A = products(q, k, gc, qs, ks, lower_bound, H * K, rows, K, C, BK, SPAN, PRECISION)
        Aqk = tl.where(i[:, None] < i[None, :], A, 0.0)
        Aqk = tl.where(i[:, None] == i[None, :], qk[:, None], Aqk) * scale
        tl.store(A_qk + row * C + at_c, tl.trans(Aqk).to(A_qk.dtype.element_ty), mask=valid[:, None])
        A_kk += tile * (C * C)
        tl.store(A_kk + i[:, None] * C + i[None, :], A * b[:, None])
        tl.debug_barrier()                                                     # A_kk is there
        X = inverse(A_kk, C, PRECISION, NORM and BETA != "given")
        if MODE == "backward":
            tl.store(A_inv + row * C + at_c, X.to(A_inv.dtype.element_ty), mask=valid[:, None])
    X = (X * b[None, :]).to(q.dtype.element_ty)
    multiply(X, w, w, HV * K, rows, K, C, BK, PRECISION)
    multiply(X, v + row * V, u + row * V, HV * V, rows, V, C, BV, PRECISION)
