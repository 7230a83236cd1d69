"""What Hopper's kernels take, for tables of docs/stages/counted.md.

Instructions and bytes are counted in the simulator, of 64 tokens and one value head; registers and spills are ptxas'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kda.backends.common.cute.tile import C
from kda.backends.common.cute.training import TOKENS
from kda.backends.common.training_plan import TrainingPlan
from kda.backends.sm90 import launch, plan
from kda.model.force import forcing
from kda.model.problem import Problem
from ptxkit.compile.launching import Launch

from ..pages import table_row
from . import GATES, LONG, SHORT, Counts, between, forward, step

SMS, DIMS = 132, (128, 64)
FUSED = "fused"                              # instead of prepare and record, in clusters of two
MAKE = "record", "again"                     # chains that make what a backward reads
BACK = "walk", "grads", "shares"
KERNELS = "prepare", "record", "again", FUSED, *BACK
STEPS = {                                    # by the forward's kernels: whether the backward has what they keep
    ("prepare", "record"): True, ("prepare", "again"): False, (FUSED,): True,
}
NAMES = {"record": "chain", "again": "chain without o"}                        # on the page
HEADER = "| kernel, K = V | warp instructions | bytes per token | registers | spills | shared memory, KiB |"
SPILLS = f"| bytes that grads spills | {' | '.join(f'K = V = {K}' for K in DIMS)} |"


def training_plan(K: int, H: int, words: str = GATES["bounded by -5"]) -> TrainingPlan:
    p = Problem.parse(f"bfloat16 K={K} V={K} T={LONG} H={H} {words} l2norm beta=sigmoid backward")
    return plan.training_plan(p, SMS)


def config_of(name: str, K: int, H: int) -> Any:
    """Return the configuration of one of the kernels that are launched one by one."""
    with forcing(form="two kernels"):
        planned = training_plan(K, H)
    return getattr(planned.making if name in MAKE else planned, name)


def of_step(K: int, saves: bool, names: tuple[str, ...]) -> dict[str, tuple[Counts, Launch]]:
    """Map the name of each kernel to what it takes and to its launch."""
    with forcing(form="one kernel" if FUSED in names else "two kernels", ctas=2):
        short, long = (step(T, saves, "sm90", K) for T in (SHORT, LONG))
    runs = zip(names, short.runs, long.runs, long.launches, strict=True)
    return {name: (between(a, b, LONG - SHORT), launched) for name, a, b, launched in runs}


def shared(name: str, K: int, launch: Launch) -> str:
    """KiB: of a CTA that has an SM to itself, and of one that shares it with another."""
    both = [launch.config] if name == FUSED else [config_of(name, K, H) for H in (1, 2 * SMS)]
    return " or ".join(dict.fromkeys(f"{config.shared / 1024:.0f}" for config in both))


def row(name: str, K: int, counts: Counts, launch: Launch) -> str:
    taken = launch.kernel.registers
    if name == "grads":
        taken = "MATH {}, LOAD {}".format(*launch.config.registers)
    cells = (f"{NAMES.get(name, name)}, {K}", f"{counts.warp_instructions:,.0f}", f"{counts.bytes:,.0f}", taken,
             launch.kernel.spills, shared(name, K, launch))
    return table_row(*cells)


def rows(dims: Iterable[int] = DIMS, forwards: Iterable[tuple[str, ...]] = STEPS) -> Iterator[str]:
    for K in dims:
        counted: dict[str, tuple[Counts, Launch]] = {}
        for names in forwards:
            counted |= of_step(K, STEPS[names], names + BACK)
        yield from (row(name, K, *counted[name]) for name in KERNELS if name in counted)


def spills() -> Iterator[str]:
    """Rows for each gate, and for each with g in float32."""
    for name, words in GATES.items():
        taken = (launch.kernel(training_plan(K, 1, words).grads).spills for K in DIMS)
        yield table_row(name, *taken)


FORMS = {                                    # forms of a forward: names of its kernels -> what is prescribed
    ("prepare", "chain"): dict(form="two kernels"), ("fused, two CTAs",): dict(form="one kernel", ctas=2),
    ("fused, four CTAs",): dict(form="one kernel", ctas=4),
}
FLOORS = "global_floor_read", "global_floor_written"
OF_FORWARD = ("| kernel, gate | warp instructions | bytes per token: requested, touched | registers | spills | shared "
              "memory, KiB |")


def of_forward() -> Iterator[str]:
    """Yield a table's lines: what each form takes for a chunk of 32 tokens."""
    for names, prescribed in FORMS.items():
        for gate in ("bounded", "softplus", "given"):
            with forcing(**prescribed):
                short, long = (forward(T, gate, "sm90", checks=False) for T in (SHORT, LONG))
            for name, a, b, launched in zip(names, short.runs, long.runs, long.launches, strict=True):
                counts = between(a, b, LONG - SHORT)
                touched = sum(b.counters[floor] - a.counters[floor] for floor in FLOORS) / (LONG - SHORT)
                cells = (f"{name}, {gate}", f"{counts.warp_instructions * C / TOKENS:,.0f}",
                         f"{counts.bytes:,.0f}, {touched:,.0f}", launched.kernel.registers, launched.kernel.spills,
                         f"{launched.config.shared / 1024:.0f}")
                yield table_row(*cells)
