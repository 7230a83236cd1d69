"""What rounding costs each form of a Hopper forward and backward: `python -m benchmarks.emulated`, on one core.

A form is what a walk over chunks multiplies, in both directions, with S the state that enters a chunk and dS the
gradient of the one that leaves it:

  x = v - kE @ S             y = inner @ x          o = qg @ S + M @ y      S  <- lam S + KS^T @ y
  z = KS @ dS + M^T @ do     dv = inner^T @ z                               dS <- lam dS + qg^T @ do - kE^T @ dv

  form   KS            M             inner    y        with TB = A_inv b = b T'; T' = (I + A' b)^-1, the inverse before
  R      b kg          A_qk b        T'       r        its rows' b, is ones on its diagonal
  T      kg            A_qk          TB       v_new
  B      kg            A_qk          b T'     v_new    b multiplies sums in float32: y = b (T' @ x), z = b (KS @ ..)
  XT     TB^T @ kg     A_qk @ TB     -        x
  XR     T'^T @ b kg   A_qk b @ T'   -        x

After the walks the local part makes the gradients of q, k, g and beta of 64 tokens from h, dh, do, dv and what was
kept: v_new in T and XT, else r = T' @ x, for which Tr, XTr and XR have a product more.  v_new = b r.

Operands of products are rounded to bfloat16, those of the inverse's merges to TF32; sums, running states, exponentials
and sums of decays are float32.  That is what a kernel computes in, so it is what this file does.  The same code in
float64 without any rounding has to give the definition's results; `--exact` shows that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from kda.model import gates
from kda.model.stages import LOG2_E
from kda.tools.verify.cases import LOWER_BOUND, Case, make_inputs
from kda.tools.verify.definition import definition
from kda.tools.verify.literal import log_decay, step_size
from ptxkit.commands.layout import table

from . import common

Tensor = torch.Tensor

SEEDS, H, T, K = 3, 2, 512, 128              # the heads of all seeds lie side by side: heads know nothing of each other
FLOOR, CAP = -127.0, -28.0                   # log2 decay of a token: at least; in a diagonal block of 8 of levels
BITS = (10, 16, 28)                          # that a token loses at most where all is counted in blocks of 8
NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")


class Precision(NamedTuple):
    dtype: torch.dtype                       # dtype of sums, exponentials, running states
    rounded: bool

    def bf16(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype) if self.rounded else x

    def tf32(self, x: Tensor) -> Tensor:
        """Round to the nearest tf32."""
        if not self.rounded:
            return x
        bits = x.view(torch.int32)
        return (bits + 0xFFF + (bits >> 13 & 1) & -0x2000).view(torch.float32)


KERNEL, EXACT = Precision(torch.float32, True), Precision(torch.float64, False)


# ---------------------------------------------------------------------------------------------- tokens


class Tokens(NamedTuple):
    """Rows (T, heads, .) of a case, after gate and norms; q comes scaled where it is multiplied."""

    qn: Tensor
    kn: Tensor
    v: Tensor
    b: Tensor
    g2: Tensor
    do: Tensor
    scale: float
    bounded: bool

    def chunks(self, C: int) -> Tokens:
        """(T / C, heads, C, .)"""
        return Tokens(*(x.unflatten(0, (-1, C)).transpose(1, 2) for x in self[:6]), *self[6:])


def unchunk(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def parameters(case: Case, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    x, heads = case.inputs, case.spec.heads
    A_log = None if x.A_log is None else x.A_log.to(dtype).view(heads, 1)
    return A_log, None if x.dt_bias is None else x.dt_bias.to(dtype).view(heads, -1)


def tokens_of(case: Case, dtype: torch.dtype) -> Tokens:
    p, x = case.problem(), case.inputs
    q, k, v, g, beta, do = (t[0].to(dtype) for t in (x.q, x.k, x.v, x.g, x.beta, case.do))
    g2 = (LOG2_E * log_decay(p, g, *parameters(case, dtype))).clamp(min=FLOOR)
    b = step_size(p, beta).unsqueeze(-1)
    return Tokens(gates.l2norm(q)[0], gates.l2norm(k)[0], v, b, g2, do, p.scale, case.spec.gate == "bounded")


# ---------------------------------------------------------------------------------------------- a chunk's operands


def cut_at(gc: Tensor, half: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut blocks into halves; return exponents of rows of the second half and the first, and which pairs are meant."""
    i = torch.arange(gc.shape[-2])
    from_cut = gc - gc[..., i // (2 * half) * 2 * half + half - 1, :]
    block = i // half
    pairs = (block.view(-1, 1) ^ 1 == block) & (block.view(-1, 1) > block)
    return from_cut.clamp(max=0), (-from_cut).clamp(max=0), pairs


def pair_products(t: Tokens, gc: Tensor, p: Precision) -> tuple[Tensor, Tensor]:
    """[i >= j] scale sum_K qn_i kn_j 2^(gc_i - gc_j), and [i > j] the same of kn alone: blocks of 32 rows of a bounded
    gate by one product, everything else by halves."""
    C, i = gc.shape[-2], torch.arange(gc.shape[-2])
    halves = [1 << n for n in range(C.bit_length() - 1)]
    levels = [cut_at(gc, half) for half in halves if not t.bounded or half >= 32]
    if t.bounded:
        first = gc[..., i // 32 * 32, :] + 0.5 * LOWER_BOUND * LOG2_E * 31
        x = gc - first.round()
        levels.append((x, -x, i.view(-1, 1) // 32 == i // 32))
    A_qk, A = (
        sum((p.bf16(row * up.exp2()) @ p.bf16(t.kn * down.exp2()).mT).where(pairs, 0.0) for up, down, pairs in levels)
        for row in (t.scale * t.qn, t.kn)
    )
    if not t.bounded:
        A_qk = A_qk + torch.diag_embed((t.scale * t.qn * t.kn).sum(-1))
    return A_qk.tril(), A.tril(-1)


def inverse(A: Tensor, p: Precision) -> Tensor:
    """(I + A)^-1: blocks of 8 rows by substitution, [X 0; -Y A X, Y] from there on."""
    n = A.shape[-1]
    if n == 8:
        eye = torch.eye(8, dtype=A.dtype)
        return torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True)
    half = n // 2
    X, Y = inverse(A[..., :half, :half], p), inverse(A[..., half:, half:], p)
    below = -p.tf32(p.tf32(Y) @ p.tf32(A[..., half:, :half])) @ p.tf32(X)
    return torch.cat([torch.cat([X, torch.zeros_like(X)], -1), torch.cat([below, Y], -1)], -2)


class Tile(NamedTuple):
    """What a walk multiplies, rounded; lam is not."""

    kE: Tensor
    qg: Tensor
    KS: Tensor
    M: Tensor
    inner: Tensor | None
    b: Tensor | None                         # b of rows, beside `inner`
    keep: Tensor                             # what x is multiplied with for the local part
    lam: Tensor


def tile(form: str, t: Tokens, p: Precision) -> Tile:
    gc = t.g2.cumsum(-2)
    last, bT = gc[..., -1:, :], t.b.mT
    A_qk, A = pair_products(t, gc, p)
    whole = inverse(A * bT, p)                                                # T', whose rows times b are TB
    T_, TB = p.bf16(whole), p.bf16(t.b * whole)
    kE, qg, kg = p.bf16(t.kn * gc.exp2()), p.bf16(t.scale * t.qn * gc.exp2()), t.kn * (last - gc).exp2()
    early = form in ("R", "XR")                                               # b multiplies keys
    KS, M = (p.bf16(x) for x in ((t.b * kg, A_qk * bT) if early else (kg, A_qk)))
    inner = T_ if early or form == "B" else TB
    keep = T_ if keeps_r(form) else TB
    if form[0] == "X":
        KS, M, inner = p.bf16(inner.mT @ KS), p.bf16(M @ inner), None
    return Tile(kE, qg, KS, M, inner, t.b if form == "B" else None, keep, last.mT.exp2())


def keeps_r(form: str) -> bool:
    return form in ("R", "XR", "B") or form.endswith("r")


# ---------------------------------------------------------------------------------------------- the walks


def times(x: Tensor, b: Tensor | None, i: int) -> Tensor:
    return x if b is None else b[i] * x


class Walked(NamedTuple):
    """Rows (T, heads, V) in float32, operands among them rounded; states of each chunk of the local part."""

    o: Tensor
    residual: Tensor                             # r or v_new
    dv: Tensor
    h: Tensor
    dh: Tensor
    ht: Tensor
    dh0: Tensor


def walk(form: str, t: Tokens, h0: Tensor, dht: Tensor, C: int, local: int, p: Precision) -> Walked:
    c = t.chunks(C)
    x = tile(form, c, p)
    NC, each = c.v.shape[0], local // C
    o, walked, dv, h, dh = ([None] * NC for _ in range(5))
    S = h0
    for i in range(NC):
        h[i] = rounded = p.bf16(S)
        seen = p.bf16(c.v[i] - x.kE[i] @ rounded)
        y = seen if x.inner is None else p.bf16(times(x.inner[i] @ seen, x.b, i))
        o[i] = x.qg[i] @ rounded + x.M[i] @ y
        S = x.lam[i] * S + x.KS[i].mT @ y
        walked[i] = p.bf16(x.keep[i] @ seen)
    dS = dht
    for i in reversed(range(NC)):
        dh[i] = rounded = p.bf16(dS)
        z = p.bf16(times(x.KS[i] @ rounded + x.M[i].mT @ c.do[i], x.b, i))
        dv[i] = z if x.inner is None else p.bf16(x.inner[i].mT @ z)
        dS = x.lam[i] * dS + x.qg[i].mT @ c.do[i] - x.kE[i].mT @ dv[i]
    rows = (unchunk(torch.stack(r)) for r in (o, walked, dv))
    return Walked(*rows, torch.stack(h[::each]), torch.stack(dh[each - 1 :: each]), S, dS)


# ---------------------------------------------------------------------------------------------- the local part


class Products(NamedTuple):
    """What every way of the local part begins with, a chunk of `local` rows."""

    kb: Tensor                               # rows that were written: b kn beside r, kn beside v_new
    G1: Tensor                               # scale tril(do @ y^T), y what was kept
    G2: Tensor                               # -strict_tril(dv @ y^T)
    do_h: Tensor                             # scale do @ h^T
    dv_h: Tensor                             # -dv @ h^T
    y_dh: Tensor                             # y @ dh^T


class Local(NamedTuple):
    dqn: Tensor
    plus: Tensor
    minus: Tensor                            # for a row of kb, before its b
    row: Tensor                              # rows of the decay's gradient, from the operands that were multiplied
    const: Tensor                            # sum_C kb 2^(gc_last - gc) y_dh


def by_rescaling(
    t: Tokens, m: Products, p: Precision, whole_anchors: bool = False, size: int = 16, cap: float = -math.inf
) -> Local:
    """One accumulator for each of dqn, plus, minus, rescaled from one block of `size` rows to the next; an anchor each,
    in the middle of a block, and with `whole_anchors` rounded to an integer.  No token loses more than `cap`."""
    t = t._replace(g2=t.g2.clamp(min=cap))
    g = t.g2.unflatten(-2, (-1, size)).cumsum(-2)                             # sums do not leave a block
    anchor, total = g[..., size // 2 - 1 : size // 2, :], g[..., -1:, :]
    anchor = anchor.round() if whole_anchors else anchor
    S, up, down = g.shape[-3], (g - anchor).exp2(), (anchor - g).exp2()
    ratio = torch.cat([anchor[..., :1, :, :], (total - anchor)[..., :-1, :, :] + anchor[..., 1:, :, :]], -3).exp2()
    at_end = (total - anchor)[..., -1, :, :].exp2()

    def blocks(x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, size))

    Qu, Ku, Kd = (p.bf16(blocks(x) * f) for x, f in ((t.qn, up), (t.kn, up), (m.kb, down)))
    rows, plus = m.do_h * ratio[..., 0, :, :], m.dv_h * ratio[..., 0, :, :]
    for s in range(S):
        later, cols = slice(size * s, None), slice(size * s, size * (s + 1))
        for acc, G in ((rows, m.G1), (plus, m.G2)):
            if s:
                acc[..., later, :] *= ratio[..., s, :, :]
            acc[..., later, :] += G[..., later, cols] @ Kd[..., s, :, :]
    minus, to_last, const = m.y_dh * at_end, at_end, 0.0
    for s in reversed(range(S)):
        upto, block = slice(0, size * (s + 1)), slice(size * s, size * (s + 1))
        if s < S - 1:
            minus[..., upto, :] *= ratio[..., s + 1, :, :]
            to_last = to_last * ratio[..., s + 1, :, :]
        const = const + to_last * (Kd[..., s, :, :] * m.y_dh[..., block, :]).sum(-2, keepdim=True)
        minus[..., upto, :] += (
            m.G1[..., block, upto].mT @ Qu[..., s, :, :] + m.G2[..., block, upto].mT @ Ku[..., s, :, :]
        )
    row = Qu * blocks(rows) + Ku * blocks(plus) - Kd * blocks(minus)
    flat = [(f * blocks(x)).flatten(-3, -2) for f, x in ((up, rows), (up, plus), (down, minus))]
    return Local(*flat, row.flatten(-3, -2), const)


def by_whole_anchors(t: Tokens, m: Products, p: Precision) -> Local:
    """Operands of a pair of blocks are those of its blocks, times powers of two: the same numbers."""
    return by_rescaling(t, m, p, whole_anchors=True)


def middle(t: Tokens, size: int, cap: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonal blocks, anchored in the middle; their decays floored at `cap`."""
    g = (t.g2 if cap is None else t.g2.clamp(min=cap)).unflatten(-2, (-1, size)).cumsum(-2)
    x, i = (g - g[..., size // 2 - 1 : size // 2, :]).flatten(-3, -2), torch.arange(t.g2.shape[-2])
    return x, -x, i.view(-1, 1) // size == i // size


def by_levels(t: Tokens, m: Products, p: Precision) -> Local:
    """Halves of blocks of 64 and 32 rows under exponents of at most 0, each level with operands of its own, and what is
    left, blocks of 16 rows, anchored in the middle: of any gate, halves of 16 too, and blocks of 8 under a cap."""
    gc, C = t.g2.cumsum(-2), t.g2.shape[-2]
    diagonal, smallest = (middle(t, 16), 16) if t.bounded else (middle(t, 8, CAP), 8)
    levels = [diagonal, *(cut_at(gc, half) for half in (8, 16, 32) if smallest <= half < C)]
    return through(levels, gc, t, m, p)


def through(levels: list[tuple[Tensor, Tensor, Tensor]], gc: Tensor, t: Tokens, m: Products, p: Precision) -> Local:
    """The products with the states, and those of the pairs of each level under its exponents."""
    up, down = gc.exp2(), (gc[..., -1:, :] - gc).exp2()
    const = (m.kb * down * m.y_dh).sum(-2, keepdim=True)
    dqn, plus, minus = m.do_h * up, m.dv_h * up, m.y_dh * down
    row = t.qn * dqn + t.kn * plus - m.kb * minus
    for x, y, pairs in levels:
        up, down, G1, G2 = x.exp2(), y.exp2(), m.G1 * pairs, m.G2 * pairs
        Qu, Ku, Kd = p.bf16(t.qn * up), p.bf16(t.kn * up), p.bf16(m.kb * down)
        acc_q, acc_p, acc_m = G1 @ Kd, G2 @ Kd, G1.mT @ Qu + G2.mT @ Ku
        dqn, plus, minus = dqn + up * acc_q, plus + up * acc_p, minus + down * acc_m
        row = row + Qu * acc_q + Ku * acc_p - Kd * acc_m
    return Local(dqn, plus, minus, row, const)


def by_pairs(t: Tokens, m: Products, p: Precision) -> Local:
    """Off the diagonal, a block of rows with all columns before it, anchored at its start, and a block of columns with
    all rows after it, anchored at its end: what a pair adds to a row is not what it takes from a column."""
    gc, C = t.g2.cumsum(-2), t.g2.shape[-2]
    dqn, plus, minus, row, const = through([middle(t, 16)], gc, t, m, p)
    for first in range(16, C, 16):
        start = gc[..., first - 1 : first, :]
        block, before = slice(first, first + 16), slice(0, first)
        up, down = (gc[..., block, :] - start).exp2(), (start - gc[..., before, :]).exp2()
        Kd = p.bf16(m.kb[..., before, :] * down)
        for total, G, x in ((dqn, m.G1, t.qn), (plus, m.G2, t.kn)):
            acc = G[..., block, before] @ Kd
            total[..., block, :] += up * acc
            row[..., block, :] += p.bf16(x[..., block, :] * up) * acc
        columns, after = slice(first - 16, first), slice(first, None)                  # their end is this block's start
        up, down = (gc[..., after, :] - start).exp2(), (start - gc[..., columns, :]).exp2()
        Qu, Ku = (p.bf16(x[..., after, :] * up) for x in (t.qn, t.kn))
        acc = m.G1[..., after, columns].mT @ Qu + m.G2[..., after, columns].mT @ Ku
        minus[..., columns, :] += down * acc
        row[..., columns, :] -= p.bf16(m.kb[..., columns, :] * down) * acc
    return Local(dqn, plus, minus, row, const)


WAYS: dict[str, Callable[[Tokens, Products, Precision], Local]] = {
    "rescaled": by_rescaling, "whole anchors": by_whole_anchors, "levels": by_levels, "pairs": by_pairs,
    **{f"blocks of 8, {bits} bits": functools.partial(by_rescaling, size=8, cap=-float(bits)) for bits in BITS},
}
ANY_GATE = [name for name in WAYS if name == "levels" or "bits" in name]


def results(
    form: str, case: Case, C: int, p: Precision, local: int = 64, way: str = "rescaled", exact_rows: bool = False,
    b_over: str = "V",
) -> dict[str, Tensor]:
    """Return the results of a whole call.  `exact_rows`: the decay's gradient comes from unrounded q and k.  `b_over`:
    b db of a sigmoid's beta is sum_V dv r, or over "K" b sum_K kn minus."""
    inputs, t = case.inputs, tokens_of(case, p.dtype)
    w = walk(form, t, inputs.initial_state[0].to(p.dtype), case.dht[0].to(p.dtype), C, local, p)
    c = t.chunks(local)
    y, dv = (x.unflatten(0, (-1, local)).transpose(1, 2) for x in (w.residual, w.dv))
    b = c.b if keeps_r(form) else torch.ones_like(c.b)
    m = Products(b * c.kn, p.bf16(c.scale * (c.do @ y.mT).tril()), p.bf16(-(dv @ y.mT).tril(-1)),
                 c.scale * (c.do @ w.h.mT), -(dv @ w.h.mT), y @ w.dh.mT)
    shares = WAYS[way if t.bounded or way in ANY_GATE else "levels"](c, m, p)
    row = shares.row
    if exact_rows:
        row = c.qn * shares.dqn + c.kn * shares.plus - m.kb * shares.minus
    lam = c.g2.sum(-2, keepdim=True).exp2()
    dg2 = row.flip(-2).cumsum(-2).flip(-2) + shares.const + lam * (w.h * w.dh).sum(-1).unsqueeze(-2)
    over_K = (c.kn * shares.minus).sum(-1, keepdim=True)                       # db; b db beside v_new
    if case.spec.beta == "given":
        db = over_K if keeps_r(form) else torch.where(c.b != 0, over_K / c.b, 0.0)
    else:
        over_V = (dv * y).sum(-1, keepdim=True)                               # b db; b^2 db beside v_new
        b_db = over_V / (1 if keeps_r(form) else c.b) if b_over == "V" else b * over_K
        db = b_db * torch.sigmoid(-inputs.beta[0].to(p.dtype)).unflatten(0, (-1, local)).mT.unsqueeze(-1)
    dqn, dkn, dg, dbeta = map(unchunk, (shares.dqn, shares.plus + b * shares.minus, dg2, db))
    dq, dk = (gates.l2norm_bwd(d, x[0].to(p.dtype)) for d, x in ((dqn, inputs.q), (dkn, inputs.k)))
    named = {"o": w.o, "ht": w.ht, "dq": dq, "dk": dk, "dv": w.dv, "dh0": w.dh0, "dbeta": dbeta.squeeze(-1)}
    if case.spec.gate != "given":
        A_log, dt_bias = parameters(case, p.dtype)
        bound = LOWER_BOUND if t.bounded else None
        dg, dA_log = gates.decay_bwd(dg, inputs.g[0].to(p.dtype), A_log, dt_bias, bound)
        named |= {"dA_log": dA_log.sum((0, 2)), "ddt_bias": dg.sum(0)}
    named["dg"] = dg
    stored = {n: p.bf16(x) if n in ("o", "dq", "dk", "dv", "dg", "dbeta") else x for n, x in named.items()}
    return {n: stored[n] for n in NAMES if n in stored}


def errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, list[float]]:
    """Norm of the error over norm, of each seed."""
    distances = {}
    for n, x in results.items():
        axis = 1 if n in ("o", "dq", "dk", "dv", "dg", "dbeta") else 0
        a, b = (y.reshape(x.shape).double().movedim(axis, 0).reshape(SEEDS, -1) for y in (x, exact[n]))
        distances[n] = ((a - b).norm(dim=1) / b.norm(dim=1)).nan_to_num(torch.inf).tolist()
    return distances


# ---------------------------------------------------------------------------------------------- cases


def drawn(changes: Callable[[Case], None] | None = None, **spec: object) -> Callable[[int], Case]:
    def draw(seed: int) -> Case:
        case = make_inputs(T=T, H=SEEDS * H, K=K, V=K, seed=seed, **spec)
        if changes is not None:
            changes(case)
        return case

    return draw


def draw_uniform(case: Case) -> None:
    random = torch.Generator().manual_seed(1)
    for n in ("q", "k", "v"):
        x = case.keywords[n]
        case.keywords[n] = torch.rand(x.shape, generator=random).to(x.dtype)


def equal_keys(b: float, jitter: float = 0.0) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        k, beta, most = case.keywords["k"], case.keywords["beta"], 2 if case.spec.beta == "2*sigmoid" else 1
        case.keywords["k"] = k[:, :1].expand_as(k).contiguous()
        logit = math.log(b / (most - b))
        case.keywords["beta"] = logit + jitter * beta

    return change


def saturate(case: Case) -> None:
    """All decays within 0.2% of the bound."""
    g, x = case.keywords["g"], case.keywords
    x["g"] = 6.5 + 0.125 * g
    x["A_log"].zero_()
    x["dt_bias"].zero_()


def reset(case: Case) -> None:
    """One token in 16 forgets all: of every channel, by -1000 or by -inf."""
    g = case.keywords["g"]
    kind = torch.randint(32, g.shape[:3], generator=torch.Generator().manual_seed(2))
    g[kind == 0] = -1000
    g[kind == 1] = -torch.inf


def zero_some_b(case: Case) -> None:
    beta = case.keywords["beta"]
    beta[torch.randint(4, beta.shape, generator=torch.Generator().manual_seed(3)) == 0] = 0


def louder(*changes: Callable[[Case], None]) -> Callable[[Case], None]:
    """Return a change that multiplies do and dht by 2^60, then makes the others."""

    def change(case: Case) -> None:
        for x in (case.do, case.dht):
            x.mul_(2.0**60)
        for other in changes:
            other(case)

    return change


CASES = {
    "slow": drawn(regime="slow"),
    "fast": drawn(regime="fast"),
    "slow, b to 2": drawn(regime="slow", beta="2*sigmoid"),
    "uniform [0, 1)": drawn(draw_uniform, regime="slow"),
    "equal keys, b 0.98": drawn(equal_keys(0.98), regime="slow"),
    "equal keys, b 1.9": drawn(equal_keys(1.9), regime="slow", beta="2*sigmoid"),
    "equal keys, b near 1.9": drawn(equal_keys(1.9, 0.25), regime="slow", beta="2*sigmoid"),
    "equal keys, b about 1": drawn(equal_keys(1.0, 1.0), regime="slow", beta="2*sigmoid"),
    "saturated": drawn(saturate, regime="slow"),
    "resets": drawn(reset, regime="slow", gate="given"),
    "b = 0 in 1 of 4": drawn(zero_some_b, regime="slow", beta="given"),
    "softplus, slow": drawn(regime="slow", gate="softplus"),
    "softplus, fast": drawn(regime="fast", gate="softplus"),
    "slow, 2^60": drawn(louder(), regime="slow"),
    "saturated, 2^60": drawn(louder(saturate), regime="slow"),
}
FORMS = ("R", "B", "T", "Tr", "XT", "XTr", "XR")
SHOWN = ("R", "T", "XT", "XR")


# ---------------------------------------------------------------------------------------------- tables

CHOSEN = "R"                                 # docs/decisions/backward_form.md
LOCALS = {                                   # in chunks of 32: what is printed, local rows, way, exact rows, b over
    "rescaled": (64, "rescaled", False, "V"),
    "whole anchors": (64, "whole anchors", False, "V"),
    "levels": (64, "levels", False, "V"),
    "pairs": (64, "pairs", False, "V"),
    "rescaled, rows not rounded": (64, "rescaled", True, "V"),
    "pairs, rows not rounded": (64, "pairs", True, "V"),
    "32 rows, rescaled": (32, "rescaled", False, "V"),
    "rescaled, b over K": (64, "rescaled", False, "K"),
    **{way: (64, way, False, "V") for way in ANY_GATE if way != "levels"},
}


def measured(name: str, forms: list[str], seed: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the errors of one case for each of the seeds that are drawn together, by table and row."""
    case = CASES[name](seed)
    exact = definition(case, torch.float64)
    all_errors = {
        f"chunks of {C}": {form: errors(results(form, case, C, KERNEL), exact) for form in forms} for C in (32, 64)
    }
    ways = WAYS if case.spec.gate == "bounded" else ANY_GATE
    all_errors["local part"] = {
        label: errors(results(CHOSEN, case, 32, KERNEL, *how), exact) for label, how in LOCALS.items() if how[1] in ways
    }
    return all_errors


def worst_if_exact(name: str, form: str) -> float:
    """Return the largest error for both sizes of chunks and every way if nothing is rounded and all is float64."""
    case = CASES[name](0)
    exact, ways = definition(case, torch.float64), WAYS if case.spec.gate == "bounded" else ANY_GATE
    all_errors = [errors(results(form, case, C, EXACT, way=way), exact) for C in (32, 64) for way in ways]
    return max(max(each) for e in all_errors for each in e.values())


def worst(errors: list[float]) -> float:
    return max(errors)


def rms(errors: list[float]) -> float:
    return math.sqrt(sum(x * x for x in errors) / len(errors))


def cell(error: float) -> str:
    """Return a table's cell, in thousandths."""
    return "inf" if math.isinf(error) else f"{1e3 * error:.2f}" if error < 1 else f"{error:.0e}"


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="one of them; all if left out")
    parser.add_argument("--form", action="append", choices=FORMS, help=f"{', '.join(SHOWN)} if left out")
    parser.add_argument("--draws", type=int, default=1, help=f"of {SEEDS} seeds each")
    parser.add_argument("--rms", action="store_true", help="over all seeds, instead of the worst")
    parser.add_argument("--exact", action="store_true", help="nothing is rounded: shows that the formulas are correct")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names, forms = args.case or list(CASES), args.form or list(SHOWN)
    if args.exact:
        rows = [[name, *(f"{worst_if_exact(name, form):.1e}" for form in forms)] for name in names]
        print("\n".join(table(rows, ["case", *forms])))
        return
    by_case = {}
    for name in names:
        by_case[name], *others = (measured(name, forms, seed) for seed in range(args.draws))
        for other in others:
            for kind, rows in other.items():
                for label, e in rows.items():
                    for n, more in e.items():
                        by_case[name][kind][label][n] += more
    errors_of = rms if args.rms else worst
    for kind in ("chunks of 32", "chunks of 64", "local part"):
        print(f"\n{kind}{f', of {CHOSEN} in chunks of 32' if kind == 'local part' else ''}")
        print("\n".join(table(
            [[name if i == 0 else "", label, *(cell(errors_of(e[n])) if n in e else "" for n in NAMES)]
             for name, kinds in by_case.items() for i, (label, e) in enumerate(kinds.get(kind, {}).items())],
            ["case", "", *NAMES], "ll" + "r" * len(NAMES))))
    common.write(args.json, by_case)


if __name__ == "__main__":
    main()
