"""`kda bench --predicted`: what the simulator's clock says of calls on a chip, and the error to expect of it.

The launches run in the simulator, in part: `kda.tools.measure.predicted` says how.  Shapes run side by side, in two
processes where there are two cores; what is predicted of one does not depend on the others.  Imports torch when it
runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kda.errors import NoBackendError
from kda.routing.dispatch import backend_asked, backend_of_backward
from kda.tools.measure.shapes import CUSTOM, DIRECTIONS, BenchShape, bytes_moved, with_gate
from ptxkit.commands.layout import row_lines
from ptxkit.commands.options import chip_for, needs_a_clock
from ptxkit.commands.progress import Progress, showing
from ptxkit.commands.render import OK, CannotJudge, Screen, heading, program_version
from ptxkit.compile.target import TARGETS, Target

from ..options import must_have_kernels, timed_arch

if TYPE_CHECKING:
    from kda.tools.measure.predicted import Prediction
    from ptxkit.timing.chips import ChipClock


WORKERS = 2                                  # at most: each may need 3.5 GB
HEAD = ("", "backend", "predicted", "error (worst)", "floor", "x floor", "recorded")


class PredictedRow(NamedTuple):
    """One predicted call: times are in seconds, errors in percent."""

    shape: str
    problem: str
    direction: str
    backend: str                             # the forward's, then the backward's
    predicted: float
    floor: float                             # bytes over what memory gives
    recorded: float | None                   # the same call, timed on such a chip
    source: str | None
    error: dict[str, Any]                    # median, worst, of
    kernels: dict[str, float]

    @property
    def x_floor(self) -> float:
        return self.predicted / self.floor

    @property
    def error_words(self) -> str:
        return f"{self.error['median']:.0f}% ({self.error['worst']:.0f}%)"


@dataclass(frozen=True)
class PredictedCalls:
    """What is predicted: directions of shapes, on a chip, by the backends that accept them there."""

    shapes: dict[str, BenchShape]
    directions: tuple[str, ...]
    target: Target
    chip: ChipClock
    backends: dict[str, dict[str, str]]      # shape -> direction -> backend
    keeps: bool | str = False                # what steps are given as disable_recompute

    def run_what_is_common(self) -> None:
        """Run once what several shapes need, before processes are forked for them."""
        from kda.tools.measure.predicted import PredictedCall, alike, keep, stands_for

        step = any(way != "forward" for way in self.directions)
        calls = [
            PredictedCall(self.target.spelling, self.backends[name]["forward"], shape, step, keeps=step and self.keeps)
            for name, shape in self.shapes.items()
        ]
        keys = stands_for(calls, self.chip.name)
        for key, clocks in zip(keys, side_by_side(lambda key: alike(*key), keys, keys, workers(len(keys)))):
            keep(key, clocks)

    def rows_of(self, name: str) -> list[PredictedRow]:
        from kda.tools.measure.predicted import predict

        calls: dict[bool, Prediction] = {}
        for step in {way != "forward" for way in self.directions}:
            forward = self.backends[name]["forward"]
            calls[step] = predict(
                self.target.spelling, self.chip.name, forward, self.shapes[name], step, keeps=self.keeps
            )
        return [self.row_of(name, way, calls[way != "forward"]) for way in self.directions]

    def row_of(self, name: str, way: str, call: Prediction) -> PredictedRow:
        from kda.tools.measure.predicted import expected, family_of

        backward = {"forward": False, "backward": True, "step": None}[way]
        launches = [one for one in call.launches if backward in (None, one.backward)]
        shape, used, timed = self.shapes[name], self.backends_of(name, way), self.measured(name, way) or {}
        kernels: dict[str, float] = {}
        for one in launches:
            word = family_of(one.kernel)
            kernels[word] = kernels.get(word, 0.0) + one.milliseconds / 1e3
        floor = bytes_moved(shape, way) / (self.chip.hbm_rate * self.chip.gigahertz * 1e9)
        return PredictedRow(name, shape.label, way, ", ".join(used), call.milliseconds(backward) / 1e3, floor,
                            timed.get("seconds"), timed.get("source"), expected(used[-1], launches), kernels)

    def backends_of(self, name: str, way: str) -> list[str]:
        return list(dict.fromkeys(self.backends[name][each] for each in DIRECTIONS if way in (each, "step")))

    def measured(self, name: str, way: str) -> dict[str, Any] | None:
        """Return the same call, timed on such a chip: of steps, those that keep nothing are on record."""
        if self.keeps and way != "forward":
            return None
        from kda.tools.measure.predicted import measured_call

        return measured_call(self.chip.name, self.shapes[name].label, way, self.backends[name]["forward"])

    def aligner(self, width: int | None) -> Callable[[Sequence[str]], list[str]]:
        """Return what makes a line of cells, in columns as wide as those of all rows will be, which are printed as they
        are found; the last column is left out where no call was timed on such a chip."""
        calls, time = [(name, way) for name in self.shapes for way in self.directions], "00.000 ms"
        columns = len(HEAD) - (not any(self.measured(*call) for call in calls))
        wide = [(way, ", ".join(self.backends_of(name, way)), time, "", time, "00.0", time) for name, way in calls]
        return lambda row: row_lines(
            [each[:columns] for each in (HEAD, *wide, row)], align="llrrrrr"[:columns], indent=2, width=width
        )[-1]


def predicted(screen: Screen, options: dict[str, Any]) -> int:
    from .asked import setting, shapes_asked, ways
    from .drawn import groups_of_predicted, write

    target = options["arch"] or TARGETS[timed_arch(options["backend"]) or "sm90"]
    needs_a_clock(target, "--arch")
    must_have_kernels(options["backend"], target)
    (chip, which), shapes, directions = chip_for(target), shapes_asked(options, "gpu"), ways(options["directions"])
    keeps = setting(options["disable_recompute"])
    backends = {name: backends_for(shape, directions, target, options["backend"], keeps)
                for name, shape in shapes.items()}
    calls = PredictedCalls(shapes, directions, target, chip, backends, keeps)
    rows: list[PredictedRow] = []
    aligned = calls.aligner(screen.width)
    if not screen.json:
        screen.line(f"predicted for {which}: nothing was timed  kda {program_version()}\n")
        screen.line("\n".join(aligned(HEAD)))
    tell = Progress("running kernels that shapes have in common", len(shapes) + 1)
    tell.step()
    with showing(tell):
        calls.run_what_is_common()
    begun = longest_first(shapes)
    with contextlib.closing(side_by_side(calls.rows_of, shapes, begun, workers(len(shapes)))) as answers:
        for name, shape in shapes.items():
            tell.step(f"{name}: running its launches in the simulator")
            with showing(tell):
                of_shape = next(answers)
            rows += of_shape
            if not screen.json:
                label = with_gate(shape.label)
                screen.line(screen.paint(label if name == CUSTOM else f"{name}: {label}", bold=True))
                for row in of_shape:
                    screen.line("\n".join(aligned(cells(row))))
    sources = sorted({row.source for row in rows if row.source})
    said = [f"recorded: {', '.join(sources)}"] * bool(sources and options["verbose"])
    if options["plot"] or options["html"]:
        details = f"{target.spelling}; predicted by the simulator's clock, not timed"
        groups, backend = groups_of_predicted(rows), rows[0].backend.partition(",")[0]
        said += write(screen, options, str(chip).upper(), details, notes(chip, rows), groups, backend, target)
    screen.answer(as_json(target, chip, rows, keeps), ["", *notes(chip, rows), *said])
    return OK


def backends_for(
    shape: BenchShape, directions: Sequence[str], target: Target, name: str | None, keeps: bool | str = False
) -> dict[str, str]:
    """Return direction -> the backend that accepts it on such a GPU."""
    from ptxkit import capture

    from .asked import backend_for, problems_of, spec_of

    name, backends = backend_asked(name), {}
    needed = [way for way in DIRECTIONS if way in directions or "step" in directions or way == "forward"]
    with capture(arch=target.spelling):
        try:
            kept = keeps if directions != ("forward",) else False
            for problem in problems_of(spec_of(shape, "slow"), needed, "cpu", kept, name):
                way = problem.direction
                backends[way] = backend_for(problem, name if way == "forward" else backend_of_backward(name))
        except NoBackendError as error:
            refused = error.choice.problem.direction
            more = ["--direction forward predicts what there is"] if refused == "backward" else []
            raise CannotJudge(*str(error).splitlines(), *more) from None
    if "reference" in backends.values():
        raise CannotJudge(
            f"backend={name!r} has no kernels for {target.name}: the reference is torch alone. "
            f"Name a backend with kernels, or another --arch; `kda doctor` lists what each one can do."
        )
    return backends


def workers(shapes: int) -> int:
    """Return the number of processes for so many shapes; one where processes cannot be forked."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(WORKERS, cores, shapes) if "fork" in multiprocessing.get_all_start_methods() else 1


