"""fwd/state and fwd/output: chunks of one sequence in turn, one value head, BV columns of the state.

  v_new = u - w @ h;  o = scale qg @ h + A_qk @ v_new;  next h = 2^gc_last h + kg^T @ v_new

h (K, BV) stays in registers, float32; it enters products in the dtype of q.  A program walks a segment of a sequence:
the whole of it, or, where few heads would leave the chip idle, a run of chunks.  Then `state` without outputs first
gives what each segment adds to a state of zero, `transition` the matrix that it multiplies a state by, and `compose`
chains these to the states that enter the segments.
"""

import triton
import triton.language as tl

from ..parts.fast import exp2
from ..parts.memory import state_at
from ..parts.sequences import piece


@triton.jit
def state(
    A_qk, w, u, qg, kg, gc_last, h0, o, v_new, h, ht, cu_seqlens, first_chunk, first, owner,
    T, N, chunks, pieces, segment, HV, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    START: tl.constexpr, FINISH: tl.constexpr, V_FIRST: tl.constexpr, OUTPUT: tl.constexpr, KEEP_H: tl.constexpr,
    KEEP_V: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One segment of `segment` chunks.  A row of T tokens has `pieces` segments and `chunks` chunks.

    START   "zero", "sequence" (h0 of each sequence) or "segment" (h0 of each segment)
    FINISH  "none", "sequence" (ht of each) or "segment" (ht of each but the last of a sequence)
    KEEP_H  "none", or the layout of h entering each chunk, "kv" or "vk"
    KEEP_V  v_new
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile, head, p = tl.program_id(0) % tiles, tl.program_id(0) // tiles % HV, tl.program_id(0) // tiles // HV
    if PACKED:
        if p >= tl.load(first + N):
            return
    n, number, begin, tokens, end = piece(p, cu_seqlens, first, owner, T, segment * C, pieces, PACKED)
    if FINISH == "segment":
        if begin + tokens == end:
            return
    if PACKED:
        chunk = tl.load(first_chunk + n) + number * segment
    else:
        chunk = n * chunks + number * segment
    DOT: tl.constexpr = w.dtype.element_ty
    i, d, e = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    real = (d < K)[:, None] & (e < V)[None, :]
    if START == "sequence":
        S = tl.load(state_at(h0, n * HV + head, d, e, K, V, V_FIRST), mask=real, other=0.0).to(tl.float32)
    elif START == "segment":
        S = tl.load(state_at(h0, p * HV + head, d, e, K, V, False), mask=real, other=0.0)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    for c in tl.range(0, tl.cdiv(tokens, C), num_stages=STAGES):
        valid = c * C + i < tokens
        row = (begin + c * C + i) * HV + head
        at_k, at_v = row[:, None] * K + d[None, :], row[:, None] * V + e[None, :]
        k_real, v_real = valid[:, None] & (d < K)[None, :], valid[:, None] & (e < V)[None, :]
        at_chunk = (chunk + c) * HV + head
        if KEEP_H != "none":
            tl.store(state_at(h, at_chunk, d, e, K, V, KEEP_H == "vk"), S.to(DOT), mask=real)
        Sd = S.to(DOT)
        x = tl.dot(tl.load(w + at_k, mask=k_real, other=0.0), Sd, input_precision=PRECISION)
        x = (tl.load(u + at_v, mask=v_real, other=0.0).to(tl.float32) - x).to(DOT)
        if KEEP_V:
            tl.store(v_new + at_v, x, mask=v_real)
        if OUTPUT:
            y = scale * tl.dot(tl.load(qg + at_k, mask=k_real, other=0.0), Sd, input_precision=PRECISION)
            a = tl.load(A_qk + row[:, None] * C + i[None, :], mask=valid[:, None], other=0.0)
            tl.store(o + at_v, tl.dot(a, x, y, input_precision=PRECISION).to(DOT), mask=v_real)
        decay = exp2(tl.load(gc_last + at_chunk.to(tl.int64) * K + d, mask=d < K, other=0.0))
        kg_ = tl.trans(tl.load(kg + at_k, mask=k_real, other=0.0))
        S = tl.dot(kg_, x, S * decay[:, None], input_precision=PRECISION)
    if FINISH == "sequence":
        if begin + tokens == end:
            tl.store(state_at(ht, n * HV + head, d, e, K, V, V_FIRST), S, mask=real)
    elif FINISH == "segment":
        tl.store(state_at(ht, p * HV + head, d, e, K, V, False), S, mask=real)


@triton.jit
def transition(
    w, kg, gc_last, M, cu_seqlens, first_chunk, first, owner,
    T, N, chunks, pieces, segment, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """M (K, K) of one segment, BV columns: the product of its chunks' Diag(2^gc_last) - kg^T @ w."""
    tiles: tl.constexpr = (K + BV - 1) // BV
    tile, head, p = tl.program_id(0) % tiles, tl.program_id(0) // tiles % HV, tl.program_id(0) // tiles // HV
    if PACKED:
        if p >= tl.load(first + N):
            return
    n, number, begin, tokens, end = piece(p, cu_seqlens, first, owner, T, segment * C, pieces, PACKED)
    if (number == 0) & (begin + tokens == end):                                # the only one of its sequence
        return
    if PACKED:
        chunk = tl.load(first_chunk + n) + number * segment
    else:
        chunk = n * chunks + number * segment
    DOT: tl.constexpr = w.dtype.element_ty
    i, d, e = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    X = tl.where(d[:, None] == e[None, :], 1.0, 0.0)
    for c in tl.range(0, tl.cdiv(tokens, C), num_stages=STAGES):
        valid = c * C + i < tokens
        at = ((begin + c * C + i) * HV + head)[:, None] * K + d[None, :]
        real = valid[:, None] & (d < K)[None, :]
        y = tl.dot(tl.load(w + at, mask=real, other=0.0), X.to(DOT), input_precision=PRECISION)
        decay = exp2(tl.load(gc_last + ((chunk + c) * HV + head).to(tl.int64) * K + d, mask=d < K, other=0.0))
        kg_ = tl.trans(tl.load(kg + at, mask=real, other=0.0))
        X = tl.dot(kg_, (-y).to(DOT), X * decay[:, None], input_precision=PRECISION)
    tl.store(state_at(M, p * HV + head, d, e, K, K, False), X, mask=(d < K)[:, None] & (e < K)[None, :])


@triton.jit
def compose(
    M, added, h0, edge, first, pieces, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, START: tl.constexpr, V_FIRST: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states at the edges of a sequence's segments: edge[p] = h entering p; next h = M[p] @ h + added[p].

    REVERSE: the gradient of the state leaving p; next dh = M[p]^T @ dh + added[p].
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile, head, n = tl.program_id(0) % tiles, tl.program_id(0) // tiles % HV, tl.program_id(0) // tiles // HV
    if PACKED:
        begin, end = tl.load(first + n), tl.load(first + n + 1)
    else:
        begin, end = n * pieces, n * pieces + pieces
    d, e, f = tl.arange(0, BK), tile * BV + tl.arange(0, BV), tl.arange(0, BK)
    real = (d < K)[:, None] & (e < V)[None, :]
    if START == "sequence":
        S = tl.load(state_at(h0, n * HV + head, d, e, K, V, V_FIRST), mask=real, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BK, BV), tl.float32)
    for j in tl.range(0, end - begin, num_stages=1):
        p = begin + j
        if REVERSE:
            p = end - 1 - j
        tl.store(state_at(edge, p * HV + head, d, e, K, V, False), S, mask=real)
        if j < end - begin - 1:
            m = tl.load(state_at(M, p * HV + head, d, f, K, K, REVERSE), mask=(d < K)[:, None] & (f < K)[None, :],
                        other=0.0)  # fmt: skip
            S = tl.dot(m, S, input_precision=PRECISION)
            S += tl.load(state_at(added, p * HV + head, d, e, K, V, False), mask=real, other=0.0)
