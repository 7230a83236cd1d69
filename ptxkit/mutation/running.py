"""Runs calls with one kernel changed at a time, until something is noticed or all schedules are through."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ptxkit.errors import PtxkitError

from ..capturing import capture, memory
from ..findings import SimulationError
from ..ptx import PtxError
from ..workers import forked
from .replay import Player, RecordedLaunch, Recorder, equal
from .rules import RULES, Weakening
from .sites import Mutant, mutants_of
from .table import Mutants, Outcome

# What each mutant runs under: asynchronous work late and early, warps in turns and in two random orders.
SCHEDULES = ({"schedule": 0}, {"schedule": 0, "early": True}, {"schedule": 1, "early": True}, {"schedule": 2})
WRONG = "wrong result"
PATIENCE, SPARE = 4, 10_000                  # a launch PATIENCE times longer than any other is endless
Verdict = tuple[tuple[str, ...], int | None]


class MutantsError(PtxkitError, RuntimeError):
    """Calls that cannot judge mutants."""


class Standard(NamedTuple):
    """An unchanged call under one schedule."""

    run_it: Callable[[], Any]
    options: dict[str, Any]                  # what `capture` was given
    results: list[torch.Tensor]
    launches: list[RecordedLaunch]

    def executes(self, mutant: Mutant) -> bool:
        launches = (launch for launch in self.launches if launch.kernel == (mutant.ptx, mutant.kernel))
        return any(mutant.line in launch.executed for launch in launches)


def mutants(
    *calls: Callable[[], Any], arch: str = "sm_100a", schedules: Sequence[dict[str, Any]] = SCHEDULES,
    rules: Sequence[Weakening] = RULES, sample: int = 1, workers: int = 1,
    tell: Callable[[int, int, int], Any] = lambda done, total, survived: None, **options: Any,
) -> Mutants:
    """Removes or weakens every synchronising instruction of the kernels that `calls` launch, one at a time, and
    reports which of these mutants are noticed.

        def call():
            x = torch.arange(4096.0)
            my_kernel(x, out := torch.empty(4096))
            return out

        found = ptxkit.mutants(call, arch="sm_90a")
        print(found)                                     # a row per source line and mutation
        assert not found.survivors

    A call launches kernels as inside `capture`, which is opened for it.  It returns its outputs (tensors, alone or in
    lists, tuples, dicts and dataclasses), which are compared bit for bit with those of the unchanged kernels, or raises
    AssertionError if they are wrong.  It must do the same every time.  torch fills new tensors with nan or the largest
    integer meanwhile, so that an unwritten result is not correct by luck.

    A mutant runs in the calls that execute the instruction, under one of `schedules` after the other, up to the first
    that notices it: by a finding, a wrong result, an exception, a deadlock, or because it does not end.  Its survival
    is accepted if a comment `# redundant: reason` (`// redundant: reason`) is on its source line or the line above.
    `sample=n` tests every n-th mutant; `workers` are processes.  `options` are those of `capture`.
    """
    if not calls or not all(map(callable, calls)):
        wrong = ", ".join(type(call).__name__ for call in calls if not callable(call)) or "nothing"
        raise MutantsError(f"mutants: needs functions that launch kernels, found {wrong}. Pass functions.")
    with _fresh_memory_filled():
        standards = _Standards(calls, schedules, arch, options)
        for first in standards.of_schedule(0):
            _check_repeats(arch, first)
        kernels = dict.fromkeys(each.kernel for first in standards.of_schedule(0) for each in first.launches)
        chosen = [mutant for key in kernels for mutant in mutants_of(*key, rules)][::sample]
        tasks = [(mutant, standards.calls_that_execute(mutant)) for mutant in chosen]
        job = _Job(arch, standards, [task for task in tasks if task[1]])
        verdicts, outcomes, survived = _verdicts(job, workers), [], 0
        for mutant, reached in tasks:
            noticed, schedule = next(verdicts) if reached else ((), None)
            outcomes.append(Outcome(mutant, noticed, schedule, bool(reached)))
            survived += not noticed
            tell(len(outcomes), len(chosen), survived)
    return Mutants(arch, outcomes, sample)


# ---- calls with unchanged kernels


class _Standards:
    """Each is computed at its first use: most mutants are noticed under the first schedule."""

    def __init__(self, calls: Sequence[Callable[[], Any]], schedules: Sequence[dict], arch: str, options: dict):
        self.calls, self.schedules, self.arch, self.options = calls, schedules, arch, options
        self._made: dict[tuple[int, int], Standard] = {}

    def standard(self, schedule: int, call: int) -> Standard:
        key = schedule, call
        if key not in self._made:
            self._made[key] = _standard(self.calls[call], self.arch, self.schedules[schedule] | self.options)
        return self._made[key]

    def of_schedule(self, schedule: int) -> list[Standard]:
        return [self.standard(schedule, call) for call in range(len(self.calls))]

    def calls_that_execute(self, mutant: Mutant) -> tuple[int, ...]:
        """Return the numbers of the calls that execute the instruction: under the first schedule that does."""
        for schedule in range(len(self.schedules)):
            if numbers := [n for n, each in enumerate(self.of_schedule(schedule)) if each.executes(mutant)]:
                return tuple(numbers)
        return ()


def _standard(run_it: Callable[[], Any], arch: str, options: dict[str, Any]) -> Standard:
    with capture(arch=arch, **options) as session:
        session.around = recorder = Recorder()
        results = _tensors(run_it())
    if session.findings:
        raise SimulationError(session.findings)
    if not session.runs:
        raise MutantsError(
            "ptxkit.mutants: a call launched no kernel that a capture accepts. Launch kernels without opening a "
            "capture of your own, and not by ptxkit.launch, which runs PTX beside any capture."
        )
    most = max(run.counters["warp_instructions"] for run in session.runs)
    return Standard(run_it, {"limit": PATIENCE * most + SPARE} | options, results, recorder.launches)


def _check_repeats(arch: str, standard: Standard) -> None:
    with capture(arch=arch, **standard.options):
        again = _tensors(standard.run_it())
    if not _equal(again, standard.results):
        raise MutantsError(
            "ptxkit.mutants: a call gives other results when it runs again, so a mutant's cannot be judged. "
            "Create its inputs inside the call, or assert what must hold and return nothing."
        )


# ---- calls with one changed kernel


class _Job(NamedTuple):
    arch: str
    standards: _Standards
    tasks: list[tuple[Mutant, tuple[int, ...]]]  # and the calls that a mutant runs in

    def verdict(self, number: int) -> Verdict:
        """Return what notices a mutant, and under which schedule; () and None where it survives all of them."""
        mutant, calls = self.tasks[number]
        for schedule, call in itertools.product(range(len(self.standards.schedules)), calls):
            if noticed := self._noticed(mutant, self.standards.standard(schedule, call)):
                return noticed, schedule
        return (), None

    def _noticed(self, mutant: Mutant, standard: Standard) -> tuple[str, ...]:
        with capture(arch=self.arch, **standard.options, stop=True) as session:
            session.around = Player(mutant, standard.launches)
            try:
                right = _equal(_tensors(standard.run_it()), standard.results)
            except SimulationError as error:
                return tuple(sorted({finding.kind for finding in error.findings}))
            except PtxError:                                                 # a rule writes what does not parse
                raise
            except AssertionError:
                right = False
            except Exception as error:
                return (type(error).__name__,)
        return () if right else (WRONG,)


_JOB: list[_Job] = []                        # a worker's: it is forked, since calls need not be pickled


def _verdicts(job: _Job, workers: int) -> Iterator[Verdict]:
    if workers == 1:
        yield from map(job.verdict, range(len(job.tasks)))
        return
    _JOB.append(job)
    try:
        with forked(workers) as pool:
            yield from pool.map(_work, range(len(job.tasks)))
    finally:
        _JOB.pop()


def _work(number: int) -> Verdict:
    return _JOB[-1].verdict(number)


# ---- results


def _tensors(result: Any) -> list[torch.Tensor]:
    if (tensors := memory.tensors_among({"the result": result})) is None:
        raise MutantsError(
            f"ptxkit.mutants: a call returned {type(result).__name__}, which contains more than tensors. Return "
            "tensors, in lists, tuples, dicts or dataclasses, or nothing."
        )
    return [x.detach().clone() for x in tensors.values()]


def _equal(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(results) == len(expected) and all(map(equal, results, expected))


@contextlib.contextmanager
def _fresh_memory_filled() -> Iterator[None]:
    """Unwritten memory must not contain the correct numbers of an earlier call: torch fills it with nan."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
