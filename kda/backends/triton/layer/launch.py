"""The convolution and the norm of a layer: tensors in, tensors out, without autograd."""

from __future__ import annotations

from typing import Any

import torch

from kda.model.host import detect
from kda.model.problem import name_of_dtype

from ...common.tensors import aligned, on_device_of
from ...common.triton_launch import launch
from . import plan

Tensor = torch.Tensor


def convolution_refused(dtype: torch.dtype, width: int, device: str) -> tuple[str, ...]:
    """Return why torch has to make this convolution; empty if a kernel can."""
    return plan.broken(plan.CONVOLUTION, plan.LayerPart(name_of_dtype(dtype), width), detect(device))


def norm_refused(dtype: torch.dtype, channels: int, device: str) -> tuple[str, ...]:
    return plan.broken(plan.NORM, plan.LayerPart(name_of_dtype(dtype), channels), detect(device))


_on_its_device = on_device_of(lambda x, *others: x)


@_on_its_device
def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, starts: Tensor | None, numbers: Tensor | None
) -> Tensor:
    """Return silu(causal convolution) of x (B, T, C) with weight (C, 4), bias (C), state (N, 3, C); see
    convolution.py."""
    call = _Convolution(x, weight, bias, state, starts, numbers)
    y = torch.empty_like(call.x)
    call.run("convolve", y=y)
    return y


@_on_its_device
def convolve_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, starts: Tensor | None,
    numbers: Tensor | None, cu_seqlens: Tensor | None, dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight, bias and state, in their dtypes."""
    call = _Convolution(x, weight, bias, state, starts, numbers)
    dy, dx = aligned(dy, x.dtype), torch.empty_like(call.x)
    runs = -(-call.tokens // call.rows)
    shares = torch.empty(runs, 4 if bias is None else 5, call.C, dtype=torch.float32, device=x.device)
    call.run("convolve_bwd", dy=dy, dx=dx, shares=shares)
    sums = shares.sum(0)
    dstate = None
    if state is not None:
        dstate = torch.empty_like(call.state)
        call.run("convolve_state_bwd", programs=dstate.shape[0], cu_seqlens=cu_seqlens, dy=dy, dstate=dstate)
    dbias = None if bias is None else sums[4].to(bias.dtype)
    dweight = sums[:4].T.to(weight.dtype).contiguous().view(weight.shape)
    return dx, dweight, dbias, dstate


class _Convolution:
    """The tensors and numbers of one call."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Any, state: Any, starts: Any, numbers: Any):
        self.x, self.state = aligned(x), aligned(state)
        B, T, self.C = x.shape
        self.tokens, self.host = B * T, detect(str(x.device))
        self.given = {
            "x": self.x, "weight": aligned(weight), "bias": aligned(bias), "state": self.state, "starts": starts,
            "numbers": numbers if state is not None else None,
        }
        self.blocks = -(-self.C // plan.CHANNELS)
        self.rows = plan.run_of(self.tokens, self.blocks, self.host.sms)
        self.sizes = {"tokens": self.tokens, "T": max(T, 1), "C": self.C, "rows": self.rows}

    def run(self, name: str, programs: int | None = None, **others: Any) -> None:
        """Launch a kernel on each block of channels, of each run of tokens or of so many others."""
        given = {"cu_seqlens": None, **self.given, **others}
        names = ("x", "weight", "bias", "state", "starts", "numbers", "cu_seqlens")
        dtypes = tuple((n, None if given[n] is None else name_of_dtype(given[n].dtype)) for n in names)
        recipe = plan.convolution(name, dtypes, self.C, self.host)
        programs = -(-self.tokens // self.rows) if programs is None else programs
        launch(recipe, self.blocks * programs, given, self.sizes)


@_on_its_device
def norm_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x (.., V) times weight (V) and sigmoid(gate (.., V))."""
    x, gate, weight = aligned(x), aligned(gate), aligned(weight)
    y = torch.empty_like(x)
    recipe, tiles, numbers = _norm("norm_gate", x, gate, weight, eps)
    launch(recipe, tiles, {"x": x, "gate": gate, "weight": weight, "y": y}, numbers)
    return y


@_on_its_device
def norm_gate_bwd(x: Tensor, gate: Tensor, weight: Tensor, eps: float, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, gate and weight."""
    x, gate, weight, dy = aligned(x), aligned(gate), aligned(weight), aligned(dy, x.dtype)
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    recipe, tiles, numbers = _norm("norm_gate_bwd", x, gate, weight, eps)
    programs = plan.norm_programs(tiles, detect(str(x.device)).sms)
    shares = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    tensors = {"x": x, "gate": gate, "weight": weight, "dy": dy, "dx": dx, "dgate": dgate, "shares": shares}
    launch(recipe, programs, tensors, numbers | {"tiles": tiles})
    return dx, dgate, shares.sum(0).to(weight.dtype)


def _norm(name: str, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Any, int, dict[str, Any]]:
    """Return the kernel's recipe, its tiles, and the numbers that both directions have."""
    V = x.shape[-1]
    dtypes = tuple((n, name_of_dtype(t.dtype)) for n, t in (("x", x), ("gate", gate), ("weight", weight)))
    recipe = plan.norm(name, dtypes, V, detect(str(x.device)))
    return recipe, -(-x.numel() // (V * recipe.constants["ROWS"])), {"rows": x.numel() // V, "eps": eps}
