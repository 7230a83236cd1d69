"""What `kda bench` prints of its results: parity, times, stages, changes, and what spoils a number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kda.tools.measure.shapes import CUSTOM, with_gate
from ptxkit.commands.layout import row_lines
from ptxkit.commands.render import Screen, program_version

from .asked import ms

if TYPE_CHECKING:
    from kda.tools.measure.timing import Machine, MeasuredShape, TimedLine
    from kda.tools.verify.parity import ParityRow

KEY = ("problem", "regime", "direction", "backend")             # these identify a timing in saved results


class Change(NamedTuple):
    line: TimedLine
    old: dict[str, Any]                      # a saved row
    verdict: str                             # "slower", "faster", "same", or "noise": the spreads overlap

    @property
    def ratio(self) -> float:
        ratio: float = self.line.median / self.old["median"]
        return ratio


def header(machine: Machine) -> str:
    clock = f"{machine.clock} of {machine.highest_clock} MHz" if machine.clock else None
    words = [f"{machine.device}, {machine.threads} threads" if machine.threads else machine.device, clock,
             f"driver {machine.driver}" if machine.driver else None,
             f"copies {machine.copy / 1e12:.2f} TB/s" if machine.copy else None,
             f"kda {program_version()}" + (f" ({machine.commit})" if machine.commit else ""),
             *(f"{name} {version}" for name, version in machine.versions.items())]
    return "  ".join(word for word in words if word)


def machine_line(screen: Screen, machine: Machine) -> str:
    words = [machine.device, f"kda {program_version()}", *(f"{n} {v}" for n, v in machine.versions.items())]
    return screen.paint("  ".join(words), bold=True)


def parity_lines(screen: Screen, results: Sequence[MeasuredShape], verbose: bool) -> list[str]:
    """Return all comparisons in one line, unless one failed; each with -v, and those that failed in any case."""
    checks = [(result, check) for result in results for check in result.checks]
    wrong = [(result, check) for result, check in checks if check.wrong]
    rows = [row for _, check in checks for row in check.rows]
    right = len(rows) - sum(len(check.wrong) for _, check in checks)
    says = f"parity: {right} of {len(rows)} tensors within budget"
    if not wrong:
        result, check = max(checks, key=lambda pair: closest(pair[1].rows).measure.used)
        row = closest(check.rows)
        says += (f"; the closest is {row.tensor} of {result.name}, {result.regime} gates: {used_words(row)}, "
                 f"against {check.against}")
    lines, shown = [f"{screen.mark('fail' if wrong else 'ok')} {says}"], []
    for result, check in checks if verbose else wrong:
        sign = screen.sign("fail" if check.wrong else "ok")
        timed = " (a timed launch)" if result.measured.timed_wrong else ""
        row = closest(check.rows)
        shown.append((f"{sign} {result.name}", result.regime, check.backend,
                      f"{len(check.rows) - len(check.wrong)} of {len(check.rows)}{timed}",
                      f"{row.tensor}: {used_words(row)}, against {check.against}"))
    lines += screen.table(shown, indent=2)
    return lines + [f"  {result.name}, {result.regime}, {check.backend}: {describe(row)}"
                    for result, check in wrong for row in check.wrong]


def closest(rows: Sequence[ParityRow]) -> ParityRow:
    return max(rows, key=lambda row: row.measure.used if not math.isnan(row.measure.used) else math.inf)


def used_words(row: ParityRow) -> str:
    from kda.tools.verify.parity import used_words

    budget = " of its budget" if row.measure.kind in ("norm", "peak") else ""
    return f"{used_words(row.measure)}{budget}"


def describe(row: ParityRow) -> str:
    from kda.tools.verify.parity import describe

    return describe(row)


def timing_lines(screen: Screen, lines: Sequence[TimedLine], verbose: bool) -> list[str]:
    """Return a heading for each shape, and a row for each of its times."""
    if not lines:
        return []
    floor, against = any(line.floor for line in lines), baseline_of(lines)
    counted = any(line.memory is not None for line in lines)
    head = ["", "gates", "backend", "median", "p20-p80", *(["TFLOP/s", "GB/s"] if verbose else [])]
    head += ["x floor"] * floor + ["memory"] * counted + ["with inputs"] * (counted and verbose)
    rows = []
    for line in lines:
        cells = [line.direction, line.regime, line.backend, f"{ms(line.median)} ms", f"{ms(line.p20)}-{ms(line.p80)}"]
        if verbose:
            cells += [f"{line.flops / line.median / 1e12:.3g}", f"{line.bytes / line.median / 1e9:.3g}"]
        cells += [f"{line.x_floor:.1f}"] if line.x_floor else []
        cells += [size(line.memory), *([size(line.memory_with_inputs)] if verbose else [])] if counted else []
        cells += [f"{ms(line.baseline['median'])} ms", f"{line.ratio:.2f}x"] if line.baseline else []
        rows.append(cells)
    head += [against, f"vs {against}"] if against else []
    top, *printed = row_lines(rows, head, "lllrrrrrrrr", 2, screen.width)
    out, shape = top, None
    for line, texts in zip(lines, printed):
        if (line.shape, line.problem) != shape:
            shape = line.shape, line.problem
            problem = with_gate(line.problem)
            title = problem if line.shape == CUSTOM else f"{line.shape}: {problem}"
            out.append(screen.paint(title, bold=True))
        out += texts
    return out


def stage_lines(screen: Screen, results: Sequence[MeasuredShape]) -> Iterator[str]:
    for result in results:
        stages = result.measured.stages
        if stages:
            total = sum(timing.median for timing in stages.values())
            rows = [(name, f"{ms(t.median)} ms", f"{ms(t.quantile(0.2))}-{ms(t.quantile(0.8))}",
                     f"{t.median / total:.0%}") for name, t in stages.items()]
            backend = result.measured.checks[0].backend
            yield ""
            yield f"stages of {backend}, each alone: {with_gate(result.shape.label)}, {result.regime} gates"
            yield from screen.table(rows, align="lrrr")


def baseline_of(lines: Sequence[TimedLine]) -> str | None:
    return next((line.baseline["backend"] for line in lines if line.baseline), None)


def size(n: int | None) -> str:
    return "" if n is None else f"{n / 2**20:.0f} MiB" if n < 2**30 else f"{n / 2**30:.2f} GiB"


def refused_captures(results: Sequence[MeasuredShape]) -> list[dict[str, str]]:
    return [{"shape": result.name, "problem": result.shape.label, "regime": result.regime, "direction": direction,
             "backend": backend, "reason": reason}
            for result in results for direction, (backend, reason) in result.measured.not_captured.items()]


def says_why(refused: dict[str, str]) -> str:
    return ("{direction}, {problem}, {regime} gates: not timed, because a call of {backend} cannot be captured in a "
            "CUDA graph: {reason}").format_map(refused)


def remarks(machine: Machine, lines: Sequence[TimedLine]) -> Iterator[str]:
    """Yield what has to be known to read the numbers."""
    if machine.kind == "cpu" and lines:
        yield "CPU times: caches and allocator are warm."
    if machine.crowded:
        yield (f"other processes kept the cores busy (a load of {machine.load:.1f} on {machine.cores}): these times "
               f"can be many times too long{', less so with OMP_NUM_THREADS=1' if machine.threads != 1 else ''}")
    if machine.clock and machine.highest_clock and machine.clock < 0.97 * machine.highest_clock:
        yield (f"the SMs ran at {machine.clock} of {machine.highest_clock} MHz: "
               f"`sudo nvidia-smi -lgc {machine.highest_clock}` asks for the highest (undo: -rgc)")
    if any(line.direction == "backward" and line.memory is not None for line in lines):
        yield "memory of a backward is that of a forward and its backward"
    for line in lines:
        for side in filter(None, (vars(line), line.baseline)):
            if side["host_inside"]:
                backend = side["backend"]
                yield f"{line.direction}, {line.problem}: host time is included, because {backend} waits for the GPU"


def compare_lines(screen: Screen, changes: Sequence[Change], options: dict[str, Any]) -> list[str]:
    if not changes:
        return [f"{options['compare']} holds none of these timings: other shapes, directions or backends."]
    marks = {"slower": "fail", "faster": "ok", "same": "ok", "noise": "info"}
    rows = [
        (f"{screen.sign(marks[c.verdict])} {c.line.direction}", c.line.problem, c.line.regime, c.line.backend,
         f"{ms(c.old['median'])} ms", f"{ms(c.line.median)} ms", f"{c.ratio - 1:+.1%}", c.verdict) for c in changes
    ]
    slower, limit = sum(c.verdict == "slower" for c in changes), f"{options['fail_above'] * 100:g}%"
    end = f"{slower or 'None'} of {len(changes)} slower by more than {limit} and beyond the spread."
    return [*screen.table(rows, header=("", "", "gates", "backend", "before", "now", "", ""), align="llllrrrl"), end]
