"""The short causal depthwise convolution of a layer, with its SiLU; its state, and its halo."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from kda.checks.calls import shape_of
from kda.model.gates import wide_dtype
from kda.model.host import stand_in
from kda.model.transforms import Links, register, untransformed

from ..errors import InputError
from .sequences import Sequences

Tensor = torch.Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    sequences: Sequences | None = None,
) -> Tensor:
    """silu(z), z[t] = bias + sum_j weight[W - 1 - j] x[t - j], differentiable; sums and SiLU in float32.

    Args:
        x: (B, T, C).
        weight: (C, W), or (C, 1, W) as in modules.
        bias: (C), or None.
        state: (N, W - 1, C), the inputs before each sequence, oldest first; None: zeros.
        sequences: where sequences begin and end; None: each row is one. Tokens outside every sequence give zeros.

    Returns:
        y (B, T, C) in the dtype of x.
    """
    if sequences is None:
        sequences = Sequences.of_rows(x.shape[0])
    if not torch.compiler.is_compiling():
        _check(x, weight, bias, state, sequences)
    weight = weight.flatten(1)
    if takes_kernels(x) and _served(x.dtype, weight.shape[1], str(x.device)):
        return Convolution.apply(x, weight, bias, state, sequences)
    return _in_torch(x, weight, bias, state, sequences)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, s: Sequences) -> None:
    """A kernel reads as much of each tensor as the shape of x says."""
    C, W = x.shape[-1] if x.dim() else 0, weight.shape[-1] if weight.dim() else 0
    shapes: dict[str, tuple[Tensor | None, tuple[tuple[int, ...], ...]]] = {
        "x": (x, ((*x.shape[:2], C),)), "weight": (weight, ((C, W), (C, 1, W))), "bias": (bias, ((C,),)),
        "state": (state, ((s.N, W - 1, C),)),
    }
    for name, (given, right) in shapes.items():
        if given is not None and (tuple(given.shape) not in right or (name == "x" and x.dim() != 3)):
            asked = "[B, T, C]" if name == "x" else f"{[*right[0]]}, by the shape of x"
            raise InputError("short_convolution", name, asked, f"shape {shape_of(given)}",
                             "See help(kda.nn.short_convolution).", f"nn.convolution.{name}")


def takes_kernels(x: Tensor) -> bool:
    """Whether x is on a GPU, or on one that the simulator stands in for, and no transform of torch.func is active."""
    gpu = x.is_cuda or (not torch.compiler.is_compiling() and stand_in() is not None)
    return gpu and untransformed()


def kernels() -> Any:
    return importlib.import_module("kda.backends.triton.layer.launch")


def _served(dtype: torch.dtype, width: int, device: str) -> bool:
    """Whether there is a kernel for such a convolution."""
    return not kernels().convolution_refused(dtype, width, device)


vars(_served)["_dynamo_marked_constant"] = True                                 # torch.compile calls it untraced


def _in_torch(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, s: Sequences) -> Tensor:
    wide, W = wide_dtype(x.dtype), weight.shape[1]
    w = weight.to(wide)
    taps = (_rows_back(x, j, W, state, s).to(wide) * w[:, W - 1 - j] for j in range(W))
    z = next(taps)
    for tap in taps:
        z = z + tap
    y = F.silu(z if bias is None else z + bias.to(wide))
    if s.starts is not None:
        t = torch.arange(x.shape[1], device=x.device)
        y = y * (t >= s.starts)[:, None]
    return y.to(x.dtype)


def _rows_back(x: Tensor, j: int, W: int, state: Tensor | None, s: Sequences) -> Tensor:
    """The input j tokens before each token (B, T, C)."""
    T = x.shape[1]
    if s.starts is None:
        before = x.new_zeros(x.shape[0], j, x.shape[2]) if state is None else state[:, W - 1 - j :].to(x.dtype)
        return torch.cat([before, x], 1)[:, :T] if j else x
    position = torch.arange(T, device=x.device) - s.starts - j                 # place in its sequence
    back = F.pad(x, (0, 0, j, 0))[:, :T]
    earlier = torch.where((position >= 0)[:, None], back, 0)
    if state is None or j == 0:
        return earlier
    if state.shape[0] == 0:  # there is no sequence, but the halo needs a backward
        return earlier + state.to(x.dtype).sum()
    within = (position < 0) & (position >= -j)
    rows = state.to(x.dtype)[s.numbers, (position + W - 1).clamp(0, W - 2)]
    return torch.where(within[:, None], rows, earlier)


def next_state(x: Tensor, W: int, state: Tensor | None = None, sequences: Sequences | None = None) -> Tensor:
    """The state after x (B, T, C): the last W - 1 inputs of each sequence (N, W - 1, C), differentiable."""
    T, C = x.shape[1:]
    if sequences is None or sequences.cu_seqlens is None:
        if T >= W - 1:
            return x[:, T - (W - 1) :].clone()                                 # a copy, so that x can be freed
        before = x.new_zeros(x.shape[0], W - 1, C) if state is None else state.to(x.dtype)
        return torch.cat([before, x], 1)[:, T:]
    offsets = sequences.cu_seqlens
    back = torch.arange(W - 1, device=x.device) - (W - 1)  # places counted from the end of a sequence
    tokens = offsets[1:, None] + back                                              # (N, W - 1)
    inside = tokens >= offsets[:-1, None]
    rows = x[0][tokens.clamp(0, max(T - 1, 0))] if T else x.new_zeros(*tokens.shape, C)
    if state is None:
        return torch.where(inside[..., None], rows, 0)
    position = (tokens - offsets[:-1, None] + W - 1).clamp(0, W - 2)               # place in the state
    before = state.to(x.dtype).gather(1, position[..., None].expand(-1, -1, C))
    return torch.where(inside[..., None], rows, before)


class Convolution(torch.autograd.Function):
    """`short_convolution` by the kernels of kda.backends.triton.layer."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, s: Sequences) -> Tensor:
        ctx.save_for_backward(x, weight, bias, state, s.starts, s.numbers, s.cu_seqlens)
        if torch.compiler.is_compiling():                                      # it does not trace an operator
            return torch.ops.kda.convolve(x, weight, bias, state, s.starts, s.numbers)
        return kernels().convolve(x, weight, bias, state, s.starts, s.numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        tensors = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            return *kernels().convolve_bwd(*tensors, dy), None
        grads = torch.ops.kda.convolve_bwd(*tensors, dy)
        return *(None if given is None else each for given, each in zip(tensors[:4], grads)), None


def _convolve_bwd(x: Tensor, *others: Tensor | None) -> list[Tensor]:
    return [x.new_empty(0) if each is None else each for each in kernels().convolve_bwd(x, *others)]


def like(*tensors: Tensor | None) -> list[Tensor]:
    """Return contiguous memory of the same shapes and dtypes, empty for None; the first is a tensor."""
    first: Any = tensors[0]
    return [first.new_empty(0) if each is None else torch.empty_like(each, memory_format=torch.contiguous_format)
            for each in tensors]


def register_pair(function: str, name: str, forward: tuple[str, Callable, Callable],
                  backward: tuple[str, Callable, Callable]) -> None:
    """Register the operators `name` and `name`_bwd, below torch.compile, of a function with a first derivative.  Each
    has its arguments and results, what runs and what a trace sees."""
    none = Links.none(
        f"torch.ops.kda.{name} and torch.ops.kda.{name}_bwd have no derivative. Call kda.nn.{function}, which has a "
        "first one."
    )
    for suffix, (schema, real, fake) in (("", forward), ("_bwd", backward)):
        register(f"{name}{suffix}{schema}", f"nn.{function}", real, fake, none)


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? starts, Tensor? numbers"
register_pair(
    "short_convolution", "convolve",
    (f"({_TENSORS}) -> Tensor", lambda *tensors: kernels().convolve(*tensors), lambda *tensors: like(tensors[0])[0]),
    (f"({_TENSORS}, Tensor? cu_seqlens, Tensor dy) -> Tensor[]", _convolve_bwd, lambda *tensors: like(*tensors[:4])),
)


class ShortConvolution(nn.Module):
    """`short_convolution` with its weight (C, 1, W) and optionally a bias (C).

    Args:
        channels: C.
        width: W, the tokens that an output depends on, including itself.
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = False, device: Any = None, dtype: Any = None):
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise like torch does for a depthwise convolution: uniform within 1 / sqrt(W)."""
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, state: Tensor | None = None, sequences: Sequences | None = None) -> Tensor:
        """x (B, T, C), state (N, W - 1, C) or None -> (B, T, C)."""
        return short_convolution(x, self.weight, self.bias, state, sequences)

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}"
