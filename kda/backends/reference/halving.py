"""Products of rows of one chunk under their decay, without an exponent above zero and without a difference of sums.

  A[i, j] = sum_K x_i y_j 2^(g2_(j+1) + ... + g2_i)        i > j; g2 is the log2 decay of a token, <= 0

Cut a block of rows in halves: for i in the second half and j in the first, the decay is that from j to the cut times
that from the cut to i, so this quarter of A is one matrix product.  Then the halves are cut in turn.  The walk
starts from single rows.  x carries the decay from its block's start, including its own row, and y that to its block's
end; merging two blocks multiplies one half of each by the other block's total decay.  Every factor is in [0, 1] and
each exponential is computed once; any gate works, including -inf.  The inverse of I + A is computed the same way.

Tensors are (..., C, K) and (..., C, C); C is a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

Tensor = torch.Tensor


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second half of each block of 2*size rows: C becomes (C / 2size, size), views."""
    return x.unflatten(-2, (-1, 2, size)).unbind(-3)


def _lower(A: Tensor, size: int) -> Tensor:
    """Return a view (.., C / 2size, size, size): the lower left quarters of the diagonal blocks of 2*size rows."""
    n = A.shape[-1] // (2 * size)
    blocks = A.unflatten(-1, (n, 2, size)).unflatten(-4, (n, 2, size))        # (..., n, 2, size, n, 2, size)
    return blocks.select(-5, 1).select(-2, 0).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _sizes(C: int) -> list[int]:
    return [1 << i for i in range(C.bit_length() - 1)]


def _cuts(xs: Sequence[Tensor], y: Tensor, total: Tensor) -> Iterator[tuple[int, list[Tensor], Tensor]]:
    """Yield (rows of a half, second half of each x, first half of y) for blocks of 2, 4, .. C rows; x and y change in
    place.

    At the start x carries the decay of its own row, y none, and `total` is the decay of each row.
    """
    for size in _sizes(y.shape[-2]):
        x1s, y0 = [_halves(x, size)[1] for x in xs], _halves(y, size)[0]
        yield size, x1s, y0
        total0, total1 = total.unflatten(-2, (-1, 2)).unsqueeze(-2).unbind(-3)
        for x1 in x1s:
            x1 *= total0
        y0 *= total1
        total = (total0 * total1).squeeze(-2)


def _of_rows(g2: Tensor) -> Tensor:
    """Return the decay of each row, rounded once from float64: a chunk multiplies up to C of them, and an exp2 that
    is an ulp too small each time would be C ulps too small in the end."""
    return g2.double().exp2().to(g2.dtype)


def decays(g2: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2^gc and 2^(gc_last - gc)."""
    row = _of_rows(g2)
    before, after = row.clone(), torch.ones_like(row)
    for _ in _cuts([before], after, row):
        pass
    return before, after


def decayed_products(xs: Sequence[Tensor], y: Tensor, g2: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return each x's A, zero for i <= j, and the walk's final operands: each x 2^gc, and y 2^(gc_last - gc)."""
    row = _of_rows(g2)
    xs, y = [x * row for x in xs], y.clone()
    As = [y.new_zeros(*y.shape[:-1], y.shape[-2]) for _ in xs]
    for size, x1s, y0 in _cuts(xs, y, row):
        for A, x1 in zip(As, x1s):
            _lower(A, size).copy_(x1 @ y0.mT)
    return As, xs, y


def decayed_products_bwd(
    dAs: Sequence[Tensor], xs: Sequence[Tensor], y: Tensor, g2: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the gradients of each x, of y, and of g2 / log2(e).  Only i > j of each dA is read."""
    dxs, dy = [torch.zeros_like(x) for x in xs], torch.zeros_like(y)
    row = _of_rows(g2)
    before, after = row.clone(), torch.ones_like(row)
    exponents = []                                                            # gradients of log(to_cut), log(from_cut)
    for size, (from_cut,), to_cut in _cuts([before], after, row):
        y0, dy0, d_from_cut = _halves(y, size)[0], torch.zeros_like(to_cut), torch.zeros_like(from_cut)
        for dA, x, dx in zip(dAs, xs, dxs):
            x1, dA10 = _halves(x, size)[1], _lower(dA, size)
            dx1 = (dA10 @ (y0 * to_cut)).mul_(from_cut)
            dy0 += dA10.mT @ (x1 * from_cut)
            d_from_cut += dx1 * x1
            _halves(dx, size)[1].add_(dx1)
        dy0 *= to_cut
        _halves(dy, size)[0].add_(dy0)
        exponents.append((size, dy0.mul_(y0), d_from_cut))
    d_before, d_after = torch.zeros_like(g2), torch.zeros_like(g2)
    for size, d_to_cut, d_from_cut in reversed(exponents):                    # undo _cuts
        d_before0, d_before1 = _halves(d_before, size)
        d_after0, _ = _halves(d_after, size)
        d_before0[..., -1:, :] += d_before1.sum(-2, keepdim=True)
        d_before1[..., -1:, :] += d_after0.sum(-2, keepdim=True)
        d_before1 += d_from_cut
        d_after0 += d_to_cut
    return dxs, dy, d_before


def inverse(A: Tensor) -> Tensor:
    """Return (I + A)^-1 of a strictly lower triangular A by block substitution: X10 = -X11 @ A10 @ X00."""
    X = A.new_ones(*A.shape[:-1], 1, 1)                                       # (.., C / size, size, size)
    for size in _sizes(A.shape[-1]):
        X00, X11 = X.unflatten(-3, (-1, 2)).unbind(-3)
        A10 = _lower(A, size)
        X = A.new_zeros(*X00.shape[:-2], 2 * size, 2 * size)
        X[..., :size, :size], X[..., size:, size:] = X00, X11
        X[..., size:, :size] = -A10 if size == 1 else (X11 @ (A10 @ X00)).neg_()
    return X.squeeze(-3)
