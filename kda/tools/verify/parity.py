"""Parity with the definition: stage by stage, then whole calls.  Finds the first wrong stage, and a smaller case.

Every stage runs twice.  Fed by its predecessors, it has to agree with the oracle's chain; fed by the oracle, with the
same stage written out.  If only the first is wrong, its inputs were wrong; if both are, the stage is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kda.model.stages import BACKWARD, FORWARD, OF_WALK, WALK, Stage, find, in_order
from ptxkit.compile.target import Target

from .budget import Budget, Measure, Rounding, shaken
from .cases import Case, Spec, make
from .definition import budgets, shakes_of, summed
from .doors import Door
from .evidence import Proof
from .faults import Fault
from .literal import chain, one_thread, one_thread_if_small, run_stage
from .places import has_rows, pattern, place

Tensor = torch.Tensor
Tensors = dict[str, "Tensor | None"]

# What a tensor is computed from, if that is not everything that its stage reads.
USES = {
    "qn": ("q",), "kn": ("k",), "b": ("beta",), "g2": ("g", "A_log", "dt_bias"), "gc_last": ("g2",),
    "A_qk": ("qn", "kn", "g2"), "A_kk": ("kn", "b", "g2"),
    "A_inv": ("A_kk",), "w": ("A_inv", "kb"), "u": ("A_inv", "v", "b"),
    "qg": ("qn", "g2"), "kb": ("kn", "b", "g2"), "kg": ("kn", "g2"),
    "v_new": ("h", "u", "w"), "ht": ("h", "v_new", "kg", "gc_last"),
    "dv_new": ("dh", "dv_local", "kg"), "dh0": ("dh", "dv_new", "do", "qg", "w", "gc_last"),
    "dA_qk": ("do", "v_new"), "dA_kk": ("dv_new", "v_new", "A_inv"),
    "dv": ("dv_new", "A_inv", "b"), "dqn_local": ("do", "h", "g2"),
    "dkn_local": ("v_new", "dh", "dv_new", "h", "A_inv", "b", "g2"),
    "db_local": ("dv_new", "h", "A_inv", "v", "kn", "g2"),
    "dqn": ("dqn_local", "dA_qk", "kn", "g2"), "db": ("db_local", "dA_kk", "kn", "g2"),
    "dkn": ("dkn_local", "dA_qk", "dA_kk", "qn", "kn", "b", "g2"),
    "dq": ("dqn", "q"), "dk": ("dkn", "k"), "dbeta": ("db", "beta"), "dg": ("dg2", "g", "A_log", "dt_bias"),
    "dA_log": ("dg", "g", "A_log", "dt_bias"), "ddt_bias": ("dg",),
}
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParityRow(NamedTuple):
    """One tensor: of a stage, or of a whole call ("forward", "backward", ...)."""

    stage: str
    tensor: str
    measure: Measure
    itself: bool = False                     # a stage that is also wrong on the oracle's tensors
    where: Mapping[str, int] = {}
    pattern: str = ""
    follows_from: str | None = None

    @property
    def wrong(self) -> bool:
        return not self.measure.used <= 1

    @property
    def of_stage(self) -> bool:
        return "/" in self.stage


@dataclass
class ParityReport:
    case: Case
    backend: str
    rows: list[ParityRow] = field(default_factory=list)
    stopped: bool = False                    # before the backward, because the forward is wrong
    no_backward: tuple[str, ...] = ()        # the backend's reasons

    @property
    def wrong(self) -> list[ParityRow]:
        return [row for row in self.rows if row.wrong]

    @property
    def first(self) -> ParityRow | None:
        """Return the row to examine: the first wrong one that does not follow from another."""
        return next((row for row in self.wrong if row.follows_from is None), next(iter(self.wrong), None))


# ---------------------------------------------------------------------------------------------- stages


def masked(name: str, x: Any, case: Case) -> Any:
    """Return x with zeros in rows past the end of a sequence, whose contents do not matter."""
    return x.masked_fill(~case.layout.valid, 0) if x is not None and has_rows(name) else x


class Oracle:
    """The stages written out for one case: exact, and in the rounding of a backend."""

    def __init__(self, case: Case, rounding: Rounding):
        self.case, self.rounding = case, rounding
        self.p, self.layout = case.problem(), case.layout
        self.exact: Tensors = case.stage_tensors(torch.float64)
        given: Tensors = case.stage_tensors(rounding.compute)
        self.shakes = (None, *shakes_of(case, rounding))
        self.rounded: list[Tensors] = [shaken_all(given, shake) for shake in self.shakes]

    def rounding_of(self, stage: Stage) -> Rounding:
        """Return the roundings of a backward by another backend, which recomputes what it does not get."""
        return self.rounding.of_gradients if stage.backward else self.rounding

    def roundings_of(self, stage: Stage) -> list[Rounding]:
        return [self.rounding_of(stage)._replace(shake=shake) for shake in self.shakes]

    def reach(self, stage: Stage) -> None:
        """Compute what the stage reads."""
        for before in FORWARD[:-1] + WALK if stage in WALK else FORWARD + BACKWARD:
            if before == stage.members[0]:
                return
            if not self.exact.keys() >= {*before.writes}:
                self.advance(before)

    def advance(self, stage: Stage) -> None:
        """Compute what the stage writes and, for a run of stages, its internal tensors."""
        self.exact = chain([stage.name], self.p, self.layout, self.exact, torch.float64)
        self.rounded = [
            chain([stage.name], self.p, self.layout, x, r.compute, r)
            for r, x in zip(self.roundings_of(stage), self.rounded)
        ]

    def feed(self, stage: Stage) -> Tensors:
        """Return what the stage reads, from the oracle, rounded to the dtypes that a backend can get."""
        read = {n: self.exact[n] for n in stage.reads}
        rounding = self.rounding_of(stage)
        return {n: None if x is None else rounding(n, x.to(rounding.compute)) for n, x in read.items()}

    def budgets_alone(self, stage: Stage, fed: Tensors) -> dict[str, Budget]:
        run = functools.partial(run_stage, stage.name, self.p, self.layout)
        rounded = [run(shaken_all(fed, r.shake), r.compute, r) for r in self.roundings_of(stage)]
        return self._budgets(stage, run(fed, torch.float64), rounded)

    def budgets_chained(self, stage: Stage) -> dict[str, Budget]:
        return self._budgets(stage, {n: self.exact[n] for n in stage.writes}, self.rounded)

    def _budgets(self, stage: Stage, exact: Tensors, roundings: list[Tensors]) -> dict[str, Budget]:
        rounding = self.rounding_of(stage)
        return {
            n: Budget.of(masked(n, x, self.case), *(masked(n, rounded[n], self.case) for rounded in roundings),
                         compute=rounding.compute, stored=rounding.dtype_of(n), summed=summed(self.case, n))
            for n, x in exact.items() if x is not None
        }


def shaken_all(tensors: Tensors, shake: int | None) -> Tensors:
    return tensors if shake is None else {n: None if x is None else shaken(x, shake) for n, x in tensors.items()}


def judge(stage: str, name: str, budget: Budget, x: Tensor | None, case: Case, whole: bool = False) -> ParityRow:
    if x is None:
        return ParityRow(stage, name, Measure(math.inf, 0.0, math.inf, "missing", None))
    measure = budget.measure(x)
    row = ParityRow(stage, name, measure, where=place(name, measure.index, case, whole))
    if row.wrong and measure.kind != "shape":
        row = row._replace(pattern=pattern(name, budget.wrong(x), case, whole))
    return row


def alone(door: Door, case: Case, stage: Stage, oracle: Oracle) -> list[ParityRow]:
    """Return the stage on the oracle's tensors."""
    oracle.reach(stage)
    fed = oracle.feed(stage)
    written = door.stage(stage.name, case, fed)
    return [
        judge(stage.name, n, budget, masked(n, written.get(n), case), case)._replace(itself=True)
        for n, budget in oracle.budgets_alone(stage, fed).items()
    ]


