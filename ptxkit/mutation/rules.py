"""Mutations of a synchronising instruction: a table of patterns and replacements.

A rule's `change` gets a `Site` and returns the text that replaces the instruction, "" to remove it, or a pair: that
text, and the earlier statement before which the instruction moves.  None: the rule does not apply.

Not in the table: `griddepcontrol.launch_dependents` (without it the next launch starts later, and nothing else
changes), `elect`, `vote` and `shfl` (they move values), `setmaxnreg` and the allocation of tensor memory (resources).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..ptx.lexer import Statement, split_list

WGMMA_GROUPS = 7                             # the most that a wait may leave in flight
SCOPES = (".sys", ".gpu", ".cluster")
ORDERED = r"(ld|st|atom|red|mbarrier|fence)\b.*\.(acquire|release|acq_rel|sc)\b"
ASYNC_WORK = {                               # what a commit covers
    "cp.async.commit_group": r"cp\.async\.(ca|cg)\b",
    "cp.async.bulk.commit_group": r"cp\.(reduce\.)?async\.bulk\.(?!commit|wait|prefetch)",
    "wgmma.commit_group": r"wgmma\.mma_async\b",
    "tcgen05.commit": r"tcgen05\.(mma|cp|shift)\b",
}
_PARTS = re.compile(r"(?P<guard>@\s*!?\s*\S+\s+)?(?P<opcode>[^\s\[{(;]+)\s*(?P<operands>.*);", re.DOTALL)


def _parts(text: str) -> tuple[str, str, str]:
    """Return (guard, opcode, operands) of an instruction."""
    match = _PARTS.fullmatch(text)
    assert match is not None                 # the lexer has read it
    return match["guard"] or "", match["opcode"], match["operands"]


class Site:
    """One instruction of a text, split for rules."""

    def __init__(self, text: Sequence[Statement], index: int):
        self.statements, self.index = text, index
        self.guard, self.opcode, operands = _parts(self.text)
        self.operands = split_list(operands) or []

    @property
    def text(self) -> str:
        return self.statements[self.index].text

    def written(self, opcode: str, operands: Iterable[str] | None = None) -> str:
        """Return an instruction under the same guard."""
        return f"{self.guard}{opcode} {', '.join(self.operands if operands is None else operands)};"

    def earlier(self, opcode: str) -> int | None:
        """Return the index of the nearest earlier instruction of this kind; None unless the same threads run both, and
        if a register that the instruction reads is written in between."""
        depth, between = 0, ""
        for index in range(self.index - 1, -1, -1):
            kind, text = self.statements[index][:2]
            depth += (kind == "close") - (kind == "open")
            if depth < 0 or kind in ("label", "function"):
                return None
            if kind != "instruction":
                continue
            guard, name, _ = _parts(text)
            if name.startswith(("bra", "brx", "ret", "exit", "call")):
                return None
            if re.match(opcode, name):
                apart = set(re.findall(r"%\w+", self.text)).isdisjoint(re.findall(r"%\w+", between))
                return index if apart and guard.split() == self.guard.split() else None
            between += text
        return None


class Weakening(NamedTuple):
    name: str                                # the mutation's: stable, --json and docs quote it
    pattern: str                             # matches the opcode from its first character
    change: Callable[[Site], str | tuple[str, int] | None]


def removed(site: Site) -> str:
    return ""


def satisfied(site: Site) -> str:
    """Return the answer of a wait without the wait."""
    return site.written("setp.eq.u32", [site.operands[0], "0", "0"])


def arriving(site: Site) -> str | None:
    """A barrier that this thread does not wait at; only one that names its number of threads can be arrived at."""
    return site.written(re.sub(r"\bsync\b", "arrive", site.opcode)) if len(site.operands) == 2 else None


def one_arrival_less(site: Site) -> str:
    address, count = site.operands
    fewer = site.written(site.opcode, [address, "ptxkit_fewer"])
    return f"{{ .reg .b32 ptxkit_fewer; sub.u32 ptxkit_fewer, {count}, 1; {fewer} }}"


def arriving_once_less(site: Site) -> str | None:
    """Return an arrival that counts for one less, if it counts for several."""
    *first, count = site.operands
    several = len(first) > 1 and count.isdigit() and int(count) > 1
    return site.written(site.opcode, [*first, str(int(count) - 1)]) if several else None


def expecting_no_bytes(site: Site) -> str:
    return site.written(site.opcode.replace(".expect_tx", ""), site.operands[:-1])


def one_group_more(site: Site) -> str:
    """Return a wait that leaves one more group in flight; one that already leaves the most is removed."""
    stay = int(site.operands[0]) + 1
    too_many = site.opcode.startswith("wgmma") and stay > WGMMA_GROUPS
    return "" if too_many else site.written(site.opcode, [str(stay)])


def without(semantics: str, instead: str) -> Callable[[Site], str]:
    return lambda site: site.written(site.opcode.replace(f".{semantics}", f".{instead}"))


def said_relaxed(behind: str) -> Callable[[Site], str]:
    """`.relaxed.cta` where nothing is said, which stands for .acquire or .release: behind a modifier."""
    return lambda site: site.written(re.sub(rf"({behind})", r"\1.relaxed.cta", site.opcode, count=1))


def for_the_cta_alone(site: Site) -> str | None:
    opcode = site.opcode
    for scope in SCOPES:
        opcode = re.sub(rf"{re.escape(scope)}(?=\.|$)", ".cta", opcode, count=1)
    return site.written(opcode) if opcode != site.opcode else None


def before_the_last_one(site: Site) -> tuple[str, int] | None:
    """Return a commit before the last operation that it should cover, if both are in the same straight line."""
    (work,) = (work for commit, work in ASYNC_WORK.items() if site.opcode.startswith(commit))
    index = site.earlier(work)
    return None if index is None else (site.text, index)


UNSAID = r"(?!.*\.(acquire|release|relaxed)\b)"
RULES = (
    Weakening("does not wait", r"mbarrier\.(try|test)_wait\b", satisfied),
    Weakening("relaxed", rf"mbarrier\.(try|test)_wait\b{UNSAID}", said_relaxed(r"_wait(?:\.parity)?")),
    Weakening("relaxed", rf"mbarrier\.arrive(_drop)?\b{UNSAID}", said_relaxed(r"arrive(?:_drop)?(?:\.expect_tx)?")),
    Weakening("relaxed", rf"barrier\.cluster\.arrive\b{UNSAID}", lambda site: site.written(f"{site.opcode}.relaxed")),
    Weakening("relaxed", r"(ld|mbarrier)\b.*\.acquire\b", without("acquire", "relaxed")),
    Weakening("relaxed", r"(st|red|atom|mbarrier|barrier)\b.*\.release\b", without("release", "relaxed")),
    Weakening("relaxed", r"atom\b.*\.acquire\b", without("acquire", "relaxed")),
    Weakening("acquires nothing", r"(atom|red|fence)\b.*\.acq_rel\b", without("acq_rel", "release")),
    Weakening("releases nothing", r"(atom|red|fence)\b.*\.acq_rel\b", without("acq_rel", "acquire")),
    Weakening("for the CTA alone", rf"(?!fence\.(mbarrier_init|proxy)){ORDERED}", for_the_cta_alone),
    Weakening("one arrival less", r"mbarrier\.init\b", one_arrival_less),
    Weakening("one arrival less", r"mbarrier\.arrive(_drop)?\b(?!.*expect_tx)", arriving_once_less),
    Weakening("expects no bytes", r"mbarrier\.arrive(_drop)?\.expect_tx\b", expecting_no_bytes),
    Weakening("removed", r"mbarrier\.(arrive|arrive_drop|expect_tx|complete_tx)\b", removed),
    Weakening("removed", r"cp\.async\.mbarrier\.arrive\b", removed),
    Weakening("does not wait", r"(bar|barrier)(\.cta)?\.sync\b", arriving),
    Weakening("removed", r"(bar|barrier)(\.cta)?\.(sync|arrive)\b", removed),
    Weakening("removed", r"bar\.warp\.sync\b", removed),
    Weakening("removed", r"barrier\.cluster\.(arrive|wait)\b", removed),
    Weakening("removed", r"(fence|membar)\b", removed),
    Weakening("one group more in flight", r"(cp\.async|cp\.async\.bulk|wgmma)\.wait_group\b", one_group_more),
    Weakening("waits for reads alone", r"cp\.async\.bulk\.wait_group(?!\.read)",
              lambda site: site.written(f"{site.opcode}.read")),
    Weakening("removed", r"cp\.async\.wait_all\b", removed),
    Weakening("removed", "|".join(map(re.escape, ASYNC_WORK)), removed),
    Weakening("too early", "|".join(map(re.escape, ASYNC_WORK)), before_the_last_one),
    Weakening("removed", r"wgmma\.fence\b", removed),
    Weakening("removed", r"tcgen05\.(wait|fence)\b", removed),
    Weakening("removed", r"griddepcontrol\.wait\b", removed),
)
