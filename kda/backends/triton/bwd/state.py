"""bwd/output and bwd/state: chunks of one sequence from the last to the first, one value head, BV columns.

  dv_new = A_qk^T @ do + kg @ dh;  next dh = 2^gc_last dh + scale qg^T @ do - w^T @ dv_new

dh (K, BV), the gradient of the state that leaves the chunk, stays in registers, float32.  Segments are those of the
forward: `added` comes of a run from zero, and the transition of a segment is the forward's, transposed.
"""

import triton
import triton.language as tl

from ..parts.fast import exp2
from ..parts.memory import state_at
from ..parts.sequences import piece


@triton.jit
def state_bwd(
    A_qk, w, qg, kg, gc_last, do, dht, dv_new, dh, dh0, cu_seqlens, first_chunk, first, owner,
    T, N, chunks, pieces, segment, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    START: tl.constexpr, FINISH: tl.constexpr, V_FIRST: tl.constexpr, KEEP: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """START and FINISH as in fwd/state, for dht and dh0; "segment" leaves out the first of a sequence.

    KEEP    dv_new, and dh leaving each chunk
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile, head, p = tl.program_id(0) % tiles, tl.program_id(0) // tiles % HV, tl.program_id(0) // tiles // HV
    if PACKED:
        if p >= tl.load(first + N):
            return
    n, number, begin, tokens, end = piece(p, cu_seqlens, first, owner, T, segment * C, pieces, PACKED)
    if FINISH == "segment":
        if number == 0:
            return
    if PACKED:
        chunk = tl.load(first_chunk + n) + number * segment
    else:
        chunk = n * chunks + number * segment
    DOT: tl.constexpr = w.dtype.element_ty
    i, d, e = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    real = (d < K)[:, None] & (e < V)[None, :]
    if START == "sequence":
        S = tl.load(state_at(dht, n * HV + head, d, e, K, V, V_FIRST), mask=real, other=0.0).to(tl.float32)
    elif START == "segment":
        S = tl.load(state_at(dht, p * HV + head, d, e, K, V, False), mask=real, other=0.0)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    steps = tl.cdiv(tokens, C)
    for j in tl.range(0, steps, num_stages=STAGES):
        c = steps - 1 - j
        valid = c * C + i < tokens
        row = (begin + c * C + i) * HV + head
        at_k, at_v = row[:, None] * K + d[None, :], row[:, None] * V + e[None, :]
        k_real, v_real = valid[:, None] & (d < K)[None, :], valid[:, None] & (e < V)[None, :]
        at_chunk = (chunk + c) * HV + head
        if KEEP:
            tl.store(state_at(dh, at_chunk, d, e, K, V, False), S.to(DOT), mask=real)
        do_ = tl.load(do + at_v, mask=v_real, other=0.0)
        a = tl.trans(tl.load(A_qk + row[:, None] * C + i[None, :], mask=valid[:, None], other=0.0))
        x = tl.dot(a, do_, input_precision=PRECISION)
        x = tl.dot(tl.load(kg + at_k, mask=k_real, other=0.0), S.to(DOT), x, input_precision=PRECISION)
        if KEEP:
            tl.store(dv_new + at_v, x.to(DOT), mask=v_real)
        decay = exp2(tl.load(gc_last + at_chunk.to(tl.int64) * K + d, mask=d < K, other=0.0))
        q_ = tl.trans(tl.load(qg + at_k, mask=k_real, other=0.0))
        w_ = tl.trans(tl.load(w + at_k, mask=k_real, other=0.0))
        S = S * decay[:, None] + scale * tl.dot(q_, do_, input_precision=PRECISION)
        S = tl.dot(w_, (-x).to(DOT), S, input_precision=PRECISION)
    if FINISH == "sequence":
        if number == 0:
            tl.store(state_at(dh0, n * HV + head, d, e, K, V, V_FIRST), S, mask=real)
    elif FINISH == "segment":
        tl.store(state_at(dh0, p * HV + head, d, e, K, V, False), S, mask=real)