def walk(door: Door, case: Case, stages: Iterable[Stage], oracle: Oracle) -> Iterator[list[ParityRow]]:
    """Yield the rows of each stage in turn; `stages` begin with the first one and are complete.

    If a later stage needs an internal tensor of a run of stages, the oracle supplies it.
    """
    seen = door.sees(case)
    env, wrong = seen.stage_tensors(oracle.rounding.compute), _inputs_that_differ(seen, case)
    for stage in stages:
        by_itself = {row.tensor: row for row in alone(door, case, stage, oracle)}
        env |= door.stage(stage.name, seen, {n: env.get(n, x) for n, x in oracle.feed(stage).items()})
        oracle.advance(stage)
        rows = []
        for n, budget in oracle.budgets_chained(stage).items():
            row = judge(stage.name, n, budget, masked(n, env.get(n), case), case)
            if by_itself[n].wrong:
                row = row._replace(itself=True) if row.wrong else by_itself[n]
            if row.wrong:
                possible = [cause for cause in causes(n, stage) if cause in stage.writes or not row.itself]
                row = row._replace(follows_from=next((cause for cause in possible if cause in wrong), None))
                wrong.add(n)
            rows.append(row)
        yield rows


def causes(name: str, stage: Stage) -> Iterator[str]:
    """Yield what a tensor is computed from, of all that the stage reads and writes."""
    reads = next(member.reads for member in stage.members if name in member.writes)
    for cause in USES.get(name, reads):
        if cause in stage.reads or cause in stage.writes:
            yield cause
        else:                                                                 # kept inside a run of stages
            yield from causes(cause, stage)


