"""The RMSNorm of a layer's outputs, head by head, with its gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from kda.checks.calls import shape_of
from kda.model.gates import wide_dtype

from ..errors import InputError
from .convolution import kernels, like, register_pair, takes_kernels

Tensor = torch.Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """weight x / sqrt(mean(x^2) + eps) sigmoid(gate), differentiable, in float32.

    Args:
        x: (.., V).
        gate: logits of the shape of x.
        weight: (V).

    Returns:
        y of the shape and dtype of x.
    """
    for name, given, shape in (("gate", gate, x.shape), ("weight", weight, x.shape[-1:])):
        if not torch.compiler.is_compiling() and given.shape != shape:
            raise InputError("gated_rms_norm", name, f"{[*shape]}, by the shape of x", f"shape {shape_of(given)}",
                             "See help(kda.nn.gated_rms_norm).", f"nn.norm.{name}")
    if takes_kernels(x) and _served(x.dtype, weight.shape[0], str(x.device)):
        return GatedNorm.apply(x, gate, weight, eps)
    wide = wide_dtype(x.dtype)
    value = x.to(wide)
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * scale * weight.to(wide) * torch.sigmoid(gate.to(wide))).to(x.dtype)


def _served(dtype: torch.dtype, channels: int, device: str) -> bool:
    """Whether there is a kernel for such a norm."""
    return not kernels().norm_refused(dtype, channels, device)


vars(_served)["_dynamo_marked_constant"] = True                                 # torch.compile calls it untraced


class GatedNorm(torch.autograd.Function):
    """`gated_rms_norm` by the kernels of kda.backends.triton.layer."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        if torch.compiler.is_compiling():
            return torch.ops.kda.norm_gate(x, gate, weight, eps)
        return kernels().norm_gate(x, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        operator = torch.ops.kda.norm_gate_bwd if torch.compiler.is_compiling() else kernels().norm_gate_bwd
        return *operator(*ctx.saved_tensors, ctx.eps, dy), None


_TENSORS = "Tensor x, Tensor gate, Tensor weight, float eps"
register_pair(
    "gated_rms_norm", "norm_gate",
    (f"({_TENSORS}) -> Tensor", lambda *given: kernels().norm_gate(*given), lambda x, *others: like(x)[0]),
    (f"({_TENSORS}, Tensor dy) -> (Tensor, Tensor, Tensor)", lambda *given: kernels().norm_gate_bwd(*given),
     lambda x, gate, weight, *others: tuple(like(x, gate, weight))),
)


class GatedRMSNorm(nn.Module):
    """`gated_rms_norm` with its weight (V)."""

    def __init__(self, channels: int, eps: float = 1e-5, device: Any = None, dtype: Any = None):
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate (.., V) -> (.., V)."""
        return gated_rms_norm(x, gate, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"
