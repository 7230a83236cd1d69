"""Every stage of `kda.model.stages` written out from its formula, in any float dtype: the oracle of `kda verify`.

It shares no code with the reference's chunked algorithm: the decay of every pair of rows is formed on its own, the
inverse is a library's triangular solve, states are walked chunk by chunk, the gate's derivative is autograd's.  In
float64 it is exact, in float32 an independent rounding.  Layouts as in `kda.backends.reference.chunked`: rows are
(NC, heads, C, D), states (NC or N, HV, K, V), b and beta (NC, HV, C, 1), A_log (HV, 1, 1), dt_bias (HV, 1, K).  g and
dt_bias have one channel where a head has one gate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from kda.model.problem import Problem
from kda.model.stages import LOG2_E, find

from .layout import ChunkLayout

Tensor = torch.Tensor
Tensors = dict[str, "Tensor | None"]
Round = Any                                  # a callable: a tensor of kda.model.stages by its name -> its rounding


SHARED = 1 << 24                             # elements of pairs of rows from which on several threads share the work


def as_it_is(name: str, x: Tensor) -> Tensor:
    return x


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads on the CPU inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


one_thread = functools.partial(threads, 1)   # thousands of small steps: several would wait for each other in between


def one_thread_if_small(p: Problem) -> contextlib.AbstractContextManager[None]:
    return one_thread() if p.HV * p.C * p.C * p.K < SHARED else contextlib.nullcontext()


def run_stage(
    name: str, p: Problem, layout: ChunkLayout, tensors: Mapping[str, Tensor | None], dtype: torch.dtype,
    round_: Round = as_it_is,
) -> Tensors:
    """Return what the stage, or the run of stages, writes, given what it reads."""
    env = chain([name], p, layout, tensors, dtype, round_)
    return {n: env[n] for n in find(name).writes}


def chain(
    names: Iterable[str], p: Problem, layout: ChunkLayout, tensors: Mapping[str, Tensor | None], dtype: torch.dtype,
    round_: Round = as_it_is,
) -> Tensors:
    """Return all tensors after the stages in order, each fed by its predecessors, including internal tensors of runs.

    `round_` is applied to everything that a stage writes, also where the stage itself uses it further.
    """
    env = dict(tensors)
    for stage in (member for name in names for member in find(name).members):
        done: set[str] = set()

        def inside(name: str, x: Tensor, done: set[str] = done) -> Tensor:
            done.add(name)
            return round_(name, x)

        with one_thread_if_small(p):
            reads = [None if x is None else x.to(dtype) for x in map(env.__getitem__, stage.reads)]
            written = zip(stage.writes, FUNCTIONS[stage.name](p, layout, inside, *reads))  # type: ignore[operator]
            env |= {n: x if x is None or n in done else round_(n, x) for n, x in written}
    return env


# a token by itself


def l2norm(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def log_decay(p: Problem, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    if p.gate == "given":
        return g
    x = g if dt_bias is None else g + dt_bias
    rate = 1.0 if A_log is None else A_log.exp()
    if p.gate == "softplus" or p.lower_bound is None:
        return -rate * F.softplus(x, threshold=40)
    return p.lower_bound * torch.sigmoid(rate * x)


def step_size(p: Problem, beta: Tensor) -> Tensor:
    return {"given": lambda x: x, "sigmoid": torch.sigmoid, "2*sigmoid": lambda x: 2 * torch.sigmoid(x)}[p.beta](beta)


# a chunk


def tri(C: int, like: Tensor) -> Tensor:
    """Return (C, C), where [i, j] is 1 where j <= i."""
    return torch.ones(C, C, dtype=like.dtype, device=like.device).tril()


def decay_of_pairs(g2: Tensor) -> Tensor:
    """Map (HV, C, K) to (HV, C, C, K): D_ij = 2^(gc_i - gc_j) for j <= i, else 0.

    gc_i - gc_j is summed as g2_(j+1) + ... + g2_i: a difference of two long sums rounds as they do, and -inf has none.
    """
    HV, C, K = g2.shape
    exponent = g2.new_full((HV, C, C, K), -torch.inf)
    of_columns = torch.zeros(HV, C, K, dtype=torch.float64)                   # gc_i - gc_j of all j
    for i in range(C):
        of_columns[:, :i] += g2[:, i, None]
        exponent[:, i, : i + 1] = of_columns[:, : i + 1]
    return exponent.exp2_()


def edges(g2: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2^gc and 2^(gc_last - gc)."""
    after = torch.cat([g2[..., 1:, :], torch.zeros_like(g2[..., :1, :])], -2)
    return g2.cumsum(-2).exp2(), after.flip(-2).cumsum(-2).flip(-2).exp2()


