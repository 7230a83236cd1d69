"""Which calls of the layer are one `kda.decode_step`, as data, and that call.

A call that a rule refuses runs by the layer's parts: convolutions, recurrence or chunks, norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda.calls.decode import decode_step
from kda.checks.decode import WIDTHS
from kda.model.host import Host, detect
from kda.model.problem import Problem, name_of_dtype
from kda.model.transforms import untransformed
from kda.routing.dispatch import backend_asked, weigh

from .cache import Cache, LayerState

Tensor = torch.Tensor
TOKENS = 8  # most in a sequence; with more the recurrence's many small programs are faster


class LayerCall(NamedTuple):
    """A call of the layer, whose shapes were checked."""

    layer: Any                               # a KimiDeltaAttention
    x: Tensor
    state: LayerState | None                 # this layer's in the cache
    attention_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cp_context: Any = None

    @property
    def T(self) -> int:
        return self.x.shape[1]

    @property
    def training(self) -> bool:
        """Whether gradients of this call are wanted."""
        if not torch.is_grad_enabled():
            return False
        states = () if self.state is None else (self.state.recurrent, *self.state.conv)
        return any(each.requires_grad for each in (self.x, *self.layer.parameters(), *states))


class StepRule(NamedTuple):
    id: str
    holds: Callable[[LayerCall], bool]
    why: str                                 # a format string over c, a LayerCall


RULES = (
    StepRule("nn.step.state", lambda c: c.state is not None, "needs a cache with a state of this layer"),
    StepRule("nn.step.mode", lambda c: c.layer.mode != "chunk", "needs mode 'auto' or 'recurrent', got 'chunk'"),
    StepRule("nn.step.tokens", lambda c: 1 <= c.T <= TOKENS, f"needs 1 to {TOKENS} tokens, got {{c.T}}"),
    StepRule("nn.step.packed", lambda c: c.cu_seqlens is None and c.cp_context is None,
             "needs each sequence in a row of its own, got cu_seqlens or a cp_context"),
    StepRule("nn.step.mask", lambda c: c.attention_mask is None or c.T == 1,
             "needs one token with an attention_mask, got {c.T}"),
    StepRule("nn.step.width", lambda c: c.layer.conv_size <= WIDTHS[1],
             f"needs a convolution over at most {WIDTHS[1]} tokens, got {{c.layer.conv_size}}"),
    StepRule("nn.step.transforms", lambda c: untransformed(), "runs by its parts under torch.func and forward-mode AD"),
    StepRule("nn.step.gradients", lambda c: not c.training, "has no backward, and this call records gradients"),
    StepRule("nn.step.backend", lambda c: has_kernel(c),
             "needs a backend with a kernel for it, or backend='reference'"),
)


def refusal(c: LayerCall) -> str | None:
    """Why a call is not one decode_step: the first broken rule, with its id; None if it is."""
    return next((f"{rule.id}: {rule.why.format(c=c)}" for rule in RULES if not rule.holds(c)), None)


def has_kernel(c: LayerCall) -> bool:
    """Whether a backend has a kernel for the step; the reference, which loops over sequences, counts only if named."""
    layer, kind = c.layer, c.x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else c.x.dtype
    sizes = layer.num_heads, layer.num_v_heads, layer.head_dim, layer.head_v_dim
    return _has_kernel(str(c.x.device), name_of_dtype(dtype), sizes, layer.backend)


def _has_kernel(device: str, dtype: str, sizes: tuple[int, int, int, int], requested: str | None) -> bool:
    return _weighed(device, dtype, sizes, backend_asked(requested), detect(device))


vars(_has_kernel)["_dynamo_marked_constant"] = True                             # torch.compile calls it untraced


@functools.lru_cache(maxsize=1024)
def _weighed(device: str, dtype: str, sizes: tuple[int, int, int, int], requested: str, host: Host) -> bool:
    H, HV, K, V = sizes
    problem = Problem(op="decode", device=device, T=1, H=H, HV=HV, K=K, V=V, dtype=dtype, g_dtype=dtype,
                      beta_dtype=dtype, state_dtype="float32", slots=1, inplace=True, state_v_first=True)
    backend = weigh(problem, host, requested).backend
    return backend is not None and (backend != "reference" or requested == backend)


def run(c: LayerCall, cache: Cache) -> Tensor:
    """y (B, T, D); the layer's state in the cache is updated in place."""
    layer, x = c.layer, c.x
    keys, values = (layer.num_heads, layer.head_dim), (layer.num_v_heads, layer.head_v_dim)
    q, k = layer.q_proj(x).unflatten(-1, keys), layer.k_proj(x).unflatten(-1, keys)
    v = layer.v_proj(x).unflatten(-1, values)
    f = layer.f_proj(x) if layer.forget_rank is None else layer.f_b_proj(layer.f_a_proj(x))
    gate = layer.g_proj(x) if layer.gate_rank is None else layer.g_b_proj(layer.g_a_proj(x))
    states, tails = cache.in_place(layer.layer_idx, q.dtype)
    convolutions = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    slots = None
    if c.attention_mask is not None:                                           # padding has no slot
        real = c.attention_mask[:, -1].to(x.device, non_blocking=True).bool()
        slots = torch.where(real, torch.arange(x.shape[0], device=x.device, dtype=torch.int32), -1)
    y = decode_step(
        q, k, v, f.unflatten(-1, (layer.num_v_heads, layer.head_dim)), layer.b_proj(x), states,
        A_log=layer.A_log, dt_bias=layer.dt_bias, lower_bound=layer.lower_bound,
        allow_neg_eigval=layer.allow_neg_eigval, ssm_state_indices=slots, conv_states=tails,
        conv_weight=torch.cat([each.weight for each in convolutions]),
        conv_bias=None if convolutions[0].bias is None else torch.cat([each.bias for each in convolutions]),
        norm_gate=gate.unflatten(-1, values), norm_weight=layer.o_norm.weight, norm_eps=layer.o_norm.eps,
        backend=layer.backend,
    )
    return layer.o_proj(y.flatten(-2))
