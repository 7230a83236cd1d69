"""How a kernel is cut and scheduled: the first row of TABLE that fits the head dims, the dtype and the GPU.

A row names the shared memory that a block must be allowed.  benchmarks/fits.py builds the kernels of every row and
prints what they need; tests/kda/backends/triton/test_fits.py checks the table.  Every GPU from sm_80 up allows 99 KiB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kda.model.host import Host
from kda.model.problem import Problem
from ptxkit.compile.errors import BuildError

from .limits import TritonConfig

SMALLEST = 99                                # KiB; assumed of an unknown GPU


@dataclass(frozen=True)
class TileConfig(TritonConfig):
    num_warps: int = 4
    stages: int = 1
    BK: int = 256                            # slice of K in registers
    BV: int = 64                             # slice of V
    maxnreg: int | None = None
    tiles: ClassVar = ("BK", "BV")
    smallest_tile: ClassVar = 16             # the smallest side of a product

    def broken_limits(self) -> Iterator[str]:
        yield from super().broken_limits()
        if self.maxnreg is not None and not 24 <= self.maxnreg <= 255:
            yield f"maxnreg must be from 24 to 255; found {self.maxnreg}"


class TableRow(NamedTuple):
    kernel: str
    bits: int                                # bits of an element of q, k and v
    K: int                                   # the largest K
    shared: int                              # KiB that a block must be allowed
    config: TileConfig
    products: str = "any"                    # "async": wgmma, tcgen05, operands in shared memory; "mma.sync": others


# The rows of 227 KiB for K <= 128 were measured on an H200; the others are built to fit, those of 4 warps for mma.sync
# and K <= 128 also so that two CTAs share an SM (docs/decisions/triton.md).
TABLE = (
    TableRow("prepare", 16, 128, 227, TileConfig(num_warps=4, BK=64, BV=128)),
    TableRow("prepare", 16, 256, 99, TileConfig(num_warps=4, BK=64, BV=64)),
    TableRow("prepare", 32, 256, 99, TileConfig(num_warps=8, BK=32, BV=32)),
    TableRow("state", 16, 64, 227, TileConfig(num_warps=4, stages=3, BV=64)),
    TableRow("state", 16, 64, 99, TileConfig(num_warps=4, stages=3, BV=64), "mma.sync"),
    TableRow("state", 16, 64, 99, TileConfig(num_warps=4, stages=2, BV=64)),
    TableRow("state", 16, 128, 227, TileConfig(num_warps=4, stages=3, BV=64)),
    TableRow("state_bwd", 16, 128, 163, TileConfig(num_warps=4, stages=2, BK=32, BV=64), "mma.sync"),
    TableRow("state", 16, 128, 163, TileConfig(num_warps=4, stages=2, BK=64, BV=64), "mma.sync"),
    TableRow("state", 16, 128, 99, TileConfig(num_warps=8, stages=2, BV=64), "mma.sync"),
    TableRow("state", 16, 128, 99, TileConfig(num_warps=8, stages=1, BV=64)),
    TableRow("state", 16, 256, 163, TileConfig(num_warps=8, stages=2, BK=128, BV=32), "mma.sync"),
    TableRow("state", 16, 256, 99, TileConfig(num_warps=8, stages=1, BK=128, BV=32), "mma.sync"),
    TableRow("state", 16, 256, 99, TileConfig(num_warps=8, stages=1, BK=64, BV=64)),
    TableRow("state", 32, 64, 99, TileConfig(num_warps=8, BV=32)),
    TableRow("state", 32, 256, 99, TileConfig(num_warps=8, BK=64, BV=16), "mma.sync"),
    TableRow("state", 32, 256, 99, TileConfig(num_warps=4, BK=64, BV=16)),
    TableRow("compose", 32, 64, 99, TileConfig(num_warps=4, BK=32, BV=32)),
    TableRow("compose", 32, 256, 99, TileConfig(num_warps=8, BK=32, BV=32)),
    TableRow("wy", 16, 128, 227, TileConfig(num_warps=4, stages=2, BV=64)),
    TableRow("wy", 16, 256, 99, TileConfig(num_warps=4, BV=64)),
    TableRow("wy", 32, 256, 99, TileConfig(num_warps=8, BV=32)),
    TableRow("intra", 16, 128, 227, TileConfig(num_warps=4, stages=2, BK=32, BV=64, maxnreg=168), "async"),
    TableRow("intra", 16, 128, 99, TileConfig(num_warps=4, BK=32, BV=128), "mma.sync"),
    TableRow("intra", 16, 256, 99, TileConfig(num_warps=8, BK=32, BV=64), "mma.sync"),
    TableRow("intra", 16, 256, 99, TileConfig(num_warps=8, BK=64, BV=64)),
    TableRow("intra", 32, 256, 99, TileConfig(num_warps=8, BK=16, BV=32)),
)


OTHERWISE = {"state_bwd": "state"}           # whose rows are a kernel's where it has none of its own


def power_of_2(n: int) -> int:
    """Return the next power of two, at least the 16 that a product needs."""
    return max(16, 1 << (n - 1).bit_length())


def choose(kernel: str, p: Problem, host: Host, bits: int = 0) -> TileConfig:
    """Return the configuration of a kernel.  `bits` are those of its operands, if they have not the dtype of q."""
    otherwise = OTHERWISE.get(kernel, kernel)
    c = p.force.config(kernel) or p.force.config(otherwise) or _from_table(kernel, p, host, bits)
    return dataclasses.replace(c, BK=min(c.BK, power_of_2(p.K)), BV=min(c.BV, power_of_2(p.V)))


def _from_table(kernel: str, p: Problem, host: Host, bits: int) -> TileConfig:
    bits = bits or (32 if p.dtype == "float32" else 16)
    allowed = host.smem or SMALLEST << 10
    products = ("any", "async" if host.cc and host.cc[0] in (9, 10, 11) else "mma.sync")
    for row in TABLE:
        fits = row.kernel in (kernel, OTHERWISE.get(kernel)) and row.bits == bits and row.products in products
        if fits and p.K <= row.K and row.shared << 10 <= allowed:
            return row.config
    raise BuildError(
        f"{kernel} of K={p.K} V={p.V} {p.dtype} needs {SMALLEST} KiB of shared memory per block; {host} allows "
        f"{allowed / 1024:g}. Use backend='reference'."
    )
