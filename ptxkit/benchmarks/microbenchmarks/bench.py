"""Builds the kernels of a group, looks at their machine code, launches them and hands figures over.

Four ways. On a GPU ("gpu") kernels run and clocks are read. In the simulator with a clock ("predicted") the clocks of a
chip are read. In the simulator without one ("simulated") few trips run: results are checked, clocks mean nothing.
Without either ("dry") kernels are only built and looked at, and every clock reads the same.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ptxkit.compile import launching, nvrtc, store
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.target import Target

from .figures import Figure

RUNS = 7                                     # launches whose median a figure is
FAKE = 1000                                  # clocks of a launch that did not take place
RATE = "bytes per clock and SM"
_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)(.*?);|^(\.L_\w+):", re.MULTILINE)
_TARGET = re.compile(r"`\((\.L_\w+)\)")

Tensor = torch.Tensor


class Skip(Exception):
    """A group that has nothing to measure here, and why."""


class Built(NamedTuple):
    kernel: Kernel
    fault: str                               # what is wrong with its machine code


class Bench:
    def __init__(self, group: str, target: Target, report: Callable[[Figure], Any], way: str = "gpu", sms: int = 132):
        self.group, self.target, self.report, self.way, self.sms = group, target, report, way, sms
        self.gpu, self.timed = way == "gpu", way in ("gpu", "predicted")
        self.device = "cuda" if self.gpu else "cpu"
        self.runs = RUNS if self.gpu else 1
        self.out = self.zeros(1 << 16)       # what kernels write results to; zero from 4096 on
        self._other: Tensor | None = None

    @property
    def hopper(self) -> bool:
        return self.target.cc[0] == 9

    # ------------------------------------------------------------------------------------------------ memory, kernels

    def zeros(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def words(self, values: Sequence[int]) -> Tensor:
        """32-bit words, given as unsigned numbers."""
        signed = [v - (1 << 32) if v >> 31 else v for v in values]
        return torch.tensor(signed, dtype=torch.int32, device=self.device)

    def tensor_map(self, tensor: Tensor, dims: Sequence[int], box: Sequence[int], swizzle: int = 128) -> bytes:
        """Describe a contiguous bf16 tensor; the first dimension is the contiguous one."""
        if self.way == "dry":
            return bytes(128)
        strides, stride = [], 2
        for size in dims[:-1]:
            stride *= size
            strides.append(stride)
        return launching.tensor_map(
            address=tensor.data_ptr(), dtype="bfloat16", dims=dims, strides=strides, box=box, swizzle=swizzle
        )

    def flush(self) -> None:
        """Put something else into L2, by reading: what is written there would be written back later."""
        if self.gpu:
            if self._other is None:
                self._other = self.zeros(1 << 26)
            self._other.sum()

    def build(self, source: str, sass: Mapping[str, int] | None = None, **defines: Any) -> Built:
        """`sass`: opcodes and how often each has to stand in a loop of the machine code: not less, and hardly more."""
        kernel = nvrtc.compile(source, "k", target=self.target, defines=defines, file=f"{self.group}.cu")
        listing = disassembled(kernel)
        return Built(kernel, disagreement(in_loops(listing), sass or {}) if listing else "")

    # ------------------------------------------------------------------------------------------------------- launches

    def trips(self, count: int, few: int = 2) -> int:
        return count if self.timed else few

    def launch(self, built: Built, *args: Any, grid: int = 1, block: int = 32, **shape: Any) -> None:
        if self.way != "dry":
            built.kernel.launch(grid, *args, block=block, **shape)

    def spans(
        self, built: Built, *args: Any, grid: int = 1, block: int = 32, runs: int = 0, cold: bool = False, **shape: Any
    ) -> list[Tensor]:
        """Return (CTAs, warps, 2) of starts and ends, for each launch; arguments follow `spans` and `out`.

        `cold`: L2 holds other things.
        """
        read = []
        for _ in range(runs or self.runs):
            if cold:
                self.flush()
            spans = self.zeros(grid * -(-block // 32) * 2, torch.int64)
            self.launch(built, spans, self.out, *args, grid=grid, block=block, **shape)
            read.append(self._read(spans).view(grid, -1, 2))
        return read

    def _read(self, x: Tensor) -> Tensor:
        """Return a tensor of clocks, once the GPU is done with it."""
        if not self.timed:
            x.view(-1)[1::2] = x.view(-1)[::2] + FAKE
        return x.cpu()

    def clocks(self, built: Built, *args: Any, **shape: Any) -> list[float]:
        """Return clocks of a CTA, first start to last end; the mean of several CTAs, as SMs do not share a clock."""
        return [lengths(spans).mean().item() for spans in self.spans(built, *args, **shape)]

    def nanoseconds(self, built: Built, *args: Any, **shape: Any) -> list[float]:
        """Return nanoseconds from the first start to the last end of all CTAs; it must be built with NANOSECONDS."""
        return [(s[:, :, 1].max() - s[:, :, 0].min()).item() for s in self.spans(built, *args, **shape)]

    def results(self, count: int) -> list[int]:
        """Return what the last launch wrote to `out`."""
        return [v & 0xFFFFFFFF for v in self.out[:count].cpu().tolist()]

    # ------------------------------------------------------------------------------------------------ checks, figures

    def wrong(self, says: str, holds: bool) -> str:
        """Return a fault, where the last launch took place and `holds` does not."""
        return "" if holds or self.way == "dry" else says

    def unlikely(self, says: str, holds: bool) -> str:
        """Return a fault, where clocks are real and say what cannot be."""
        return "" if holds or not self.gpu else says

    def figure(self, name: str, values: Sequence[float], unit: str, *faults: str) -> Figure:
        figure = Figure.from_values(self.group, name, values, unit, "; ".join(filter(None, faults)))
        self.report(figure)
        return figure

    def each(self, name: str, clocks: Sequence[float], count: float, *faults: str, unit: str = "clocks") -> Figure:
        """Return clocks of one of `count`."""
        return self.figure(name, [c / count for c in clocks], unit, *faults)

    def rate(self, name: str, moved: float, clocks: Sequence[float], *faults: str) -> Figure:
        """Return bytes a clock."""
        return self.figure(name, [moved / c for c in clocks], RATE, *faults)


def lengths(spans: Tensor) -> Tensor:
    """Return clocks of each CTA."""
    return (spans[:, :, 1].amax(1) - spans[:, :, 0].amin(1)).double()


# ------------------------------------------------------------------------------------------------------ machine code


@functools.cache
def disassembler() -> str | None:
    """nvdisasm of a CUDA toolkit, or the one that comes with Triton."""
    try:
        import triton
    except ImportError:
        return shutil.which("nvdisasm")
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(program) if program.exists() else shutil.which("nvdisasm")


def disassembled(kernel: Kernel) -> str | None:
    """Return the machine code of a kernel; None without a disassembler."""
    if (tool := disassembler()) is None:
        return None

    def listed() -> store.Entry:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "k.cubin")
            path.write_bytes(kernel.cubin)
            done = subprocess.run([tool, "-c", path], capture_output=True, check=True)
        return {"sass": done.stdout}

    listing = store.default().fetch(store.digest("sass 1", kernel.cubin), listed, {"kernel": "sass", "file": "sass"})
    return listing["sass"].decode()


def opcodes(listing: str) -> Counter[str]:
    """Return how often each opcode stands in it."""
    return Counter(opcode for opcode, _, _ in _LINE.findall(listing) if opcode)


def in_loops(listing: str) -> Counter[str]:
    """Return the same in loops alone; where loops lie in loops, in those: the outer one is that of passes, and ptxas
    moves there what it finds to be the same in every trip."""
    opcodes, labels, loops = [], {}, []
    for opcode, operands, label in _LINE.findall(listing):
        if label:
            labels[label] = len(opcodes)
            continue
        target = _TARGET.search(operands)
        if opcode.startswith("BRA") and target and labels.get(target[1], len(opcodes)) < len(opcodes):
            loops.append(range(labels[target[1]], len(opcodes)))
        opcodes.append(opcode)
    depth = [sum(n in loop for loop in loops) for n in range(len(opcodes))]
    least = 2 if max(depth, default=0) > 1 else 1
    return Counter(opcode for opcode, deep in zip(opcodes, depth) if deep >= least)


def disagreement(found: Counter[str], asked: Mapping[str, int]) -> str:
    """"FFMA stands 128 times, not 256"; an opcode stands for all that begin with it, "|" for either."""
    faults = []
    for opcode, count in asked.items():
        names = opcode.split("|")
        seen = sum(n for name, n in found.items() if any(f"{name}.".startswith(f"{each}.") for each in names))
        again = max(round(seen / count), 1) if count else 1                  # ptxas may unroll a short loop once more
        right = 0.98 * count <= seen <= 1.1 * count + 40
        if not right and not (count < 64 and again < 9 and abs(seen - again * count) < 40 and seen > count):
            faults.append(f"{opcode} stands {seen} times in the machine code, not {count}")
    return "; ".join(faults)