def longest_first(shapes: dict[str, BenchShape]) -> list[str]:
    """Return those whose launches run as asked, for their short rows are planned otherwise or are no shorter."""
    return sorted(shapes, key=lambda name: (not shapes[name].lengths, -shapes[name].T))


_WORK: list[Callable[[Any], Any]] = []       # the work of this process's workers, which inherit it when they are forked


def side_by_side(
    work: Callable[[Any], Any], names: Iterable[Any], begun: Iterable[Any], processes: int
) -> Generator[Any, None, None]:
    """Yield what `work` makes of each name, in the order of names, begun in another order.  What fails in another
    process is done again in this one: its error comes as it would have come here, and a process that was killed is made
    up for."""
    if processes < 2:
        yield from map(work, names)
        return
    from ptxkit.workers import forked

    _WORK.append(work)
    try:
        with forked(processes) as pool:
            futures = {name: pool.submit(_work, name) for name in begun}
            for name in names:
                yield work(name) if futures[name].exception() else futures[name].result()
    finally:
        _WORK.pop()


def _work(name: Any) -> Any:
    return _WORK[-1](name)


def cells(row: PredictedRow) -> tuple[str, ...]:
    from .asked import ms

    return (row.direction, row.backend, f"{ms(row.predicted)} ms", row.error_words, f"{ms(row.floor)} ms",
            f"{row.x_floor:.1f}", f"{ms(row.recorded)} ms" if row.recorded else "")


