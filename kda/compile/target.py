"""An arch that code is built for.  Needs no GPU, no torch and no compiler."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Target(NamedTuple):
    name: str                                # "sm100", how kda spells it
    cc: tuple[int, int]                      # compute capability
    spelling: str                            # "sm_100a", how compilers spell it
    examples: str                            # products, for people


TARGETS = {
    t.name: t
    for t in (
        Target("sm80", (8, 0), "sm_80", "A100"),
        Target("sm86", (8, 6), "sm_86", "RTX 30, A10, A40"),
        Target("sm89", (8, 9), "sm_89", "RTX 40, L4, L40S"),
        Target("sm90", (9, 0), "sm_90a", "H100, H200, H20"),
        Target("sm100", (10, 0), "sm_100a", "B200, GB200"),
        Target("sm103", (10, 3), "sm_103a", "B300, GB300"),
        Target("sm120", (12, 0), "sm_120a", "RTX 50, RTX PRO 6000"),
    )
}


def parse(text: str) -> Target:
    """`sm100`, `sm_100a`, `100` and `10.0` all name the same target."""
    digits = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)[af]?", text.strip().lower())
    name = "sm" + "".join(digits.groups()) if digits else ""
    if name not in TARGETS:
        raise ValueError(f"no GPU arch is called {text!r}; kda knows {', '.join(TARGETS)}")
    return TARGETS[name]


def code_for(cc: tuple[int, int], archs: Iterable[str] = TARGETS) -> Target | None:
    """Of code for these archs, what a GPU runs: that for its own arch, else the newest of those that later ones run."""
    fits = [t for t in map(TARGETS.__getitem__, archs) if t.cc == cc or (t.spelling[-1] != "a" and t.cc < cc)]
    return max(fits, key=lambda t: t.cc, default=None)
