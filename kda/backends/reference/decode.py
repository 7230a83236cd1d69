"""`kda.decode_step` in plain torch, sequence by sequence and token by token: what every kernel is held against.

The state after a token is rounded to the dtype of the pool before the next token meets it, as if each token had been
a call of its own.  So a pool holds the same bits however many tokens a call has.
"""

from __future__ import annotations

from typing import Any

import torch

from kda.model.gates import wide_dtype
from kda.model.problem import StepInputs, StepProblem

from .chunked import activated

Tensor = torch.Tensor


def decode_step(s: StepProblem, x: StepInputs) -> None:
    """Write o into x.out; update states, conv_states and records in place."""
    p, o = s.core, x.out.zero_()
    slots = range(p.N) if x.slots is None else x.slots.tolist()
    for n, slot in enumerate(slots):
        if s.first_slot <= slot < x.states.shape[0]:
            o[n] = _Sequence(s, x, n, slot).step().to(o.dtype)


class _Sequence:
    """One sequence of a call.  A position counts from its first token, 0; those before it are negative."""

    def __init__(self, s: StepProblem, x: StepInputs, n: int, slot: int):
        self.s, self.x, self.n, self.slot, self.p = s, x, n, slot, s.core
        self.wide = wide_dtype(x.q.dtype)
        self.parents = [*range(-1, self.p.T - 1)] if x.parents is None else [-1, *x.parents[n].tolist()[1:]]
        self.accepted = 1 if x.accepted is None else int(x.accepted[n])
        self.path = [*range(self.p.T)] if x.path is None else x.path[n].tolist()
        if s.width:                                                           # (T, C), and what came before, a copy
            self.raw = torch.cat([t[n].flatten(1) for t in (x.q, x.k, x.v)], 1).to(x.conv_states.dtype)
            self.tail = x.conv_states[slot].clone()

    def step(self) -> Tensor:
        p, x = self.p, self.x
        records: Any = x.records[self.slot] if self.s.drafts else ()
        q, k, v, decay, b = self._operands()
        S = x.states[self.slot].to(self.wide).contiguous()                    # (HV, V, K)
        for i in range(1, self.accepted):
            k_i, decay_i, change = self._read_record(records[self.path[i] - 1])
            S = self._stored(decay_i * S + change[..., None] * k_i)
        after, o = {-1: S}, []
        for t in range(p.T):
            S = decay[t] * after[self.parents[t]]
            change = b[t] * (v[t] - (S * k[t]).sum(-1))
            o.append(p.scale * ((S * q[t]).sum(-1) + (q[t] * k[t]).sum(-1) * change))
            after[t] = self._stored(S + change[..., None] * k[t])
            if t and self.s.drafts:
                records[t - 1] = torch.cat([k[t].squeeze(1).expand(p.HV, -1), decay[t].squeeze(1), change], -1)
        x.states[self.slot] = after[0 if self.s.drafts else p.T - 1].to(x.states.dtype)
        if self.s.width:
            first = p.T - self.s.tail                                         # the position of the oldest one kept
            x.conv_states[self.slot] = torch.stack([self._input(first + i) for i in range(self.s.tail)])
        return self._normed(torch.stack(o))

    def _stored(self, S: Tensor) -> Tensor:
        return S.to(self.x.states.dtype).to(self.wide)

    def _read_record(self, record: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return k, decay (HV, 1, K) and change (HV, V) of a token of the last step."""
        k, decay, change = record.to(self.wide).split([self.p.K, self.p.K, self.p.V], -1)
        return k[:, None], decay[:, None], change

    def _input(self, position: int) -> Tensor:
        """Return what the convolution was given there (C), in the dtype in which it is kept."""
        if position >= 0:
            return self.raw[position]
        i, before = self.accepted + position, self.s.width - 2                # which of the accepted tokens that is
        return self.tail[before + (self.path[i] if i >= 0 else i)]

    def _convolved(self) -> tuple[Tensor, Tensor, Tensor]:
        p, x, W = self.p, self.x, self.s.width
        rows = []
        for t in range(p.T):
            z, position = torch.zeros_like(self.raw[0], dtype=self.wide), t
            for j in range(W):
                z = z + x.conv_weight[:, W - 1 - j].to(self.wide) * self._input(position).to(self.wide)
                position = self.parents[position] if position >= 0 else position - 1
            rows.append(torch.nn.functional.silu(z if x.conv_bias is None else z + x.conv_bias.to(self.wide)))
        q, k, v = torch.stack(rows).split([p.H * p.K, p.H * p.K, p.HV * p.V], 1)
        return q.unflatten(1, (p.H, p.K)), k.unflatten(1, (p.H, p.K)), v.unflatten(1, (p.HV, p.V))

    def _operands(self) -> tuple[Tensor, ...]:
        """Return q, k, decay (T, HV, 1, K), v (T, HV, V), b (T, HV, 1): all that the recurrence is given."""
        p, x, n = self.p, self.x, self.n
        q, k, v = self._convolved() if self.s.width else (t[n].to(self.wide) for t in (x.q, x.k, x.v))
        A_log = None if x.A_log is None else x.A_log.to(self.wide).reshape(p.HV, 1)
        bias = None if x.dt_bias is None else x.dt_bias.to(self.wide).reshape(p.HV, p.gate_width)
        g = x.g[n].to(self.wide).reshape(p.T, p.HV, p.gate_width)
        q, k, decay, b = activated(p, q, k, g, x.beta[n].to(self.wide), A_log, bias)
        q, k = (t.repeat_interleave(p.HV // p.H, 1)[:, :, None] for t in (q, k))
        return q, k, v, decay.exp()[:, :, None], b[..., None]

    def _normed(self, o: Tensor) -> Tensor:
        x, eps = self.x, self.s.norm_eps
        if eps is None:
            return o
        scale = torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
        return o * scale * x.norm_weight.to(self.wide) * torch.sigmoid(x.norm_gate[self.n].to(self.wide))
