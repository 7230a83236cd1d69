"""The recurrence token by token, for short prompts and for decoding; float32 throughout.

  S <- 2^g2 S;  x = b (v - k^T S);  S <- S + k x^T;  o = scale q^T S, which is scale (q^T S before x + (q^T k) x)

A program holds BV columns of one state (K, V) in registers from a sequence's first token to its last.  It is one warp
for each 256 channels of K: up to there, sums over K take shuffles and no barrier.  Rows of two tokens ahead are on
their way while a token is worked on.

What decoding costs is the state: at K=V=128 in float32, 64 KiB in and 64 KiB out for a head, against 1 KiB of rows.
4.3 TB/s over 132 SMs at a latency of about 1 us want 16 KiB of loads in flight on each SM, and more where a program
computes and stores for longer than it loads.  A program of 16 columns loads 8 KiB in pieces of 64 bytes (states (V, K):
of 512), 16 loads of 16 bytes a thread, all issued before the first is used; at 168 registers 12 of them share an SM:
96 KiB.  Programs of 8 columns load 4 KiB; at 128 registers there are 16: 64 KiB.  In the time that the bytes take the
former issue about 40% of the instructions that an SM could, the latter 60%: they are for calls that leave SMs idle.

Products and sums are rounded as they are written here (enable_fp_fusion is off): a product that goes to another lane is
rounded and one that stays must be, too, or lanes that hold the same sum would differ.

A sequence without a slot is one whose loads and stores are masked: what is zero gives zero.
"""

import triton
import triton.language as tl

from ..parts.gate import at_most, inverse_norm, log2_decay, rate_of, step_size

ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2**23)    # adding it rounds to a whole number, kept in the low bits
ZEROED: tl.constexpr = tl.constexpr(16)              # tokens of no sequence that are zeroed at a time


