"""bwd/gate for the gate alone: from dg2_row to dg, dA_log and ddt_bias.

  dg2[t] = through_last + sum_(i >= t) dg2_row[i], then back through the gate
  dA_log and ddt_bias are sums over all tokens: of a chunk in `gate_bwd`, of all chunks in `sum_chunks`, in one order
  One gate per head has the sum of its channels' dg2: of a slice of K in `gate_bwd`, of all slices where a sum of all
  chunks or of shares is made anyway (`sum_chunks`, norms.py), because dg and the terms of sums are linear in dg2
"""

import triton
import triton.language as tl

from ..parts.gate import log2_decay_bwd


@triton.jit
def gate_bwd(
    g, rate, dt_bias, dg2_row, dg, of_A_log, of_dt_bias, through_last, d, head, place, stride, rows, lower_bound,
    one,
    K: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr, GATE: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr,
    SUMMED: tl.constexpr, PER_HEAD: tl.constexpr,
):
    """Computes the gradients of one chunk and channels d; dg2_row is (C, K), or dg2 where that is SUMMED.  A thread has
    one channel and RUN rows, as in fwd/prepare.  `place` is that of the chunk, PER_HEAD of the chunk and slice, in
    of_A_log and of_dt_bias.
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
    if PER_HEAD:
        summed_bwd(g, rate, dt_bias, tl.sum(tl.where(real, dg2, 0.0), 0), dg, of_A_log, of_dt_bias, near * stride,
                   r < rows, head, place, lower_bound, GATE, RATE, BIAS)
    else:
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
                tl.store(of_A_log + place + d, tl.sum(tl.sum(tl.where(real, of_A, 0.0), 2), 1), mask=d < K)
            if BIAS:
                tl.store(of_dt_bias + place + d, tl.sum(tl.sum(tl.where(real, dx, 0.0), 2), 1), mask=d < K)


@triton.jit
def summed_bwd(
    g, rate, dt_bias, dg2, dg, of_A_log, of_dt_bias, offset, real, head, place, lower_bound, GATE: tl.constexpr,
    RATE: tl.constexpr, BIAS: tl.constexpr,
):
    """Computes shares of the gradients of one gate per head; dg2 (C / RUN, RUN) is a sum over channels."""
    if GATE == "given":
        tl.store(dg + offset, dg2, mask=real)
    else:
        x = tl.load(g + offset).to(tl.float32)
        if BIAS:
            x += tl.load(dt_bias + head).to(tl.float32)
        dx, of_A = log2_decay_bwd(dg2, x, rate, lower_bound, GATE)
        tl.store(dg + offset, dx, mask=real)
        if RATE:
            tl.store(of_A_log + place, tl.sum(tl.sum(tl.where(real, of_A, 0.0), 1), 0))
        if BIAS:
            tl.store(of_dt_bias + place, tl.sum(tl.sum(tl.where(real, dx, 0.0), 1), 0))


@triton.jit
def sum_chunks(of_A_log, of_dt_bias, dA_log, ddt_bias, chunks, HV, K: tl.constexpr, BK: tl.constexpr,
               ROWS: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr, PER_HEAD: tl.constexpr):
    """Computes dA_log and ddt_bias of one value head: sums over all chunks, always in one order; PER_HEAD: over the K
    slices of channels, too."""
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
        if PER_HEAD:
            tl.store(ddt_bias + head, tl.sum(bias, 0))
        else:
            tl.store(ddt_bias + head * K + d, bias, mask=d < K)
