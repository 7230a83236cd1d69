"""Runs on a GPU what the ledger of evidence lacks (kda/tools/verify/ledger.py), the most important first.

    python -m benchmarks.evidence --list                   what has no evidence, and the cases that would give it
    python -m benchmarks.evidence --minutes 9              run as many of them as fit, on all GPUs of this machine
    python -m benchmarks.evidence --merge FILE             put the rows of a run into the ledger, then as --write
    python -m benchmarks.evidence --write                  the ledger's kernels and paths, and README's table

Rows go to FOLDER/evidence.json (--out; $OUT, or benchmarks/results) after each case, and a later call with the same
folder, or with a ledger that they were merged into, goes on where they end.  Kernels are built by all CPUs while the
first cases run.  Each GPU has --workers processes; one that crashes, or takes too long, is started again without the
case that it had.  With two GPUs or more, the matrix of benchmarks/parallel_matrix.py comes first.

--device cpu --tokens 80 --only WORDS runs cases in the simulator, to see that this program runs: its rows are of no GPU
and cannot be merged.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kda.tools.verify import digests
from kda.tools.verify.ledger import FILE, GOOD, RAN, SIMULATED, Known, Ledger, host_code
from ptxkit.compile import fetching
from ptxkit.compile.target import Target, parse

from . import common, ledger_page
from .evidence_cases import (
    GROUPS,
    MORE_TESTS,
    TESTS,
    Case,
    GpuTest,
    covering,
    covers,
    gpu_tests,
    matches,
    paths_of,
)

DIGESTS = common.ROOT / "tests" / "helpers" / "digests.json"
TOGETHER = 48                                # kernels that are built in one go
ALL_TESTS = TESTS | MORE_TESTS
MATRIX = [sys.executable, "-m", "benchmarks.parallel_matrix"]
SIMULATOR = "simulator"                      # the card of a row that is of no GPU
PARALLEL = "parallel: "
TWO_GPUS = "parallel: two GPUs of one host"  # the path of benchmarks/parallel_matrix.py
Row = dict[str, Any]
Job = Case | GpuTest


# ---- the ledger


def shipped() -> dict[str, dict[str, dict[str, str]]]:
    """{"sm90 sm90": {words of a class of problems: {"chain 0": digest}}}, as tests/helpers/digests.json has them."""
    groups: dict[str, dict[str, dict[str, str]]] = {}
    for label, known in json.loads(DIGESTS.read_text())["kernels"].items():
        group, _, rest = label.partition(": ")
        kernel, _, words = rest.partition(" of ")
        groups.setdefault(group, {}).setdefault(words, {})[kernel] = known["code"]
    return groups


def document(runs: Iterable[Row]) -> dict[str, Any]:
    """A ledger of the kernels and paths of this tree, with the last run of each case."""
    compilers = json.loads(DIGESTS.read_text())["compilers"]
    latest = {run["case"]: run for run in sorted(runs, key=lambda run: run["date"])}
    paths = {path: [] for path in paths_of()} | {path: [test.name for test in gpu_tests(path)] for path in ALL_TESTS}
    paths[TWO_GPUS] = [PARALLEL + case for case in pairs_of_gpus()]
    cases = {path: set(named) for path, named in paths.items() if named}
    runs = [run for name, run in sorted(latest.items())                        # those of cases that there are
            if run["path"] in paths and name in cases.get(run["path"], {name})]
    return {"compilers": compilers, "kernels": shipped(), "paths": paths, "runs": runs}


def written(document: Mapping[str, Any]) -> str:
    """One line for each class of problems and each run, so that changes can be read."""
    def lines(items: Iterable[str]) -> str:
        return ",\n  ".join(items)

    kernels = lines(f"{json.dumps(group)}: {{\n   " + ",\n   ".join(
        f"{json.dumps(words)}: {json.dumps(codes)}" for words, codes in codes_of_group.items()) + "}"
        for group, codes_of_group in document["kernels"].items())
    paths = lines(f"{json.dumps(path)}: {json.dumps(cases)}" for path, cases in document["paths"].items())
    runs = lines(map(json.dumps, document["runs"]))
    return (f'{{"compilers": {json.dumps(document["compilers"])},\n "kernels": {{\n  {kernels}}},\n'
            f' "paths": {{\n  {paths}}},\n "runs": [\n  {runs}]}}\n')


def rows_of(file: Path) -> list[Row]:
    return json.loads(file.read_text())["runs"] if file.exists() else []


def merge(files: Iterable[Path]) -> None:
    runs = rows_of(FILE)
    for file in files:
        if not file.is_file():
            sys.exit(f"{file}: there is no such file. Name the evidence.json of a run.")
        rows = rows_of(file)
        if simulated := [row["case"] for row in rows if row["card"] == SIMULATOR]:
            sys.exit(f"{file}: {len(simulated)} rows are of the simulator, not of a GPU. Merge rows of a GPU alone.")
        runs += rows
    write(runs)


def texts(runs: Iterable[Row]) -> dict[Path, str]:
    """Return the ledger of these runs, and README with its column of it."""
    data = document(runs)
    readme = ledger_page.with_states(ledger_page.README.read_text(), Ledger(data))
    return {FILE: written(data), ledger_page.README: readme}


def write(runs: Iterable[Row]) -> None:
    for file, text in texts(runs).items():
        file.write_text(text)


# ---- what is lacking


def groups_for(target: Target) -> list[tuple[str, str]]:
    """Backends and archs whose kernels run on a GPU, the most important first.  The driver finishes older code of
    Triton and of sm89."""
    order = {group: (parse(group[1]).cc != target.cc, number) for number, group in enumerate(GROUPS)}
    older = (group for group in GROUPS if group[0] in ("triton", "sm89") and parse(group[1]).cc < target.cc)
    same = (group for group in GROUPS if parse(group[1]).cc == target.cc)
    return sorted({*older, *same}, key=lambda group: order[group])


def lacking(ledger: Ledger, target: Target, again: bool = False) -> list[Job]:
    """What to run, in this order: cases that take a path for the first time, tests of other paths, cases of kernels.
    What ran with the same host code and compiler is left out, since it would launch the same kernels; a case whose
    kernels are not known is not left out.  `again`: all counts as lacking."""
    runs = [] if again else [run for run in ledger.runs if run["host"] == host_code(run["path"]) and alike(ledger, run)]
    ran, known = {run["case"] for run in runs}, {run["case"] for run in runs if run["codes"]}
    without = {each.name for each in ledger.paths() if again or each.state == SIMULATED}
    first: list[Job] = []
    later: list[Job] = []
    for backend, arch in groups_for(target):
        codes = {each.code for each in ledger.kernels(f"{backend} {arch}") if again or each.state != RAN}
        taken: set[str] = set()
        for case in covering(backend, arch, codes, without,
                             codes_of(ledger, backend, arch), known):
            (later if case.path in taken or case.path not in without else first).append(case)
            taken.add(case.path)
    tests, more = ([test for path in some for test in gpu_tests(path) if test.name not in ran]
                   for some in (TESTS, MORE_TESTS))
    return [*first, *tests, *later, *more]


def alike(ledger: Ledger, run: Row) -> bool:
    """Whether a run had the compiler of the ledger's kernels."""
    backend = run["path"].partition(":")[0]
    name, _, version = ledger.compilers.get("triton" if backend == "pool" else backend, "").rpartition(" ")
    return run["versions"].get(name) in (None, version)


