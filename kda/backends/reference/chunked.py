"""The chunked algorithm, one function per stage of `kda.model.stages`, forward and backward; the backward is explicit.

A stage gets a `Setup` and the tensors its row of `kda.model.stages` reads, and returns those it writes.  Tensors of
rows are (NC, heads, C, D), of states (NC, HV, K, V) or (N, HV, K, V); b and beta are (NC, HV, C, 1).  q, k before
fwd/gate and their gradients after bwd/gate have H heads, everything else HV.  All of it runs in one float dtype, the
caller's.  g, dg and dt_bias may have one channel: the gate of all channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from kda.model import gates
from kda.model.stages import LOG2_E, Stage

from .halving import decayed_products, decayed_products_bwd, decays, inverse
from .ragged import Ragged

Tensor = torch.Tensor


class Setup(NamedTuple):
    """The settings of a stage."""

    table: Ragged
    scale: float
    groups: int = 1                          # value heads of a q/k head
    gate: str = "given"                      # "given", "softplus" or "bounded"
    lower_bound: float | None = None
    beta: str = "given"                      # "given", "sigmoid" or "2*sigmoid"
    qk_l2norm: bool = False


def run(
    stages: tuple[Stage, ...], setup: Setup, tensors: Mapping[str, Tensor | None], want: Iterable[str]
) -> dict[str, Tensor | None]:
    """Run the stages that `want` needs, in order; those that were saved by the forward are not recomputed."""
    env, missing, needed = dict(tensors), set(want) - set(tensors), []
    for stage in reversed(stages):
        if missing.intersection(stage.writes):
            needed.append(stage)
            missing = (missing - set(stage.writes)) | (set(stage.reads) - set(tensors))
    for stage in reversed(needed):
        env |= {name: x for name, x in run_stage(stage, setup, env).items() if name not in tensors}
    return env


def run_stage(stage: Stage, setup: Setup, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the results of one stage."""
    outputs = globals()[stage.function](setup, **{name: tensors[name] for name in stage.reads})
    return dict(zip(stage.writes, outputs))


def _masked(x: Tensor, setup: Setup) -> Tensor:
    return x if setup.table.valid is None else x.masked_fill(~setup.table.valid, 0)


def activated(c: Any, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None):
    """Return q and k normalised, natural-log decays and step sizes, as the Setup or Problem says."""
    qn, kn = (gates.l2norm(q)[0], gates.l2norm(k)[0]) if c.qk_l2norm else (q, k)
    decay = g if c.gate == "given" else gates.decay(g, A_log, dt_bias, _bound(c))
    return qn, kn, decay.expand(*decay.shape[:-1], k.shape[-1]), gates.beta_activation(beta, c.beta)


def _bound(c: Any) -> float | None:
    return c.lower_bound if c.gate == "bounded" else None


# forward


@torch.no_grad()
def gate(c: Setup, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None):
    qn, kn, decay, b = activated(c, q, k, g, beta, A_log, dt_bias)
    g2, b = _masked(LOG2_E * decay, c), _masked(b, c)
    if c.groups > 1:
        qn, kn = qn.repeat_interleave(c.groups, 1), kn.repeat_interleave(c.groups, 1)
    return qn, kn, b, g2, g2.sum(-2, keepdim=True)


@torch.no_grad()
def intra(c: Setup, qn: Tensor, kn: Tensor, b: Tensor, g2: Tensor):
    (A_qk, A_kk), (qg, kb), kg = decayed_products((qn, b * kn), kn, g2)
    A_qk.diagonal(dim1=-2, dim2=-1).copy_((qn * kn).sum(-1))
    return A_qk.mul_(c.scale), A_kk, qg, kb, kg


@torch.no_grad()
def wy(c: Setup, A_kk: Tensor, kb: Tensor, v: Tensor, b: Tensor):
    A_inv = inverse(A_kk)
    return A_inv, A_inv @ kb, A_inv @ (v * b)


@torch.no_grad()
def state(c: Setup, w: Tensor, u: Tensor, kg: Tensor, gc_last: Tensor, h0: Tensor):
    h, v_new, ht = w.new_empty(*w.shape[:2], *h0.shape[2:]), torch.empty_like(u), h0.clone()
    decay, kgT = gc_last.mT.exp2(), kg.mT
    for sequences, chunks in c.table.waves():
        S = ht[sequences]
        h[chunks] = S
        v_new[chunks] = x = _add_product(u[chunks], w[chunks], S, -1)         # v_new = u - w @ h
        ht[sequences] = _add_product(decay[chunks] * S, kgT[chunks], x)       # next h = 2^gc_last h + kg^T @ v_new
    return h, v_new, ht


@torch.no_grad()
def output(c: Setup, qg: Tensor, h: Tensor, A_qk: Tensor, v_new: Tensor):
    return ((qg @ h).mul_(c.scale).add_(A_qk @ v_new),)


