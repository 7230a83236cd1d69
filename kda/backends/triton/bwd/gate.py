"""bwd/gate of one chunk: back through the gate, the l2norms and the sum over the value heads of a q/k head.

  dg2[t] = sum_(i >= t) dg2_row[i], then through the gate; dq = q_norm (dqn - qn (qn . dqn)), dk alike
  dA_log and ddt_bias are sums over all tokens: of this chunk here, of all chunks in `sum_chunks`, always in one order
"""

import triton
import triton.language as tl

from ..parts.gate import log2_decay_bwd, rate_of
from ..parts.sequences import clear, piece


@triton.jit
def norm_bwd(x, dxn, dx, norm, rows, H, HV, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr):
    """dx of one q/k head out of the dxn of its value heads."""
    i, d = tl.arange(0, C)[:, None], tl.arange(0, BK)[None, :]
    real = (i < rows) & (d < K)
    dy = tl.zeros((C, BK), tl.float32)
    for group in range(HV // H):
        dy += tl.load(dxn + i * (HV * K) + group * K + d, mask=real, other=0.0)
    if NORM:
        r = tl.load(norm + tl.arange(0, C) * HV, mask=tl.arange(0, C) < rows, other=0.0)[:, None]
        y = tl.load(x + i * (H * K) + d, mask=real, other=0.0).to(tl.float32) * r
        dy = r * (dy - y * tl.sum(y * dy, 1)[:, None])
    tl.store(dx + i * (H * K) + d, dy.to(dx.dtype.element_ty), mask=real)


@triton.jit
def gate_bwd(
    q, k, g, A_log, dt_bias, q_norm, k_norm, dqn, dkn, gc, dq, dk, dg, of_A_log, of_dt_bias, cu_seqlens,
    first, owner, T, chunks, N, H, HV, one, lower_bound,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr, RUN: tl.constexpr, GATE: tl.constexpr,
    RATE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """gc is dg2_row (chunks, HV, C, K) of bwd/chunk, or dg2 where that is SUMMED.

    A program without a chunk clears dq, dk, dg in its share of the tokens past the last sequence."""
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    if PACKED:
        idle = chunk - tl.load(first + N)
        if idle >= 0:
            begin = tl.load(cu_seqlens + N) + idle.to(tl.int64) * C
            if head == 0:
                end = tl.minimum(begin + C, T)
                clear(dq, begin, end, H * K, 1024)
                clear(dk, begin, end, H * K, 1024)
                clear(dg, begin, end, HV * K, 1024)
            zero = tl.zeros((BK,), tl.float32)
            d = tl.arange(0, BK)
            number = chunk.to(tl.int64) * HV + head
            if RATE:
                tl.store(of_A_log + number * K + d, zero, mask=d < K)
            if BIAS:
                tl.store(of_dt_bias + number * K + d, zero, mask=d < K)
            return
    _, _, begin, rows, _ = piece(chunk, cu_seqlens, first, owner, T, C, chunks, PACKED)
    row, number = begin * HV + head, chunk.to(tl.int64) * HV + head
    if head % (HV // H) == 0:
        at = (begin * H + head // (HV // H)) * K
        norm_bwd(q + at, dqn + row * K, dq + at, q_norm + row, rows, H, HV, K, C, BK, NORM)
        norm_bwd(k + at, dkn + row * K, dk + at, k_norm + row, rows, H, HV, K, C, BK, NORM)

    g, dg, gc = g + row * K, dg + row * K, gc + number * (C * K)
    rate = rate_of(A_log, head, RATE)
    # One channel a thread, as in fwd/prepare.
    r = RUN * tl.arange(0, C // RUN)[:, None] + tl.arange(0, RUN)[None, :]     # (C / RUN, RUN)
    for k0 in tl.range(0, K, BG, num_stages=1):
        d = k0 + tl.arange(0, BG)
        at = (d * one)[:, None, None] + r[None, :, :] * (HV * K)
        real = (d < K)[:, None, None] & (r < rows)[None, :, :]
        dg2 = tl.load(gc + (d * one)[:, None, None] + (r * K)[None, :, :], mask=real, other=0.0).to(tl.float32)
        if not SUMMED:
            of_run = tl.sum(dg2, 2)                                            # (BG, C / RUN)
            after = tl.cumsum(of_run, 1, reverse=True) - of_run
            dg2 = tl.cumsum(dg2, 2, reverse=True) + after[:, :, None]
        if GATE == "given":
            tl.store(dg + at, dg2.to(dg.dtype.element_ty), mask=real)
        else:
            x = tl.load(g + at, mask=real, other=0.0).to(tl.float32)
            if BIAS:
                x += tl.load(dt_bias + head * K + d, mask=d < K, other=0.0).to(tl.float32)[:, None, None]
            dx, of_A = log2_decay_bwd(dg2, x, rate, lower_bound, GATE)
            dx, of_A = tl.where(real, dx, 0.0), tl.where(real, of_A, 0.0)
            tl.store(dg + at, dx.to(dg.dtype.element_ty), mask=real)
            if RATE:
                tl.store(of_A_log + number * K + d, tl.sum(tl.sum(of_A, 2), 1), mask=d < K)
            if BIAS:
                tl.store(of_dt_bias + number * K + d, tl.sum(tl.sum(dx, 2), 1), mask=d < K)


@triton.jit
def sum_chunks(of_A_log, of_dt_bias, dA_log, ddt_bias, chunks, HV, K: tl.constexpr, BK: tl.constexpr,
               ROWS: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Sums over all chunks of one value head."""
    head = tl.program_id(0)
    d = tl.arange(0, BK)
    A = tl.zeros((BK,), tl.float32)
    bias = tl.zeros((BK,), tl.float32)
    for c0 in range(0, chunks, ROWS):
        c = c0 + tl.arange(0, ROWS)
        at = (c.to(tl.int64)[:, None] * HV + head) * K + d[None, :]
        real = (c < chunks)[:, None] & (d < K)[None, :]
        if RATE:
            A += tl.sum(tl.load(of_A_log + at, mask=real, other=0.0), 0)
        if BIAS:
            bias += tl.sum(tl.load(of_dt_bias + at, mask=real, other=0.0), 0)
    if RATE:
        tl.store(dA_log + head, tl.sum(A, 0))
    if BIAS:
        tl.store(ddt_bias + head * K + d, bias, mask=d < K)
