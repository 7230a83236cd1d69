"""What is left of bwd/gate, of ROWS tokens and one q/k head: back through the l2norms, and beta.

  dq = q_norm (dqn - qn (qn . dqn)), dqn a sum over the value heads of the q/k head, dk alike
  dbeta = db through its sigmoid, db a sum of shares; dg of one gate per head is such a sum

Every token is a row: those past the last sequence get zeros.
"""

import triton
import triton.language as tl

from ..parts.gate import sigmoid_slope
from ..parts.memory import load_columns


@triton.jit
def norm_bwd(
    x, dxn, dx, norm, row, near, inside, H, HV, head, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
):
    """`near` are rows that are there, `inside` those of a sequence."""
    d, group = tl.arange(0, BK)[None, :], HV // H
    dy = tl.zeros((row.shape[0], BK), tl.float32)
    for j in range(group):
        dy += load_columns(dxn + ((near * HV + head * group + j) * K)[:, None] + d, d, K, BK).to(tl.float32)
    if NORM:
        r = tl.load(norm + near * HV + head * group)[:, None]
        y = load_columns(x + ((near * H + head) * K)[:, None] + d, d, K, BK).to(tl.float32) * r
        dy = r * (dy - y * tl.sum(y * dy, 1)[:, None])
    dy = tl.where(inside[:, None], dy, 0.0).to(dx.dtype.element_ty)
    tl.store(dx + ((near * H + head) * K)[:, None] + d, dy, mask=(row == near)[:, None] & (d < K))


@triton.jit
def sum_of_shares(shares, tokens, HV, offset, ROWS: tl.constexpr, SHARES: tl.constexpr):
    sum_ = tl.zeros((ROWS,), tl.float32)
    for share in tl.static_range(SHARES):
        sum_ += tl.load(shares + tokens.to(tl.int64) * (share * HV) + offset)
    return sum_


@triton.jit
def norms_bwd(
    q, k, beta, q_norm, k_norm, dqn, dkn, db, dg_shares, dq, dk, dbeta, dg, taken, tokens, H, HV,
    K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
):
    """dqn, dkn (tokens, HV, K), the norms (tokens, HV), db (SHARES, tokens, HV), dg_shares one less."""
    head = tl.program_id(0) % H
    row = (tl.program_id(0) // H).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    near, end = tl.minimum(row, tokens - 1), tokens.to(tl.int64)
    if taken is not None:
        end = tl.load(taken)
    norm_bwd(q, dqn, dq, q_norm, row, near, row < end, H, HV, head, K, BK, NORM)
    norm_bwd(k, dkn, dk, k_norm, row, near, row < end, H, HV, head, K, BK, NORM)
    for j in range(HV // H):
        offset = near * HV + head * (HV // H) + j
        sum_ = sum_of_shares(db, tokens, HV, offset, ROWS, SHARES)
        if BETA != "given":
            logit = tl.load(beta + offset).to(tl.float32)
            sum_ *= sigmoid_slope(logit) * (2.0 if BETA == "2*sigmoid" else 1.0)
        sum_ = tl.where(row < end, sum_, 0.0)
        tl.store(dbeta + offset, sum_.to(dbeta.dtype.element_ty), mask=row == near)
        if dg is not None:
            sum_ = tl.where(row < end, sum_of_shares(dg_shares, tokens, HV, offset, ROWS, SHARES - 1), 0.0)
            tl.store(dg + offset, sum_.to(dg.dtype.element_ty), mask=row == near)