def codes_of(ledger: Ledger, backend: str, arch: str) -> dict[Any, str]:
    codes = ledger.shipped[f"{backend} {arch}"]
    labels = digests.labelled(backend, arch)
    return {recipe: codes[words][kernel] for label, recipe in labels.items()
            for kernel, _, words in [label.partition(": ")[2].partition(" of ")]}


def listing(ledger: Ledger, target: Target) -> Iterator[str]:
    for group in ledger.groups:
        kernels = [*ledger.kernels(group)]
        yield f"{group}: {count(kernels)} kernels"
        backend, arch = group.split()
        if (backend, arch) in groups_for(target):
            launched = covers(backend, arch, codes_of(ledger, backend, arch))
            yield from (f"    no case launches {each.name}" for each in kernels
                        if each.state != RAN and each.code not in launched)
    for each in ledger.paths():
        if each.state != RAN:
            yield f"{each.name}: {each.state}"
    jobs = lacking(ledger, target)
    yield f"{len(jobs)} cases for {target.name}:"
    yield from (f"    {job.name}" for job in jobs)


def count(known: list[Known]) -> str:
    return f"{sum(each.state == RAN for each in known)} of {len(known)}"


# ---- running


class Worker:
    """A process that is told the names of cases and answers with rows, one a line; "" is its end."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process, self.failed = process, False
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, name: str) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):   # then it has ended, as its lines will say
            self.process.stdin.write(json.dumps(name) + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put("")


class Runner:
    """A queue of jobs, a thread that builds their kernels, a thread for each worker process, and the rows so far."""

    def __init__(self, args: argparse.Namespace, jobs: list[Job], out: Path):
        self.args, self.jobs, self.out = args, jobs, out
        self.ends = time.monotonic() + 60 * args.minutes
        self.ready: queue.Queue[Job | None] = queue.Queue()
        self.rows = {row["case"]: row for row in rows_of(out / "evidence.json")}
        self.lock = threading.Lock()

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def run(self, devices: list[str]) -> None:
        threads = [threading.Thread(target=self.work, args=(device,), daemon=True)
                   for device in devices for _ in range(self.args.workers)]
        for thread in (building := threading.Thread(target=self.build, args=(len(threads),), daemon=True), *threads):
            thread.start()
        for thread in (building, *threads):
            thread.join(max(0.0, self.left) + 5)

    def build(self, workers: int) -> None:
        """Kernels of the next cases, which are ready then."""
        waiting = list(self.jobs)
        while waiting and self.left > 0:
            some, recipes = [], set[Any]()
            while waiting and len(recipes) < TOGETHER:
                job = waiting.pop(0)
                some.append(job)
                recipes |= {*job.recipes()} if isinstance(job, Case) else set()
            fetching.attempt_all(recipes, self.args.builders)
            for job in some:
                self.ready.put(job)
        for _ in range(workers):
            self.ready.put(None)

    def work(self, device: str) -> None:
        """Give jobs to a process of its own, and start it anew when it ends."""
        worker = None
        while self.left > 15:
            try:
                job = self.ready.get(timeout=max(0.1, self.left))
            except queue.Empty:
                break
            if job is None:
                break
            if worker is None or worker.process.poll() is not None:
                worker = Worker(self.start(device))
            ended = self.ask(worker, job, min(self.limit(job), self.left))
            if ended is not None:
                worker.process.kill()
                worker = None
                if self.left > 1:            # else the slice is over, which says nothing of the case
                    self.add(failure(job, ended, device))
            elif worker.failed:
                worker.process.wait()        # it ends by itself: the next case is not for it
                worker = None
        if worker is not None:
            worker.process.kill()

    def limit(self, job: Job) -> float:
        """Seconds that a case may take, or a test with all its cases."""
        return 150.0 if isinstance(job, Case) else 600.0

    def start(self, device: str) -> subprocess.Popen[str]:
        environment = os.environ | {"KDA_QUIET": "1", "PYTHONUNBUFFERED": "1"}
        if device != "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = device
        argv = common.again(__spec__, "--worker", "--out", self.out.resolve(), "--tokens", self.args.tokens,
                            "--device", "cpu" if device == "cpu" else "cuda")
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=common.ROOT
        )

    def ask(self, worker: Worker, job: Job, limit: float) -> str | None:
        """Take the rows of a job; why it ended without its end."""
        ends = time.monotonic() + limit
        worker.say(job.name)
        while True:
            try:
                line = worker.lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                return f"took longer than {limit:.0f} s"
            if not line:
                return f"the process ended with {worker.process.wait()}"
            if (row := json.loads(line)) is None:
                return None
            worker.failed = row["outcome"] not in GOOD
            self.add(row)

    def add(self, row: Row) -> None:
        with self.lock:
            self.rows[row["case"]] = row
            print(f"{row['outcome']:7} {row.get('seconds', 0):6.1f} s  {row['case']}", *row["errors"][:6],
                  sep="\n        ", flush=True)
            common.write(self.out / "evidence.json", {"runs": [*self.rows.values()]})


def failure(job: Job, why: str, device: str) -> Row:
    row: Row = {"case": job.name, "path": job.path, "outcome": "crash", "errors": [why], "launches": [], "codes": []}
    return signed(row, device)


def signed(row: Row, device: str) -> Row:
    """A row with what is the same for all of a machine and a day."""
    return row | {"host": host_code(row["path"]), "card": card() if device != "cpu" else SIMULATOR,
                  "date": str(datetime.date.today()), "versions": versions()}


def card() -> str:
    import torch

    return re.sub(r"NVIDIA |GeForce |\s*\d+ ?GB.*", "", torch.cuda.get_device_name())


def versions() -> dict[str, str]:
    import torch

    from ptxkit.compile.recipes import COMPILERS

    installed = {name: version() for name, version in COMPILERS.values()}
    return {"torch": str(torch.__version__)} | {name: version for name, version in installed.items() if version}


@functools.cache
def pairs_of_gpus() -> tuple[str, ...]:
    """The cases of benchmarks/parallel_matrix.py."""
    from . import parallel_matrix

    return tuple(parallel_matrix.name_of(case) for case in parallel_matrix.cases())


def matrix(args: argparse.Namespace, runner: Runner, ledger: Ledger, gpus: int) -> None:
    """The rows of two GPUs together; the program leaves out what its file says of cases that ran with this code."""
    if gpus < 2 or args.no_matrix:
        return
    file, minutes = runner.out / "parallel_matrix.json", args.minutes / 2
    ran = {} if args.again else {run["case"]: run for run in ledger.runs if run["outcome"] == "ok"
                                  and run["path"] == TWO_GPUS and run["host"] == host_code(TWO_GPUS)}
    before = [{"case": case, "outcome": "ok", "errors": {}} for case in pairs_of_gpus() if PARALLEL + case in ran]
    file.write_text(json.dumps(before))
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*MATRIX, "--json", str(file.resolve()), "--minutes", f"{minutes:.1f}"],
                       timeout=60 * minutes + 160, check=False, cwd=common.ROOT)
    for row in json.loads(file.read_text()):
        if (name := PARALLEL + row["case"]) not in ran:
            errors = [f"{what}: {why}" for what, why in row["errors"].items()] if row["outcome"] != "ok" else []
            known: Row = {"case": name, "path": TWO_GPUS, "outcome": row["outcome"], "errors": errors, "launches": [],
                          "codes": [], "seconds": row["seconds"]}
            runner.add(signed(known, "cuda"))


# ---- a worker


def serve(args: argparse.Namespace) -> None:
    """Cases by name from stdin, one a line; their rows to stdout, then null."""
    import torch

    from .evidence_run import run, run_test

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                            # what others print does not belong to the answers
    device = "cpu" if args.device == "cpu" else "cuda:0"
    tests = {test.name: test for path in ALL_TESTS for test in gpu_tests(path)}
    for line in sys.stdin:
        name = json.loads(line)
        job = tests.get(name) or Case.named(name, args.tokens)
        try:
            row = run(job, device, args.out / "budgets") if isinstance(job, Case) else run_test(job)
            row = signed(row, device)
        except Exception as error:
            row = failure(job, f"{type(error).__name__}: {error}"[:2000], device) | {"outcome": "error"}
        answers.write(json.dumps(row) + "\nnull\n")
        answers.flush()
        if row["outcome"] not in GOOD:
            os._exit(0)                      # an error of the GPU stays with its process
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ---- the command


def target_of(device: str) -> Target:
    """What this machine's GPU runs; without one, Hopper."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return parse("sm90")
    major, minor = torch.cuda.get_device_capability()
    return parse(f"sm{major}{minor}")


