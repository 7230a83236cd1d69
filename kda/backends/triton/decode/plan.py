"""What the plans of both decoding kernels share: plain Python, no torch, no Triton.

A plan is a module with these functions, of a call (a Problem or a StepProblem) and of its tensors' layouts by name:

  TENSORS                          names of the tensors that a call gives, in the order in which `launch` has them
  config(call, sms)                how the kernel is cut
  grid(call, config)               programs of a launch
  numbers(call, layouts)           arguments that are no tensors
  layout(call, layouts, numbers)   what the kernel is built for that neither the call nor the config says
  recipe(call, layout, config, target)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...common.arguments import Arguments, number


class TensorLayout(NamedTuple):
    """The dtype of a tensor, and how it lies in memory."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int                             # modulo 16


Layouts = Mapping[str, TensorLayout]
INNERMOST = "dkvc"                           # axes along which elements may lie next to each other


def with_strides(axes: Mapping[str, str]) -> Callable[[type[Arguments]], type[Arguments]]:
    """Return a decorator that adds the strides of tensors, `tensor_axis`, for axes with a letter each.  Where a tensor
    begins at a multiple of 16, so do its rows."""
    return lambda tensors: tensors.and_more(tensors.__name__, **{
        f"{name}_{axis}": number("int64", axis not in INNERMOST and tensors.declared[name].divisible)
        for name, letters in axes.items() for axis in letters
    })


def strides_of(axes: Mapping[str, str], layouts: Layouts) -> dict[str, int]:
    """Return `tensor_axis` -> stride, for axes with a letter each.

    An axis of one element has no stride, whatever its tensor says.
    """
    return {
        f"{name}_{axis}": stride
        for name in axes.keys() & layouts.keys()
        for axis, size, stride in zip(axes[name], layouts[name].shape, layouts[name].strides)
        if size > 1
    }


def aligned(layouts: Layouts, strides: Mapping[str, float], name: str, axes: str = "") -> bool:
    """Whether a tensor begins at a multiple of 16 bytes, and its strides along `axes` are multiples of 16 elements."""
    return not any(n % 16 for n in (layouts[name].address, *(strides[f"{name}_{axis}"] for axis in axes)))
