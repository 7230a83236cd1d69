"""An arch that code is built for.  Needs no GPU, no torch and no compiler."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

from .. import application


class Target(NamedTuple):
    name: str                                # "sm100"
    cc: tuple[int, int]                      # compute capability
    spelling: str                            # "sm_100a", how compilers spell it
    examples: str                            # products, for people

    @property
    def number(self) -> int:
        """100 of "sm100"."""
        return 10 * self.cc[0] + self.cc[1]


TARGETS = {
    t.name: t
    for t in (
        Target("sm80", (8, 0), "sm_80", "A100"),
        Target("sm86", (8, 6), "sm_86", "RTX 30, A10, A40"),
        Target("sm89", (8, 9), "sm_89", "RTX 40, L4, L40S"),
        Target("sm90", (9, 0), "sm_90a", "H100, H200, H20"),
        Target("sm100", (10, 0), "sm_100a", "B200, GB200"),
        Target("sm103", (10, 3), "sm_103a", "B300, GB300"),
        Target("sm110", (11, 0), "sm_110a", "Jetson Thor, T5000"),
        Target("sm120", (12, 0), "sm_120a", "RTX 50, RTX PRO 6000"),
        Target("sm121", (12, 1), "sm_121a", "GB10, DGX Spark"),
    )
}
NAMES = [*TARGETS, *(card.lower() for t in TARGETS.values() for card in t.examples.split(", "))]

# arch -> its cards, as a pattern of a name without "NVIDIA", "GeForce", spaces and hyphens
CARDS = {
    "sm80": r"a100|a800|a30",
    "sm86": r"a2|a10g?|a16|a40|(rtx)?30[5-9]0|(rtx)?a[2456][05]00",
    "sm89": r"l4|l20|l40s?|(rtx)?40[5-9]0|rtx[2456][05]00ada",
    "sm90": r"h100|h200|h20|h800|gh200",
    "sm100": r"b100|b200|gb200",
    "sm103": r"b300|gb300",
    "sm110": r"(jetson)?(agx)?thor(developerkit)?|(jetson)?t[45]000",
    "sm120": r"(rtx)?50[5-9]0|(rtx)?pro[2456][05]00",
    "sm121": r"gb10|(dgx)?spark",
}
# what a driver, or a shop, adds to a card's name
_VARIANT = (
    r"(ti|super|d|laptop|gpu|pcie|sxm\d?|nvl|maxq|\d+gb|hbm\d?e?|generation|blackwell|(server|workstation)edition)*"
)


def parse(text: str) -> Target:
    """Return the target of an arch or a card: `sm100`, `sm_100a`, `100`, `10.0`, `B200` and `NVIDIA B200` name one."""
    spelling = text.strip().lower()
    digits = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)[af]?", spelling)
    name = "sm" + "".join(digits.groups()) if digits else ""
    if (target := TARGETS.get(name) or of_card(spelling)) is None:
        known = ", ".join(f"{t.name} ({t.examples})" for t in TARGETS.values())
        near = difflib.get_close_matches(spelling, NAMES, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no GPU arch or card is called {text!r}; {hint}{application.current().name} knows {known}")
    return target


def of_card(name: str) -> Target | None:
    """Return the target of a card, whose name may be the common one or the driver's."""
    short = short_name(name)
    return next((TARGETS[arch] for arch, cards in CARDS.items() if re.fullmatch(f"({cards}){_VARIANT}", short)), None)


def short_name(card: str) -> str:
    """Shorten a card's name: "NVIDIA H100 80GB HBM3" becomes `h10080gbhbm3`."""
    return re.sub(r"nvidia|geforce|tesla|quadro|[\s_-]", "", card.lower())


def code_for(cc: tuple[int, int], archs: Iterable[str] = TARGETS) -> Target | None:
    """Return the one of `archs` whose code this GPU runs: its own, or else the newest that is upward compatible."""
    fits = [t for t in map(TARGETS.__getitem__, archs) if t.cc == cc or (t.spelling[-1] != "a" and t.cc < cc)]
    return max(fits, key=lambda t: t.cc, default=None)
