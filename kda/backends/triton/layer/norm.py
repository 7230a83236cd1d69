"""The gated RMSNorm after KDA, and its backward.  Rows of V channels, those of one token and head.

  y = n w sigmoid(gate),  n = x / sqrt(mean(x^2) + eps)

Only the inputs are saved: the backward computes n and the sigmoid again.
"""

import triton
import triton.language as tl

from ..parts.gate import sigmoid
from ..parts.memory import load_columns


@triton.jit
def norm_of(x, offset, valid, d, eps, V: tl.constexpr, BV: tl.constexpr):
    """Returns n of rows, and 1 / sqrt(mean(x^2) + eps)."""
    value = tl.load(x + offset, mask=valid & (d < V), other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / V + eps)[:, None]
    return value * scale, scale


@triton.jit
def norm_gate(
    x, gate, weight, y, rows, eps,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):
    """Computes ROWS rows of y."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BV)[None, :]
    valid = (row < rows)[:, None]
    offset = row.to(tl.int64)[:, None] * V + d
    n, _ = norm_of(x, offset, valid, d, eps, V, BV)
    w = load_columns(weight + d, d, V, BV).to(tl.float32)
    s = sigmoid(tl.load(gate + offset, mask=valid & (d < V), other=0.0).to(tl.float32))
    tl.store(y + offset, (n * w * s).to(y.dtype.element_ty), mask=valid & (d < V))


@triton.jit
def norm_gate_bwd(
    x, gate, weight, dy, dx, dgate, shares, rows, eps, tiles,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):
    """Computes dx, dgate, and the share of each program in dw: (programs, V).  The programs process the tiles in
    turns."""
    d = tl.arange(0, BV)[None, :]
    w = load_columns(weight + d, d, V, BV).to(tl.float32)
    dw = tl.zeros((ROWS, BV), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = (row < rows)[:, None]
        offset = row.to(tl.int64)[:, None] * V + d
        n, scale = norm_of(x, offset, valid, d, eps, V, BV)
        s = sigmoid(tl.load(gate + offset, mask=valid & (d < V), other=0.0).to(tl.float32))
        e = tl.load(dy + offset, mask=valid & (d < V), other=0.0).to(tl.float32) * s
        dw += e * n
        e *= w
        tl.store(dgate + offset, (e * n * (1.0 - s)).to(dgate.dtype.element_ty), mask=valid & (d < V))
        e = scale * (e - n * (tl.sum(e * n, 1) / V)[:, None])
        tl.store(dx + offset, e.to(dx.dtype.element_ty), mask=valid & (d < V))
    out = tl.program_id(0).to(tl.int64) * V + tl.arange(0, BV)
    tl.store(shares + out, tl.sum(dw, 0), mask=tl.arange(0, BV) < V)
