"""What a call of a backend takes on a chip: its launches, each predicted from few of its clusters and its tokens.

The launches that a call makes are taken down first, with nothing run: once as asked, and once with each of two shorter
rows.  Where the same kernels come, only those are run.  A launch whose grid does not grow with the row walks along it,
and is predicted from both (`longer`); of any other, some waves on a few SMs say what all of them take.  Where a short
row is planned otherwise, the call runs as asked, still on a few SMs.  Packed sequences are taken to be of one length,
their mean.  A kernel that has run with more waves than are looked at is not run again for other counts of them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kda
from kda import simulator
from kda.measure.shapes import Shape
from kda.simulator.capturing import capture
from kda.simulator.timing.clock import Clock, Setting, longer
from kda.verify.cases import Case, Spec, make

SHORT = ((512, 1024), (1024, 2048))  # tokens of a row, of what stands for a longer one
BLOCK = 64  # tokens that are drawn; a row repeats them
WAVES, SMS = 3, 8                            # that run in detail
ERRORS = Path(simulator.__file__).parent / "timing" / "errors.json"


class Launched(NamedTuple):
    """A launch of the call as asked."""

    kernel: str
    clocks: float
    overlap: float  # clocks by which it begins before the launch ahead of it ends; less than 0: after it
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


@functools.cache
def recorded() -> dict[str, Any]:
    """What benchmarks/predicted.py found: kernels that were timed, and the errors of their predictions, in percent."""
    return json.loads(ERRORS.read_text())


def recorded_call(chip: str, problem: str, direction: str, backend: str) -> dict[str, Any] | None:
    """A whole call that was timed on such a chip, {"seconds", "source"}."""
    if chip != recorded()["chip"]:
        return None
    asked = {"problem": problem, "direction": direction, "backend": backend}
    return next((call for call in recorded()["calls"] if asked.items() <= call.items()), None)


def expected(backend: str, launches: Iterable[Launched]) -> dict[str, Any]:
    """The errors to expect of launches: the worst of their families that were timed, else of the backend, or of all."""
    errors = recorded()["errors"]
    families = {f"{backend} {family_of(one.kernel)}" for one in launches} & {*errors["families"]}
    if families:
        each = [errors["families"][name] for name in families]
        return {"median": max(of["median"] for of in each), "worst": max(of["worst"] for of in each),
                "of": ", ".join(sorted(families))}  # fmt: skip
    whose = backend if backend in errors["backends"] else "all"
    of = errors["backends"].get(backend, errors["all"])
    return {"median": of["median"], "worst": of["worst"], "of": f"{whose}, other kernels"}


def family_of(kernel: str) -> str:
    """What the stage of a compiled kernel is called; the DSL's names hold the module's and the class's."""
    words = ("fused", "prepare", "chain", "compose", "pairs", "tables", "join", "carry")
    return next((word for word in words if f"fwd{word}" in kernel or f"cute{word}" in kernel), kernel)


def predict(arch: str, chip: str, backend: str, shape: Shape, step: bool, gate: str = "bounded") -> Prediction:
    """A forward, or (step) a recorded forward and its backward."""
    row = round(shape.tokens / len(shape.lengths)) if shape.lengths else shape.T
    trial = functools.partial(_Trial, arch, backend, shape, step, gate)
    asked = trial(row).launches()
    works = _working(asked, arch, backend, shape, step, gate, row)
    for few, many in SHORT:
        if many >= row:
            break
        short, long = trial(few).launches(), trial(many).launches()
        names = {tuple(one.kernel.name for one in each) for each in (short, long, asked)}
        if len(names) == 1:
            walks = [a.grid == b.grid == c.grid for a, b, c in zip(short, long, asked)]
            settings = [_setting(chip, one, n) for one, n in zip(asked, works)]
            a = trial(few).clocks([one if walk or not one.waves else None for one, walk in zip(settings, walks)])
            b = trial(many).clocks(settings)
            each = zip(walks, a.clocks, b.clocks)
            clocks = [longer((few, x), (many, y), row).clocks if walk else y.clocks for walk, x, y in each]
            return _joined(b, clocks)
    found = trial(row).clocks([_setting(chip, one, n) for one, n in zip(asked, works)])
    return _joined(found, [clock.clocks for clock in found.clocks])


def _clusters(launch: Any) -> int:
    return math.prod(launch.grid) // math.prod(launch.cluster)


