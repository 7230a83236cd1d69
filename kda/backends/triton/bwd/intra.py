"""bwd/intra of one chunk, one value head and BK channels, what bwd/wy takes from states, and back through the gate.

  dqn = scale 2^gc (do @ h^T) + x;  dkn = b plus + minus;  db = db_local + sum_K kn plus
  plus = -2^gc (P @ h^T) + z;  minus = 2^(gc_last - gc) (v_new @ dh^T) + y;  x, y, z from dA_qk and dA_kk, below
  dg2_row = qn dqn + kn (b plus - minus), summed over rows >= t; all rows also have what goes through gc_last
In float32 such differences would show: dg2 is summed of terms that all count, level by level.

x, y, z by halving (parts/halving.py): with S = 2^level rows in a half, L1 @ (kn in first halves, qn in second ones) is
x in second halves and its share of y in first ones, and L2 @ (kn in first halves, b kn in second ones) is z and the
other share, all operands under the decay to or from the cut.  Diagonal blocks of SPAN rows go at once: L1 and L2 @ kn
under the decay to the cut are x and z, and U1 @ qn + U2 @ b kn under the decay from it is y; what they give is under
the inverse.  Where there are such blocks, all four matrices are over `unit` (bwd/wy.py).

What row i gains of dg2_row by a pair of tokens row j loses, and for rows before both the two must cancel: so L1 and L2
are the same numbers either way, and operands come in two parts, high and low.
"""

import triton
import triton.language as tl

from ..parts.fast import exp2, in_two, rounded_product, settled
from ..parts.gate import rate_of, step_size
from ..parts.halving import FIRST, LEVELS, decay_to_cut, from_first, half_of_bound, quarters
from ..parts.memory import load_columns, load_tile
from ..parts.sequences import chunk_place, clear_rows
from .gate import gate_bwd

# The anchor of products with L1 and L2 is this many bits off the middle of the range: the largest operands still have
# room for their sums, the smallest results' factors are still normal numbers (plan.SPANS: at least 2^-113 in the
# middle), and where little decays a dA of 2^-36 of the largest of its chunk counts.
ROOM: tl.constexpr = tl.constexpr(12.0)


@triton.jit
def sum_where(where, x, PRECISION: tl.constexpr):
    """Returns for each t the sum of rows i of x with here[t, i]."""
    return tl.dot(tl.where(where, 1.0, 0.0), x, input_precision=PRECISION)


@triton.jit
def product(M, high, low, total, PRECISION: tl.constexpr):
    """Returns of + M @ (high + low); in float32, high alone."""
    total = tl.dot(M, high, total, input_precision=PRECISION)
    if M.dtype != tl.float32:
        total = tl.dot(M, low, total)
    return total


