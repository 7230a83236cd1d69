"""bwd/gate for the gate alone: from dg2_row to dg, dA_log and ddt_bias.

  dg2[t] = through_last + sum_(i >= t) dg2_row[i], then back through the gate
  dA_log and ddt_bias are sums over all tokens: of a chunk in `gate_bwd`, of all chunks in `sum_chunks`, in one order
"""

import triton
import triton.language as tl

from ..parts.gate import log2_decay_bwd


@triton.jit
def gate_bwd(
    g, rate, dt_bias, dg2_row, dg, of_A_log, of_dt_bias, through_last, d, head, number, stride, rows, lower_bound,
    one,
    K: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr, GATE: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """Computes the gradients of one chunk and channels d; dg2_row is (C, K), or dg2 where that is SUMMED.  A thread has
    one channel and RUN rows, as in fwd/prepare.
    """
    r = RUN * tl.arange(0, C // RUN)[:, None] + tl.arange(0, RUN)[None, :]     # (C / RUN, RUN)
    real = (d < K)[:, None, None] & (r < rows)[None, :, :]
    near = tl.minimum(r, rows - 1)
    channel = tl.max_contiguous(d * one, d.shape[0])[:, None, None]
    offset = channel + (r * K)[None, :, :]
    dg2 = tl.load(dg2_row + offset, mask=real, other=0.0).to(tl.float32)
    if not SUMMED:
        # Triton's reverse cumsum asks other threads for what it has.
        of_run = tl.sum(dg2, 2)                                                # (channels, C / RUN)
        after = (tl.sum(of_run, 1) + through_last)[:, None] - tl.cumsum(of_run, 1)
        dg2 += (after + of_run)[:, :, None] - tl.cumsum(dg2, 2)
    offset = channel + near[None, :, :] * stride
    if GATE == "given":
        tl.store(dg + offset, dg2.to(dg.dtype.element_ty), mask=real)
    else:
        x = tl.load(g + offset, mask=(d < K)[:, None, None], other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(dt_bias + head * K + d, mask=d < K, other=0.0).to(tl.float32)[:, None, None]
        dx, of_A = log2_decay_bwd(dg2, x, rate, lower_bound, GATE)
        tl.store(dg + offset, dx.to(dg.dtype.element_ty), mask=real)
        if RATE:
            tl.store(of_A_log + number * K + d, tl.sum(tl.sum(tl.where(real, of_A, 0.0), 2), 1), mask=d < K)
        if BIAS:
            tl.store(of_dt_bias + number * K + d, tl.sum(tl.sum(tl.where(real, dx, 0.0), 2), 1), mask=d < K)


@triton.jit
def sum_chunks(of_A_log, of_dt_bias, dA_log, ddt_bias, chunks, HV, K: tl.constexpr, BK: tl.constexpr,
               ROWS: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr):
    """Computes dA_log and ddt_bias of one value head: sums over all chunks, always in one order."""
    head = tl.program_id(0)
    d = tl.arange(0, BK)
    A = tl.zeros((BK,), tl.float32)
    bias = tl.zeros((BK,), tl.float32)
    for c0 in range(0, chunks, ROWS):
        c = c0 + tl.arange(0, ROWS)
        offset = (c.to(tl.int64)[:, None] * HV + head) * K + d[None, :]
        real = (c < chunks)[:, None] & (d < K)[None, :]
        if RATE:
            A += tl.sum(tl.load(of_A_log + offset, mask=real, other=0.0), 0)
        if BIAS:
            bias += tl.sum(tl.load(of_dt_bias + offset, mask=real, other=0.0), 0)
    if RATE:
        tl.store(dA_log + head, tl.sum(A, 0))
    if BIAS:
        tl.store(ddt_bias + head * K + d, bias, mask=d < K)
