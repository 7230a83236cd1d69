"""Functions of a single token before the recurrence, and their derivatives: decay, beta, l2norm.

  softplus gate   decay = -e^A softplus(x)          x = g + dt_bias, A = A_log
  bounded gate    decay = lower_bound sigmoid(e^A x)
  beta            (1 or 2) sigmoid(beta)
  l2norm          y = x / sqrt(sum x^2 + 1e-6)

Every function has one dtype for inputs and results; A_log and dt_bias have shapes that broadcast against g.  e^A and
e^A x are kept finite, so that a saturated gate has the gradient 0 and never 0 * inf.
"""

from __future__ import annotations

import torch

L2NORM_EPS = 1e-6


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, sums and the gate: float64 if `dtype` is float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def _logits(g, A_log, dt_bias):
    """Return x and e^A."""
    x = g if dt_bias is None else g + dt_bias
    rate = g.new_ones(()) if A_log is None else _finite(A_log.exp())
    return x, rate


def _finite(x):
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def decay(g, A_log, dt_bias, lower_bound):
    """Natural-log decay of each token and channel, <= 0."""
    x, rate = _logits(g, A_log, dt_bias)
    if lower_bound is None:
        return -_finite(rate * torch.logaddexp(x, x.new_zeros(())))
    return lower_bound * torch.sigmoid(_finite(rate * x))


def decay_bwd(d_decay, g, A_log, dt_bias, lower_bound):
    """dg, and the terms of dA_log, to be summed over all tokens and channels of a head."""
    x, rate = _logits(g, A_log, dt_bias)
    if lower_bound is None:
        softplus = torch.logaddexp(x, x.new_zeros(()))
        return -rate * (torch.sigmoid(x) * d_decay), -_finite(rate * softplus) * d_decay
    y = _finite(rate * x)
    dy = d_decay * lower_bound * torch.sigmoid(y) * torch.sigmoid(-y)
    return dy * rate, dy * y


def beta_activation(beta, kind: str):
    """`kind` is "given", "sigmoid" or "2*sigmoid"."""
    if kind == "given":
        return beta
    return (2.0 if kind == "2*sigmoid" else 1.0) * torch.sigmoid(beta)


def beta_activation_bwd(db, beta, kind: str):
    if kind == "given":
        return db
    return (2.0 if kind == "2*sigmoid" else 1.0) * torch.sigmoid(beta) * torch.sigmoid(-beta) * db


def l2norm(x):
    """y over the last axis, and 1 / |x|."""
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
    return x * r, r


def l2norm_bwd(dy, x):
    y, r = l2norm(x)
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))
