"""Positions of sequences: token rows to chunks and back, and the order of chunks.

A batch of B rows of T tokens is the packed case with N = B equal lengths; below there is only one token axis.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Ragged:
    """Chunks of C rows for sequences [starts[n], starts[n] + lengths[n]); the last chunk of a sequence may be short."""

    def __init__(self, starts: list[int], lengths: list[int], tokens: int, C: int, device: torch.device):
        self.starts, self.lengths, self.tokens, self.C, self.device = starts, lengths, tokens, C, device
        self.N = len(lengths)
        self.counts = [-(-n // C) for n in lengths]                           # chunks of each sequence
        *self.first, self.NC = itertools.accumulate(self.counts, initial=0)   # its first chunk; chunks in all
        # Every row of every chunk is a token, in order: chunking is then a view.
        self.dense = self.NC * C == tokens == sum(lengths)

    @functools.cached_property
    def valid(self) -> torch.Tensor | None:
        """Return (NC, 1, C, 1), False in the padding of short chunks; None when there is none."""
        if sum(self.lengths) == self.NC * self.C:
            return None
        rows = torch.arange(self.C, device=self.device)
        left = [n - c * self.C for n, count in zip(self.lengths, self.counts) for c in range(count)]
        return (rows < torch.tensor(left, device=self.device)[:, None]).view(self.NC, 1, self.C, 1)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """Return (NC * C,) the token of each row; padding points at token 0 and is masked."""
        first = [s + c * self.C for s, count in zip(self.starts, self.counts) for c in range(count)]
        begins = torch.tensor(first, dtype=torch.long, device=self.device)
        rows = begins[:, None] + torch.arange(self.C, device=self.device)
        if self.valid is not None:
            rows = rows.masked_fill(~self.valid.view(self.NC, self.C), 0)
        return rows.flatten()

    def chunk(self, x: torch.Tensor) -> torch.Tensor:
        """Turn (tokens, heads, D) into (NC, heads, C, D), zero in the padding."""
        if self.dense:
            return x.unflatten(0, (self.NC, self.C)).transpose(1, 2).contiguous()
        chunks = x.index_select(0, self.rows).unflatten(0, (self.NC, self.C)).transpose(1, 2).contiguous()
        return chunks if self.valid is None else chunks.masked_fill_(~self.valid, 0)

    def unchunk(self, chunks: torch.Tensor) -> torch.Tensor:
        """Turn (NC, heads, C, D) into (tokens, heads, D), zero in tokens outside every sequence."""
        x = chunks.transpose(1, 2).flatten(0, 1)
        if self.dense:
            return x
        out = chunks.new_zeros(self.tokens, *x.shape[1:])
        if self.valid is None:
            return out.index_copy_(0, self.rows, x)
        valid = self.valid.flatten()
        return out.index_copy_(0, self.rows[valid], x[valid])

    @functools.cached_property
    def _waves(self) -> list[tuple[slice | torch.Tensor, slice | torch.Tensor]]:
        longest = max(self.counts, default=0)
        if self.N == 1:
            return [(slice(0, 1), slice(c, c + 1)) for c in range(longest)]
        waves: list[tuple[slice | torch.Tensor, slice | torch.Tensor]] = []
        for c in range(longest):
            alive = [n for n in range(self.N) if self.counts[n] > c]
            chunks = torch.tensor([self.first[n] + c for n in alive], device=self.device)
            waves.append((slice(None) if len(alive) == self.N else torch.tensor(alive, device=self.device), chunks))
        return waves

    def waves(self, reverse: bool = False) -> Iterator[tuple[slice | torch.Tensor, slice | torch.Tensor]]:
        """Return (sequences, chunks): the c-th chunk of every sequence that has one, for c in turn."""
        return reversed(self._waves) if reverse else iter(self._waves)

    def slabs(self, chunks: int, apart: bool = False) -> Iterator[Slab]:
        """Cuts into runs of at most `chunks` chunks, in order of time; sequences continue from one slab to the next.

        With `apart` no slab has two sequences, so a sequence has the same slabs alone and packed.
        """
        ends = [first + count for first, count in zip(self.first, self.counts)]
        runs = list(zip(self.first, ends)) if apart else [(0, self.NC)]
        for lo, hi in ((lo, min(lo + chunks, end)) for begin, end in runs for lo in range(begin, end, chunks)):
            pieces, n = [], bisect.bisect_right(ends, lo)
            while n < self.N and self.first[n] < hi:
                if self.counts[n]:
                    begin = max(lo - self.first[n], 0) * self.C
                    end = min((hi - self.first[n]) * self.C, self.lengths[n])
                    pieces.append((n, self.starts[n] + begin, end - begin))
                n += 1
            _, starts, lengths = map(list, zip(*pieces))
            tokens = slice(starts[0], starts[-1] + lengths[-1])
            table = Ragged([s - tokens.start for s in starts], lengths, tokens.stop - tokens.start, self.C, self.device)
            yield Slab(table, torch.tensor([n for n, _, _ in pieces], device=self.device), slice(lo, hi), tokens)


class Slab(NamedTuple):
    """A run of chunks, as a table of its own."""

    table: Ragged                            # its sequences are pieces; rows count from the slab's first token
    sequences: torch.Tensor                  # the sequence of each piece
    chunks: slice
    tokens: slice


def ragged(shape: tuple[int, int], cu_seqlens: list[int] | None, C: int, device: torch.device) -> Ragged:
    """Return the table of (B, T) rows, or of one row packed by `cu_seqlens`."""
    B, T = shape
    if cu_seqlens is None:
        return Ragged([b * T for b in range(B)], [T] * B, B * T, C, device)
    return Ragged(cu_seqlens[:-1], [e - s for s, e in zip(cu_seqlens, cu_seqlens[1:])], T, C, device)
