"""bwd/wy of one chunk and one value head, except its products with states.

  P = A_inv^T @ dv_new;  dv = b P;  db_local = sum_V P v
  dA_qk = scale tril(do @ v_new^T);  dA_kk = -strict_tril(P @ v_new^T)

bwd/intra takes dA_qk and dA_kk once by rows and once by columns, in the same rounding.  So L1 has dA_qk below the
diagonal and its transpose above it, L2 has dA_kk alike, and the diagonal of dA_qk, whose pairs have no decay, is apart.
Diagonal blocks of SPAN rows have what is above in U1 and U2 instead.

bwd/intra multiplies such blocks with factors of up to 2^124, and what gradients leave of the range of float32 is then
little.  So there L1, L2, U1 and U2 are over a power of two for each chunk, `units`, that leaves them near 1 at most.
"""

import triton
import triton.language as tl

from ..parts.gate import step_size
from ..parts.sequences import chunk_place, clear_rows


@triton.jit
def unit_of(size):
    """Returns a power of two near `size` >= 0, but none below 2^-100, and 1 over it."""
    exponent = tl.minimum(tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 127 - 100), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def wy_bwd(
    v, beta, A_inv, v_new, dv_new, do, P, L1, L2, U1, U2, units, dv, db, diagonal, chunk_table, T, chunks, HV, scale,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BETA: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """Scratch: P (tokens, HV, V), diagonal and db, here db_local (tokens, HV), L1, L2, U1 and U2 (chunks, HV, C, C),
    units (chunks, HV).

    A program without a chunk clears dv in its share of the tokens past the last sequence.
    """
    DOT: tl.constexpr = v.dtype.element_ty
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    begin, rows = chunk_place(chunk, chunk_table, T, C, chunks)
    if chunk_table is not None:
        if rows <= 0:
            for v0 in tl.range(0, V, BV):
                clear_rows(dv, begin, -rows, head, HV, v0 + tl.arange(0, BV), V, C)
            return
    # From here on tensors begin at the chunk's first row of this head, and offsets are small.
    row, number = begin * HV + head, chunk.to(tl.int64) * HV + head
    v, v_new, dv_new = v + row * V, v_new + row * V, dv_new + row * V
    do, P, dv = do + row * V, P + row * V, dv + row * V
    L1, L2 = L1 + number * (C * C), L2 + number * (C * C)
    if SPAN > 1:
        U1, U2 = U1 + number * (C * C), U2 + number * (C * C)
    i = tl.arange(0, C)
    valid = i < rows
    at_v = i[:, None] * (HV * V)

    b = tl.load(beta + row + i * HV, mask=valid, other=0.0).to(tl.float32)
    b = tl.where(valid, step_size(b, BETA), 0.0)
    of_P = tl.zeros((C,), tl.float32)
    D1 = tl.zeros((C, C), tl.float32)
    D2 = tl.zeros((C, C), tl.float32)
    at_inv = A_inv + row * C + i[:, None] * (HV * C) + i[None, :]
    At = tl.trans(tl.load(at_inv, mask=valid[:, None], other=0.0))
    for v0 in tl.range(0, V, BV, num_stages=STAGES):
        e = v0 + tl.arange(0, BV)[None, :]
        real = valid[:, None] & (e < V)
        p = tl.dot(At, tl.load(dv_new + at_v + e, mask=real, other=0.0), input_precision=PRECISION)
        tl.store(dv + at_v + e, (p * b[:, None]).to(dv.dtype.element_ty), mask=real)
        of_P += tl.sum(p * tl.load(v + at_v + e, mask=real, other=0.0).to(tl.float32), 1)
        pd = p.to(DOT)
        tl.store(P + at_v + e, pd, mask=real)
        v_ = tl.trans(tl.load(v_new + at_v + e, mask=real, other=0.0))
        D1 = tl.dot(tl.load(do + at_v + e, mask=real, other=0.0), v_, D1, input_precision=PRECISION)
        D2 = tl.dot(pd, v_, D2, input_precision=PRECISION)
    tl.store(db + row + i * HV, of_P, mask=valid)
    on_diagonal = tl.sum(tl.where(i[:, None] == i[None, :], D1, 0.0), 1)
    tl.store(diagonal + row + i * HV, on_diagonal * scale, mask=valid)
    below = i[:, None] > i[None, :]
    D1, D2 = tl.where(below, D1 * scale, 0.0), tl.where(below, -D2, 0.0)
    if SPAN > 1:
        unit, over = unit_of(tl.max(tl.maximum(tl.abs(D1), tl.abs(D2))))
        tl.store(units + number, unit)
        D1, D2 = D1 * over, D2 * over
    offset = i[:, None] * C + i[None, :]
    Q, K = tl.trans(D1), tl.trans(D2)
    if SPAN > 1:
        same = (i // SPAN)[:, None] == (i // SPAN)[None, :]
        tl.store(U1 + offset, tl.where(same, Q, 0.0).to(DOT))
        tl.store(U2 + offset, tl.where(same, K, 0.0).to(DOT))
        Q, K = tl.where(same, 0.0, Q), tl.where(same, 0.0, K)
    tl.store(L1 + offset, (D1 + Q).to(DOT))
    tl.store(L2 + offset, (D2 + K).to(DOT))
