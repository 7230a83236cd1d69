"""Faults planted into the kernels of kda: calls then run a copy of the backend with one text replaced."""

import functools
import importlib
import shutil
from pathlib import Path
from typing import NamedTuple

from cute_calls import called, kept_nowhere
from planted import edited

from kda.backends.common import training
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.parity import judge
from ptxkit.compile import nvrtc, sources

BACKENDS = Path(training.__file__).parents[1]


class Fault(NamedTuple):
    """Text that stands once in a kernel's source, the text planted instead (usually a statement that does nothing), and
    how a call notices it: by the kind of a finding, by a "wrong answer", or by the stage that gives one."""

    file: str                                # in kda/backends: "sm89/fwd/chain.cu"; without ".py" if it is Python
    case: str                                # one of the test's cases
    noticed: str
    old: str
    new: str = "pass"
    schedule: int = 0                        # others than 0 are early, too


SPACE = " "                                  # many stand before a comment that tells two equal lines apart


def faults(files, name="{says}"):
    """Return the faults by name; `files` has a table for each file, of the other fields by what they say."""
    rows = [(says, Fault(file, *row)) for file, table in files.items() for says, row in table.items()]
    found = {name.format(says=says, case=fault.case): fault for says, fault in rows}
    assert len(found) == len(rows)
    return found


def faults_of_the_queue(case, added_early):
    """Return the faults of what lies between walk and grads in one grid, for Hopper and Blackwell.  `added_early` says
    how a call of the arch notices an item that is not in memory."""
    rows = {
        "an item is added before dv and dh are in memory": (
            added_early, "cute.arch.mbarrier_wait(s.stored + turn, before >> 1 & 1)", "pass", 2
        ),
        "the queue orders nothing": ("race-write-read", 'sem="release"', 'sem="relaxed"', 2),
        "the queue is read without an order": ("race-write-read", 'sem="acquire"', 'sem="relaxed"', 2),
        "items are computed in another order than walks add them": (
            "race-write-read or out-of-bounds", "if item < items:", "if item < 0:", 2
        ),
        "the first item that a walk adds is its last": (
            "race-read-write or race-write-read", "place.pairs - 1 - j) * x.HV", "j) * x.HV", 2
        ),
        "dh of an item of one tile comes over another one": (
            "out-of-bounds", "2 * pair + 1 < place.steps", "2 * pair < place.steps", 2
        ),
        "LOAD is not told where dh lies": (
            "out-of-bounds", "store(x.places_of_dh + item * len(places), places)", "pass", 2
        ),
    }
    return {says: (case, *row) for says, row in rows.items()}


def source_of(file, folder=BACKENDS):
    return folder / (file if "." in file else f"{file}.py")


def initialises(pipeline, count, pipelines="self.c.pipelines"):
    """Return the text that initialises mbarriers, and the same with another count in one of the pipelines."""
    old, new = f"initialise(s, {pipelines})", "p._replace(arrivals=(p.arrivals[0]._replace(count={}),))"
    return old, old.replace(pipelines, f"[{new.format(count)} if p.name == {pipeline!r} else p for p in {pipelines}]")


def copy_backend(backend, fault, folder, monkeypatch):
    """Copy a backend and what it shares with others, with the fault, and return the name of the new package."""
    package = "broken_" + folder.name.replace("-", "_")
    for part in (backend, "common"):
        shutil.copytree(BACKENDS / part, folder / package / part)
    source = source_of(fault.file, folder / package)
    source.write_text(edited(source.read_text(), [(fault.old, fault.new)], fault.file))
    monkeypatch.syspath_prepend(folder)
    return package


def built_by_cutedsl(package, backend, fault, config, *arch):
    """Return the kernel of a configuration, built from a copy of the backend; None if the fault is in none of its
    files."""
    plan = importlib.import_module(f"kda.backends.{backend}.plan")
    module, faulty = plan.KERNELS[type(config)], f"kda.backends.{fault.file.replace('/', '.')}"
    if faulty not in sources.files(f"kda.backends.{module}"):
        return None
    (kernel,) = importlib.import_module(f"{package}.{module}").build(config, *(arch or (plan.TARGET,))).kernels.values()
    return kernel


def built_by_nvrtc(package, backend, fault, config):
    """Return the same of a backend whose sources are CUDA C++; every kernel may include every header."""
    if fault.file.endswith(".cu") and fault.file != f"{backend}/{config.file}":
        return None
    given = importlib.import_module(f"{package}.{backend}.source").source_of(config)
    return nvrtc.compile(given.text, given.entry, defines=given.defines, headers=given.headers, file=given.file)


def plant(fault, folder, monkeypatch, backend="sm90"):
    """Let kernels that have the fault come from a copy of the backend in `folder`, each built once."""
    package = copy_backend(backend, fault, folder, monkeypatch)
    launch = importlib.import_module(f"kda.backends.{backend}.launch")
    whole, built = launch.kernel, built_by_nvrtc if backend == "sm89" else built_by_cutedsl

    @functools.cache
    def broken(config, *arch):
        return built(package, backend, fault, config, *arch) or whole(config, *arch)

    monkeypatch.setattr(launch, "kernel", broken)
    for launcher in (launch, training):
        kept_nowhere(monkeypatch, launcher)


def assert_noticed(fault, session, rows):
    """Check that a fault was noticed, as one kind of finding or another: an access past the end of a tensor may meet
    another one there.  `rows()` judges results, which is slow: only a wrong answer needs it."""
    if fault.noticed == "wrong answer":
        assert any(row.wrong for row in rows())
    else:
        kinds = {finding.kind for finding in session.findings}
        wanted = fault.noticed.split(" or ")
        assert kinds & {*wanted}, f"found {kinds or 'nothing'} instead of {fault.noticed}"


def assert_a_call_notices(fault, case, backend="sm90"):
    found, session = called(case, backend=backend, schedule=fault.schedule, early=bool(fault.schedule))

    def rows():
        limits = budgets(case, Door(backend, "cpu").rounding(case), backward=False)
        return [judge("call", name, limits[name], found[name], case, whole=True) for name in found if name in limits]

    assert_noticed(fault, session, rows)
