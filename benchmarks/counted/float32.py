"""What the float32 kernels take, for a table of docs/stages/counted.md.

Registers are ptxas' for sm_89.  Instructions (PTX, without mov) and bytes are counted in the simulator, those of 192
tokens less those of 64: a chunk of a value head, all CTAs that share it, in a training step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from kda.backends.sm89 import launch, plan
from kda.model.bundles import Save
from kda.model.force import forcing
from kda.model.problem import Problem
from kda.tools.verify.cases import Case, make_inputs
from ptxkit import capture
from ptxkit.report import Run

from ..pages import table_row

LONG, SHORT, C = 192, 64, 64
HEADS, SMS = 16, 132                         # whose columns of a state are counted
AGAIN = {"chain": "chain, backward", "prepare": "prepare, backward"}
HEADER = "| launch | registers | shared, KiB | instructions | mma | fma | bytes per token: read, touched | written |"


def case_of(T: int, D: int) -> Case:
    return make_inputs(T=T, H=1, K=D, V=D, dtype="float32", gate="softplus")


def runs(case: Case) -> dict[str, Run]:
    """The launches of a training step by name."""
    p = case.problem()
    with capture(arch="sm89") as session:
        saved = launch.forward(p, case.inputs, Save.PRODUCTS).saved
        launch.backward(dataclasses.replace(p, direction="backward"), case.inputs, case.do, case.dht, saved)
    by_name: dict[str, Run] = {}
    for run in session.runs:
        by_name[AGAIN[run.kernel] if run.kernel in by_name else run.kernel] = run
    return by_name


def kernels(p: Problem) -> dict:
    directions = (dataclasses.replace(p, direction=direction) for direction in ("forward", "backward"))
    forward, backward = (plan.plan(each, SMS, None, Save.PRODUCTS).steps for each in directions)
    configs = {AGAIN.get(name, name): config for name, (config, _) in backward.items()}
    return configs | {name: config for name, (config, _) in forward.items()}


def row(name: str, config, long: Run, short: Run) -> str:
    chunks = (LONG - SHORT) // C

    def each(counter) -> float:
        return (counter(long) - counter(short)) / chunks

    words = [each(lambda run, word=word: run.instructions.get(word, 0)) for word in ("mma", "fma")]
    instructions = each(lambda run: sum(run.instructions.values()) - run.instructions.get("mov", 0))
    read, touched, written = (
        each(lambda run, word=word: run.counters[f"global_{word}"]) / C
        for word in ("bytes_read", "floor_read", "bytes_written")
    )
    built = launch.kernel(config)
    cells = [f"`{name}` {config.K}", built.registers, f"{config.shared / 1024:.1f}", f"{instructions:,.0f}",
             *(f"{word:,.0f}" for word in words), f"{read:,.0f}, {touched:,.0f}", f"{written:,.0f}"]
    return table_row(*cells)


def rows(dims: Iterable[int] = (64, 128)) -> Iterator[str]:
    for D in dims:
        many = dataclasses.replace(case_of(SHORT, D).problem(), H=HEADS, HV=HEADS)
        with forcing(columns=plan.columns(many, SMS)):
            long, short, configs = runs(case_of(LONG, D)), runs(case_of(SHORT, D)), kernels(case_of(SHORT, D).problem())
        yield from (row(name, configs[name], run, short[name]) for name, run in long.items() if name != "sum_chunks")
