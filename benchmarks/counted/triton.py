"""Bytes that the Triton backend's launches touch, for the table of docs/triton.md: of a token and a value head,
bfloat16, K = V = 128, those of 192 tokens less those of 64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kda.backends.triton import launch
from kda.model.bundles import Save
from kda.tools.verify.cases import make_inputs
from ptxkit import capture
from ptxkit.capturing.session import Session
from ptxkit.report import Run

from ..pages import table_row

LONG, SHORT, ARCH = 192, 64, "sm90"
SECTOR, READ, WRITTEN = 32, 1, 2             # bytes; flags of a sector
FLOOR, FLA = {"forward": "1,282", "backward": "2,822"}, {"forward": "about 9,750", "backward": "about 24,700"}
HEADER = "| launch | reads | writes |"


class Bytes(NamedTuple):
    """The bytes of a launch: `read_back` are those that it had written itself, `left` those that are no result and that
    no other launch reads."""

    reads: float
    read_back: float
    writes: float
    left: float

    @property
    def all(self) -> float:
        return self.reads + self.writes

    @property
    def scratch(self) -> float:
        return self.read_back + self.left


def step(T: int, save: Save, backward: bool) -> tuple[Session, list[torch.Tensor]]:
    """A forward, and its backward: the launches and the results."""
    case = make_inputs(T=T, H=1, K=128, V=128, gate="bounded", initial_state=False)
    p = dataclasses.replace(case.problem(), final_state=False)
    with capture(arch=ARCH, checks=False) as session:
        session.around = lambda launch, simulate: simulate(accesses=True)
        outputs = launch.forward(p, case.inputs, save)
        results = [outputs.o]
        if backward:
            back = dataclasses.replace(p, direction="backward")
            results += launch.backward(back, case.inputs, case.do, None, outputs.saved)
    return session, [x for x in results if x is not None]


def touched(session: Session, results: list[torch.Tensor]) -> list[Bytes]:
    """Return the bytes of each launch.  The session holds all tensors, so that none has the address of another."""

    def sectors(run: Run, flag: int) -> torch.Tensor:
        regions = ((address, torch.frombuffer(bytearray(flags), dtype=torch.uint8)) for address, flags in run.sectors)
        return torch.cat([address // SECTOR + (flags & flag).nonzero()[:, 0] for address, flags in regions])

    def without(some: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        return some[~torch.isin(some, torch.cat([some[:0], *others]))]

    read, written = ([sectors(run, flag) for run in session.runs] for flag in (READ, WRITTEN))
    given = [torch.arange(x.data_ptr() // SECTOR, -(-(x.data_ptr() + x.nbytes) // SECTOR)) for x in results]
    bytes_ = []
    for n, (r, w) in enumerate(zip(read, written)):
        ways = r, without(r[torch.isin(r, w)], written[:n]), w, without(w, [*read[n + 1 :], *given])
        bytes_.append(Bytes(*(SECTOR * len(sectors_of_way) for sectors_of_way in ways)))
    return bytes_


def launches(save: Save, backward: bool) -> dict[str, Bytes]:
    """Return the bytes of each launch for a token.  A backward repeats launches of the forward: "prepare again"."""
    short, long = (step(T, save, backward) for T in (SHORT, LONG))
    by_name: dict[str, Bytes] = {}
    for run, a, b in zip(long[0].runs, touched(*short), touched(*long), strict=True):
        of_token = Bytes(*((y - x) / (LONG - SHORT) for x, y in zip(a, b)))
        by_name[f"{run.kernel} again" if run.kernel in by_name else run.kernel] = of_token
    return by_name


def cell(n: float, scratch: float) -> str:
    return f"{n:,.0f} [{scratch:,.0f}]" if scratch else f"{n:,.0f}"


def direction(way: str, by_name: dict[str, Bytes]) -> Iterator[str]:
    shown = {"prepare again": "backward `prepare`, A_qk and A_inv saved", "state again": "backward `state`",
             "prepare": "forward `prepare`", "state": "forward `state`"}
    for name, each in by_name.items():
        yield table_row(shown.get(name, f"`{name}`"), cell(each.reads, each.read_back), cell(each.writes, each.left))
    all_, scratch = sum(each.all for each in by_name.values()), sum(each.scratch for each in by_name.values())
    yield table_row(f"**{way}, {len(by_name)} launches: {all_:,.0f}, without scratch {all_ - scratch:,.0f}**",
                    f"floor {FLOOR[way]}", f"FLA {FLA[way]}")


def rows() -> Iterator[str]:
    yield from direction("forward", launches(Save.NOTHING, False))
    step = launches(Save.PRODUCTS, True)
    yield from direction("backward", dict(list(step.items())[2:]))


def saved_instead() -> tuple[str, str]:
    """With `disable_recompute`: bytes that the forward of a step writes more, and that its backward touches less."""
    step, whole = (launches(save, True) for save in (Save.PRODUCTS, Save.ALL))
    written, again = (
        [sum(each[name].writes for name in ("prepare", "state")) for each in (whole, step)],
        [sum(each.all for name, each in launched.items() if name.endswith("again")) for launched in (step, whole)],
    )
    return f"{written[0] - written[1]:,.0f}", f"{again[0] - again[1]:,.0f}"
