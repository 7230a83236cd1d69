"""What every launcher does with tensors before a kernel gets their addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kda.model.offsets import offsets_after_waiting
from kda.model.problem import Inputs, Problem
from ptxkit.compile.launch_list import settled

Tensor = torch.Tensor


def on_device_of(tensor: Callable[..., Tensor]) -> Callable[[Callable], Callable]:
    """Return a decorator that makes the GPU of `tensor(*args)` the current one: launches go to that."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            x = tensor(*args)
            if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
                return function(*args)
            with torch.cuda.device(x.device):
                return function(*args)

        return run

    return decorate


on_its_device = on_device_of(lambda p, x, *others: x.q)


def in_memory(x: Tensor) -> Tensor:
    """Return x, or a copy where memory does not hold its numbers: torch has only noted that they are negated or
    zero."""
    return x.clone() if x.is_neg() or (not x.data_ptr() and x.numel()) else x


def aligned(x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return x, or a copy, that is contiguous and begins at a multiple of 16 bytes."""
    if x is None:
        return None
    if dtype is not None and x.dtype != dtype:
        x = x.to(dtype)
    if not x.is_contiguous():
        x = x.contiguous()
    return in_memory(x) if x.data_ptr() % 16 == 0 else x.clone()


# The names that kernels have for the tensors of a call, and those of them that are read a chunk at a time.
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0", "cu_seqlens")
ROWS = ("q", "k", "g", "beta", "A_log", "dt_bias")


def inputs_in_memory(x: Inputs) -> list[Tensor | None]:
    """Return INPUTS as kernels read them: contiguous, at multiples of 16 bytes, A_log and dt_bias in float32."""
    q, k, v, g, beta, A_log, dt_bias, h0, offsets, *_ = x
    if offsets is not None:
        offsets = offsets_on(q.device, offsets)
    if A_log is not None and A_log.dtype != torch.float32:
        A_log = A_log.float()
    if dt_bias is not None and dt_bias.dtype != torch.float32:
        dt_bias = dt_bias.float()
    tensors = [q, k, v, g, beta, A_log, dt_bias, h0, offsets]
    return tensors if settled(tensors) else list(map(aligned, tensors))


def offsets_on(device: torch.device, cu_seqlens: Tensor) -> Tensor:
    """Return the offsets on the GPU.  The CPU does not wait until the copy has ended."""
    return cu_seqlens.to(device, non_blocking=True).contiguous()


def chunks_of_a_row(p: Problem, x: Inputs) -> int:
    """Return the number of chunks of a row.  If packed, the CPU waits for offsets that only the GPU holds."""
    ends = offsets_after_waiting(x) or [0, p.T]
    return sum(-(-(end - start) // p.C) for start, end in zip(ends, ends[1:]))