def _working(launches: list[Any], arch: str, backend: str, shape: Shape, step: bool, gate: str, row: int) -> list[int]:
    """Clusters of each launch that have something to do: a packed grid is as large as the tokens may ask for, and the
    same sequences as a batch say how much of it these do."""
    found = [_clusters(one) for one in launches]
    if not shape.lengths:
        return found
    batch = shape._replace(B=len(shape.lengths), T=row, lengths=())
    alike: dict[str, list[int]] = {}
    for one in _Trial(arch, backend, batch, step, gate, row).launches():
        alike.setdefault(family_of(one.kernel.name), []).append(_clusters(one))
    for n, one in enumerate(launches):
        if left := alike.get(family_of(one.kernel.name)):
            found[n] = min(found[n], left.pop(0))
    return found


def _setting(chip: str, launch: Any, clusters: int) -> Setting:
    """Tables of packed sequences run in full: what the other kernels do depends on them."""
    if family_of(launch.kernel.name) == "tables":
        return Setting(chip, clusters, sms=SMS)
    return Setting(chip, clusters, WAVES, SMS)


class _Clocked(NamedTuple):
    kernels: list[str]
    clocks: list[Clock | None]
    backward: list[bool]


def _joined(found: _Clocked, clocks: Iterable[float]) -> Prediction:
    ahead, launches = [None, *found.clocks], []
    for kernel, all_, clock, before, back in zip(found.kernels, clocks, found.clocks, ahead, found.backward):
        overlap = 0.0 if not before else -clock.gap if clock.begins is None else before.clocks - clock.begins
        launches.append(Launched(kernel, all_, overlap, clock, back))
    return Prediction(tuple(launches))


_SEEN: dict[tuple[Any, ...], Clock] = {}


def forget() -> None:
    """The clocks of kernels that have run: what the next predictions say does not depend on those before."""
    _SEEN.clear()


def _key(launch: Any, setting: Setting) -> tuple[Any, ...]:
    return launch.kernel.ptx, launch.block, launch.cluster, launch.pdl, setting.chip, setting.waves


def known(launch: Any, setting: Setting) -> Clock | None:
    """The clock of a kernel of which more waves ran than are looked at, and more are asked for."""
    clock = _SEEN.get(_key(launch, setting))
    if not clock or not clock.more or launch.pdl:              # a dependent launch's time depends on the one ahead
        return None
    found = clock.of(setting.of)
    return found if found.share > setting.waves * clock.resident else None


def _empty(block: torch.Tensor, B: int, T: int) -> torch.Tensor:
    return block.new_empty(B, T, *block.shape[2:])


def _repeated(block: torch.Tensor, B: int, T: int) -> torch.Tensor:
    return block.repeat(B, -(-T // BLOCK), *[1] * (block.dim() - 2))[:, :T].contiguous()


class _Trial:
    """The call with rows of so many tokens."""

    def __init__(self, arch: str, backend: str, shape: Shape, step: bool, gate: str, row: int):
        self.arch, self.backend, self.shape, self.step, self.gate, self.row = arch, backend, shape, step, gate, row

    def launches(self) -> list[Any]:
        """That it makes; none runs."""
        with capture(arch=self.arch) as session:
            session.around = lambda launch, simulate: None
            self._call(self._case(_empty))
        return session.launches

    def clocks(self, settings: list[Setting | None]) -> _Clocked:
        """Of each launch with its setting; where there is none, it does not run."""
        clocks: list[Clock | None] = []
        with capture(arch=self.arch, checks=False, clock=True) as session:

            def around(launch: Any, simulate: Callable[[], Any]) -> Any:
                setting = settings[len(clocks)]
                clocks.append(known(launch, setting) if setting else None)
                if not setting or clocks[-1]:
                    return None
                session.options["clock"] = setting
                run = simulate()
                clocks[-1] = _SEEN[_key(launch, setting)] = run.clock
                return run

            session.around = around
            forward = self._call(self._case(_repeated), lambda: len(clocks))
        kernels = [launch.kernel.name for launch in session.launches]
        return _Clocked(kernels, clocks, [n >= forward for n in range(len(clocks))])

    def _case(self, fill: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Case:
        """Inputs whose rows `fill` makes of those of a block of tokens."""
        s = self.shape
        block = make(Spec(T=BLOCK, H=s.H, HV=s.HV, K=s.K, V=s.V, dtype=s.dtype, gate=self.gate, initial_state=False))
        B, T, N = (1, self.row * len(s.lengths), len(s.lengths)) if s.lengths else (s.B, self.row, s.B)

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x if x.dim() < 3 else fill(x, B, T)

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
