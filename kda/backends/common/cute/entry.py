"""What is compiled: a kernel, and the host function that the DSL wants around it.

ptxkit.compile keeps the kernel alone: launches are made from its configuration (`arguments.KernelConfig`), and the
host function is never run.  Kernels of a call overlap by programmatic dependent launches, where their configurations
say `pdl`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_ptr

from ptxkit.compile import cutedsl
from ptxkit.compile.target import Target

from .copies import TYPES
from .segments import clear_chunk, locate_chunk


class Entry:
    """A subclass has `kernel(self, x)`, x of its configuration's `arguments`; its module has its `build`.

    `@cute.jit` stands on functions with control flow on values of the GPU, which the DSL has to rewrite.  All others
    are plain Python, which runs while a kernel is traced, and so do their loops and conditions.
    """

    def __init__(self, config: Any):
        self.c = config

    @classmethod
    def build(cls, config: Any, target: Target) -> cutedsl.Compiled:
        config.require_valid()
        return cutedsl.compile(cls(config), example(config), *[Int32(1)] * 3, cutedsl.fake_stream(), target=target)

    # redundant: a wgmma.fence, where no thread touched registers of a product since the last; it stands before each
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


def permit_early_launch():
    """The next kernel, if it is launched so, may come onto the SM now and wait there."""
    cute.arch.griddepcontrol_launch_dependents()


def wait_for_the_kernel_before():
    """First of all in a kernel that is launched so: what it reads is there."""
    cute.arch.griddepcontrol_wait()


class ChunkEntry(Entry):
    """A subclass has `make(x, chunk, begin, tokens, number, head)`, of what `locate_chunk` finds, and `warp()`.  A CTA
    without a chunk clears its share of the rows of o outside every sequence."""

    @cute.kernel
    def kernel(self, x):
        head, y, z = cute.arch.block_idx()
        if cutlass.const_expr(self.c.pdl):
            wait_for_the_kernel_before()
        chunk, begin, tokens, number = locate_chunk(self.c.packed, x, y, z)
        if tokens > 0:
            self.make(x, chunk, begin, tokens, number, head)
        elif cutlass.const_expr(self.c.packed):
            clear_chunk(x, self.c.V, begin, -tokens, head, self.warp())