def whose_errors(row: PredictedRow) -> str:
    """Say in words whose errors `kda.tools.measure.predicted.expected` took."""
    kernels = row.error["of"]
    if kernels.endswith("all, other kernels"):
        return "the other backends' kernels"
    return "the backend's other kernels" if kernels.endswith(", other kernels") else "kernels of the same names"


COMPARED = ("h200", "h100")                  # chips whose predictions were compared with times
SAYS = {                                     # a chip: what is said of its error; that of an H200 stands with each row
    "h200": "",
    "h100": "predictions for h100 were compared with times of older kernels alone: 20% too short to 13% too long",
    "b200": "no time of kda's on a b200 is known; FlashInfer's kernels were predicted 16 to 37% too long",
}


def notes(chip: ChipClock, rows: Sequence[PredictedRow]) -> list[str]:
    these = " or ".join(dict.fromkeys(map(whose_errors, rows)))
    texts = [f"errors are those of {these} on an H200, the worst of a call's kernels; --json names those. All "
             "predictions of today's kernels on an H200 are too short"]
    unknown = f"no prediction for {chip} was ever compared with a time: its error is not known"
    return [*texts, *filter(None, [SAYS.get(chip.name, unknown)])]


def as_json(target: Target, chip: ChipClock, rows: Sequence[PredictedRow], keeps: bool | str) -> dict[str, Any]:
    return heading(
        "bench", OK, predicted=True, arch=target.name, chip=chip.name, compared=chip.name in COMPARED,
        disable_recompute=keeps, rows=[{**row._asdict(), "x_floor": row.x_floor} for row in rows],
    )
