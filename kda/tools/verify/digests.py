"""Digests of the PTX of shipped kernels, and the classes of problems by which those kernels are known.

A kernel is known by its backend, arch, problem and place among the recipes of that problem, not by names in Python, so
that these may change.  Kernel names, comments, lines of source and debug sections are left out of what is digested.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import Counter
from typing import NamedTuple

from kda.model.host import host_of
from kda.model.problem import Problem
from ptxkit.compile import recipes as known
from ptxkit.compile.recipes import AnyRecipe

STATES = "state_dtype=float32 final_state=true"
LAYER = "dt_bias=true l2norm beta=sigmoid"
MODEL = f"bounded {LAYER} {STATES}"
# Every option of a kernel stands in at least one row; each row is a class of problems that models or tests use.
FORWARDS = (
    f"bfloat16 {MODEL}",
    f"bfloat16 {MODEL} packed H=2 HV=4",
    f"bfloat16 {MODEL} batch_invariant=true state_v_first=true intermediate_states=true g_dtype=float32",
    f"bfloat16 softplus l2norm packed beta=2*sigmoid {STATES} beta_dtype=float32",
    "bfloat16 g_dtype=float32 state_dtype=bfloat16 state_v_first=true",
    "bfloat16 bounded lower_bound=-5 packed H=2 HV=4 C=32",
)
PER_HEAD = (
    f"bfloat16 {MODEL} gate_per_head=true", f"bfloat16 softplus l2norm packed gate_per_head=true {STATES}",
)
SMALL = (f"bfloat16 K=64 V=64 {MODEL}", f"bfloat16 K=64 V=128 softplus packed {STATES}")
FROM_ZERO = f"{LAYER} final_state=true"       # the named shapes of `kda bench`
NAMED = (
    f"bfloat16 bounded {FROM_ZERO}", f"bfloat16 bounded {FROM_ZERO} packed", f"bfloat16 softplus {FROM_ZERO}",
    f"bfloat16 K=64 V=64 bounded {FROM_ZERO}",
)
DEFAULTS = (                                 # no states: README's call, the models of `kda explain`, layers in training
    "bfloat16 softplus", "bfloat16 softplus l2norm beta=sigmoid", "bfloat16 bounded l2norm beta=sigmoid",
    f"bfloat16 softplus {LAYER}", f"bfloat16 bounded {LAYER}", f"bfloat16 softplus {LAYER} packed",
    f"bfloat16 bounded {LAYER} packed",
)
FLOATS = (
    f"float32 K=64 V=64 {MODEL} forward", f"float32 K=64 V=64 {MODEL} backward",
    f"float32 softplus dt_bias=true l2norm packed C=32 {STATES} forward",
    f"float32 softplus dt_bias=true l2norm packed C=32 {STATES} backward",
    "float32 beta=2*sigmoid state_v_first=true forward", "float32 beta=2*sigmoid state_v_first=true backward",
    f"float32 K=64 V=64 {MODEL} gate_per_head=true forward", f"float32 K=64 V=64 {MODEL} gate_per_head=true backward",
)
BOTH = (
    f"bfloat16 {MODEL} forward", f"bfloat16 {MODEL} backward", f"bfloat16 {MODEL} disable_recompute=true forward",
    f"bfloat16 {MODEL} disable_recompute=true backward", f"bfloat16 softplus packed H=2 HV=4 {STATES} forward",
    f"bfloat16 softplus packed H=2 HV=4 {STATES} backward", "float16 g_dtype=float32 recurrent",
    f"bfloat16 softplus recurrent packed slots=4 inplace=true {STATES}",
    f"bfloat16 {MODEL} gate_per_head=true forward", f"bfloat16 {MODEL} gate_per_head=true backward",
)
IN_SLOTS = "slots=4 inplace=true state_dtype=float32 state_v_first=true"
SERVING = (
    f"bfloat16 bounded dt_bias=true l2norm beta=sigmoid decode {IN_SLOTS}",
    f"bfloat16 softplus dt_bias=true l2norm beta=sigmoid decode {IN_SLOTS}",
    f"bfloat16 softplus dt_bias=true l2norm beta=sigmoid decode {IN_SLOTS.replace('float32', 'bfloat16')}",
    f"bfloat16 bounded dt_bias=true l2norm beta=sigmoid decode T=4 accepted_tokens=true {IN_SLOTS}",
    f"bfloat16 bounded l2norm beta=sigmoid packed start_slots=true checkpoints=float32 batch_invariant=true {IN_SLOTS}",
)
LAYERS = ("bfloat16", "float32")
PROBLEMS = {
    ("sm100", "sm100"): FORWARDS + SMALL[:1] + PER_HEAD, ("sm100", "sm103"): FORWARDS[:1],
    ("sm90", "sm90"): FORWARDS + SMALL + PER_HEAD + NAMED + DEFAULTS, ("sm89", "sm89"): FLOATS,
    ("triton", "sm80"): BOTH[:2], ("triton", "sm90"): BOTH + SERVING, ("triton", "sm100"): BOTH[:2],
    ("layer", "sm90"): LAYERS,
}
PLANS = {backend: f"kda.backends.{backend}.plan" for backend, _ in PROBLEMS}
PLANS["layer"] = "kda.backends.triton.layer.plan"
COMPILERS = {                                # keys of known.COMPILERS
    "sm100": "cutedsl", "sm90": "cutedsl", "sm89": "nvrtc", "triton": "triton", "layer": "triton",
}


class Digest(NamedTuple):
    """What is kept of the code of one kernel."""

    code: str
    instructions: dict[str, int]             # opcode -> how often it stands there


def labelled(backend: str, arch: str) -> dict[str, AnyRecipe]:
    """Return recipes under the names by which digests are kept, each once."""
    plan = importlib.import_module(PLANS[backend])
    labels: dict[AnyRecipe, str] = {}
    for words in PROBLEMS[backend, arch]:
        numbers = Counter[str]()
        for recipe in plan.recipes(Problem.parse(words), host_of(arch)):
            labels.setdefault(recipe, f"{backend} {arch}: {recipe.name} {numbers[recipe.name]} of {words}")
            numbers[recipe.name] += 1
    return {label: recipe for recipe, label in labels.items()}


def version(backend: str) -> str:
    """Return the compiler that builds a backend's kernels, and its version."""
    name, installed = known.COMPILERS[COMPILERS[backend]]
    return f"{name} {installed()}"


_COMMENTS = re.compile(r"/\*.*?\*/", re.DOTALL)
_NOT_CODE = re.compile(r"//[^\n]*|^[ \t]*\.(?:loc|file)\b[^\n]*|^[ \t]*\$L__(?:tmp|func|info)\w*:", re.MULTILINE)
_SECTION = re.compile(r"^[ \t]*\.section[^{]*\{.*?^[ \t]*\}", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)")
_OPCODE = re.compile(r"^[ \t]*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z]\w*)[.\w:]*[ \t;]", re.MULTILINE)


def normalised(ptx: str) -> str:
    """Return the code alone, without comments, sections and names."""
    ptx = _NOT_CODE.sub("", _SECTION.sub("", _COMMENTS.sub("", ptx)))
    for number, name in enumerate(_ENTRY.findall(ptx)):
        ptx = ptx.replace(name, f"kernel_{number}")
    return "\n".join(" ".join(line.split()) for line in ptx.splitlines() if line.strip())


def digest(ptx: str) -> Digest:
    code = normalised(ptx)
    return Digest(hashlib.sha256(code.encode()).hexdigest()[:16], dict(sorted(Counter(_OPCODE.findall(code)).items())))