# forward


def gate(p: Problem, layout: ChunkLayout, round_: Round, q, k, g, beta, A_log, dt_bias):
    qn, kn = (l2norm(q), l2norm(k)) if p.qk_l2norm else (q, k)
    head = torch.arange(p.HV) // (p.HV // p.H)                                # the q/k head of a value head
    b = torch.where(layout.valid, step_size(p, beta), 0.0)
    g2 = torch.where(layout.valid, log_decay(p, g, A_log, dt_bias) * LOG2_E, 0.0).expand(-1, -1, -1, p.K)
    return qn[:, head], kn[:, head], b, g2, g2.sum(-2, keepdim=True)


def intra(p: Problem, layout: ChunkLayout, round_: Round, qn, kn, b, g2):
    A_qk, A_kk = (qn.new_zeros(*qn.shape[:2], p.C, p.C) for _ in range(2))
    for c in range(layout.NC):
        D = round_("D", decay_of_pairs(g2[c]))                                # (HV, i, j, K)
        kD = round_("kD", kn[c].unsqueeze(1) * D)                             # kn_j D_ij
        A_qk[c] = p.scale * (qn[c].unsqueeze(2) * kD).sum(-1)
        A_kk[c] = (b[c] * (kn[c].unsqueeze(2) * kD).sum(-1)).tril(-1)
    E, E_after = edges(g2)
    return A_qk, A_kk, qn * E, b * kn * E, kn * E_after


def wy(p: Problem, layout: ChunkLayout, round_: Round, A_kk, kb, v, b):
    eye = torch.eye(p.C, dtype=A_kk.dtype)
    A_inv = torch.linalg.solve_triangular(eye + A_kk, eye.expand_as(A_kk), upper=False, unitriangular=True)
    A_inv = round_("A_inv", A_inv)
    return A_inv, A_inv @ kb, A_inv @ round_("bv", b * v)


def state(p: Problem, layout: ChunkLayout, round_: Round, w, u, kg, gc_last, h0):
    h, v_new, ht = w.new_zeros(layout.NC, p.HV, p.K, p.V), torch.zeros_like(u), h0.clone()
    for n, chunks in enumerate(layout.chunks_of):
        for c in chunks:
            h[c] = round_("h", ht[n])
            v_new[c] = round_("v_new", u[c] - w[c] @ h[c])
            ht[n] = gc_last[c].mT.exp2() * ht[n] + kg[c].mT @ v_new[c]
    return h, v_new, ht


def output(p: Problem, layout: ChunkLayout, round_: Round, qg, h, A_qk, v_new):
    return (p.scale * (qg @ h) + A_qk @ v_new,)


# backward


def output_bwd(p: Problem, layout: ChunkLayout, round_: Round, do, A_qk):
    return (A_qk.mT @ do,)


def state_bwd(p: Problem, layout: ChunkLayout, round_: Round, do, dv_local, qg, kg, w, gc_last, dht):
    dh, dv_new, dh0 = w.new_zeros(layout.NC, p.HV, p.K, p.V), torch.zeros_like(dv_local), dht.clone()
    for n, chunks in enumerate(layout.chunks_of):
        for c in reversed(chunks):
            dh[c] = round_("dh", dh0[n])
            dv_new[c] = round_("dv_new", dv_local[c] + kg[c] @ dh[c])
            decayed = gc_last[c].mT.exp2() * dh0[n]
            dh0[n] = decayed + p.scale * (qg[c].mT @ do[c]) - w[c].mT @ dv_new[c]
    return dh, dv_new, dh0


