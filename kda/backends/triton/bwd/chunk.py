"""bwd/wy and bwd/intra of one chunk and one value head in one pass.

  P = A_inv^T @ dv_new;  dv = b P;  dA_qk = scale tril(do @ v_new^T);  dA_kk = -strict_tril(P @ v_new^T)
  dqn = scale 2^gc (do @ h^T) + x;  dkn = b plus + minus;  db = sum_V P v + sum_K kn plus
  plus = 2^gc (-P @ h^T) + z;  minus = 2^(gc_last - gc) (v_new @ dh^T) + y;  x, y, z from dA_qk and dA_kk by halving
  dg2_row = qn dqn + kn (b plus - minus), to be summed over rows >= t; the last row also has what goes through gc_last.
In float32 such differences would show: dg2 is summed here, of terms that all count, level by level.

x, y, z: with S = 2^level rows in a half, L1 and L2 hold dA_qk and dA_kk below the diagonal and their transposes above
it.  Then L1 @ (k in first halves, q in second ones) is x in second halves and its share of y in first ones, and L2 @ k
is z and the other share, all operands under the decay to or from the cut.  b and the norms are folded into L1, L2.
"""

import triton
import triton.language as tl

from ..parts.fast import exp2, times
from ..parts.gate import step_size
from ..parts.halving import LEVELS, cut_of, decay_to_cut, quarters
from ..parts.memory import load_columns
from ..parts.sequences import clear, piece


@triton.jit
def sum_where(here, x, PRECISION: tl.constexpr):
    """[t]: the sum of rows i of x with here[t, i]."""
    return tl.dot(tl.where(here, 1.0, 0.0), x, input_precision=PRECISION)


