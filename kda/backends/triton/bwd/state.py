"""bwd/output and bwd/state: chunks of one sequence from the last to the first, one value head, BV columns.

  dv_new = A_qk^T @ do + kg @ dh;  next dh = 2^gc_last dh + scale qg^T @ do - w^T @ dv_new

dh (K, BV), the gradient of the state that leaves the chunk, stays in registers, float32, in slices of BK rows.
Segments are those of the forward: `added` comes of a run from zero, and the transition of a segment is the forward's,
transposed.
"""

import triton
import triton.language as tl

from ..parts.fast import exp2
from ..parts.memory import load_rows, load_start, store_state
from ..parts.sequences import walk_place


@triton.jit
def state_bwd(
    A_qk, w, qg, kg, gc_last, do, dht, dv_new, dh, dh0, segment_table, T, chunks, pieces, segment, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    START: tl.constexpr, FINISH: tl.constexpr, V_FIRST: tl.constexpr, STORE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """START and FINISH as in fwd/state, for dht and dh0; "segment" leaves out the first of a sequence.

    STORE   dv_new, and dh leaving each chunk
    """
    tile, head, p, n, number, begin, left, chunk = walk_place(segment_table, T, C, segment, chunks, pieces, HV, V, BV)
    if segment_table is not None and n < 0:
        return
    tokens = tl.minimum(left, segment * C)
    if FINISH == "segment":
        if number == 0:
            return
    DOT: tl.constexpr = w.dtype.element_ty
    i, e = tl.arange(0, C), tile * BV + tl.arange(0, BV)
    S = load_start(dht, START, p, n, head, HV, e, K, V, BK, V_FIRST)
    if segment_table is not None:
        if tokens == 0:                                                        # as in fwd/state
            if FINISH == "sequence":
                store_state(dh0, n * HV + head, S, e, K, V, BK, V_FIRST)
            return
    steps = tl.cdiv(tokens, C)
    for j in tl.range(0, steps, num_stages=STAGES):
        c = steps - 1 - j
        valid = c * C + i < tokens
        row = (begin + c * C + i) * HV + head
        at_v, v_real = row[:, None] * V + e[None, :], valid[:, None] & (e < V)[None, :]
        at_chunk = (chunk + c) * HV + head
        if STORE:
            store_state(dh, at_chunk, S, e, K, V, BK, False)
        do_ = tl.load(do + at_v, mask=v_real, other=0.0)
        a = tl.trans(tl.load(A_qk + row[:, None] * C + i[None, :], mask=valid[:, None], other=0.0))
        x = tl.dot(a, do_, input_precision=PRECISION)
        for s in tl.static_range(len(S)):
            d = s * BK + tl.arange(0, BK)
            k_ = load_rows(kg, row, valid, d, K)
            x = tl.dot(k_, S[s].to(DOT), x, input_precision=PRECISION)
        if STORE:
            tl.store(dv_new + at_v, x.to(DOT), mask=v_real)
        next_S = ()
        for s in tl.static_range(len(S)):
            d = s * BK + tl.arange(0, BK)
            offset, real = row[:, None] * K + d[None, :], valid[:, None] & (d < K)[None, :]
            decay = exp2(tl.load(gc_last + at_chunk.to(tl.int64) * K + d, mask=d < K, other=0.0))
            q_ = tl.trans(tl.load(qg + offset, mask=real, other=0.0))
            w_ = tl.trans(tl.load(w + offset, mask=real, other=0.0))
            y = S[s] * decay[:, None] + scale * tl.dot(q_, do_, input_precision=PRECISION)
            next_S = next_S + (tl.dot(w_, (-x).to(DOT), y, input_precision=PRECISION),)
        S = next_S
    if FINISH == "sequence":
        if number == 0:
            store_state(dh0, n * HV + head, S, e, K, V, BK, V_FIRST)
    elif FINISH == "segment":
        store_state(dh0, p * HV + head, S, e, K, V, BK, False)