@triton.jit
def decay_of(g2):
    """Returns 2^g2 for g2 in [-127, 128], 0 and infinity at the ends.  The chip's exp2 errs to one side near 0: over
    many tokens that adds up."""
    t = g2 + ROUNDER
    f = g2 - (t - ROUNDER)                           # [-1/2, 1/2]
    p = tl.fma(f, 1.5353362e-4, 1.33988747e-3)       # 2^f, minimax: 2e-9
    p = tl.fma(f, p, 9.61843736e-3)
    p = tl.fma(f, p, 5.55033247e-2)
    p = tl.fma(f, p, 2.40226479e-1)
    p = tl.fma(f, p, 6.93147203e-1)
    p = tl.fma(f, p, 1.0)
    return p * ((t.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def rows_at(t, live, rows, steps, real_k, real_v, PER_VALUE: tl.constexpr):
    """Loads q, k, v, g and beta of token t, zeros if it is not `live`; `rows` point to those of token 0."""
    q, k, v, g, beta = rows
    q_t, k_t, v_t, g_t, beta_t = steps
    qt = tl.load(q + t * q_t, mask=real_k & live, other=0.0)
    kt = tl.load(k + t * k_t, mask=real_k & live, other=0.0)
    vt = tl.load(v + t * v_t, mask=real_v & live, other=0.0)
    gt = tl.load(g + t * g_t, mask=real_k & live, other=0.0)
    if PER_VALUE:
        bt = tl.load(beta + t * beta_t, mask=real_v & live, other=0.0)
    else:
        bt = tl.load(beta + t * beta_t, mask=live, other=0.0)
    return qt, kt, vt, gt, bt


@triton.jit
def read_state(base, d, e, real, to_k, to_v, ORDER: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Loads a state (BK, BV) as float32, along whichever axis is contiguous in memory."""
    if ORDER == "kv":
        S = tl.load(base + (d[:, None] * V + e[None, :]), mask=real, other=0.0)
    elif ORDER == "vk":
        S = tl.trans(tl.load(base + (e[:, None] * K + d[None, :]), mask=tl.trans(real), other=0.0))
    else:
        S = tl.load(base + (d[:, None] * to_k + e[None, :] * to_v), mask=real, other=0.0)
    return S.to(tl.float32)


@triton.jit
def write_state(base, S, d, e, real, to_k, to_v, ORDER: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    S = S.to(base.dtype.element_ty)
    if ORDER == "kv":
        tl.store(base + (d[:, None] * V + e[None, :]), S, mask=real)
    elif ORDER == "vk":
        tl.store(base + (e[:, None] * K + d[None, :]), tl.trans(S), mask=tl.trans(real))
    else:
        tl.store(base + (d[:, None] * to_k + e[None, :] * to_v), S, mask=real)


@triton.jit
def recurrent(
    q, k, v, g, beta, A_log, dt_bias, state, ht, o, cu_seqlens, slots, accepted,
    scale, lower_bound, T, N, HV, group, pool, S_slots,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, g_b, g_t, g_h, g_d, beta_b, beta_t, beta_h, beta_d,
    state_n, state_h, state_k, state_v, slots_n, slots_s,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    BETA: tl.constexpr, PER_VALUE: tl.constexpr, ORDER: tl.constexpr, FINAL_ORDER: tl.constexpr,
    INPLACE: tl.constexpr, PER_TOKEN: tl.constexpr, GATES: tl.constexpr,
):
    """x_b, x_t, x_h, x_d: strides of x by row, token, head and channel; tensors that a call has not are None.
    GATES: numbers that g has for a token and head; if one, g_d is 0.

    `state` has `pool` states, `slots` S_slots for each sequence.  Offsets, counts and slots are numbers on the GPU that
    nobody has looked at: whatever they are, no memory outside the tensors is touched.  Offsets and counts are brought
    into range; a slot out of range is padding.
    """
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % HV
    n = tl.program_id(0) // tiles // HV
    d, e = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    real_k, real_v = d < K, e < V
    real = real_k[:, None] & real_v[None, :]
    if cu_seqlens is None:
        row, begin, end = n.to(tl.int64), T * 0, T
    else:
        row = tl.zeros((), tl.int64)
        begin = tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T)
        last = tl.maximum(tl.load(cu_seqlens + N).to(tl.int64), 0)
    slot, live = n.to(tl.int64), n >= 0
    if slots is not None:
        slots += n * slots_n
        first = tl.zeros((), tl.int64)
        if accepted is not None:
            first = tl.minimum(tl.maximum(tl.load(accepted + n).to(tl.int64), 1), S_slots) - 1
        slot = tl.load(slots + first * slots_s).to(tl.int64)
        live = (slot >= 0) & (slot < pool)

    q += row * q_b + head // group * q_h + d * q_d
    k += row * k_b + head // group * k_h + d * k_d
    v += row * v_b + head * v_h + e * v_d
    g += row * g_b + head * g_h + d * g_d
    beta += row * beta_b + head * beta_h
    if PER_VALUE:
        beta += e * beta_d
    o += (row * T * HV + head) * V + e
    rows, steps = (q, k, v, g, beta), (q_t, k_t, v_t, g_t, beta_t)
    now = rows_at(begin, live & (begin < end), rows, steps, real_k, real_v, PER_VALUE)
    then = rows_at(begin + 1, live & (begin + 1 < end), rows, steps, real_k, real_v, PER_VALUE)
    S = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        state += head * state_h
        S = read_state(state + slot * state_n, d, e, real & live, state_k, state_v, ORDER, K, V)
    rate = rate_of(A_log, head, A_log is not None)
    bias = tl.zeros((BK,), tl.float32)
    if dt_bias is not None:
        biased = d if GATES == K else d * 0
        bias = tl.load(dt_bias + head * GATES + biased, mask=real_k, other=0.0).to(tl.float32)

    for t in range(begin, end):
        qt, kt, vt, gt, bt = now
        now = then
        then = rows_at(t + 2, live & (t + 2 < end), rows, steps, real_k, real_v, PER_VALUE)
        if INPLACE and PER_TOKEN:
            to = tl.load(slots + (t - begin) * slots_s, mask=live & (t - begin < S_slots), other=-1).to(tl.int64)
        qt, kt = qt.to(tl.float32), kt.to(tl.float32)
        if NORM:
            qt *= inverse_norm(tl.sum(qt * qt, 0))
            kt *= inverse_norm(tl.sum(kt * kt, 0))
        g2 = log2_decay(gt.to(tl.float32) + bias, rate, lower_bound, GATE)
        if GATE == "given":
            g2 = at_most(g2, 128.0)
        S *= decay_of(g2)[:, None]
        recalled = tl.sum(kt[:, None] * S, 0)
        seen = tl.sum(qt[:, None] * S, 0)
        x = step_size(bt.to(tl.float32), BETA) * (vt.to(tl.float32) - recalled)
        S = tl.fma(kt[:, None], x[None, :], S)
        tl.store(o + t * HV * V, scale * tl.fma(tl.sum(qt * kt, 0), x, seen), mask=real_v)
        if INPLACE and PER_TOKEN:
            stored = real & (to >= 0) & (to < pool)
            write_state(state + to * state_n, S, d, e, stored, state_k, state_v, ORDER, K, V)
    if INPLACE and not PER_TOKEN:
        stored = real & live & (begin < end)
        write_state(state + slot * state_n, S, d, e, stored, state_k, state_v, ORDER, K, V)
    if ht is not None:
        write_state(ht + (n * HV + head).to(tl.int64) * (K * V), S, d, e, real, state_k, state_v, FINAL_ORDER, K, V)

    if cu_seqlens is not None:                       # tokens of no sequence: zeros, all programs of a head in turn
        for t in range(last + n * ZEROED, T, N * ZEROED):
            i = t + tl.arange(0, ZEROED)
            zeros = tl.zeros((ZEROED, BV), o.dtype.element_ty)
            tl.store(o + i[:, None] * (HV * V), zeros, mask=(i < T)[:, None] & real_v[None, :])
