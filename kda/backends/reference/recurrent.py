"""The definition of KDA, token by token:

    S <- Diag(e^decay_t) S
    S <- S + b_t k_t (v_t - k_t^T S)^T
    o_t = scale S^T q_t

in any float dtype, on any device, differentiable by autograd.  It uses only sums and elementwise products, so no matrix
library decides the order of a sum.  Everything else in the package is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .ragged import Ragged

Tensor = torch.Tensor


def steps(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor, S: Tensor, scale: float, table: Ragged
) -> Iterator[tuple[Tensor | slice, Tensor | slice, Tensor, Tensor]]:
    """Walk all sequences together: (sequences, rows, their o, their S after that token) for the 1st, 2nd, ... token.

    Every token is a row of `table`, which has C = 1: q, k, decay are (rows, HV, 1, K), v (rows, HV, 1, V),
    b (rows, HV, 1, 1 or V); S is (N, HV, K, V) and o (.., HV, 1, V).
    """
    q, k, decay = q.mT, k.mT, decay.mT                                        # columns (K, 1)
    for sequences, t in table.waves():
        s = decay[t].exp() * S[sequences]
        s = s + k[t] * (b[t] * (v[t] - (k[t] * s).sum(-2, keepdim=True)))
        yield sequences, t, scale * (q[t] * s).sum(-2, keepdim=True), s
        S = s if isinstance(sequences, slice) else S.index_copy(0, sequences, s)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, b: Tensor, S: Tensor, scale: float, table: Ragged
) -> tuple[Tensor, Tensor]:
    """Return o (tokens, HV, V), zero in tokens outside every sequence, and the final states (N, HV, K, V).

    q, k, decay are (tokens, HV, K), v (tokens, HV, V), b (tokens, HV, 1 or V); `table` has C = 1.
    """
    q, k, v, decay, b = map(table.chunk, (q, k, v, decay, b))
    outputs, order = [v[:0]], [table.rows[:0]]
    for sequences, rows, o, s in steps(q, k, v, decay, b, S, scale, table):
        outputs.append(o)
        order.append(table.rows[rows])
        S = s if isinstance(sequences, slice) else S.index_copy(0, sequences, s)
    o = torch.cat(outputs).squeeze(-2)
    return o.new_zeros(table.tokens, *o.shape[1:]).index_copy(0, torch.cat(order), o), S
