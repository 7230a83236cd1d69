"""What is compiled: a kernel, and the host function that the DSL wants around it.

ptxkit.compile keeps the kernel alone: launches are made from its configuration (`arguments.KernelConfig`), and the
host function is never run.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_ptr

from ptxkit.compile import cutedsl
from ptxkit.compile.target import Target

from .copies import TYPES


class Entry:
    """A subclass has `kernel(self, x)`, x of its configuration's `arguments`."""

    def __init__(self, config: Any):
        self.c = config

    @cute.jit
    def __call__(self, x, grid_x: Int32, grid_y: Int32, grid_z: Int32, stream):
        self.kernel(x).launch(
            grid=(grid_x, grid_y, grid_z), block=(self.c.threads, 1, 1), stream=stream, **self.c.launch_options
        )


def example(config: Any) -> Any:
    """What the compiler is told of the arguments: dtypes and alignments, no values."""
    values = {}
    for name, argument in config.arguments.declared.items():
        kind = TYPES[argument.dtype_in(config)]
        if argument.is_tensor:
            values[name] = make_ptr(kind, 1024, cute.AddressSpace.gmem, assumed_align=kind.width // 8)
        else:
            values[name] = kind(1)
    return config.arguments(**values)


def compile(kernel: type[Entry], config: Any, target: Target) -> cutedsl.Compiled:
    config.require_valid()
    return cutedsl.compile(kernel(config), example(config), *[Int32(1)] * 3, cutedsl.fake_stream(), target=target)