def _inputs_that_differ(seen: Case, case: Case) -> set[str]:
    """Return the names of inputs that the backend changed."""
    if seen is case:
        return set()
    a, b = (x.stage_tensors(torch.float64) for x in (seen, case))
    pairs = ((n, x, b[n]) for n, x in a.items())
    return {n for n, x, y in pairs if x is not None and (y is None or not torch.equal(x, y))}


# ---------------------------------------------------------------------------------------------- whole calls


def direction(name: str) -> str:
    return "forward" if name in ("o", "ht") else "backward"


def whole_call(door: Door, case: Case, backward: bool) -> tuple[list[ParityRow], dict[str, Tensor], dict[str, Budget]]:
    results, limits = door.call(case, backward), budgets(case, door.rounding(case), backward)
    rows = [judge(direction(n), n, limit, results.get(n), case, whole=True) for n, limit in limits.items()]
    return rows, results, limits


def compare(
    door: Door, other: Door, case: Case, backward: bool, results: dict, limits: dict[str, Budget]
) -> list[ParityRow]:
    """Compare two backends; the difference of two results may use the budgets of both."""
    theirs, their_limits = other.call(case, backward), budgets(case, other.rounding(case), backward)
    return [
        judge(f"to {other.name}", n, (limit + their_limits[n]).around(theirs[n]), results[n], case, whole=True)
        for n, limit in limits.items()
    ]


# ---------------------------------------------------------------------------------------------- equal bits


def same_bits(stage: str, name: str, a: Tensor, b: Tensor, case: Case) -> ParityRow:
    differs = a.contiguous().view(BITS[a.element_size()]) != b.contiguous().view(BITS[b.element_size()])
    if not differs.any():
        return ParityRow(stage, name, Measure(0.0, 0.0, 0.0, "bits", None))
    index = tuple(int(i) for i in torch.unravel_index(differs.flatten().int().argmax(), differs.shape))
    share = int(differs.sum()) / differs.numel()
    measure = Measure(share, 0.0, math.inf, "bits", index, float(a[index]), float(b[index]))
    where, shape = place(name, index, case, whole=True), pattern(name, differs, case, whole=True)
    return ParityRow(stage, name, measure, where=where, pattern=shape)


def run_vs_run(door: Door, case: Case, backward: bool) -> list[ParityRow]:
    first, second = door.call(case, backward), door.call(case, backward)
    return [same_bits("run vs run", n, first[n], second[n], case) for n in first]


