"""Products of rows of one chunk under their decay, without an exponent above zero and without a difference of sums.

  A[i, j] = sum_K x_i y_j 2^(g2_(j+1) + ... + g2_i)        i > j; g2 is the log2 decay of a token, <= 0

Cut a block of rows in halves: for i in the second half and j in the first, the decay is that from j to the cut times
that from the cut to i, so this quarter of A is one matrix product.  Then the halves are cut in turn.  We walk from
single rows up and the decays grow with the blocks: `before`, from a block's start to a row, that row's own decay
included, and `after`, from a row to the block's end.  Every factor is in [0, 1] and each exponential is taken once;
any gate will do, -inf too.  The inverse of I + A cuts the same way.

y and g2 are (..., C, K); x is (..., C, X, K), X rows a token that share its decay, and A is (..., C, X, C).  C is a
power of two.
"""

from __future__ import annotations

import torch


def _halves(x: torch.Tensor, size: int, axis: int = -2) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second half of each block of 2*size rows: C becomes (C / 2size, size), views."""
    return x.unflatten(axis, (-1, 2, size)).unbind(axis - 1)


def _lower(A: torch.Tensor, size: int) -> torch.Tensor:
    """(.., C, X, C) -> the lower left quarter of each diagonal block of 2*size rows, (.., C / 2size, size, X, size)."""
    n = A.shape[-1] // (2 * size)
    blocks = A.unflatten(-1, (n, 2, size)).unflatten(-5, (n, 2, size))        # (..., n, 2, size, X, n, 2, size)
    return blocks.select(-6, 1).select(-2, 0).diagonal(dim1=-5, dim2=-2).movedim(-1, -4)


def _sizes(C: int) -> list[int]:
    return [1 << i for i in range(C.bit_length() - 1)]


def _of_rows(g2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`before` and `after` of blocks of one row."""
    return g2.exp2(), torch.ones_like(g2)


def _widen(before: torch.Tensor, after: torch.Tensor, size: int) -> None:
    """From blocks of `size` rows to blocks of twice as many, in place."""
    before0, before1 = _halves(before, size)
    after0, _ = _halves(after, size)
    after0 *= before1[..., -1:, :]
    before1 *= before0[..., -1:, :]


def decays(g2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`before` and `after` of the whole chunk: 2^gc and 2^(gc_last - gc)."""
    before, after = _of_rows(g2)
    for size in _sizes(g2.shape[-2]):
        _widen(before, after, size)
    return before, after


def decayed_products(x: torch.Tensor, y: torch.Tensor, g2: torch.Tensor) -> torch.Tensor:
    """A, zero for i <= j."""
    A = x.new_zeros(*x.shape[:-1], x.shape[-3])
    before, after = _of_rows(g2)
    for size in _sizes(g2.shape[-2]):
        to_cut, from_cut = _halves(after, size)[0], _halves(before, size)[1].unsqueeze(-2)
        y0 = _halves(y, size)[0] * to_cut
        x1 = (_halves(x, size, -3)[1] * from_cut).flatten(-3, -2)
        _lower(A, size).copy_((x1 @ y0.mT).unflatten(-2, (size, -1)))
        _widen(before, after, size)
    return A


def decayed_products_bwd(
    dA: torch.Tensor, x: torch.Tensor, y: torch.Tensor, g2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dy, and the gradient of g2 / log2(e).  Only i > j of dA is read."""
    dx, dy = torch.zeros_like(x), torch.zeros_like(y)
    before, after = _of_rows(g2)
    exponents = []                                                            # gradients of log(to_cut), log(from_cut)
    for size in _sizes(g2.shape[-2]):
        to_cut, from_cut = _halves(after, size)[0], _halves(before, size)[1].unsqueeze(-2)
        y0, x1 = _halves(y, size)[0], _halves(x, size, -3)[1]
        dA10 = _lower(dA, size).flatten(-3, -2)                               # (..., size*X, size)
        dx1 = (dA10 @ (y0 * to_cut)).unflatten(-2, (size, -1)).mul_(from_cut)
        dy0 = (dA10.mT @ (x1 * from_cut).flatten(-3, -2)).mul_(to_cut)
        _halves(dx, size, -3)[1].add_(dx1)
        _halves(dy, size)[0].add_(dy0)
        exponents.append((size, dy0.mul_(y0), dx1.mul_(x1).sum(-2)))
        _widen(before, after, size)
    d_before, d_after = torch.zeros_like(g2), torch.zeros_like(g2)
    for size, d_to_cut, d_from_cut in reversed(exponents):                    # undo _widen
        d_before0, d_before1 = _halves(d_before, size)
        d_after0, _ = _halves(d_after, size)
        d_before0[..., -1:, :] += d_before1.sum(-2, keepdim=True)
        d_before1[..., -1:, :] += d_after0.sum(-2, keepdim=True)
        d_before1 += d_from_cut
        d_after0 += d_to_cut
    return dx, dy, d_before


def inverse(A: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 of a strictly lower triangular A, (..., C, C), by block substitution: X10 = -X11 @ A10 @ X00."""
    X = A.new_ones(*A.shape[:-1], 1, 1)                                       # (..., C / size, size, size)
    for size in _sizes(A.shape[-1]):
        X00, X11 = X.unflatten(-3, (-1, 2)).unbind(-3)
        A10 = _lower(A.unsqueeze(-2), size).squeeze(-2)
        X = A.new_zeros(*X00.shape[:-2], 2 * size, 2 * size)
        X[..., :size, :size], X[..., size:, size:] = X00, X11
        X[..., size:, :size] = -A10 if size == 1 else (X11 @ (A10 @ X00)).neg_()
    return X.squeeze(-3)
