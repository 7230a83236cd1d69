"""The sequence of each token: in rows of T tokens, packed sequences, or a padded batch.

Nothing here waits for a GPU, and shapes follow from those of the arguments, so everything can be captured and compiled.
A padded batch becomes one row: real tokens first, in order, then the padding, which is past the last offset and outside
every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda.model.transforms import untransformed

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sequences:
    """N sequences in rows (B, T)."""

    N: int
    cu_seqlens: Tensor | None = None         # (N + 1,) offsets in the only row; None: each row is a sequence
    cu_seqlens_cpu: Tensor | None = None
    starts: Tensor | None = None             # (T,) int32: the first token of each token's sequence; T: none
    numbers: Tensor | None = None            # (T,) int32: the number of that sequence

    @classmethod
    def of_rows(cls, B: int) -> Sequences:
        return cls(B)

    @classmethod
    def of_offsets(cls, cu_seqlens: Tensor, T: int, device: torch.device, cpu: Tensor | None = None) -> Sequences:
        """cu_seqlens (N + 1,) in a row of T tokens."""
        offsets, N = cu_seqlens.to(device, non_blocking=True), cu_seqlens.numel() - 1
        t = torch.arange(T, device=device, dtype=offsets.dtype)
        numbers = torch.searchsorted(offsets, t, right=True) - 1               # the last sequence that starts up to t
        starts = torch.where(t < offsets[-1], offsets[numbers], T)
        numbers = numbers.clamp(0, max(N - 1, 0))
        return cls(N, offsets, cpu, starts.to(torch.int32), numbers.to(torch.int32))

    def cleared(self, x: Tensor) -> Tensor:
        """x (B, T, D) with zeros outside every sequence, where memory may hold anything."""
        return x if self.starts is None else x.masked_fill((self.starts == x.shape[1])[:, None], 0)


class Permuted(torch.autograd.Function):
    """Rows of x (T, ..) in another order, each once; the backward permutes them back instead of summing."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, dy: Tensor):
        order, inverse = ctx.saved_tensors
        return Permuted.apply(dy, inverse, order), None, None


def permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The same; torch.func and forward-mode AD take the operation of torch."""
    return Permuted.apply(x, order, inverse) if untransformed() else x.index_select(0, order)


@dataclass(frozen=True)
class Padded:
    """A batch (B, T, ..) with a mask, as one row of packed sequences (1, B * T, ..) and back."""

    sequences: Sequences
    order: Tensor                            # (B * T,): the position in the batch of each token of the row
    inverse: Tensor

    @classmethod
    def of(cls, mask: Tensor, device: torch.device) -> Padded:
        """mask (B, T): true or 1 where a token is real, at any position."""
        real = mask.to(device, non_blocking=True).bool()
        offsets, row = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)), real.flatten()
        order = torch.argsort((~row).to(torch.uint8), stable=True)
        t, count = torch.arange(row.numel(), device=device), row.cumsum(0)     # real tokens up to each
        inverse = torch.where(row, count - 1, offsets[-1] + t - count)         # scatter_ has no rule of vmap
        return cls(Sequences.of_offsets(offsets, real.numel(), device), order, inverse)

    def packed(self, x: Tensor) -> Tensor:
        """(B, T, D) to (1, B * T, D)."""
        return permuted(x.flatten(0, 1), self.order, self.inverse).unsqueeze(0)

    def padded(self, x: Tensor, B: int) -> Tensor:
        """(1, B * T, ..) to (B, T, ..)."""
        return permuted(x.squeeze(0), self.inverse, self.order).unflatten(0, (B, -1))
