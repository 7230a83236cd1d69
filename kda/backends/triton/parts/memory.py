"""Loads and addresses."""

import triton
import triton.language as tl


@triton.jit
def load_columns(pointers, d, D: tl.constexpr, BD: tl.constexpr):
    """Loads columns d < D; slices of BD that cut D evenly need no mask."""
    if D % BD == 0:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=d < D, other=0.0)
    return x


@triton.jit
def load_tile(pointers, e, V: tl.constexpr, BV: tl.constexpr, d, K: tl.constexpr, BK: tl.constexpr):
    """Loads where e < V and d < K; a tile without elements outside needs no mask."""
    if K % BK == 0 and V % BV == 0:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(e < V) & (d < K), other=0.0)
    return x


@triton.jit
def load_rows(x, row, valid, d, D: tl.constexpr):
    """Loads columns d < D of rows of D, zero where a row is not valid."""
    return tl.load(x + row[:, None] * D + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def state_at(states, number, d, e, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Returns the addresses [d, e] in state `number` of many, each (K, V), or (V, K)."""
    base = states + number.to(tl.int64) * (K * V)
    if V_FIRST:
        pointers = base + e[None, :] * K + d[:, None]
    else:
        pointers = base + d[:, None] * V + e[None, :]
    return pointers


@triton.jit
def load_state(states, number, e, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr):
    """Loads columns e of one state in slices of BK rows, as float32; zeros where `states` is None."""
    S = ()
    for d0 in tl.static_range(0, K, BK):
        d = d0 + tl.arange(0, BK)
        if states is None:
            x = tl.zeros((BK, e.shape[0]), tl.float32)
        else:
            real = (d < K)[:, None] & (e < V)[None, :]
            x = tl.load(state_at(states, number, d, e, K, V, V_FIRST), mask=real, other=0.0).to(tl.float32)
        S = S + (x,)
    return S


@triton.jit
def load_start(
    states, START: tl.constexpr, p, n, head, HV, e, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """Loads the state that a walk starts with: that of segment p with START "segment", else that of sequence n."""
    if START == "segment":
        S = load_state(states, p * HV + head, e, K, V, BK, False)
    else:
        S = load_state(states, n * HV + head, e, K, V, BK, V_FIRST)
    return S


@triton.jit
def store_state(states, number, S, e, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr):
    for s in tl.static_range(len(S)):
        d = s * BK + tl.arange(0, BK)
        real = (d < K)[:, None] & (e < V)[None, :]
        tl.store(state_at(states, number, d, e, K, V, V_FIRST), S[s].to(states.dtype.element_ty), mask=real)