def wy_bwd(p: Problem, layout: ChunkLayout, round_: Round, do, h, dh, v_new, dv_new, A_inv, qn, kn, v, b, g2):
    E, E_after = edges(g2)
    P = A_inv.mT @ dv_new
    operand = round_("P", P)
    Q = -operand @ h.mT
    R = E_after * (v_new @ dh.mT)
    dqn = p.scale * E * (do @ h.mT)
    db = (P * v).sum(-1, keepdim=True) + (Q * kn * E).sum(-1, keepdim=True)
    lower, strictly = tri(p.C, P), tri(p.C, P) - torch.eye(p.C, dtype=P.dtype)
    dA_qk, dA_kk = p.scale * (do @ v_new.mT) * lower, -(operand @ v_new.mT) * strictly
    last = E[:, :, -1:] * (h * dh).sum(-1).unsqueeze(-2)
    dg2 = lower.mT @ (qn * dqn + b * kn * E * Q) + strictly @ (kn * R) + last
    return b * P, db, dqn, R + b * E * Q, dg2, dA_qk, dA_kk


def intra_bwd(
    p: Problem, layout: ChunkLayout, round_: Round, dA_qk, dA_kk, qn, kn, b, g2,
    dqn_local, dkn_local, dg2_local, db_local,
):
    x, y, z = (torch.zeros_like(qn) for _ in range(3))
    for c in range(layout.NC):
        D = round_("D", decay_of_pairs(g2[c]))                                # (HV, i, j, K)
        kD = round_("kD", kn[c].unsqueeze(1) * D)                             # kn_j D_ij
        qD, bkD = (round_("qD", row.unsqueeze(2) * D) for row in (qn[c], b[c] * kn[c]))
        both = dA_qk[c].unsqueeze(-1), dA_kk[c].tril(-1).unsqueeze(-1)
        x[c], z[c] = ((round_("dA_k", dA) * kD).sum(2) for dA in both)
        y[c] = sum((round_("dA_q", dA) * row).sum(1) for dA, row in zip(both, (qD, bkD)))
    dg2 = dg2_local + tri(p.C, x).mT @ (qn * x + b * kn * z - kn * y)
    return dqn_local + x, dkn_local + b * z + y, dg2, db_local + (z * kn).sum(-1, keepdim=True)


def gate_bwd(p: Problem, layout: ChunkLayout, round_: Round, dqn, dkn, dg2, db, q, k, g, beta, A_log, dt_bias):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (q, k, g, beta, A_log, dt_bias)]
    with torch.enable_grad():
        qn, kn, b, g2, _ = gate(p, layout, as_it_is, *leaves)
        into = [x for x in leaves if x is not None]
        # dg2 is the gradient of g2 / log2(e)
        grads = torch.autograd.grad(
            (qn, kn, b, g2 / LOG2_E), into, (dqn, dkn, db, dg2), allow_unused=True, materialize_grads=True
        )
    by_leaf = iter(grads)
    dq, dk, dg, dbeta, dA_log, ddt_bias = (None if x is None else next(by_leaf) for x in leaves)
    return (dq, dk, dg, dbeta, None if dA_log is None else dA_log.flatten(),
            None if ddt_bias is None else ddt_bias.squeeze(1))


# the backward in two pieces


def operands(p: Problem, layout: ChunkLayout, round_: Round, qn, kn, b, g2):
    E, E_after = edges(g2)
    AQB, A = (qn.new_zeros(*qn.shape[:2], p.C, p.C) for _ in range(2))
    for c in range(layout.NC):
        D = decay_of_pairs(g2[c])                                             # (HV, i, j, K)
        AQB[c], A[c] = (((row[c].unsqueeze(2) * D) * (b * kn)[c].unsqueeze(1)).sum(-1) for row in (p.scale * qn, kn))
    eye = torch.eye(p.C, dtype=A.dtype)
    T_inv = torch.linalg.solve_triangular(eye + A.tril(-1), eye.expand_as(A), upper=False, unitriangular=True)
    return kn * E, p.scale * qn * E, b * kn * E_after, AQB, T_inv


