"""Loads and addresses."""

import triton
import triton.language as tl


@triton.jit
def load_columns(pointers, d, D: tl.constexpr, BD: tl.constexpr):
    """Where columns d < D; slices of BD that cut D evenly need no mask."""
    if D % BD == 0:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=d < D, other=0.0)
    return x


@triton.jit
def load_tile(pointers, e, V: tl.constexpr, BV: tl.constexpr, d, K: tl.constexpr, BK: tl.constexpr):
    """load_columns both ways: where e < V and d < K."""
    if K % BK == 0 and V % BV == 0:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(e < V) & (d < K), other=0.0)
    return x


@triton.jit
def state_at(states, number, d, e, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Addresses [d, e] in state `number` of many, each (K, V), or (V, K)."""
    base = states + number.to(tl.int64) * (K * V)
    if V_FIRST:
        at = base + e[None, :] * K + d[:, None]
    else:
        at = base + d[:, None] * V + e[None, :]
    return at
