"""What every launcher does with tensors before a kernel gets their addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kda.problem import Inputs, Problem

Tensor = torch.Tensor


def on_its_device(function: Callable) -> Callable:
    """`function(p, x, ...)` on the GPU that x lies on: launches go to the current one."""

    @functools.wraps(function)
    def run(p: Problem, x: Inputs, *args: Any) -> Any:
        device = x.q.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(p, x, *args)
        with torch.cuda.device(device):
            return function(p, x, *args)

    return run


def aligned(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Contiguous, at a multiple of 16 bytes."""
    if x is None:
        return None
    x = x.to(dtype or x.dtype).contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
