"""The cases that `benchmarks/evidence.py` chooses from: what they call, and the kernels that they launch.

A case is a class of problems (kda/tools/verify/digests.py), a path (what is called, and the form in which host code
launches a plan), and a shape.  `candidates` has many more cases than are necessary; `covering` takes those that launch
what has no evidence yet, the most important first.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kda.backends.common.pool.plan import inner
from kda.backends.common.triton_types import TYPES
from kda.backends.triton import plan as triton_plan
from kda.backends.triton.decode import recurrent_plan, step_plan
from kda.calls import ahead
from kda.errors import NoBackendError
from kda.model.bundles import Save
from kda.model.force import Force, forcing
from kda.model.host import Host, detect, host_of, standing_in
from kda.model.problem import Problem
from kda.routing.dispatch import backend_of_backward, choose, route
from kda.tools.verify import digests
from ptxkit.compile.recipes import AnyRecipe

from . import common

FORWARD, APART, RECOMPUTED, STATES, ALL = "forward", "backward alone", "step", "step, states kept", "step, all kept"
KEEPS = {RECOMPUTED: False, STATES: "states", ALL: True}       # what a step keeps -> disable_recompute
SLOTS, RECURRENT, DECODE = "chunk_kda from and to slots", "fused_recurrent_kda", "decode_step"
INDICES = ("int64", "int32")                 # dtypes of offsets and of slots
Variants = Mapping[str, tuple[Any, ...]]     # fields of a Case, and the values with which there are cases
OF_CHUNKS: Variants = {"states": (True, False), "offsets": INDICES}
CALLS: dict[str, tuple[str, Variants]] = {   # what is called, the `op` of its problems, and how its cases differ
    FORWARD: ("chunk", OF_CHUNKS | {"every": (False, True)}),
    **dict.fromkeys((RECOMPUTED, ALL, STATES, APART), ("chunk", OF_CHUNKS)),
    SLOTS: ("chunk", {"offsets": INDICES, "slots": INDICES}),
    RECURRENT: ("recurrent", {"offsets": INDICES, "slots": INDICES, "sms": (0, 1)}),
    DECODE: ("decode", {"slots": INDICES, "by_column": (False, True), "by_channel": (False, True), "sms": (0, 1)}),
}


class Form(NamedTuple):
    """A way in which host code launches a plan."""

    kernel: str                              # a call of this form launches it; "": it may launch any
    T: int                                   # tokens and heads with which it exists
    heads: int
    forced: Mapping[str, Any] = {}           # fields of Force that prescribe it
    sms: tuple[int, ...] = (0,)              # numbers of SMs that plans count on; 0: those of the GPU


TWO = dict(form="two kernels")
# The first forms are those that most calls take.
HOPPER = {
    "as the plan says": Form("", 150, 1),
    "one kernel, clusters of two": Form("fused", 150, 3, dict(form="one kernel", ctas=2)),
    "one kernel, clusters of four": Form("fused", 150, 3, dict(form="one kernel", ctas=4)),
    "one kernel, CTAs alone": Form("fused", 150, 3, dict(form="one kernel", ctas=1, clusters=2)),
    "kernels apart": Form("prepare", 150, 3, TWO, (0, 2)),
    "kernels apart, cut into segments": Form("compose", 2200, 1, TWO, (0, 12, 8, 6, 3)),
    "one kernel, clusters of two that share walks": Form("fused", 150, 3, dict(form="one kernel", ctas=2, clusters=2)),
    "one kernel, clusters of four that share walks": Form("fused", 150, 3, dict(form="one kernel", ctas=4, clusters=2)),
    "some CTAs make and others walk": Form("stream", 150, 1, dict(form="stream", segments=1)),
    "some CTAs make and others walk, in segments": Form("join", 150, 1, dict(form="stream", segments=2)),
    "kernels apart, cut, more walks than SMs": Form("compose", 3072, 1, TWO, (12, 6)),
    "a walk back and gradients in one grid": Form("reverse", 150, 3, dict(reverse=True)),
    "the same, cut into segments": Form("reverse", 2200, 1, TWO | dict(reverse=True)),
}
BLACKWELL = {
    "as the plan says": Form("", 150, 1),
    "cut into segments": Form("compose", 2200, 1),
    "one kernel": Form("fused", 150, 3, dict(form="one kernel")),
    "a walk back and gradients in one grid": Form("reverse", 150, 3, dict(reverse=True)),
    "the same, cut into segments": Form("reverse", 2200, 1, TWO | dict(reverse=True)),
}
TRITON = {"as the plan says": Form("", 150, 1), "cut into segments": Form("compose", 2200, 1)}
FLOAT32 = {
    "as the plan says": Form("", 150, 1),
    "a state's columns in fewer CTAs": Form("chain", 150, 3, sms=(2, 4, 8, 16, 32, 100)),
}
PATHS: dict[str, tuple[dict[str, Form], tuple[str, ...]]] = {  # and what is called
    "sm90": (HOPPER, (FORWARD, RECOMPUTED, ALL, STATES, APART)),
    "sm100": (BLACKWELL, (FORWARD, RECOMPUTED, ALL, STATES, APART)),
    "triton": (TRITON, (FORWARD, RECOMPUTED, ALL, APART, SLOTS, RECURRENT, DECODE)),
    "sm89": (FLOAT32, (FORWARD, RECOMPUTED, APART)),
}
GROUPS = tuple(group for group in digests.PROBLEMS if group[0] in PATHS)
# Tests of tests/gpu: what is no plan of chunk_kda, and what else they say of its plans.
TESTS = {
    "triton: decode_step": "test_triton_decode_step_on_gpu.py", "triton: recurrent": "test_triton_recurrent_on_gpu.py",
    "pool: prefill from and to slots": "test_pool_on_gpu.py", "layer: nn.KimiDeltaAttention": "test_layer_on_gpu.py",
}
MORE_TESTS = {
    "sm90: tests of the forward": "test_sm90_forward_on_gpu.py",
    "sm90: tests of the backward": "test_sm90_backward_on_gpu.py", "sm90: tests of halves": "test_halves_on_gpu.py",
    "triton: tests of chunk_kda": "test_triton_backend_on_gpu.py", "sm89: tests": "test_sm89_on_gpu.py",
    "reference: tests of the API": "test_api.py", "reference: tests of selftest and verify": "test_evidence.py",
}
STEPS = 3                                    # sequences of a call of decode_step
OPTIONS = "test_every_option_is_the_definition"
PARTS = {                                    # tests that take minutes, and the parts in which their cases run
    f"test_sm90_forward_on_gpu.py::{OPTIONS}": 4, f"test_sm90_backward_on_gpu.py::{OPTIONS}": 4,
    f"test_triton_backend_on_gpu.py::{OPTIONS}": 4,
}
ON_GPU = common.ROOT / "tests" / "gpu"
LEFT_OUT = (".slow", ".exhaustive")          # marks of tests


class GpuTest(NamedTuple):
    """A test with all its cases, or a part of them: evidence for a path together with the others of its file."""

    path: str
    test: str                                # "file.py::test"
    part: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        return self.test if self.parts == 1 else f"{self.test}, part {self.part + 1} of {self.parts}"


@dataclass(frozen=True)
class Case:
    """One call of CALLS, or a forward and its backward."""

    backend: str
    arch: str
    words: str                               # they name its class of problems
    form: str                                # a key of PATHS
    call: str                                # a key of CALLS
    sms: int = 0                             # that plans count on; 0: those of the GPU
    states: bool = True                      # final states are requested, and have gradients
    every: bool = False                      # a forward returns the states that enter chunks, too
    offsets: str = "int64"                   # dtype of cu_seqlens
    slots: str = "int64"                     # dtype of slots, and of what else is counted or indexed beside them
    by_column: bool = False                  # the states (V, K) of decode_step lie as (K, V)
    by_channel: bool = False                 # a channel's rows lie next to each other in conv_states
    tokens: int = 0                          # instead of the form's, for the simulator

    @property
    def path(self) -> str:
        return f"{'pool' if self.call == SLOTS else self.backend}: {self.call}, {self.form}"

    @property
    def name(self) -> str:
        other = [f"{self.sms} SM{'s' * (self.sms > 1)}"] * (self.sms > 0) + ["no final states"] * (not self.states)
        other += ["states of chunks"] * self.every + [f"{self.offsets} offsets"] * (self.offsets != "int64")
        other += [f"{self.slots} slots"] * (self.slots != "int64") + ["states by column"] * self.by_column
        other += ["tails by channel"] * self.by_channel
        return ", ".join([f"{self.path} | {self.arch} {self.words}", *other])

    @classmethod
    def named(cls, name: str, tokens: int = 0) -> Case:
        return dataclasses.replace(_by_name()[name], tokens=tokens)

    @property
    def as_form(self) -> Form:
        return PATHS[self.backend][0][self.form]

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem of its forward."""
        p, form = Problem.parse(self.words), self.as_form
        if self.call == DECODE:
            return dataclasses.replace(p, B=STEPS, N=STEPS, H=2, HV=2 * (p.HV // p.H))
        T = self.tokens or form.T
        p = dataclasses.replace(
            p, direction="forward", B=1, T=T, N=len(lengths(T)) if p.packed else 1, H=form.heads,
            HV=form.heads * (p.HV // p.H), scale=p.K**-0.5,
            intermediate_states=self.every, disable_recompute=False, force=Force(**form.forced),
        )
        if self.call in (SLOTS, RECURRENT):
            return p
        return dataclasses.replace(inner(p) if p.slots else p, checkpoints=None, final_state=self.states)

    def with_its_sms(self, host: Host) -> Host:
        return dataclasses.replace(host, sms=self.sms or host.sms)

    def planned(self) -> contextlib.AbstractContextManager[None]:
        """Let plans be of its form inside the block."""
        return forcing(**self.as_form.forced)

    def recipes(self) -> list[AnyRecipe]:
        """The kernels that it launches on a GPU of its arch; none where its backend does not accept the call."""
        with standing_in(self.with_its_sms(host_of(self.arch))), self.planned():
            try:
                return list(dict.fromkeys(self._recipes()))
            except NoBackendError:
                return []

    def _recipes(self) -> Iterator[AnyRecipe]:
        p, offsets = self.problem, self.offsets if self.problem.packed else None
        if self.call in (SLOTS, RECURRENT, DECODE):
            yield from filter(self._launches, triton_plan.recipes(p, detect(p.device), training=False))
            return
        if self.call == FORWARD:
            yield from ahead.recipes_of(choose(p, self.backend).backend, p, Save.NOTHING, offsets)
            return
        if self.call == APART:
            back = dataclasses.replace(p, direction="backward")
            to = backend_of_backward(self.backend)
            yield from ahead.recipes_of(choose(back, to).backend, back, Save.NOTHING, offsets)
            return
        p = dataclasses.replace(p, disable_recompute=self.call == ALL)
        way = route(p, self.backend, training=True, states=self.call == STATES)
        yield from ahead.recipes_of_step(way, offsets)

    def _launches(self, recipe: AnyRecipe) -> bool:
        """Whether it launches this kernel, one of those that calls of its class launch."""
        built_for = {**recipe.constants, **recipe.signature}
        lie = {"ORDER": "kv" if self.by_column else "vk", "conv_states_c": TYPES["int64"] if self.by_channel else 1}
        indices = dict.fromkeys(("slots", "starts", "offsets", "checkpoints", "accepted"), self.slots)
        needed = {name: f"*{TYPES[dtype]}" for name, dtype in (indices | {"cu_seqlens": self.offsets}).items()}
        if self.call == DECODE:
            config = step_plan.config(step_plan.usual_step(self.problem), detect(self.problem.device).sms)
            needed |= lie | {"ROWS": config.rows or self.problem.V, "AHEAD": config.ahead}
        if self.call == RECURRENT:
            needed["BV"] = recurrent_plan.config(self.problem, detect(self.problem.device).sms).BV
        return all(built_for.get(name) in (None, value) for name, value in needed.items())


def lengths(T: int) -> tuple[int, ...]:
    """The lengths of packed sequences in a row of T tokens, the last nine of which belong to no sequence.  A long
    sequence is alone, because beside others it would not be cut."""
    return (65, 0, 1, T - 75) if T < 1000 else (T - 9,)


def _cases(backend: str, arch: str, form: str, calls: Iterable[str]) -> Iterator[tuple[Case, list[AnyRecipe]]]:
    """Those that take a form, with the kernels that they launch."""
    kernel, *_, numbers = PATHS[backend][0][form]
    for words, call in itertools.product(digests.PROBLEMS[backend, arch], calls):
        (op, variants), p = CALLS[call], Problem.parse(words)
        if p.op != op or (call == SLOTS and not p.slots):
            continue
        given = {"offsets": p.packed, "slots": p.slots}                        # else their dtype makes no case
        values = [each[: 1 + bool(given.get(name, True))] for name, each in variants.items()]
        for sms, what in itertools.product(numbers, itertools.product(*values)):
            case = Case(backend, arch, words, form, call, **{"sms": sms} | dict(zip(variants, what)))
            recipes = case.recipes()
            if recipes and (not kernel or any(recipe.name == kernel for recipe in recipes)):
                yield case, recipes


@functools.cache
def candidates(backend: str, arch: str) -> dict[Case, list[AnyRecipe]]:
    """Many more cases than are necessary, the most important ones first, with the kernels that they launch."""
    forms, calls = PATHS[backend]
    return {case: recipes for form in forms for case, recipes in _cases(backend, arch, form, calls)}


@functools.cache
def _by_name() -> dict[str, Case]:
    return {case.name: case for backend, arch in GROUPS for case in candidates(backend, arch)}


def paths_of() -> list[str]:
    """All paths that cases take, each once."""
    paths: dict[str, None] = {}
    for backend, arch in GROUPS:
        forms, calls = PATHS[backend]
        for form, call in itertools.product(forms, calls):
            paths |= {case.path: None for case, _ in itertools.islice(_cases(backend, arch, form, [call]), 1)}
    return list(paths)


def gpu_tests(path: str) -> list[GpuTest]:
    file = (TESTS | MORE_TESTS)[path]
    functions = [node for node in ast.parse((ON_GPU / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    tests = [
        f"{file}::{node.name}" for node in functions
        if node.name.startswith("test_") and not any(mark in ast.unparse(each) for each in node.decorator_list
                                                     for mark in LEFT_OUT)
    ]
    return [GpuTest(path, test, part, PARTS.get(test, 1)) for test in tests for part in range(PARTS.get(test, 1))]


def covers(backend: str, arch: str, codes: Mapping[AnyRecipe, str]) -> set[str]:
    """The kernels that some case launches."""
    return {codes[r] for recipes in candidates(backend, arch).values() for r in recipes if r in codes}


def covering(
    backend: str, arch: str, wanted: set[str], paths: set[str], codes: Mapping[AnyRecipe, str], without: Container[str]
) -> list[Case]:
    """Cases that take each of `paths` and launch each kernel of `wanted`, by the digests `codes`, as far as that is
    possible: first one for each path, then those that launch most of what is left.  None of `without`, which ran."""
    launched = {case: {codes[r] for r in recipes if r in codes}
                for case, recipes in candidates(backend, arch).items() if case.name not in without}
    chosen, left, paths = [], set(wanted), set(paths)
    for case, kernels in launched.items():
        if case.path in paths:
            chosen.append(case)
            paths.remove(case.path)
            left -= kernels
    while left and launched:
        # without final states a call launches what it may launch; with them, kernels for no gradient of theirs are idle
        case = max(launched, key=lambda case: (len(launched[case] & left), not case.states))
        if not launched[case] & left:
            break
        chosen.append(case)
        left -= launched[case]
    return chosen


def matches(name: str, words: str) -> bool:
    """Whether the words stand in a name, in this order."""
    return re.search(".*".join(map(re.escape, words.split())), name) is not None
