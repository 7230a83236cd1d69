"""What `kda doctor` says of a GPU: how much of what its backends run has run on one since the code last changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kda.routing.dispatch import capability
from kda.tools.verify.ledger import RAN, Known, Ledger, cards, last_date
from kda.tools.verify.ran import other_version
from ptxkit.commands.render import Screen
from ptxkit.compile.target import code_for


class Ran(NamedTuple):
    """The part of one backend that has run on a GPU like this one."""

    backend: str
    arch: str                                # the arch that its kernels are built for
    kernels: tuple[int, int]                 # how many ran, and how many there are
    paths: tuple[int, int]
    cards: tuple[str, ...]
    last: str                                # a date; "" if nothing ran
    why: str = ""                            # kernels count as not run


def ran_on(backends: Iterable[str], cc: tuple[int, int]) -> tuple[Ran, ...]:
    """Return what ran of each backend that has kernels for this GPU and is in the ledger."""
    ledger, targets = Ledger.read(), {name: code_for(cc, capability(name).archs) for name in backends}
    known = {group.split()[0] for group in ledger.groups}
    return tuple(_of(ledger, name, target.name) for name, target in targets.items() if target and name in known)


def _of(ledger: Ledger, backend: str, arch: str) -> Ran:
    group = f"{backend} {arch}"
    kernels = [*ledger.kernels(group)] if group in ledger.shipped else []
    paths = [*ledger.paths(backend)]
    why = "" if kernels else f"no run is kept of kernels for {arch}"
    built = ledger.compilers.get(backend, "")
    if kernels and (other := other_version(built)):
        kernels = [each._replace(state="", run=None) for each in kernels]
        why = f"the ledger has kernels of {built}; here they are built by {other}"
    known = [*kernels, *paths]
    return Ran(backend, arch, _count(kernels), _count(paths), tuple(cards(known)), last_date(known), why)


def _count(known: Sequence[Known]) -> tuple[int, int]:
    return sum(each.state == RAN for each in known), len(known)


def lines(screen: Screen, ran: Sequence[Ran]) -> list[str]:
    def cells(each: Ran) -> tuple[str, ...]:
        counts = (f"{some} of {all_}" for some, all_ in (each.kernels, each.paths))
        return f"  {each.backend}, {each.arch}", *counts, ", ".join(each.cards) or "-", each.last or "-", each.why

    header = ("Ran on a GPU as it is", "kernels", "host paths", "on", "last", "")
    return screen.table([cells(each) for each in ran], header) if ran else []
