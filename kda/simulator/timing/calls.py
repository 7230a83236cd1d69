"""What a call of a backend takes on a chip: its launches, each predicted from few of its clusters and few of its tokens.

The launches that a call makes are taken down first, with nothing run: once as asked, and once with each of two shorter
rows. Where the same kernels come, only those are run. A launch whose grid does not grow with the row walks along it, and
is predicted from both (`longer`); of any other, some waves on a few SMs say what all of them take. Where a short row is
planned otherwise, the call runs as asked, still on a few SMs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import kda
from kda.measure.shapes import Shape
from kda.simulator.capturing import capture
from kda.simulator.timing.clock import Clock, Setting, longer
from kda.verify.cases import Case, Spec, make

SHORT = ((512, 1024), (1024, 2048))  # tokens of a row, of what stands for a longer one
BLOCK = 64  # tokens that are drawn; a row repeats them
WAVES = 3


class Launched(NamedTuple):
    """A launch of the call as asked."""

    kernel: str
    clocks: float
    overlap: float  # clocks by which it begins before the launch ahead of it ends
    of: Clock  # what it was predicted from, the longer of the two
    backward: bool

    @property
    def milliseconds(self) -> float:
        return self.clocks / self.of.chip.gigahertz / 1e6

    @property
    def stalls(self) -> list[tuple[str, float]]:
        """(why, clocks that warps waited for each instruction that they issued), worst first."""
        issued = sum(warp["issued"] for warp in self.of.warps)
        return sorted(((why, n / issued) for why, n in self.of.stalls.items()), key=lambda item: -item[1])


@dataclass(frozen=True)
class Prediction:
    launches: tuple[Launched, ...]

    def milliseconds(self, backward: bool | None = None) -> float:
        """Of all launches, or of those of one direction alone."""
        some = [one for one in self.launches if backward in (None, one.backward)]
        clocks = sum(one.clocks - one.overlap for one in some)
        return clocks / some[0].of.chip.gigahertz / 1e6 if some else 0.0

    def kernel(self, name: str, backward: bool = False, nth: int = 0) -> Launched:
        found = [one for one in self.launches if family_of(one.kernel) == name and one.backward == backward]
        if len(found) <= nth:
            there = ", ".join(f"{family_of(one.kernel)}{' (backward)' * one.backward}" for one in self.launches)
            raise LookupError(f"the call has no such launch of {name}; it has {there}")
        return found[nth]


def family_of(kernel: str) -> str:
    """What the stage of a compiled kernel is called; the DSL's names hold the module's and the class's."""
    words = ("fused", "prepare", "chain", "compose", "pairs", "tables", "join", "carry")
    return next((word for word in words if f"fwd{word}" in kernel or f"cute{word}" in kernel), kernel)


def predict(arch: str, chip: str, backend: str, shape: Shape, step: bool, gate: str = "bounded") -> Prediction:
    """A forward, or (step) a recorded forward and its backward."""
    row = max(shape.lengths) if shape.lengths else shape.T
    trial = functools.partial(_Trial, arch, backend, shape, step, gate)
    asked = trial(row).launches()
    for few, many in SHORT:
        if many >= row:
            break
        short, long = trial(few).launches(), trial(many).launches()
        if [one.kernel.name for one in short] == [one.kernel.name for one in long] == [one.kernel.name for one in asked]:
            walks = [a.grid == b.grid == c.grid for a, b, c in zip(short, long, asked)]
            settings = [Setting(chip, _clusters(one), WAVES) for one in asked]
            a = trial(few).clocks([one if walk else None for one, walk in zip(settings, walks)])
            b = trial(many).clocks(settings)
            clocks = [longer((few, x), (many, y), row).clocks if x else y.clocks for x, y in zip(a.clocks, b.clocks)]
            return _joined(b, clocks)
    found = trial(row).clocks([Setting(chip, _clusters(one), WAVES) for one in asked])
    return _joined(found, [clock.clocks for clock in found.clocks])


def _clusters(launch: Any) -> int:
    return math.prod(launch.grid) // math.prod(launch.cluster)


class _Clocked(NamedTuple):
    kernels: list[str]
    clocks: list[Clock | None]
    backward: list[bool]


def _joined(found: _Clocked, clocks: Iterable[float]) -> Prediction:
    ahead, launches = [None, *found.clocks], []
    for kernel, all_, clock, before, back in zip(found.kernels, clocks, found.clocks, ahead, found.backward):
        overlap = before.clocks - clock.begins if before and clock.begins is not None else 0.0
        launches.append(Launched(kernel, all_, overlap, clock, back))
    return Prediction(tuple(launches))


class _Trial:
    """The call with rows of so many tokens."""

    def __init__(self, arch: str, backend: str, shape: Shape, step: bool, gate: str, row: int):
        self.arch, self.backend, self.shape, self.step, self.gate, self.row = arch, backend, shape, step, gate, row

    def launches(self) -> list[Any]:
        """That it makes; none runs."""
        with capture(arch=self.arch) as session:
            session.around = lambda launch, simulate: None
            self._call(self._case(torch.empty_like))
        return session.launches

    def clocks(self, settings: list[Setting | None]) -> _Clocked:
        """Of each launch with its setting; where there is none, it does not run."""
        clocks: list[Clock | None] = []
        with capture(arch=self.arch, checks=False, clock=True) as session:

            def around(launch: Any, simulate: Callable[[], Any]) -> Any:
                session.options["clock"] = settings[len(clocks)]
                run = simulate() if settings[len(clocks)] else None
                clocks.append(run and run.clock)
                return run

            session.around = around
            forward = self._call(self._case(torch.clone), lambda: len(clocks))
        kernels = [launch.kernel.name for launch in session.launches]
        return _Clocked(kernels, clocks, [n >= forward for n in range(len(clocks))])

    def _case(self, fill: Callable[[torch.Tensor], torch.Tensor]) -> Case:
        """Inputs whose tokens repeat those of a block; `fill` makes a tensor of what has the shape."""
        s = self.shape
        block = make(Spec(T=BLOCK, H=s.H, HV=s.HV, K=s.K, V=s.V, dtype=s.dtype, gate=self.gate, initial_state=False))
        B, T, N = (1, self.row * len(s.lengths), len(s.lengths)) if s.lengths else (s.B, self.row, s.B)

        def rows(x: torch.Tensor) -> torch.Tensor:
            if x.dim() < 3:
                return x
            x = x.unsqueeze(1).expand(B, -(-T // BLOCK), *x.shape[1:])
            return fill(x.flatten(1, 2)[:, :T]) if fill is torch.clone else fill(x.new_empty(1).expand(B, T, *x.shape[3:]))

        keywords = {name: rows(x) if isinstance(x, torch.Tensor) else x for name, x in block.keywords.items()}
        if s.lengths:
            keywords["cu_seqlens"] = torch.arange(0, T + 1, self.row)
        return Case(block.spec, keywords, rows(block.do), block.dht.expand(N, *block.dht.shape[1:]).contiguous())

    def _call(self, case: Case, count: Callable[[], int] = int) -> int:
        """Makes the call; the launches of its forward, by `count`."""
        if not self.step:
            kda.chunk_kda_fwd(**case.keywords, backend=self.backend)
            return count()
        leaves = {
            name: x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in case.keywords.items()
        }
        o, ht = kda.chunk_kda(**leaves, backend=self.backend)
        forward = count()
        torch.autograd.backward((o, ht), (case.do, case.dht))
        return forward