def packed_vs_alone(door: Door, case: Case, backward: bool) -> list[ParityRow]:
    """Compare packed sequences with each alone: batch_invariant=True gives the same bits, except in sums over all."""
    packed = door.call(case, backward, batch_invariant=True)
    names = [n for n in packed if n not in ("dA_log", "ddt_bias")]
    joined = {n: torch.zeros_like(packed[n]) for n in names}
    for n, (start, end) in enumerate(case.layout.bounds):
        sequence = case.part(n, slice(start, end), case.spec.H, case.spec.heads)
        mine = door.call(sequence, backward, batch_invariant=True)
        for name in names:
            if name in ("ht", "dh0"):
                joined[name][n] = mine[name][0]
            else:
                joined[name].flatten(0, 1)[start:end] = mine[name][0]
    return [same_bits("packed vs alone", n, packed[n], joined[n], case) for n in names]


# ---------------------------------------------------------------------------------------------- all of it


def examine(
    door: Door, case: Case, only_stage: str | None = None, other: Door | None = None, exact: bool = False,
    keep_going: bool = False, tell: Callable[[str], None] = lambda text: None,
) -> ParityReport:
    """Examine stages, then whole calls; with `only_stage` only that one, with `exact` only equal bits."""
    report = ParityReport(case, door.name, no_backward=door.against(case, "backward"))
    with one_thread_if_small(case.problem()):
        _examine(report, door, only_stage, other, exact, keep_going, tell)
    return report


def _examine(
    report: ParityReport, door: Door, only_stage: str | None, other: Door | None, exact: bool, keep_going: bool,
    tell: Callable[[str], None],
) -> None:
    case, backward = report.case, not report.no_backward
    if exact:
        tell("run after run, packed and alone")
        report.rows = run_vs_run(door, case, backward) + packed_vs_alone(door, case, backward)
        return
    oracle = Oracle(case, door.rounding(case))
    stages = [] if only_stage in OF_WALK else _looked_at(door, backward, only_stage)
    if only_stage in OF_WALK or (only_stage is not None and stages != _unbroken(stages)):
        report.rows = alone(door, case, find(only_stage), oracle)             # no stage of the backend's own feeds it
        return
    forward = [stage.name for stage in stages if not stage.backward]
    if stages:
        tell(stages[0].name)
    chained = _unbroken(stages)
    others = (alone(door, case, stage, oracle) for stage in stages[len(chained) :])
    for rows in itertools.chain(walk(door, case, chained, oracle), others):
        tell(f"after {rows[0].stage}")
        if only_stage in (None, rows[0].stage):
            report.rows += rows
        if only_stage is None and rows[0].stage == forward[-1] and report.wrong and not keep_going:
            report.stopped = True
            return
    if only_stage is None:
        tell("whole calls")
        first = report.first
        rows, results, limits = whole_call(door, case, backward)
        if other is not None and other.name != door.name:
            rows += compare(door, other, case, backward, results, limits)
        report.rows += [row._replace(follows_from=first.tensor) if first and row.wrong else row for row in rows]


def _looked_at(door: Door, backward: bool, only_stage: str | None) -> list[Stage]:
    """Return the stages of a backend, or those up to one of them."""
    stages = [stage for stage in in_order(door.stages) if stage not in WALK and (backward or not stage.backward)]
    return stages if only_stage is None else stages[: stages.index(find(only_stage)) + 1]


def parts(door: Door, case: Case, only_stage: str | None = None, exact: bool = False) -> int | None:
    """Return how often `examine` tells what it does now; None if that says little."""
    if exact or only_stage in OF_WALK:
        return None
    stages = _looked_at(door, not door.against(case, "backward"), only_stage)
    return len(stages) + bool(stages) + (only_stage is None)


def _unbroken(stages: list[Stage]) -> list[Stage]:
    """Return the stages up to the first gap: those after it have no input of the backend's own."""
    unbroken: list[Stage] = []
    computed: set[Any] = set()
    order = FORWARD + BACKWARD
    for stage in stages:
        if not computed.issuperset(order[: order.index(stage.members[0])]):
            break
        unbroken.append(stage)
        computed.update(stage.members)
    return unbroken


def smaller(door: Door, report: ParityReport, fault: Fault | None, tries: int = 6) -> Spec | None:
    """Return a smaller case that is wrong in the same place, drawn from the same seed; None if none was found."""
    first, spec = report.first, report.case.spec
    if first is None:
        return None
    only_stage = first.stage if first.of_stage else None
    best = None
    for change in _reductions(spec, first)[:tries]:
        try_ = dataclasses.replace(best or spec, **change)
        try_ = fault.suited(try_) if fault else try_
        if try_ == (best or spec):
            continue
        result = examine(door, make(try_), only_stage, exact=first.measure.kind == "bits")
        if result.first and (result.first.stage, result.first.tensor) == (first.stage, first.tensor):
            best = try_
    return best


