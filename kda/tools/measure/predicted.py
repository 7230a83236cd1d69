"""The predicted time of a backend's call on a chip: each of its launches is predicted from a few clusters and tokens.

First the launches of a call are recorded without running them: with the requested row, and with two shorter rows.  If a
direction has the same kernels in all three, only the short ones run.  If the grid of a launch does not grow with the
row, its kernel loops over the row, and its time is extrapolated from both short rows (`longer`); any other launch is
predicted from some waves on a few SMs.  If a short row has another plan, the direction runs with the requested row,
still on a few SMs.  Packed sequences are assumed to have equal lengths, their mean.

CTAs of a grid that wait for each other's results (`_waits_inside`) run on a few SMs that all run in detail, with those
SMs' share of the heads.

A kernel whose grid grows with the row is assumed to need the same time per CTA in any call, so it runs in one call for
all shapes, a row of 1,024 tokens and 64 heads (`alike`), and its time with more CTAs follows.  A prediction depends
only on its own arguments: everything that is kept between predictions is a function of them.
"""

from __future__ import annotations

import collections
import functools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kda
from kda.model.force import Force, forced, forcing
from kda.tools.measure.shapes import BenchShape
from kda.tools.verify.cases import Case, Spec, make
from kda.tools.verify.definition import leaves_of
from ptxkit.capturing import capture
from ptxkit.capturing.session import Session
from ptxkit.timing.chips import CHIPS
from ptxkit.timing.clock import Clock, Setting, longer

SHORT = ((512, 1024), (1024, 2048))  # tokens of a row, of what stands for a longer one
BLOCK = 64  # tokens that are drawn; a row repeats them
WAVES, SMS = 3, 8                            # waves and SMs that run in detail
FEW_SMS = range(12, 21)                      # SMs that run a grid whose CTAs wait for each other
TOKENS, HEADS, PACKED = 1024, 64, 8          # size of the call that stands for others; PACKED: its sequences, if packed
MANY = 1 << 20                               # clusters, more waves than are looked at
ERRORS = Path(__file__).with_name("errors.json")


class PredictedLaunch(NamedTuple):
    """A launch of the requested call."""

    kernel: str
    clocks: float
    overlap: float  # clocks by which it begins before the launch ahead of it ends; less than 0: after it
    clock: Clock  # what it was predicted from, the longer of the two
    backward: bool

    @property
    def milliseconds(self) -> float:
        return self.clocks / self.clock.chip.gigahertz / 1e6

    @property
    def stalls(self) -> list[tuple[str, float]]:
        """Return (why, clocks that warps waited for each instruction that they issued), worst first."""
        issued = sum(warp["issued"] for warp in self.clock.warps)
        return sorted(((why, n / issued) for why, n in self.clock.stalls.items()), key=lambda item: -item[1])


@dataclass(frozen=True)
class Prediction:
    launches: tuple[PredictedLaunch, ...]

    def milliseconds(self, backward: bool | None = None) -> float:
        """Return the time of all launches, or of those of one direction alone."""
        some = [one for one in self.launches if backward in (None, one.backward)]
        clocks = sum(one.clocks - one.overlap for one in some)
        return clocks / some[0].clock.chip.gigahertz / 1e6 if some else 0.0

    def kernel(self, name: str, backward: bool = False, nth: int = 0) -> PredictedLaunch:
        matching = [one for one in self.launches if family_of(one.kernel) == name and one.backward == backward]
        if len(matching) <= nth:
            names = ", ".join(f"{family_of(one.kernel)}{' (backward)' * one.backward}" for one in self.launches)
            raise LookupError(f"the call has no such launch of {name}; it has {names}")
        return matching[nth]


@functools.cache
def measured() -> dict[str, Any]:
    """Return what benchmarks/predicted.py found: kernels that were timed, and the errors of their predictions, in
    percent."""
    return json.loads(ERRORS.read_text())


def measured_call(chip: str, problem: str, direction: str, backend: str) -> dict[str, Any] | None:
    """Return a whole call that was timed on such a chip, {"seconds", "source"}."""
    if chip != measured()["chip"]:
        return None
    wanted = {"problem": problem, "direction": direction, "backend": backend}
    return next((call for call in measured()["calls"] if wanted.items() <= call.items()), None)


def expected(backend: str, launches: Iterable[PredictedLaunch]) -> dict[str, Any]:
    """Return the expected error of launches: the worst of their families, and, if one of these was never timed, of all
    that the backend's timed kernels have, or those of all backends."""
    errors = measured()["errors"]
    families = {f"{backend} {family_of(one.kernel)}" for one in launches}
    known = {name: errors["families"][name] for name in sorted(families & {*errors["families"]})}
    if not families or families - {*known}:
        whose = backend if backend in errors["backends"] else "all"
        known[f"{whose}, other kernels"] = errors["backends"].get(backend, errors["all"])
    return {"median": max(each["median"] for each in known.values()),
            "worst": max(each["worst"] for each in known.values()), "of": ", ".join(known)}