def visible() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES spells them."""
    import torch

    numbers = range(torch.cuda.device_count())
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [named[n] if named else str(n) for n in numbers]


def main() -> int:
    parser = common.parser(__spec__, __doc__, json=False)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--merge", metavar="FILE", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path(os.environ.get("OUT") or common.RESULTS))
    parser.add_argument("--only", metavar="WORDS", default="", help="cases whose names have these words, in this order")
    parser.add_argument("--no-matrix", action="store_true", help="not the matrix of several GPUs")
    parser.add_argument("--again", action="store_true", help="also what has run with this code, or failed")
    parser.add_argument("--workers", type=int, default=4, help="processes of a GPU  [default: 4]")
    parser.add_argument("--builders", type=int, help="processes that build kernels  [default: a CPU each, at most 16]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=0, help="of a row, at least 80, with --device cpu")
    parser.add_argument("--most", type=int, help="run so many cases at most")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args)
        return 0
    if args.merge:
        merge(args.merge)
        return 0
    if args.write:
        write(rows_of(FILE))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    target = target_of(args.device)
    rows = rows_of(args.out / "evidence.json")
    ledger = Ledger(document([*rows_of(FILE), *rows]))
    if args.list:
        print("\n".join(listing(ledger, target)))
        return 0
    jobs = [job for job in lacking(ledger, target, args.again) if matches(job.name, args.only)]
    if args.device == "cpu":
        jobs, devices = [job for job in jobs if isinstance(job, Case)], ["cpu"]
    else:
        devices = visible()
        if not devices:
            sys.exit("There is no GPU here. --device cpu runs cases in the simulator; --list says what is lacking.")
        if importlib.util.find_spec("pytest") is None:
            print("pytest is not installed: the tests of tests/gpu are left out")
            jobs = [job for job in jobs if isinstance(job, Case)]
    runner = Runner(args, jobs[: args.most], args.out)
    if args.device == "cuda":
        matrix(args, runner, ledger, len(devices))
    runner.run(devices)
    done = [row for row in runner.rows.values() if row["case"] not in {before["case"] for before in rows}]
    print(f"{len(done)} new rows, {sum(row['outcome'] != 'ok' for row in done)} not ok; {len(jobs)} cases were lacking")
    sys.stdout.flush()
    os._exit(int(any(row["outcome"] != "ok" for row in done)))                 # threads may still build


if __name__ == "__main__":
    sys.exit(main())
