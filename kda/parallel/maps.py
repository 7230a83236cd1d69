"""How a piece of a sequence maps the state that enters it, as `bundles.SegmentSummary`: S -> M S + added.

A backend that declares `maps` computes them with its own kernels. For any other backend, two ordinary forwards suffice,
without a backward: from the identity with v = 0 the final state is M, and row t of o is y_t = scale M_t^T q_t, where
M_t maps the state over the tokens up to t. So the gradient of the state that enters is y^T do from the outputs plus
M^T dS from the state that leaves.
"""

from __future__ import annotations

import dataclasses

import torch

from kda.calls.autograd import autocast_off
from kda.model.bundles import Save, SegmentSummary
from kda.model.gates import wide_dtype
from kda.model.problem import Inputs, Problem, name_of_dtype
from kda.routing.dispatch import capability, choose, launcher, route

Tensor = torch.Tensor

ROWS = 1024                                  # rows of y and do that are multiplied at once


def problem_of_piece(p: Problem, T: int, state: bool) -> Problem:
    """A single sequence of T tokens whose final state is requested."""
    return dataclasses.replace(
        p, direction="forward", T=T, N=1, packed=False, final_state=True, intermediate_states=False,
        disable_recompute=False, state_v_first=False, state_dtype=name_of_dtype(wide_of(p)) if state else None,
    )


def piece(x: Inputs, begin: int, end: int, h0: Tensor | None) -> Inputs:
    """Tokens begin:end as a separate call; h0 (1, HV, K, V)."""
    rows = {name: getattr(x, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta")}
    return x._replace(**rows, initial_state=h0, cu_seqlens=None, cu_seqlens_cpu=None)


def segment_map(p: Problem, x: Inputs, requested: str, transition: bool) -> SegmentSummary:
    """The map of one sequence (B = 1) that is not packed; with x.initial_state, `added` is the final state.

    Without `transition` M is zero, because the caller does not need it.
    """
    p = problem_of_piece(p, x.q.shape[1], x.initial_state is not None)
    if p.T == 0:
        eye = torch.eye(p.K, dtype=wide_of(p), device=x.q.device).expand(1, p.HV, p.K, p.K)
        return SegmentSummary(eye, _zeros(p, x, p.V) if x.initial_state is None else x.initial_state)
    backend = choose(p, requested).backend
    with autocast_off(x.q):
        if "forward" in capability(backend).maps:  # type: ignore[arg-type]
            return launcher(backend).segment_map(p, x, transition)
        added = launcher(backend).forward(p, x, Save.NOTHING).final_state
        M = _from_identity(p, x._replace(q=x.k), requested)[1] if transition else _zeros(p, x, p.K)
    return SegmentSummary(M, added)  # type: ignore[arg-type]


def segment_map_bwd(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, requested: str) -> Tensor:
    """The gradient (1, HV, K, V) of the state that enters the piece, for do (1, T, HV, V) and `dht` (1, HV, K, V).

    The piece maps a gradient dS of its final state to M^T dS + this, with the M of `segment_map`.
    """
    p = dataclasses.replace(problem_of_piece(p, x.q.shape[1], state=True), direction="backward")
    if p.T == 0:
        return _zeros(p, x, p.V) if dht is None else dht
    backend = choose(p, requested).backend                                         # the backend of the backward
    with autocast_off(x.q):
        if "backward" in capability(backend).maps:  # type: ignore[arg-type]
            return launcher(backend).segment_map_bwd(p, x, do, dht)
        y, M = _from_identity(p, x, requested)
        added = _zeros(p, x, p.V)
        exact = torch.float32 if p.dtype in ("bfloat16", "float16") else torch.float64
        for i in range(0, p.T, ROWS):
            rows, gradients = (t[0, i:i + ROWS].to(exact).transpose(0, 1) for t in (y, do))
            added += (rows.mT @ gradients).to(added.dtype)
    return added if dht is None else fold([SegmentSummary(M.mT, added)], dht)


def how(p: Problem, requested: str) -> str:
    """Say in one line for people how the maps of such a call are computed."""
    p = problem_of_piece(p, p.T, state=False)
    backend, mirror = (choice.backend for choice in route(p, requested, training=True).choices)
    again = choose(_identity(p), requested).backend
    ahead = f"kernels of {backend}" if backend != "reference" else "stages of the reference"
    back = ahead if mirror == backend else f"kernels of {mirror}"
    if "forward" not in capability(backend).maps:  # type: ignore[arg-type]
        ahead = f"a forward of {backend} and one of {again} from the identity"
    if "backward" not in capability(mirror).maps:  # type: ignore[arg-type]
        back = f"a forward of {again} from the identity"
    return f"the maps of pieces of sequences are computed by {ahead}, in the backward by {back}"


def fold(maps: list[SegmentSummary], S: Tensor) -> Tensor:
    """S (1, HV, K, V) after all pieces, in order. In float64, which torch's flags do not affect."""
    state = S.double()
    for m in maps:
        state = m.added.double() + m.M.double() @ state
    return state.to(S.dtype)


def compose(later: SegmentSummary, earlier: SegmentSummary) -> SegmentSummary:
    """The composition of both maps, in float64 as in `fold`."""
    M = later.M.double()
    return SegmentSummary((M @ earlier.M.double()).to(later.M.dtype), fold([later], earlier.added))


def _from_identity(p: Problem, x: Inputs, requested: str) -> tuple[Tensor, Tensor]:
    """y (1, T, HV, K) and M (1, HV, K, K)."""
    p = _identity(p)
    eye = torch.eye(p.K, dtype=wide_of(p), device=x.q.device).expand(1, p.HV, p.K, p.K).contiguous()
    x = x._replace(v=x.v.new_zeros(1, p.T, p.HV, p.K), initial_state=eye)
    out = launcher(choose(p, requested).backend).forward(p, x, Save.NOTHING)
    return out.o, out.final_state  # type: ignore[return-value]


def _identity(p: Problem) -> Problem:
    return dataclasses.replace(p, direction="forward", V=p.K, state_dtype=name_of_dtype(wide_of(p)))


def _zeros(p: Problem, x: Inputs, columns: int) -> Tensor:
    return x.q.new_zeros(1, p.HV, p.K, columns, dtype=wide_of(p))


def wide_of(p: Problem) -> torch.dtype:
    return wide_dtype(getattr(torch, p.dtype))
