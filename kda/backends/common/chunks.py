"""Converts between the tensors of a call and those of `kda.model.stages`."""

from __future__ import annotations

import torch

from kda.model.problem import Problem
from kda.model.stages import SHAPES

Tensor = torch.Tensor


class Chunks:
    """Rows of tokens as chunks (NC, heads, C, D), zero in rows of no token, and back."""

    def __init__(self, p: Problem, offsets: list[int] | None, device: torch.device):
        ends = torch.tensor(offsets if offsets is not None else [b * p.T for b in range(p.B + 1)], device="cpu")
        starts, lengths = ends[:-1], ends.diff()
        chunks = (lengths + p.C - 1) // p.C
        self.C, self.NC, self.tokens = p.C, int(chunks.sum()), p.B * p.T
        shift = (chunks.cumsum(0) - chunks) * p.C - starts
        self.positions = (torch.arange(int(ends[-1]), device="cpu") + shift.repeat_interleave(lengths)).to(device)

    def rows(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.tokens, x.shape[1], x.shape[3])
        out[: len(self.positions)] = x.transpose(1, 2).flatten(0, 1)[self.positions]
        return out

    def chunks(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.NC * self.C, *x.shape[1:])
        out[self.positions] = x[: len(self.positions)]
        return out.unflatten(0, (self.NC, self.C)).transpose(1, 2).contiguous()


def has_rows(name: str) -> bool:
    return SHAPES[name].startswith("(C")