@triton.jit
def level_bwd(
    x, plus, minus, q, k, gc, M1, M2, unit, qs, ks, bks, level, d, rows, stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Adds the products of one level to x, plus and minus, and returns these products and their decay, too.

    `unit` may be None, for 1.
    """
    i = tl.arange(0, C)
    near = tl.minimum(i, rows - 1)                                             # rows that are not there: the last one
    second = ((i >> level) % 2 == 1)[:, None]
    zero = tl.zeros((C, BK), tl.float32)
    E = decay_to_cut(gc, near, level, d, rows, K, BK)
    offset = near[:, None] * stride
    y = load_columns(tl.where(second, q + offset, k + offset) + d, d, K, BK).to(tl.float32)
    high, low = in_two(y * (E * tl.where(second, qs[:, None], ks[:, None])), k.dtype.element_ty)
    of_q = product(M1, high, low, zero, PRECISION)
    y = load_columns(k + offset + d, d, K, BK).to(tl.float32)
    high, low = in_two(y * (E * tl.where(second, bks[:, None], ks[:, None])), k.dtype.element_ty)
    of_k = product(M2, high, low, zero, PRECISION)
    if unit is not None:
        E *= unit
    from_cut = tl.where(second, E, 0.0)
    x, plus = settled(x + of_q * from_cut), settled(plus + of_k * from_cut)
    return x, plus, settled(minus + (of_q + of_k) * (E - from_cut)), of_q, of_k, E


@triton.jit
def intra_bwd(
    q, k, g, beta, A_log, dt_bias, gc, q_norm, k_norm, h, dh, v_new, do, P, L1, L2, U1, U2, units, diagonal,
    dqn, dkn, dg, db, of_A_log, of_dt_bias, chunk_table, T, tokens, chunks, H, HV, one, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr,
    RUN: tl.constexpr, GATE: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr,
    NORM: tl.constexpr, SUMMED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PER_HEAD: tl.constexpr,
):
    """gc (chunks, HV, C, K) is dg2_row in the end, dg2 itself where it is SUMMED.  dqn, dkn (tokens, HV, K);
    db (1 + slices of K, tokens, HV), shares of it; of_A_log, of_dt_bias (chunks, HV, K).  PER_HEAD: dg (slices of K,
    tokens, HV), shares of it, and of_A_log, of_dt_bias (chunks, HV, slices of K).

    A program without a chunk clears dg in its share of the tokens past the last sequence, and of_A_log and of_dt_bias.
    """
    DOT: tl.constexpr = k.dtype.element_ty
    slices: tl.constexpr = (K + BK - 1) // BK
    part, head, chunk = tl.program_id(0) % slices, tl.program_id(0) // slices % HV, tl.program_id(0) // slices // HV
    d = part * BK + tl.arange(0, BK)
    number = chunk.to(tl.int64) * HV + head
    begin, rows = chunk_place(chunk, chunk_table, T, C, chunks)
    if chunk_table is not None:
        if rows <= 0:
            if PER_HEAD:
                if RATE:
                    tl.store(of_A_log + number * slices + part, 0.0)
                if BIAS:
                    tl.store(of_dt_bias + number * slices + part, 0.0)
            else:
                clear_rows(dg, begin, -rows, head, HV, d, K, C)
                zero = tl.zeros((BK,), tl.float32)
                if RATE:
                    tl.store(of_A_log + number * K + d, zero, mask=d < K)
                if BIAS:
                    tl.store(of_dt_bias + number * K + d, zero, mask=d < K)
            return
    # From here on tensors begin at the chunk's first row of this head, and offsets are small.
    row = begin * HV + head
    q += (begin * H + head // (HV // H)) * K
    k += (begin * H + head // (HV // H)) * K
    WIDTH: tl.constexpr = 1 if PER_HEAD else K
    place = number * K
    if PER_HEAD:
        dg += part * (tokens.to(tl.int64) * HV)
        place = number * slices + part
    g, dg, dqn, dkn = g + row * WIDTH, dg + row * WIDTH, dqn + row * K, dkn + row * K
    v_new, do, P = v_new + row * V, do + row * V, P + row * V
    gc, h, dh = gc + number * (C * K), h + number * (K * V), dh + number * (K * V)
    L1, L2 = L1 + number * (C * C), L2 + number * (C * C)
    i = tl.arange(0, C)
    valid = i < rows
    near = tl.minimum(i, rows - 1)                                             # rows that are not there: the last one
    at_c = i[:, None] * C + i[None, :]
    at_v = near[:, None] * (HV * V)

    rate = rate_of(A_log, head, RATE)
    b = tl.load(beta + row + i * HV, mask=valid, other=0.0).to(tl.float32)
    b = tl.where(valid, step_size(b, BETA), 0.0)
    qs = tl.where(valid, 1.0, 0.0)
    ks = tl.where(valid, 1.0, 0.0)
    if NORM:
        qs = tl.load(q_norm + row + i * HV, mask=valid, other=0.0)
        ks = tl.load(k_norm + row + i * HV, mask=valid, other=0.0)
    bks = b * ks

    x = tl.zeros((C, BK), tl.float32)
    plus = tl.zeros((C, BK), tl.float32)
    minus = tl.zeros((C, BK), tl.float32)
    through_last = tl.zeros((BK,), tl.float32)
    # A loop of its own: Triton has one buffer too few for an operand of a product that is used otherwise, too.
    for v0 in tl.range(0, V, BV, num_stages=1):
        e = v0 + tl.arange(0, BV)
        offset = e[:, None] + d[None, :] * V
        h_ = load_tile(h + offset, e[:, None], V, BV, d[None, :], K, BK).to(tl.float32)
        dh_ = load_tile(dh + offset, e[:, None], V, BV, d[None, :], K, BK).to(tl.float32)
        through_last += tl.sum(rounded_product(h_, dh_), 0)
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        e = v0 + tl.arange(0, BV)
        offset = e[:, None] + d[None, :] * V                                   # (BV, BK): h^T
        h_ = load_tile(h + offset, e[:, None], V, BV, d[None, :], K, BK)
        dh_ = load_tile(dh + offset, e[:, None], V, BV, d[None, :], K, BK)
        x = tl.dot(load_columns(do + at_v + e[None, :], e[None, :], V, BV), h_, x, input_precision=PRECISION)
        plus = tl.dot(load_columns(P + at_v + e[None, :], e[None, :], V, BV), h_, plus, input_precision=PRECISION)
        minus = tl.dot(load_columns(v_new + at_v + e[None, :], e[None, :], V, BV), dh_, minus,
                       input_precision=PRECISION)
    at_gc, at_qk = near[:, None] * K + d[None, :], near[:, None] * (H * K) + d[None, :]
    sums = load_columns(gc + at_gc, d[None, :], K, BK)
    last = load_columns(gc + (rows - 1) * K + d, d, K, BK)
    E = exp2(sums.to(tl.float32))
    x, plus = settled(x * (scale * E)), settled(plus * -E)
    minus = settled(minus * exp2((last[None, :] - sums).to(tl.float32)))
    kn = load_columns(k + at_qk, d[None, :], K, BK).to(tl.float32) * ks[:, None]
    through_last *= exp2(last.to(tl.float32))
    dg2 = tl.zeros((C, BK), tl.float32)
    if SUMMED:
        qn = load_columns(q + at_qk, d[None, :], K, BK).to(tl.float32) * qs[:, None]
        dg2 += through_last[None, :] + sum_where(i[:, None] > i[None, :], kn * minus, PRECISION)
        dg2 += sum_where(i[:, None] <= i[None, :], qn * x + kn * (b[:, None] * plus), PRECISION)
    else:
        through_last += tl.sum(kn * minus, 0)

    if SPAN > 1:
        U1, U2 = U1 + number * (C * C), U2 + number * (C * C)
        same, unit = (i // SPAN)[:, None] == (i // SPAN)[None, :], tl.load(units + number)
        half = half_of_bound(lower_bound, SPAN)
        # Barriers keep decays from being held for what comes later: registers are short.
        tl.debug_barrier()
        zero = tl.zeros((C, BK), tl.float32)
        inverse, E = from_first(gc, half - ROOM, d[None, :], rows, K, C, BK, SPAN)
        high, low = in_two(load_columns(k + at_qk, d[None, :], K, BK).to(tl.float32) * ks[:, None] * E, DOT)
        y = product(tl.load(L1 + at_c, mask=same, other=0.0), high, low, zero, PRECISION)
        x = settled(x + y * inverse * unit)                                    # inverse * unit may not be finite
        y = product(tl.load(L2 + at_c, mask=same, other=0.0), high, low, zero, PRECISION)
        plus = settled(plus + y * inverse * unit)
        tl.debug_barrier()
        E, inverse = from_first(gc, half, d[None, :], rows, K, C, BK, SPAN)
        high, low = in_two(load_columns(q + at_qk, d[None, :], K, BK).to(tl.float32) * qs[:, None] * E, DOT)
        y = product(tl.load(U1 + at_c), high, low, zero, PRECISION)
        high, low = in_two(load_columns(k + at_qk, d[None, :], K, BK).to(tl.float32) * bks[:, None] * E, DOT)
        minus = settled(minus + product(tl.load(U2 + at_c), high, low, y, PRECISION) * inverse * unit)
        tl.debug_barrier()
        for level in tl.static_range(FIRST(SPAN), LEVELS(C)):
            half = i // (1 << level)
            in_level = (half ^ 1)[:, None] == half[None, :]
            M1, M2 = tl.load(L1 + at_c, mask=in_level, other=0.0), tl.load(L2 + at_c, mask=in_level, other=0.0)
            x, plus, minus, of_q, of_k, E = level_bwd(
                x, plus, minus, q, k, gc, M1, M2, unit, qs, ks, bks, level, d[None, :], rows, H * K, K, C, BK, PRECISION
            )
    else:
        for level in tl.range(0, LEVELS(C), num_stages=1):
            in_level = quarters(i, level)
            M1, M2 = tl.where(in_level, tl.load(L1 + at_c), 0.0), tl.where(in_level, tl.load(L2 + at_c), 0.0)
            x, plus, minus, of_q, of_k, E = level_bwd(
                x, plus, minus, q, k, gc, M1, M2, None, qs, ks, bks, level, d[None, :], rows, H * K, K, C, BK, PRECISION
            )
            if SUMMED:
                second = ((i >> level) % 2 == 1)[:, None]
                half, after = i >> level, tl.where(second, i[:, None] <= i[None, :], i[:, None] > i[None, :])
                of_pairs = tl.where(second, qn * of_q + kn * (b[:, None] * of_k), kn * (of_q + of_k)) * E
                dg2 += sum_where((half[:, None] == half[None, :]) & after, of_pairs, PRECISION)

    on_diagonal = tl.load(diagonal + row + i * HV, mask=valid, other=0.0)[:, None]
    kn = load_columns(k + at_qk, d[None, :], K, BK).to(tl.float32) * ks[:, None]
    qn = load_columns(q + at_qk, d[None, :], K, BK).to(tl.float32) * qs[:, None]
    x += on_diagonal * kn
    minus += on_diagonal * qn
    tl.store(db + (part + 1) * (tokens.to(tl.int64) * HV) + row + i * HV, tl.sum(kn * plus, 1), mask=valid)
    plus *= b[:, None]
    at_k = near[:, None] * (HV * K) + d[None, :]
    real = valid[:, None] & (d < K)[None, :]
    tl.store(dqn + at_k, x.to(dqn.dtype.element_ty), mask=real)
    tl.store(dkn + at_k, (plus + minus).to(dkn.dtype.element_ty), mask=real)
    if not SUMMED:
        dg2 = qn * x + kn * (plus - minus)
    tl.debug_barrier()                                                         # all of the slice of gc was read
    tl.store(gc + at_gc, dg2.to(gc.dtype.element_ty), mask=real)
    tl.debug_barrier()                                                         # dg2 is there
    gate_bwd(g, rate, dt_bias, gc, dg, of_A_log, of_dt_bias, through_last, d, head, place, HV * WIDTH, rows,
             lower_bound, one, K, C, RUN, GATE, RATE, BIAS, SUMMED, PER_HEAD)