def family_of(kernel: str) -> str:
    """Return what the stage of a compiled kernel is called; the DSL's names hold the module's and the class's."""
    words = ("fused", "stream", "prepare", "chain", "compose", "pairs", "tables", "join", "carry", "operands", "record",
             "walk", "grads", "reverse", "shares")
    return next((word for word in words for folder in ("fwd", "bwd", "cute") if folder + word in kernel), kernel)


class PredictedCall(NamedTuple):
    """A call whose launches are predicted; in place of its rows they may have shorter ones."""

    arch: str
    backend: str
    shape: BenchShape
    step: bool                               # a training forward and its backward
    apart: bool = False                      # whether these are functions of their own, between which nothing is saved
    keeps: bool | str = False                # what a step is given as disable_recompute

    @property
    def row(self) -> int:
        s = self.shape
        return round(s.tokens / len(s.lengths)) if s.lengths else s.T

    @property
    def like(self) -> PredictedCall:
        """Return the call that stands for all of other numbers of tokens, sequences and heads."""
        s = self.shape
        shared = s.heads // s.H                                                # value heads that have one q and k
        H = s.H if s.dtype == "float32" else max(1, HEADS // shared)           # float32's prepare: 2.5% from 16 to 64
        lengths = (TOKENS,) * PACKED if s.lengths else ()
        shape = BenchShape(T=0 if lengths else TOKENS, H=H, HV=H * shared, K=s.K, V=s.V, dtype=s.dtype, gate=s.gate,
                           lengths=lengths)
        return self._replace(shape=shape)

    def launches(self, row: int, backward: bool) -> list[Any]:
        """Return the launches of a direction, with rows of so many tokens; none of them runs."""
        launches: list[Any] = []

        def around(launch: Any, simulate: Callable[[], Any], of_backward: bool) -> None:
            if of_backward == backward:
                launches.append(launch)

        with capture(arch=self.arch) as session:
            self._run(session, self._case(row, _empty), around, backward)
        return launches

    def clocks(
        self, row: int, backward: bool, settings: list[Setting | None], known: list[Clock | None]
    ) -> list[Clock | None]:
        """Return the clocks of each launch of a direction; those in `known` are not simulated again, and a launch
        without a setting does not run. In the other direction only the tables run."""
        clocks: list[Clock | None] = []
        with capture(arch=self.arch, checks=False, clock=True) as session:

            def around(launch: Any, simulate: Callable[[], Any], of_backward: bool) -> Any:
                if of_backward != backward:
                    session.options["clock"] = None
                    return simulate() if _is_table(launch) else None
                setting, clock = settings[len(clocks)], known[len(clocks)]
                clocks.append(clock)
                if clock or not setting:
                    return None
                session.options["clock"] = setting
                run = simulate()
                clocks[-1] = run.clock
                return run

            self._run(session, self._case(row, _repeated), around, backward)
        return clocks

    def _case(self, row: int, fill: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Case:
        """Return inputs whose rows `fill` makes of those of a block of tokens."""
        s = self.shape
        block = make(Spec(T=BLOCK, H=s.H, HV=s.HV, K=s.K, V=s.V, dtype=s.dtype, gate=s.gate, initial_state=False))
        B, T, N = (1, row * len(s.lengths), len(s.lengths)) if s.lengths else (s.B, row, s.B)

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x if x.dim() < 3 else fill(x, B, T)

        keywords = {name: rows(x) if isinstance(x, torch.Tensor) else x for name, x in block.keywords.items()}
        if s.lengths:
            keywords["cu_seqlens"] = torch.arange(0, T + 1, row)
        return Case(block.spec, keywords, rows(block.do), block.dht.expand(N, *block.dht.shape[1:]).contiguous())

    def _run(self, session: Session, case: Case, around: Callable[..., Any], backward: bool) -> None:
        """Make the call, of a step the backward only where that is asked for; `around` is told the direction."""
        session.around = functools.partial(around, of_backward=False)
        if self.apart or not self.step:
            kda.chunk_kda_fwd(**case.keywords, backend=self.backend)
            if backward:
                session.around = functools.partial(around, of_backward=True)
                kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords, backend=self.backend)
            return
        keeps: dict[str, Any] = {"disable_recompute": self.keeps} if self.keeps else {}
        o, ht, *_ = kda.chunk_kda(**case.keywords | leaves_of(case.keywords), **keeps, backend=self.backend)
        if backward:
            session.around = functools.partial(around, of_backward=True)
            torch.autograd.backward((o, ht), (case.do, case.dht))


def predict(
    arch: str, chip: str, backend: str, shape: BenchShape, step: bool, apart: bool = False, keeps: bool | str = False
) -> Prediction:
    """Predict a forward, or (step) a training forward and its backward, of which nothing is saved if they are apart."""
    call = PredictedCall(arch, backend, shape, step, apart, keeps)
    if not step:
        return Prediction(_way(call._replace(keeps=False), chip, False))
    plain = call._replace(step=False, keeps=False)
    measured, alone = ([*map(_signature, one.launches(one.row, False))] for one in (call, plain))
    forward = _way(plain if measured == alone else call, chip, False)
    return Prediction(forward + _way(call, chip, True))


def _way(call: PredictedCall, chip: str, backward: bool) -> tuple[PredictedLaunch, ...]:
    """Predict the launches of one direction."""
    return _forced_way(call, chip, backward, forced())


@functools.lru_cache(maxsize=64)
def _forced_way(call: PredictedCall, chip: str, backward: bool, force: Force) -> tuple[PredictedLaunch, ...]:
    row = call.row
    launches = call.launches(row, backward)
    works = _working(launches, call, backward)
    settings = [None if _waits_inside(one) else _setting(chip, one, n) for one, n in zip(launches, works)]
    most = WAVES * CHIPS[chip].sms
    large = any(one and one.waves and one.clusters > most for one in settings)
    same = alike(call.like, chip, backward) if large else {}
    known = [setting and _known(same, one, setting) for one, setting in zip(launches, settings)]
    with forcing(**dict.fromkeys(["reverse"] * any(map(_waits_inside, launches)), True)):
        return _predicted(call, chip, backward, launches, settings, known)


def _predicted(
    call: PredictedCall, chip: str, backward: bool, launches: list[Any], settings: list[Setting | None],
    known: list[Clock | None],
) -> tuple[PredictedLaunch, ...]:
    row = call.row

    def clocks(row: int, settings: list[Setting | None], known: list[Clock | None]) -> list[Any]:
        found = call.clocks(row, backward, settings, known)
        return [_on_few_sms(call, chip, backward, row) if _waits_inside(one) else clock
                for one, clock in zip(launches, found)]

    for few, many in SHORT:
        if many >= row:
            break
        short, long = call.launches(few, backward), call.launches(many, backward)
        names = {tuple(one.kernel.name for one in each) for each in (short, long, launches)}
        if len(names) == 1:
            walks = [a.grid == b.grid == c.grid for a, b, c in zip(short, long, launches)]
            known = [None if walk else clock for walk, clock in zip(walks, known)]
            in_short = [one if one and (walk or not one.waves) else None for one, walk in zip(settings, walks)]
            a = clocks(few, in_short, [None] * len(known))
            b = clocks(many, settings, known)
            each = [
                longer((few, x), (many, y), row).clocks if walk else y.clocks for walk, x, y in zip(walks, a, b)
            ]
            return _joined(launches, b, each, backward)
    found = clocks(row, settings, known)
    return _joined(launches, found, [clock.clocks for clock in found], backward)


def _waits_inside(launch: Any) -> bool:
    """Return whether CTAs of the grid wait for others of it, so that a part of the grid would wait for ever."""
    return family_of(launch.kernel.name) == "reverse"


def _on_few_sms(call: PredictedCall, chip: str, backward: bool, row: int) -> Clock:
    """Return the clock of a grid whose CTAs wait for each other, with a row of so many tokens."""
    s, all_ = call.shape, int(CHIPS[chip].sms)

    def heads(sms: int) -> int:
        return max(1, round(s.H * sms / all_))

    def busier(sms: int) -> float:                                             # than these SMs with whole heads
        return s.H * sms / all_ / heads(sms)

    sms = min(FEW_SMS, key=lambda sms: abs(math.log(busier(sms))))
    few = call._replace(shape=s._replace(H=heads(sms), HV=heads(sms) * (s.heads // s.H)))
    with forcing(sms=sms, reverse=True):
        launches = few.launches(row, backward)
        settings = [_setting(chip, one, _clusters(one)) if _is_table(one)
                    else Setting(chip, all_ * _clusters(one) // sms, sms=sms) if _waits_inside(one) else None
                    for one in launches]
        found = few.clocks(row, backward, settings, [None] * len(launches))
    (clock,) = (clock for clock, one in zip(found, launches) if clock and _waits_inside(one))
    return replace(clock, clocks=clock.clocks * busier(sms))


Alike = dict[tuple[Any, ...], Clock]         # the clock of each kernel
_ALIKE: dict[tuple[PredictedCall, str, bool], Alike] = {}


def stands_for(calls: Iterable[PredictedCall], chip: str) -> list[tuple[PredictedCall, str, bool]]:
    """Return what `alike` is asked for by more than one of these calls that have grids of many waves."""
    large = [call for call in calls if call.shape.tokens * call.shape.heads > BLOCK * WAVES * CHIPS[chip].sms]
    counts = collections.Counter((call.like, chip, back) for call in large for back in {False, call.step})
    return [one for one, count in counts.items() if count > 1 and one not in _ALIKE]


def alike(like: PredictedCall, chip: str, backward: bool) -> Alike:
    """Return the clocks of kernels whose grids grow with the row, in a call that stands for those of all such
    shapes."""
    key = like, chip, backward
    if key not in _ALIKE:
        _ALIKE[key] = _alike(*key)
    return _ALIKE[key]


def keep(key: tuple[PredictedCall, str, bool], clocks: Alike) -> None:
    """Remember what `alike` found in another process."""
    _ALIKE[key] = clocks


def _alike(like: PredictedCall, chip: str, backward: bool) -> Alike:
    few, many = TOKENS // 2, TOKENS
    short, long = like.launches(few, backward), like.launches(many, backward)
    if [one.kernel.name for one in short] != [one.kernel.name for one in long]:
        return {}
    grows = [a.grid != b.grid and not b.pdl for a, b in zip(short, long)]
    settings = [_setting(chip, one, MANY) if more or _is_table(one) else None for one, more in zip(long, grows)]
    clocks = like.clocks(many, backward, settings, [None] * len(settings))
    return {_key(one): replace(clock, stalls_of=[]) for one, clock, more in zip(long, clocks, grows) if more and clock}


def _key(launch: Any) -> tuple[Any, ...]:
    return launch.kernel.ptx, launch.kernel.name, launch.block, launch.cluster, launch.dynamic_shared


def _known(same: Alike, launch: Any, setting: Setting) -> Clock | None:
    """Return the clock of a launch of more waves than are looked at, from that of its kernel in the call that stands
    for it; a dependent launch has none, for its time depends on the one ahead."""
    clock = None if launch.pdl or not setting.waves else same.get(_key(launch))
    if not clock or not clock.more:
        return None
    known = clock.of(setting.clusters)
    return known if known.share > setting.waves * clock.resident else None


def _signature(launch: Any) -> tuple[Any, ...]:
    return *_key(launch), launch.grid, launch.pdl


def _clusters(launch: Any) -> int:
    return math.prod(launch.grid) // math.prod(launch.cluster)


def _working(launches: list[Any], call: PredictedCall, backward: bool) -> list[int]:
    """Return the clusters of each launch that have something to do: a packed grid is as large as the tokens may ask
    for, and the same sequences as a batch say how much of it these do."""
    working, s = [_clusters(one) for one in launches], call.shape
    if not s.lengths:
        return working
    batch = call._replace(shape=s._replace(B=len(s.lengths), T=call.row, lengths=()))
    alike: dict[str, list[int]] = {}
    for one in batch.launches(call.row, backward):
        alike.setdefault(family_of(one.kernel.name), []).append(_clusters(one))
    for n, one in enumerate(launches):
        if left := alike.get(family_of(one.kernel.name)):
            working[n] = min(working[n], left.pop(0))
    return working


def _is_table(launch: Any) -> bool:
    return family_of(launch.kernel.name) == "tables"


def _setting(chip: str, launch: Any, clusters: int) -> Setting:
    """Return how a launch runs; tables of packed sequences run in full, since other kernels depend on their values.
    Where segments are walked back over, CTAs of the first may have nothing to do: SMs run some of the second, too."""
    if _is_table(launch):
        return Setting(chip, clusters, sms=SMS)
    x, y, segments = launch.grid
    walks_back = family_of(launch.kernel.name) == "walk" and segments > 1
    return Setting(chip, clusters, WAVES, SMS + x * y if walks_back else SMS)


def _joined(
    launches: list[Any], clocks: list[Clock], each: Iterable[float], backward: bool
) -> tuple[PredictedLaunch, ...]:
    """Return a launch in `each` clocks; the first one of a backward comes after its forward."""
    ahead, joined = [None, *clocks], []
    for launch, all_, clock, before in zip(launches, each, clocks, ahead):
        if clock.begins is not None and before:
            overlap = before.clocks - clock.begins
        else:
            overlap = -clock.gap if before or backward else 0.0
        joined.append(PredictedLaunch(launch.kernel.name, all_, overlap, clock, backward))
    return tuple(joined)


def forget() -> None:
    """Forget all predictions: for those who change how a backend plans."""
    _forced_way.cache_clear()
    _ALIKE.clear()


def _empty(block: torch.Tensor, B: int, T: int) -> torch.Tensor:
    return block.new_empty(B, T, *block.shape[2:])


def _repeated(block: torch.Tensor, B: int, T: int) -> torch.Tensor:
    return block.repeat(B, -(-T // BLOCK), *[1] * (block.dim() - 2))[:, :T].contiguous()
