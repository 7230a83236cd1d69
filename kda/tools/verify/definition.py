"""The definition of a whole call in one float dtype: `recurrent` token by token, and autograd through it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kda.backends.reference.ragged import Ragged
from kda.backends.reference.recurrent import recurrent
from kda.model.gates import wide_dtype
from kda.model.stages import BACKWARD, FORWARD

from .budget import Budget, Rounding, shaken, shakes
from .cases import Case
from .literal import chain, l2norm, log_decay, one_thread, step_size

Tensor = torch.Tensor

GRADIENTS = {f"d{name}": name for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")} | {"dh0": "initial_state"}
SEGMENT = 32                                 # tokens whose states autograd holds at a time


def leaves_of(keywords: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of floating point, as leaves that autograd follows."""
    return {name: x.detach().requires_grad_() for name, x in keywords.items()
            if isinstance(x, Tensor) and x.is_floating_point()}


def by_gradient(leaves: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return those that are there, by the names of their gradients."""
    return {name: x for name, leaf in GRADIENTS.items() if (x := leaves.get(leaf)) is not None}


def as_given(x: Tensor) -> Tensor:
    return x


@one_thread()
def definition(
    case: Case, dtype: torch.dtype, backward: bool = True, given: Callable[[Tensor], Tensor] = as_given
) -> dict[str, Tensor]:
    """Return o, ht and, by name, the gradient of every tensor that the case has, on the CPU; `given` changes the
    inputs."""
    case, p = case.map(lambda x: x.detach().cpu()), case.problem()
    leaves = {
        name: given(x.to(dtype)).clone().requires_grad_(backward)
        for name, x in case.inputs._asdict().items()
        if x is not None and name in GRADIENTS.values()
    }
    offsets = case.spec.offsets if p.packed else None
    ends = [b * p.T for b in range(p.B + 1)] if offsets is None else offsets
    with torch.set_grad_enabled(backward):
        rows = {name: leaves[name].flatten(0, 1)[: ends[-1]] for name in ("q", "k", "v", "g", "beta")}
        q, k = (l2norm(rows[n]) if p.qk_l2norm else rows[n] for n in ("q", "k"))
        head = torch.arange(p.HV) // (p.HV // p.H)
        gate = {"A_log": (p.HV, 1), "dt_bias": (p.HV, p.gate_width)}
        A_log, dt_bias = (leaves[name].view(shape) if name in leaves else None for name, shape in gate.items())
        g = rows["g"].unsqueeze(-1) if p.gate_per_head else rows["g"]
        decay = log_decay(p, g, A_log, dt_bias)
        tokens = (q[:, head], k[:, head], rows["v"], decay, step_size(p, rows["beta"]).unsqueeze(-1))
        S = leaves["initial_state"] if "initial_state" in leaves else torch.zeros(p.N, p.HV, p.K, p.V, dtype=dtype)
        outputs, states = [], []
        for n, (start, end) in enumerate(zip(ends, ends[1:])):
            s = S[n : n + 1]
            for first in range(start, end, SEGMENT):
                o, s = checkpoint(
                    _segment, p.scale, s, *(x[first : min(first + SEGMENT, end)] for x in tokens), use_reentrant=False
                )
                outputs.append(o)
            states.append(s)
        o = torch.cat(outputs) if outputs else rows["v"]
        ht = torch.cat(states) if states else S
    tail = o.new_zeros(p.B * p.T - ends[-1], p.HV, p.V)
    results = {"o": torch.cat([o, tail]).detach().view(p.B, p.T, p.HV, p.V), "ht": ht.detach()}
    if not backward:
        return results
    cotangents = ((o, case.do.to(dtype).flatten(0, 1)[: ends[-1]]), (ht, case.dht.to(dtype)))
    ends_at, begins = zip(*((x, dx) for x, dx in cotangents if x.requires_grad))
    grads = torch.autograd.grad(ends_at, list(leaves.values()), begins, allow_unused=True, materialize_grads=True)
    return results | by_gradient(dict(zip(leaves, grads)))


def _segment(scale: float, s: Tensor, *tokens: Tensor) -> tuple[Tensor, Tensor]:
    n = tokens[0].shape[0]
    q, k, v, g, beta = tokens
    return recurrent(q, k, v, g, beta, s, scale, Ragged([0], [n], n, 1, s.device))


def from_stages(case: Case, env: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the results of a call, from what the stages wrote."""
    layout, inputs = case.layout, case.inputs
    results: dict[str, Tensor] = {"ht": env["ht"]}
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        if name in env:
            like = inputs.v if name == "o" else getattr(inputs, GRADIENTS[name])
            results[name] = layout.unchunk(env[name]).view(like.shape)
    for name in ("dA_log", "ddt_bias", "dh0"):
        like = getattr(inputs, GRADIENTS[name])
        if env.get(name) is not None and like is not None:
            results[name] = env[name].reshape(like.shape)
    return results


def stored_as(case: Case, name: str) -> torch.dtype:
    """Return the dtype of a result."""
    if name == "ht":
        return wide_dtype(case.inputs.q.dtype)
    return case.inputs.q.dtype if name == "o" else getattr(case.inputs, GRADIENTS[name]).dtype


def summed(case: Case, name: str) -> int:
    """Return how many terms are in the sums behind one element of a tensor: over channels, and tokens of a chunk."""
    p = case.problem()
    return (p.K + p.V + p.C) * (p.B * p.T if name in ("dA_log", "ddt_bias") else 1)


def shakes_of(case: Case, rounding: Rounding) -> range:
    return shakes(case.inputs.g.numel(), coarse=bool(rounding.stored))


def budgets(
    case: Case, rounding: Rounding, backward: bool = True, exact: Mapping[str, Tensor] | None = None
) -> dict[str, Budget]:
    """Return the budget of every result of the call; `exact` are the results in float64, if they are known already."""
    exact = exact or definition(case, torch.float64, backward)
    apart = backward and rounding.gradients is not None
    of_outputs = _roundings(case, rounding, backward and not apart)
    of_gradients = _roundings(case, rounding.of_gradients, backward) if apart else of_outputs
    roundings = {name: of_gradients if name in GRADIENTS else of_outputs for name in exact}
    return {
        name: Budget.of(x, *(r[name].to(stored_as(case, name)) for r in roundings[name]),
                        compute=rounding.compute, stored=stored_as(case, name), summed=summed(case, name))
        for name, x in exact.items()
    }


def _roundings(case: Case, rounding: Rounding, backward: bool) -> list[dict[str, Tensor]]:
    """Return the results of the call with independent roundings."""
    first, *others = shakes_of(case, rounding)
    if rounding.stored:
        return [_of_stages(case, rounding, backward, shake) for shake in (None, first, *others)]
    given = functools.partial(shaken, shake=first)
    rounded = [definition(case, rounding.compute, backward, x) for x in (as_given, given)]
    return rounded + [_of_stages(case, rounding, backward, shake) for shake in (None, *others)]


def _of_stages(case: Case, rounding: Rounding, backward: bool, shake: int | None) -> dict[str, Tensor]:
    """Return the call with the roundings of its stages: chunks of nearly parallel keys lose more accuracy than
    tokens."""
    names = [stage.name for stage in FORWARD + (BACKWARD if backward else ())]
    operands = {n: dtype for n, dtype in rounding.stored.items() if n != "o" and n not in GRADIENTS}
    rounding = rounding._replace(shake=shake, stored=operands)               # the caller rounds results
    given = as_given if shake is None else functools.partial(shaken, shake=shake)
    tensors = {n: None if x is None else given(x) for n, x in case.stage_tensors(rounding.compute).items()}
    return from_stages(case, chain(names, case.problem(), case.layout, tensors, rounding.compute, rounding))
