"""The positions of a problem's tokens in chunks.  Separate code, so that wrong indices in a backend are noticed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kda.model.problem import Problem

Tensor = torch.Tensor


class Piece(NamedTuple):
    """One chunk: rows of it are the tokens [start, start + rows) of the flattened batch."""

    seq: int
    chunk: int                               # its number in its sequence
    start: int
    rows: int


class ChunkLayout:
    """Tokens (tokens, heads, D) as chunks (NC, heads, C, D), sequence after sequence, and back."""

    def __init__(self, bounds: list[tuple[int, int]], tokens: int, C: int):
        self.bounds, self.tokens, self.C = bounds, tokens, C
        self.pieces = [
            Piece(n, c, start + c * C, min(C, end - start - c * C))
            for n, (start, end) in enumerate(bounds)
            for c in range(-(-(end - start) // C))
        ]
        self.chunks_of = [[i for i, piece in enumerate(self.pieces) if piece.seq == n] for n in range(len(bounds))]

    @classmethod
    def from_problem(cls, p: Problem, offsets: list[int] | None) -> ChunkLayout:
        ends = offsets if offsets is not None else [b * p.T for b in range(p.B + 1)]
        return cls(list(zip(ends, ends[1:])), p.B * p.T, p.C)

    @property
    def NC(self) -> int:
        return len(self.pieces)

    @property
    def valid(self) -> Tensor:
        """Return (NC, 1, C, 1), False in rows past the end of a sequence."""
        rows = torch.tensor([piece.rows for piece in self.pieces]).view(-1, 1, 1, 1)
        return torch.arange(self.C).view(1, 1, -1, 1) < rows

    def chunk(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.NC, x.shape[1], self.C, x.shape[2])
        for i, piece in enumerate(self.pieces):
            out[i, :, : piece.rows] = x[piece.start : piece.start + piece.rows].transpose(0, 1)
        return out

    def unchunk(self, chunks: Tensor) -> Tensor:
        out = chunks.new_zeros(self.tokens, chunks.shape[1], chunks.shape[3])
        for i, piece in enumerate(self.pieces):
            out[piece.start : piece.start + piece.rows] = chunks[i, :, : piece.rows].transpose(0, 1)
        return out
