"""Which of a call's kernels ran on a GPU since their code last changed, by the ledger."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from ptxkit.compile.recipes import COMPILERS, AnyRecipe, known_version
from ptxkit.compile.target import Target, parse

from . import digests
from .ledger import RAN, Ledger


class RanKernels(NamedTuple):
    """What the ledger knows of a call's kernels that one backend builds for one arch."""

    backend: str
    arch: str                                # that the kernels are built for
    kernels: tuple[int, int]                 # how many of the call's ran as they are now, and how many it has
    alike: tuple[int, int]                   # the same of all that the ledger lists under their names
    paths: tuple[int, int]                   # the same of the backend's host paths
    cards: tuple[str, ...]                   # on which any of these kernels ran
    last: str                                # a date; "" if none ran
    asked: str = ""                          # the arch that was asked for, if no card is of it
    why: str = ""                            # for which kernels count as not run
    one_of: bool = False                     # a call launches one of its kernels, which its tensors' layout chooses

    def __str__(self) -> str:
        name = f"evidence, {self.backend} for {self.arch}"
        if not self.alike[0]:
            why = f" ({self.why})" if self.why else ""
            return f"{name}: no kernel of these names ran on a GPU as it is now{why}"
        these = "variants, of which such a call launches one," if self.one_of else "kernels of this call"
        counts = (f"{_of(self.kernels)} {these} ran on a GPU as they are now; of all kernels of these names in "
                  f"the ledger {_of(self.alike)}; of ways to launch them {_of(self.paths)}")
        other = f"; none of them is a GPU of {self.asked}" if self.asked else ""
        return f"{name}: {counts}; on {' and '.join(self.cards)}, last on {self.last}{other}"


def _of(counts: tuple[int, int]) -> str:
    return "{} of {}".format(*counts)


def ran_of(
    backend: str, recipes: Iterable[AnyRecipe], asked: Target | None, one_of: bool = False
) -> list[RanKernels]:
    """Return what is known of the kernels of a call on a GPU of `asked`, for each arch that they are built for.
    `one_of`: the call launches one of them."""
    of_archs: dict[str, list[AnyRecipe]] = {}
    for recipe in dict.fromkeys(recipes):
        of_archs.setdefault(recipe.target.name, []).append(recipe)
    return [_of_arch(backend, arch, same, asked, one_of) for arch, same in of_archs.items()]


def _of_arch(
    backend: str, arch: str, recipes: list[AnyRecipe], asked: Target | None, one_of: bool
) -> RanKernels:
    ledger, labels, group = Ledger.read(), _labels(backend, arch), f"{backend} {arch}"
    listed = {f"{group}: {each.name}": each.code for each in ledger.kernels(group)} if group in ledger.groups else {}
    names = {recipe.name for recipe in recipes}
    same = {label: code for label, code in listed.items() if label.removeprefix(f"{group}: ").split()[0] in names}
    other = other_version(ledger.compilers.get(backend, "")) if same else ""
    why = f"the ledger has those of {ledger.compilers[backend]}, and {other} is installed" if other else ""
    of_these = [run for run in ledger.runs if run["outcome"] == "ok" and {*same.values()} & {*run["codes"]}]
    runs = [] if other else of_these
    ran = {code for run in runs for code in run["codes"]}
    cards, paths = sorted({run["card"] for run in runs}), [*ledger.paths(backend)]
    elsewhere = asked is not None and not any(parse(card) == asked for card in cards)
    return RanKernels(
        backend, arch, (sum(listed.get(labels.get(recipe, "")) in ran for recipe in recipes), len(recipes)),
        (sum(code in ran for code in same.values()), len(same)), (sum(path.state == RAN for path in paths), len(paths)),
        tuple(cards), max((run["date"] for run in runs), default=""), asked.name if asked and elsewhere else "", why,
        one_of=one_of and len(recipes) > 1,
    )


@functools.cache
def _labels(backend: str, arch: str) -> dict[AnyRecipe, str]:
    """Return the names by which the ledger knows kernels; none of an arch that it does not list."""
    if (backend, arch) not in digests.PROBLEMS:
        return {}
    return {recipe: label for label, recipe in digests.labelled(backend, arch).items()}


def other_version(built: str) -> str:
    """Return the installed compiler, if it is another version of the one that built the ledger's kernels."""
    for name, version in COMPILERS.values():
        installed = known_version(name, version) if built.startswith(f"{name} ") else None
        if installed and built != f"{name} {installed}":
            return f"{name} {installed}"
    return ""