def _reductions(spec: Spec, first: ParityRow) -> list[dict[str, Any]]:
    seq = first.where.get("seq", 0)
    groups = spec.heads // spec.H
    changes: list[dict[str, Any]] = []
    if spec.lengths is not None and len(spec.lengths) > 1:
        changes.append({"lengths": (spec.lengths[seq],)})
    if spec.lengths is None and spec.B > 1:
        changes.append({"B": 1})
    if spec.H > 1:
        changes.append({"H": 1, "HV": groups if groups > 1 else None})
    if groups > 1:
        changes.append({"HV": None})
    return changes


# ---------------------------------------------------------------------------------------------- proofs

PROOFS = (                                   # drawn in each of the backend's `proof_dtypes`
    Spec(lengths=(65, 0, 1, 30), H=1, HV=2, gate="bounded", regime="slow", seed=1),
    Spec(T=64, H=2, gate="softplus", regime="fast", beta="2*sigmoid", seed=2),
)


def proof_specs(door: Door) -> list[Spec]:
    return [dataclasses.replace(spec, dtype=dtype) for dtype in door.capability.proof_dtypes for spec in PROOFS]


@functools.lru_cache(maxsize=8)
def _oracle(spec: Spec, door: Door) -> Oracle:
    case = make(spec)
    return Oracle(case, door.rounding(case))


def prove_executed(backend: str, stage: str, target: Target | None) -> Proof:
    """Prove a backend's stage on this machine, fed by the oracle."""
    return prove(Door(backend), stage)


@one_thread()
def prove(door: Door, stage: str) -> Proof:
    """Prove a stage behind a door, fed by the oracle."""
    specs = proof_specs(door)
    way = "backward" if find(stage).backward else "forward"
    refused = {spec: door.against(make(spec), way) for spec in specs}
    if all(refused.values()):
        reasons = dict.fromkeys(reason for spec in specs for reason in refused[spec])
        return Proof(False, "FAIL", tuple(f"{stage}: not accepted: {reason}" for reason in reasons))
    used: dict[str, float] = {}
    wrong: list[str] = []
    for oracle in (_oracle(spec, door) for spec in specs if not refused[spec]):
        for row in alone(door, oracle.case, find(stage), oracle):
            used[row.tensor] = max(used.get(row.tensor, 0.0), row.measure.used)
            wrong += [f"{stage}: {describe(row)}, {oracle.case.spec.dtype}"] if row.wrong else []
    says = ", ".join(f"{n} {u:.2f}" for n, u in sorted(used.items(), key=lambda item: -item[1])[:3])
    return Proof(not wrong, says, tuple(wrong))


def describe(row: ParityRow) -> str:
    """Return one line about a wrong row."""
    if row.measure.kind in ("shape", "missing"):
        return f"{row.tensor}: {worst(row)}"
    return f"{row.tensor}: {used_words(row.measure)} of its budget, {worst(row)}"


def worst(row: ParityRow) -> str:
    """Name the worst place: "seq 0 chunk 1 head 3 k 64 v 0: got 0.412, want 0.009"."""
    m = row.measure
    if m.index is None:
        return {"shape": "another shape", "missing": "nothing was written"}.get(m.kind, "")
    place = " ".join(f"{axis} {i}" for axis, i in row.where.items())
    return f"{place}: got {m.got:.6g}, want {m.want:.6g}"


def used_words(m: Measure) -> str:
    """Say how much of a budget is used: "35%", "33x", "nan"."""
    if m.kind == "bits":
        return "differ" if m.used else "equal"
    if m.kind not in ("norm", "peak"):
        return m.kind
    if m.used < 10:
        return f"{m.used:.0%}"
    return f"{m.used:.0f}x" if m.used < 1e4 else f"{m.used:.0e}x".replace("e+0", "e").replace("e+", "e")