def residual(p: Problem, layout: ChunkLayout, round_: Round, v, kE, T_inv, h):
    return (T_inv @ (v - kE @ h),)


def walk_bwd(p: Problem, layout: ChunkLayout, round_: Round, do, kE, qE, KGB, AQB, T_inv, gc_last, dht):
    dh, dv, dh0 = kE.new_zeros(layout.NC, p.HV, p.K, p.V), torch.zeros_like(do), dht.clone()
    for n, chunks in enumerate(layout.chunks_of):
        for c in reversed(chunks):
            dh[c] = round_("dh", dh0[n])
            z = round_("z", KGB[c] @ dh[c] + AQB[c].mT @ do[c])
            dv[c] = round_("dv", T_inv[c].mT @ z)
            dh0[n] = gc_last[c].mT.exp2() * dh0[n] + qE[c].mT @ do[c] - kE[c].mT @ dv[c]
    return dv, dh, dh0


def grads_bwd(p: Problem, layout: ChunkLayout, round_: Round, q, k, g, beta, A_log, dt_bias, do, r, dv, h, dh):
    qn, kn, b, g2, gc_last = gate(p, layout, as_it_is, q, k, g, beta, A_log, dt_bias)
    E, E_after = edges(g2)
    Qu, Ku, Kd = round_("Qu", qn), round_("Ku", kn), round_("Kd", b * kn)
    G1, G2 = round_("G", p.scale * (do @ r.mT).tril()), round_("G", -(dv @ r.mT).tril(-1))
    R = E_after * (r @ dh.mT)
    dqn, plus, minus = p.scale * E * (do @ h.mT), -E * (dv @ h.mT), R.clone()
    for c in range(layout.NC):
        D = decay_of_pairs(g2[c])
        G1_D, G2_D = (G[c].unsqueeze(-1) * D for G in (G1, G2))               # (HV, i, j, K)
        dqn[c] += (G1_D * Kd[c].unsqueeze(1)).sum(2)
        plus[c] += (G2_D * Kd[c].unsqueeze(1)).sum(2)
        minus[c] += (G1_D * Qu[c].unsqueeze(2) + G2_D * Ku[c].unsqueeze(2)).sum(1)
    row = Qu * dqn + Ku * plus - Kd * minus  # from the multiplied operands, so that pairs cancel
    const = (Kd * R).sum(-2, keepdim=True) + gc_last.exp2() * (h * dh).sum(-1).unsqueeze(-2)
    dg2, db = tri(p.C, row).mT @ row + const, (kn * minus).sum(-1, keepdim=True)
    of_chunks = [None if x is None else x.expand(layout.NC, *x.shape) for x in (A_log, dt_bias)]
    into = dqn, plus + b * minus, dg2, db, q, k, g, beta, *of_chunks
    dq, dk, dg, dbeta, dA_log, ddt_bias = gate_bwd(p, layout, as_it_is, *into)
    return (dq, dk, dg, dbeta, None if dA_log is None else dA_log.view(layout.NC, p.HV),
            None if ddt_bias is None else ddt_bias.view(layout.NC, p.HV, p.gate_width))


FUNCTIONS = {
    "fwd/gate": gate, "fwd/intra": intra, "fwd/wy": wy, "fwd/state": state, "fwd/output": output,
    "fwd/operands": operands, "fwd/residual": residual, "bwd/walk": walk_bwd, "bwd/grads": grads_bwd,
    "bwd/output": output_bwd, "bwd/state": state_bwd, "bwd/wy": wy_bwd, "bwd/intra": intra_bwd, "bwd/gate": gate_bwd,
}
