"""Runs a script with a GPU that is simulated, each of its launches under several schedules."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ptxkit import application
from ptxkit.compile.launching import Launch, launch_sink
from ptxkit.errors import PtxkitError

from ..capturing import Capture, capture, memory
from ..capturing.gpu.threads import followed
from ..findings import Finding
from ..mutation import Mutants, mutants
from ..mutation.replay import equal
from ..temporary import replaced


class ScriptError(PtxkitError, ValueError):
    """A script that cannot be run."""


class MemoryBefore(NamedTuple):
    """The memory that a launch may touch, as it was before."""

    tensors: dict[str, torch.Tensor]
    copies: list[torch.Tensor]

    @classmethod
    def from_launch(cls, launch: Launch, foreign: Container[int]) -> MemoryBefore:
        """`foreign`: addresses of storages that the script did not make."""
        if launch.tensors is not None:
            tensors = memory.with_pointees(launch.tensors)
        else:
            tensors = {name: x for name, x in memory.live().items() if x.data_ptr() not in foreign}
        return cls(tensors, [x.detach().clone() for x in tensors.values()])

    def restore(self) -> None:
        """Through `.data`: autograd knows nothing of what kernels write, and refuses a saved tensor that changed."""
        for x, copy in zip(self.tensors.values(), self.copies):
            x.data.copy_(copy)

    def differs(self, results: Sequence[torch.Tensor]) -> bool:
        return not all(map(equal, self.tensors.values(), results))


@dataclass
class Simulated:
    """What a script's kernels did."""

    script: str
    arch: str
    schedules: int
    session: Capture
    failed: str | None = None                # the traceback of the script, or how it ended
    seen: dict[tuple, tuple[Finding, int]] = field(default_factory=dict)  # each once, and its first schedule
    varying: set[str] = field(default_factory=set)  # kernels whose results depend on the schedule
    # the first launch of each kernel
    first: dict[tuple[str, str], tuple[Launch, MemoryBefore]] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        """Return errors, in the order in which they were found."""
        return [finding for finding, _ in self.seen.values() if finding.grade == "error"]

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding, _ in self.seen.values() if finding.grade != "error"]

    def add(self, findings: Sequence[Finding], schedule: int) -> None:
        for finding in findings:
            places = [place and (place.source or place.line) for place in (finding.place, finding.other)]
            key = finding.kind, finding.grade, finding.kernel, *places
            self.seen.setdefault(key, (finding, schedule))

    def mutants(self, **options: Any) -> Mutants:
        """Weaken the kernels' synchronisation, one instruction at a time, in the first launch of each kernel."""
        return mutants(*map(_again, self.first.values()), arch=self.arch, **options)


def _again(launched: tuple[Launch, MemoryBefore]) -> Callable[[], list[torch.Tensor]]:
    launch, before = launched

    def call() -> list[torch.Tensor]:
        before.restore()
        sink = launch_sink()
        assert sink is not None             # mutants opens a capture around every call
        sink.launch(replace(launch, tensors=before.tensors))
        return [*before.tensors.values()]

    return call


def _all(run: Any) -> list[Finding]:
    return [*run.findings, *run.notes]


def schedule(number: int) -> dict[str, Any]:
    """Warps in turns and late copies first, then random orders, with asynchronous work early in every other one."""
    return {"schedule": number, "early": number % 2 == 1}


def run(
    script: str | os.PathLike[str], args: Sequence[str] = (), *, arch: str = "sm_100a", schedules: int = 1,
    keep: bool = False, clock: Any = None,
    watch: Callable[[str, int], AbstractContextManager[Callable[[], None]]] | None = None, **options: Any,
) -> Simulated:
    """Run a script's `__main__` in a capture; each launch runs under `schedules` schedules, from the same memory.

    With `clock` the script's memory and times are those of a run with a clock, beside the schedules. `keep` remembers
    the first launch of each kernel, for `mutants`.  `watch(kernel, runs)` is entered for each launch, and what it gives
    is called after each run of it.  `options` are those of `capture`.
    """
    path = Path(script)
    if not path.is_file():
        command = f"{application.current().name} simulate"
        raise ScriptError(f"{command}: there is no script {str(script)!r}. Name a Python file.")
    numbers = range(schedules) if clock else range(1, schedules)
    main = {"clock": clock} if clock else schedule(0)
    older = memory.live()                                                     # held, so that no address is used again
    foreign = {x.data_ptr() for x in older.values()}
    with capture(arch=arch, **main, **options) as session:
        result = Simulated(str(script), arch, schedules, session)

        def launched(launch: Launch, simulate: Callable[..., Any]) -> Any:
            watched = watch(launch.kernel.name, len(numbers) + 1) if watch else contextlib.nullcontext(lambda: None)
            with watched as ran:
                return under_schedules(launch, simulate, ran)

        def under_schedules(launch: Launch, simulate: Callable[..., Any], ran: Callable[[], None]) -> Any:
            key = launch.kernel.ptx, launch.kernel.name
            fresh = keep and key not in result.first
            before = MemoryBefore.from_launch(launch, foreign) if numbers or fresh else None
            if before and fresh:
                result.first[key] = launch, before
            outcomes = []
            for number in numbers:
                assert before is not None
                options = session.options | {"clock": None, "timeline": False} | schedule(number)
                with replaced(session, options=options):
                    result.add(_all(simulate()), number)
                ran()
                outcomes.append([x.detach().clone() for x in before.tensors.values()])
                before.restore()
            run = simulate()
            result.add(_all(run), 0)
            if before and any(map(before.differs, outcomes)):
                result.varying.add(launch.kernel.name)
            return run

        session.around = launched
        with followed(session):
            result.failed = _executed(path, args)
    return result


def _executed(path: Path, args: Sequence[str]) -> str | None:
    """Run it as `python script.py args` would; None if it succeeded, otherwise what went wrong."""
    argv, paths = sys.argv, [*sys.path]
    sys.argv, sys.path[0:0] = [str(path), *args], [str(path.resolve().parent)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            return f"it ended with {end.code!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return _traceback(error, str(path))
    finally:
        sys.argv, sys.path[:] = argv, paths
    return None


def _traceback(error: BaseException, script: str) -> str:
    """Return the traceback from the script's own frame on; a script that cannot be parsed has none."""
    if isinstance(error, SyntaxError) and error.filename == script:
        return "".join(traceback.format_exception_only(error)).strip()
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__)).rstrip()
