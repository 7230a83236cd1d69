"""Between tensors of a call and those of `kda.stages`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kda.problem import Inputs, Problem
from kda.stages import SHAPES

Tensor = torch.Tensor


class Chunks:
    """Rows of tokens as chunks (NC, heads, C, D), zero in rows of no token, and back."""

    def __init__(self, p: Problem, offsets: list[int] | None, device: torch.device):
        ends = torch.tensor(offsets if offsets is not None else [b * p.T for b in range(p.B + 1)])
        starts, lengths = ends[:-1], ends.diff()
        chunks = (lengths + p.C - 1) // p.C
        self.C, self.NC, self.tokens = p.C, int(chunks.sum()), p.B * p.T
        shift = (chunks.cumsum(0) - chunks) * p.C - starts
        self.at = (torch.arange(int(ends[-1])) + shift.repeat_interleave(lengths)).to(device)

    def rows(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.tokens, x.shape[1], x.shape[3])
        out[: len(self.at)] = x.transpose(1, 2).flatten(0, 1)[self.at]
        return out

    def chunks(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.NC * self.C, *x.shape[1:])
        out[self.at] = x[: len(self.at)]
        return out.unflatten(0, (self.NC, self.C)).transpose(1, 2).contiguous()


def whole_call(
    p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> tuple[Problem, Inputs, Chunks]:
    """Of a stage that is a forward in one piece: the call that asks for all its results.  Tensors lie in chunks: rows
    (NC, heads, C, D), states (N, HV, K, V)."""
    p = dataclasses.replace(
        p, final_state=True, intermediate_states=True, state_v_first=False, state_dtype=p.state_dtype or "float32",
        packed=offsets is not None,
    )  # fmt: skip
    device = next(x.device for x in tensors.values() if x is not None)
    table = Chunks(p, offsets, device)
    types = dict.fromkeys(("q", "k", "v"), p.dtype) | {"g": p.g_dtype, "beta": p.beta_dtype}
    rows = {n: table.rows(tensors[n]).to(getattr(torch, dtype)) for n, dtype in types.items()}
    rows = {n: x.view(p.B, p.T, *(x.shape[1:] if n != "beta" else x.shape[1:2])) for n, x in rows.items()}
    flat = {n: None if tensors[n] is None else tensors[n].flatten() for n in ("A_log", "dt_bias")}
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
    h0 = tensors["h0"].to(getattr(torch, p.state_dtype))
    return p, Inputs(**rows, **flat, initial_state=h0, cu_seqlens=cu_seqlens), table


def has_rows(name: str) -> bool:
    return SHAPES[name].startswith("(C")