@triton.jit
def chunk_bwd(
    q, k, v, beta, gc, q_norm, k_norm, A_inv, h, dh, v_new, dv_new, do, P, L1, L2, dv, dbeta, dqn, dkn,
    cu_seqlens, first, owner,
    T, chunks, N, H, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr,
    NORM: tl.constexpr, PACKED: tl.constexpr, SUMMED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P is scratch (tokens, HV, V), L1 and L2 (chunks, HV, C, C); gc is (chunks, HV, C, K), and dg2_row in the end, or
    dg2 itself where it is SUMMED.

    A program without a chunk clears dv and dbeta in its share of the tokens past the last sequence.
    """
    DOT: tl.constexpr = q.dtype.element_ty
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    if PACKED:
        idle = chunk - tl.load(first + N)
        if idle >= 0:
            begin = tl.load(cu_seqlens + N) + idle.to(tl.int64) * C
            if head == 0:
                clear(dv, begin, tl.minimum(begin + C, T), HV * V, 1024)
                clear(dbeta, begin, tl.minimum(begin + C, T), HV, 1024)
            return
    _, _, begin, rows, _ = piece(chunk, cu_seqlens, first, owner, T, C, chunks, PACKED)
    # From here on tensors begin at the chunk's first row of this head, and offsets are small.
    row, number = begin * HV + head, chunk.to(tl.int64) * HV + head
    q += (begin * H + head // (HV // H)) * K
    k += (begin * H + head // (HV // H)) * K
    dqn, dkn = dqn + row * K, dkn + row * K
    v, v_new, dv_new = v + row * V, v_new + row * V, dv_new + row * V
    do, P, dv = do + row * V, P + row * V, dv + row * V
    A_inv, gc, h, dh = A_inv + row * C, gc + number * (C * K), h + number * (K * V), dh + number * (K * V)
    L1, L2 = L1 + number * (C * C), L2 + number * (C * C)
    i = tl.arange(0, C)
    valid = i < rows
    near = tl.minimum(i, rows - 1)                                             # rows that are not there: the last one
    at_qk, at_k, at_v = near[:, None] * (H * K), i[:, None] * (HV * K), i[:, None] * (HV * V)

    logit = tl.load(beta + row + i * HV, mask=valid, other=0.0).to(tl.float32)
    b = tl.where(valid, step_size(logit, BETA), 0.0)
    qs = tl.full((C,), 1.0, tl.float32)
    ks = tl.full((C,), 1.0, tl.float32)
    if NORM:
        qs = tl.load(q_norm + row + i * HV, mask=valid, other=0.0)
        ks = tl.load(k_norm + row + i * HV, mask=valid, other=0.0)

    db = tl.zeros((C,), tl.float32)
    D1 = tl.zeros((C, C), tl.float32)
    D2 = tl.zeros((C, C), tl.float32)
    At = tl.trans(tl.load(A_inv + i[:, None] * (HV * C) + i[None, :], mask=valid[:, None], other=0.0))
    for v0 in tl.range(0, V, BV, num_stages=1):
        e = v0 + tl.arange(0, BV)[None, :]
        v_real = valid[:, None] & (e < V)
        p = tl.dot(At, tl.load(dv_new + at_v + e, mask=v_real, other=0.0), input_precision=PRECISION)
        tl.store(dv + at_v + e, (p * b[:, None]).to(dv.dtype.element_ty), mask=v_real)
        db += tl.sum(p * tl.load(v + at_v + e, mask=v_real, other=0.0).to(tl.float32), 1)
        pd = p.to(DOT)
        tl.store(P + at_v + e, pd, mask=v_real)
        v_ = tl.trans(tl.load(v_new + at_v + e, mask=v_real, other=0.0))
        D1 = tl.dot(tl.load(do + at_v + e, mask=v_real, other=0.0), v_, D1, input_precision=PRECISION)
        D2 = tl.dot(pd, v_, D2, input_precision=PRECISION)
    D1 *= scale
    on_diagonal = tl.sum(tl.where(i[:, None] == i[None, :], D1, 0.0), 1)       # of dA_qk: it has no decay
    below = i[:, None] > i[None, :]
    D1, D2 = tl.where(below, D1, 0.0), tl.where(below, -D2, 0.0)
    # the norm of the row that a column will meet: k's below the diagonal, above it q's in L1 and k's in L2
    at_c = i[:, None] * C + i[None, :]
    tl.store(L1 + at_c, (D1 * ks[None, :] + tl.trans(D1 * qs[:, None])).to(DOT))
    tl.store(L2 + at_c, (D2 * ks[None, :] + tl.trans(D2 * (b * ks)[:, None])).to(DOT))
    tl.debug_barrier()                                                         # P, L1 and L2 are there

    for k0 in tl.range(0, K, BK, num_stages=1):
        d = k0 + tl.arange(0, BK)
        real = valid[:, None] & (d < K)[None, :]
        dq = tl.zeros((C, BK), tl.float32)
        plus = tl.zeros((C, BK), tl.float32)
        minus = tl.zeros((C, BK), tl.float32)
        through_last = tl.zeros((BK,), tl.float32)
        for v0 in tl.range(0, V, BV, num_stages=1):
            e = v0 + tl.arange(0, BV)
            v_real = valid[:, None] & (e < V)[None, :]
            at = e[:, None] + d[None, :] * V                                   # (BV, BK): h^T
            h_ = tl.load(h + at, mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)
            dh_ = tl.load(dh + at, mask=(e < V)[:, None] & (d < K)[None, :], other=0.0)
            through_last += tl.sum(h_.to(tl.float32) * dh_.to(tl.float32), 0)
            do_ = tl.load(do + at_v + e[None, :], mask=v_real, other=0.0)
            dq = tl.dot(do_, h_, dq, input_precision=PRECISION)
            P_ = tl.load(P + at_v + e[None, :], mask=v_real, other=0.0)
            plus = tl.dot(P_, h_, plus, input_precision=PRECISION)
            v_ = tl.load(v_new + at_v + e[None, :], mask=v_real, other=0.0)
            minus = tl.dot(v_, dh_, minus, input_precision=PRECISION)
        sums = load_columns(gc + near[:, None] * K + d[None, :], d[None, :], K, BK)
        last = load_columns(gc + (rows - 1) * K + d, d, K, BK)
        E = exp2(sums.to(tl.float32))
        dq *= scale * E
        plus *= -E
        minus *= exp2((last[None, :] - sums).to(tl.float32))
        kn = load_columns(k + at_qk + d[None, :], d[None, :], K, BK).to(tl.float32) * ks[:, None]
        through_last *= exp2(last.to(tl.float32))
        dg2 = tl.zeros((C, BK), tl.float32)
        if SUMMED:
            qn = load_columns(q + at_qk + d[None, :], d[None, :], K, BK).to(tl.float32) * qs[:, None]
            dg2 += through_last[None, :] + sum_where(i[:, None] > i[None, :], kn * minus, PRECISION)
            dg2 += sum_where(i[:, None] <= i[None, :], qn * dq + kn * (b[:, None] * plus), PRECISION)
        else:
            through_last += tl.sum(kn * minus, 0)

        for level in tl.range(0, LEVELS(C), num_stages=1):
            second = ((i >> level) % 2 == 1)[:, None]
            cut = load_columns(gc + cut_of(i, level, rows)[:, None] * K + d[None, :], d[None, :], K, BK)
            at = near[:, None] * K + d[None, :]
            E = decay_to_cut(load_columns(gc + at, d[None, :], K, BK), cut)
            x = load_columns(k + at_qk + d[None, :], d[None, :], K, BK)
            y = load_columns(tl.where(second, q + at_qk, k + at_qk) + d[None, :], d[None, :], K, BK)
            here = quarters(i, level)
            of_q = tl.dot(tl.where(here, tl.load(L1 + at_c), 0.0), times(y, E), input_precision=PRECISION)
            of_k = tl.dot(tl.where(here, tl.load(L2 + at_c), 0.0), times(x, E), input_precision=PRECISION)
            from_cut = tl.where(second, E, 0.0)
            dq += of_q * from_cut
            plus += of_k * from_cut
            minus += (of_q + of_k) * (E - from_cut)
            if SUMMED:
                half, after = i >> level, tl.where(second, i[:, None] <= i[None, :], i[:, None] > i[None, :])
                of_pairs = tl.where(second, qn * of_q + kn * (b[:, None] * of_k), kn * (of_q + of_k)) * E
                dg2 += sum_where((half[:, None] == half[None, :]) & after, of_pairs, PRECISION)

        kn = load_columns(k + at_qk + d[None, :], d[None, :], K, BK).to(tl.float32) * ks[:, None]
        qn = load_columns(q + at_qk + d[None, :], d[None, :], K, BK).to(tl.float32) * qs[:, None]
        dq += on_diagonal[:, None] * kn
        minus += on_diagonal[:, None] * qn
        db += tl.sum(kn * plus, 1)
        plus *= b[:, None]
        tl.store(dqn + at_k + d[None, :], dq, mask=real)
        tl.store(dkn + at_k + d[None, :], plus + minus, mask=real)
        if not SUMMED:
            dg2 = qn * dq + kn * (plus - minus) + tl.where((i == rows - 1)[:, None], through_last[None, :], 0.0)
        tl.debug_barrier()                                                     # all of the slice of gc was read
        tl.store(gc + i[:, None] * K + d[None, :], dg2.to(gc.dtype.element_ty), mask=real)

    if BETA != "given":
        db *= step_size(logit, "sigmoid") * step_size(-logit, "sigmoid") * (2.0 if BETA == "2*sigmoid" else 1.0)
    tl.store(dbeta + row + i * HV, db.to(dbeta.dtype.element_ty), mask=valid)
