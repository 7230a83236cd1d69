"""Shared by the launchers of several archs: memory for results, a kernel's launch, whole calls as stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kda.model.bundles import Grads, Outputs, Save
from kda.model.problem import Inputs, Problem
from ptxkit.compile.fetching import fetch_here
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.recipes import AnyRecipe

from .chunks import Chunks
from .tensors import chunks_of_a_row

Tensor = torch.Tensor


def states_between_chunks(p: Problem, x: Inputs) -> Tensor | None:
    """Allocate memory for the states that enter chunks, if they are requested."""
    return x.q.new_empty(p.B, chunks_of_a_row(p, x), *p.state_shape) if p.intermediate_states else None


def gate_numbers(p: Problem) -> dict[str, float]:
    """Return the numbers, beside `chunks`, with which kernels that make tiles are launched."""
    return dict(T=p.T, H=p.H, HV=p.HV, scale=p.scale, lower_bound=p.lower_bound or 0.0)


def walk_numbers(p: Problem, plan: Any) -> dict[str, float]:
    """Return the numbers with which kernels that walk over tiles are launched; a plan has chunks and segments."""
    return dict(T=p.T, chunks=plan.chunks, segments=plan.segments, segment=plan.segment, HV=p.HV)


def kernels(recipe: Callable[..., AnyRecipe]) -> Callable[..., Kernel]:
    """Return the function from a configuration, and a target if `recipe` needs one, to its kernel: built, or of the
    store."""
    return functools.cache(lambda *arguments: fetch_here(recipe(*arguments)))


def forward_as_stage(
    forward: Callable[..., Outputs], save: Save, p: Problem, offsets: list[int] | None,
    tensors: Mapping[str, Tensor | None],
) -> dict[str, Tensor | None]:
    """A forward in one piece with all its results, on tensors in chunks: rows (NC, heads, C, D),
    states (N, HV, K, V).  `p` is that of the backend's `call_of_stage`."""
    table = chunks_of(p, offsets, tensors)
    out = forward(p, inputs_of(p, table, offsets, tensors), save)
    saved = {} if out.saved is None else {n: table.chunks(x) for n, x in out.saved._asdict().items()}
    return {"o": table.chunks(out.o.flatten(0, 1)), "ht": out.final_state, "h": out.h.flatten(0, 1), **saved}  # type: ignore[union-attr]


def backward_as_stage(
    backward: Callable[..., Grads], p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """A backward for which nothing was kept, on tensors in the layout of `forward_as_stage`."""
    table = chunks_of(p, offsets, tensors)
    do = rows_of(p, table, tensors["do"], p.dtype)  # type: ignore[arg-type]
    grads = backward(p, inputs_of(p, table, offsets, tensors), do, tensors["dht"])._asdict()
    rows = {n: table.chunks(grads[n].flatten(0, 1)) for n in ("dq", "dk", "dv", "dg")}
    bias = grads["ddt_bias"]
    return grads | rows | {
        "dbeta": table.chunks(grads["dbeta"].flatten(0, 1).unsqueeze(-1)),
        "ddt_bias": None if bias is None else bias.view(p.HV, p.K),
    }


def chunks_of(p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]) -> Chunks:
    return Chunks(p, offsets, next(x.device for x in tensors.values() if x is not None))


def inputs_of(
    p: Problem, table: Chunks, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> Inputs:
    """The inputs of a call, from tensors in chunks."""
    types = dict.fromkeys(("q", "k", "v"), p.dtype) | {"g": p.g_dtype, "beta": p.beta_dtype}
    rows = {n: rows_of(p, table, tensors[n], dtype) for n, dtype in types.items()}  # type: ignore[arg-type]
    for name in ("g", "beta") if p.gate_per_head else ("beta",):
        rows[name] = rows[name].squeeze(-1)
    flat = {n: None if tensors[n] is None else tensors[n].flatten() for n in ("A_log", "dt_bias")}  # type: ignore[union-attr]
    h0 = None if tensors["h0"] is None else tensors["h0"].to(getattr(torch, p.state_dtype))  # type: ignore[arg-type]
    return Inputs(
        **rows, **flat, initial_state=h0,
        cu_seqlens=None if offsets is None else torch.tensor(offsets, device=table.positions.device),
    )


def rows_of(p: Problem, table: Chunks, x: Tensor, dtype: str) -> Tensor:
    """(B, T, heads, D), contiguous."""
    rows = table.rows(x).to(getattr(torch, dtype))
    return rows.view(p.B, p.T, *rows.shape[1:])