# backward


@torch.no_grad()
def output_bwd(c: Setup, do: Tensor, A_qk: Tensor):
    return (A_qk.mT @ do,)


@torch.no_grad()
def state_bwd(
    c: Setup, do: Tensor, dv_local: Tensor, qg: Tensor, kg: Tensor, w: Tensor, gc_last: Tensor, dht: Tensor
):
    dh, dv_new, dh0 = w.new_empty(*w.shape[:2], *dht.shape[2:]), torch.empty_like(dv_local), dht.clone()
    decay = gc_last.mT.exp2()
    from_o, wT = (qg.mT @ do).mul_(c.scale), w.mT
    for sequences, chunks in c.table.waves(reverse=True):
        dS = dh0[sequences]
        dh[chunks] = dS
        dv_new[chunks] = x = _add_product(dv_local[chunks], kg[chunks], dS)   # dv_new = dv_local + kg @ dh
        dh0[sequences] = _add_product(decay[chunks] * dS + from_o[chunks], wT[chunks], x, -1)
    return dh, dv_new, dh0


@torch.no_grad()
def wy_bwd(
    c: Setup, do: Tensor, h: Tensor, dh: Tensor, v_new: Tensor, dv_new: Tensor, A_inv: Tensor,
    qn: Tensor, kn: Tensor, v: Tensor, b: Tensor, g2: Tensor,
):
    E, E_after = decays(g2)                                                   # 2^gc, 2^(gc_last - gc)
    P = A_inv.mT @ dv_new                                                     # gradient of b v
    Q = (P @ h.mT).neg_()                                                     # gradient of b kn 2^gc
    QE = Q * E
    dqn_local = (do @ h.mT).mul_(E).mul_(c.scale)
    R = (v_new @ dh.mT).mul_(E_after)                                         # gradient of kn through kg
    db_local = (P * v).sum(-1, keepdim=True) + (QE * kn).sum(-1, keepdim=True)
    bQE = QE * b
    dA_qk = (do @ v_new.mT).tril_().mul_(c.scale)
    dA_kk = (P @ v_new.mT).tril_(-1).neg_()
    d_last = E[..., -1:, :] * (h * dh).sum(-1).unsqueeze(-2)                  # through 2^gc_last, which sees all rows
    dg2_local = _sum_from(qn * dqn_local + kn * bQE) + _sum_before(kn * R) + d_last
    return P * b, db_local, dqn_local, R.add_(bQE), dg2_local, dA_qk, dA_kk


@torch.no_grad()
def intra_bwd(
    c: Setup, dA_qk: Tensor, dA_kk: Tensor, qn: Tensor, kn: Tensor, b: Tensor, g2: Tensor,
    dqn_local: Tensor, dkn_local: Tensor, dg2_local: Tensor, db_local: Tensor,
):
    (x, z), y, dg2 = decayed_products_bwd((dA_qk, dA_kk), (qn, b * kn), kn, g2)
    diagonal = dA_qk.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dqn = dqn_local + x + diagonal * kn
    dkn = dkn_local + b * z + y + diagonal * qn
    return dqn, dkn, dg2_local + dg2, db_local + (z * kn).sum(-1, keepdim=True)


@torch.no_grad()
def gate_bwd(
    c: Setup, dqn: Tensor, dkn: Tensor, dg2: Tensor, db: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None,
):
    dq, dk = _sum_groups(dqn, c.groups), _sum_groups(dkn, c.groups)
    if c.qk_l2norm:
        dq, dk = gates.l2norm_bwd(dq, q), gates.l2norm_bwd(dk, k)
    dbeta = gates.beta_activation_bwd(_masked(db, c), beta, c.beta)
    dg = _masked(dg2, c).sum_to_size(g.shape)
    dA_log = ddt_bias = None
    if c.gate != "given":
        dg, dA_log_terms = gates.decay_bwd(dg, g, A_log, dt_bias, _bound(c))
        dA_log = dA_log_terms.sum((0, 2, 3)) if A_log is not None else None
        ddt_bias = dg.sum((0, 2)) if dt_bias is not None else None
    return dq, dk, dg, dbeta, dA_log, ddt_bias


def _add_product(x: Tensor, a: Tensor, b: Tensor, sign: int = 1) -> Tensor:
    """Return x + sign a @ b, all (sequences, HV, rows, columns)."""
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), alpha=sign).view(x.shape)


def _sum_from(x: Tensor) -> Tensor:
    """Return sums over rows i >= t."""
    return x.flip(-2).cumsum(-2).flip(-2)


def _sum_before(x: Tensor) -> Tensor:
    """Return sums over rows i < t."""
    return torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :].cumsum(-2)], -2)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)
