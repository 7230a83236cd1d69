"""One case of `benchmarks/evidence_cases.py`, on a GPU or in the simulator: whether it is right, and what it launched.

Results are compared with float64 on the same device, in both gate regimes, within the budgets of kda.tools.verify.  The
same call is made again with other contents in fresh and freed memory, and once more from a CUDA graph that was captured
with other numbers: its bits may not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import kda
from kda.model import host
from kda.model.host import host_of
from kda.tools.verify import cases
from kda.tools.verify.budget import Budget
from kda.tools.verify.cases import REGIMES, Spec
from kda.tools.verify.definition import budgets, by_gradient, leaves_of
from kda.tools.verify.digests import digest
from kda.tools.verify.doors import Door
from kda.tools.verify.literal import one_thread
from ptxkit.compile import listening
from ptxkit.compile.target import parse
from ptxkit.temporary import replaced

from . import evidence_slots
from .evidence_cases import APART, DECODE, FORWARD, KEEPS, ON_GPU, Case, GpuTest, lengths

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
PADDING = 9                                  # tokens of packed rows that belong to no sequence
MARKS = "not exhaustive and not slow"
BLOCKS = {16 << 20: 40, 1 << 20: 256, 64 << 10: 512}           # bytes -> how many blocks of poison


# ---- what is called


def drawn(case: Case, regime: str, seed: int) -> cases.Case:
    """Its inputs, on the CPU, with states (K, V) where they are in no pool."""
    if case.call == DECODE:
        return evidence_slots.step(case, regime, seed)
    p = case.problem
    spec = Spec(
        lengths=lengths(p.T) if p.packed else None, B=p.B, T=p.T, H=p.H, HV=p.HV, K=p.K, V=p.V, C=p.C, dtype=p.dtype,
        gate=p.gate, gate_per_head=p.gate_per_head, regime=regime, beta=p.beta, l2norm=p.qk_l2norm,
        initial_state=p.state_dtype is not None, padding=PADDING if p.packed else 0, seed=seed,
    )
    plain = cases.make(spec)
    x = dict(plain.keywords)
    for name, dtype in (("g", p.g_dtype), ("beta", p.beta_dtype), ("initial_state", p.state_dtype)):
        if x.get(name) is not None:
            x[name] = x[name].to(getattr(torch, dtype))
    if p.packed:
        x["cu_seqlens"] = x["cu_seqlens"].to(getattr(torch, case.offsets))
    if not p.dt_bias:
        x.pop("dt_bias", None)
    if case.call in evidence_slots.FUNCTIONS:
        return evidence_slots.with_slots(case, cases.Case(spec, x, plain.do, plain.dht))
    return cases.Case(spec, x, plain.do, plain.dht if p.final_state else torch.zeros_like(plain.dht))


def named(outputs: tuple[Tensor | None, ...], final_state: bool) -> Tensors:
    results = dict(zip(("o", "ht", "h"), outputs))
    return {name: x for name, x in results.items() if x is not None and (name != "ht" or final_state)}


def exactly(case: Case, given: cases.Case, device: str) -> Tensors:
    """All results in float64, by the reference."""
    doubled = given.map(lambda x: x.to(device, torch.float64) if x.is_floating_point() else x.to(device))
    leaves = leaves_of(doubled.keywords)
    options = dict(backend="reference")
    outputs, wanted = kda.chunk_kda(**doubled.keywords | leaves | options), by_gradient(leaves)
    grads = torch.autograd.grad(outputs[:2], list(wanted.values()), (doubled.do, doubled.dht), allow_unused=True,
                                materialize_grads=True)
    exact = {n: x.detach() for n, x in (named(outputs, True) | dict(zip(wanted, grads))).items()}
    if case.every:
        with torch.no_grad():
            exact["h"] = kda.chunk_kda(**doubled.keywords, **options, return_intermediate_states=True)[2]
    return exact


def called(case: Case, given: cases.Case) -> Tensors:
    """The results of the backend; states come and go as the class of problems has them."""
    if case.call in evidence_slots.FUNCTIONS:
        return evidence_slots.called(case, given.keywords, backend=case.backend)
    p, x = case.problem, dict(given.keywords)
    flip = p.state_v_first
    x |= dict(backend=case.backend, batch_invariant=p.batch_invariant, state_v_first=flip,
              output_final_state=p.final_state)
    dht = given.dht.mT.contiguous() if flip else given.dht
    if flip and "initial_state" in x:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    if case.call == APART:
        grads = kda.chunk_kda_bwd(**x, do=given.do, dht=dht if p.final_state else None)
        results = {name: y for name, y in grads._asdict().items() if y is not None}
    else:
        if case.call == FORWARD:
            if case.every and p.packed:      # how many chunks there are: a graph cannot wait for the GPU to say so
                x["cu_seqlens_cpu"] = torch.tensor(given.spec.offsets, dtype=x["cu_seqlens"].dtype)
            with torch.no_grad():
                results = named(kda.chunk_kda(**x, return_intermediate_states=case.every), p.final_state)
        else:
            leaves = leaves_of(x)
            outputs = kda.chunk_kda(**x | leaves, disable_recompute=KEEPS[case.call])
            results, wanted = named(outputs, p.final_state), by_gradient(leaves)
            ends = (outputs[0], outputs[1]) if p.final_state else (outputs[0],)
            grads = torch.autograd.grad(ends, list(wanted.values()), (given.do, dht)[: len(ends)], allow_unused=True,
                                        materialize_grads=True)
            results = {name: y.detach() for name, y in results.items()} | dict(zip(wanted, grads))
    return {name: y.mT if flip and name in ("ht", "h", "dh0") else y for name, y in results.items()}


# ---- what is right


@functools.lru_cache(maxsize=8)
@one_thread()
def right(case: Case, regime: str, device: str, folder: Path | None) -> tuple[cases.Case, dict[str, Budget]]:
    """The inputs, and every result in float64 with its budget.  `folder` keeps budgets, which take a while."""
    given = drawn(case, regime, seed=1)
    if case.call in evidence_slots.FUNCTIONS:
        return given, evidence_slots.limits_of(case, given, device)
    exact = {name: x.cpu() for name, x in exactly(case, given, device).items()}
    rounding = Door(case.backend, device).rounding(given)
    key = repr((given.spec, rounding, case.problem.final_state, [str(x.dtype) for x in given.inputs if x is not None]))
    file = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json" if folder else None
    if file and file.exists():
        limits = {name: Budget(exact[name], *numbers) for name, numbers in json.loads(file.read_text()).items()}
    else:
        whole = {name: x for name, x in exact.items() if name != "h"}
        limits = budgets(given, rounding, exact=whole)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            whole_file = file.with_suffix(f".{time.monotonic_ns()}")
            whole_file.write_text(json.dumps({name: limit[1:] for name, limit in limits.items()}))
            whole_file.replace(file)
    if "h" in exact:                         # states between chunks, in the dtype of q
        of_states = limits["ht"]
        limits["h"] = Budget(exact["h"], of_states.norm + 2.0**-8, of_states.peak + 0.1)
    return given, limits


def reused(case: Case) -> Case:
    """The case with which it shares inputs and budgets."""
    return dataclasses.replace(case, call=case.call if case.call in evidence_slots.FUNCTIONS else FORWARD, sms=0)


# ---- memory and launches


def poison(device: str) -> None:
    """Fill memory that the allocator holds with nan: small blocks and large ones, which it gives to the next calls."""
    if device == "cpu" or not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    blocks = [torch.full((size // 2,), torch.nan, dtype=torch.bfloat16, device=device)
              for size, count in BLOCKS.items() for _ in range(count)]
    del blocks


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def by_code(kernels: Iterable[Any]) -> dict[str, str]:
    """Return the digest of the code of each of these kernels, with its name."""
    return {_code(kernel): short(kernel.name) for kernel in kernels}


def short(name: str) -> str:
    """The module and the class of a kernel in the CuTe DSL, which stand in its name."""
    return re.sub(r"^kernel_cutlass_kernel_kdabackends(\w+?)_object_at.*", r"\1", name)


_CODES: dict[int, tuple[Any, str]] = {}


def _code(kernel: Any) -> str:
    if id(kernel) not in _CODES:
        _CODES[id(kernel)] = kernel, digest(kernel.ptx).code
    return _CODES[id(kernel)][1]


# ---- tests


def run_test(job: GpuTest) -> dict[str, Any]:
    """A row for a test: whether all its cases passed, and what those that passed launched."""
    import pytest

    kernels: list[Any] = []
    with listening.launched(kernels):
        watch = Watch({"case": job.name, "path": job.path}, kernels)
        part = f"{job.part}/{job.parts}"                                       # an option of tests/conftest.py
        argv = [f"{ON_GPU / job.test}", "--part", part, "-q", "--maxfail=8", "-p", "no:cacheprovider", "-m", MARKS]
        code = int(pytest.main(argv, plugins=[watch]))
    if code not in (0, 1) or not watch.row["cases"] + len(watch.row["errors"]) + watch.skipped:
        raise RuntimeError(f"pytest ended with {code}")
    if not watch.row["cases"] and not watch.row["errors"]:
        watch.row["outcome"] = "skipped"
    return watch.row


class Watch:
    """A plugin of pytest that adds up the cases of a test."""

    def __init__(self, row: dict[str, Any], kernels: list[Any]):
        self.kernels, self.skipped = kernels, 0
        self.row = row | {"outcome": "ok", "errors": [], "cases": 0, "launches": [], "codes": [], "seconds": 0.0}

    def pytest_runtest_setup(self, item: Any) -> None:
        poison("cuda")
        self.kernels.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.row["seconds"] = round(self.row["seconds"] + report.duration, 2)
        self.skipped += report.skipped
        if report.failed:
            lines = report.longreprtext.strip().splitlines()
            why = [line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:]
            self.row["outcome"] = "wrong"
            self.row["errors"].append(f"{report.nodeid.partition('::')[2]}: {'; '.join(why[:3])}"[:400])
        elif report.when == "call" and report.passed:
            self.row["cases"] += 1
            launched = by_code(self.kernels)
            self.row["launches"] = sorted({*self.row["launches"], *launched.values()})
            self.row["codes"] = sorted({*self.row["codes"], *launched})


# ---- one case


def on(stated: host.Host) -> contextlib.AbstractContextManager[None]:
    """Make every GPU look like this one inside the block, in all threads: autograd has one for each GPU."""
    return replaced(host, _examined=lambda device: stated)


def run(case: Case, device: str, folder: Path | None = None) -> dict[str, Any]:
    """A row of the ledger, without what is the same for all cases of a machine."""
    began, session = time.monotonic(), None
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            from ptxkit import capture

            session = stack.enter_context(capture(arch=parse(case.arch).spelling, sms=case.sms or None))
            device = "cuda"
        else:
            chip, gpu = host_of(case.arch), case.with_its_sms(host.detect(device))
            if gpu.cc != chip.cc and case.backend != "sm89":                   # older code, which the driver finishes
                gpu = dataclasses.replace(gpu, cc=chip.cc, smem=chip.smem)
            stack.enter_context(on(gpu))
        stack.enter_context(case.planned())
        kernels: list[Any] = []
        if session is None:
            stack.enter_context(listening.launched(kernels))
        used: list[tuple[float, float, str]] = []
        errors: list[str] = []
        for regime in REGIMES:
            given, limits = right(reused(case), regime, device, folder)
            on_device = given.map(lambda x: x.to(device))
            errors += [f"{regime} gates: {line}" for line in checked(case, on_device, limits, device, used)]
        if session is not None:
            errors += [str(finding) for finding in session.findings]
            kernels += [each.kernel for each in session.launches]
        if not kernels:
            errors.append("no kernel was launched, or none of its launches was heard")
    most, error, result = max(used)
    launched = by_code(kernels)
    return {
        "case": case.name, "path": case.path, "outcome": "wrong" if errors else "ok", "errors": errors,
        "result": result, "used": number(most), "error": number(error),
        "launches": sorted(set(launched.values())), "codes": sorted(launched),
        "seconds": round(time.monotonic() - began, 2),
    }


def checked(
    case: Case, given: cases.Case, limits: dict[str, Budget], device: str,
    used: list[tuple[float, float, str]],
) -> Iterator[str]:
    """What is wrong; `used` gets how much of its budget each result uses, its error and its name."""
    poison(device)
    first = {name: x.clone() for name, x in called(case, given).items()}
    for name, x in first.items():
        measure = limits[name].measure(x.float() if x.dtype == torch.float16 else x)
        used.append((measure.used, measure.error, name))
        if not measure.used <= 1:
            yield f"{name} is {measure.used:.3g} times its budget ({measure.kind} {measure.error:.3g})"
    with fresh_memory_is_nan():
        yield from differ("a second call, with nan in fresh memory,", called(case, given), first)
    if torch.cuda.is_available():
        yield from from_a_graph(case, given, first, device)


def number(x: float) -> float | None:
    """What JSON can hold: three digits, and None where x is not finite."""
    return float(f"{x:.3g}") if math.isfinite(x) else None


def from_a_graph(case: Case, given: cases.Case, first: Tensors, device: str) -> Iterator[str]:
    """Capture a graph with other numbers, then replay it with those of the case."""
    others = drawn(case, "slow", seed=2).map(lambda x: x.to(device))
    static = others.map(torch.clone)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())                              # the clones are made there
    with torch.cuda.stream(side):
        called(case, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = called(case, static)
    pairs = [(static.keywords[name], x) for name, x in given.keywords.items() if isinstance(x, Tensor)]
    for to, x in [*pairs, (static.do, given.do), (static.dht, given.dht)]:
        to.copy_(x)
    poison(device)
    for time_ in ("first", "second"):
        graph.replay()
        torch.cuda.synchronize()
        yield from differ(f"the {time_} replay of a graph", again, first)


def differ(what: str, results: Tensors, first: Tensors) -> Iterator[str]:
    names = [name for name, x in first.items() if name not in results or not torch.equal(bits(results[name]), bits(x))]
    if names or results.keys() != first.keys():
        yield f"{what} gives other bits: {', '.join(names) or 'other results'}"


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
