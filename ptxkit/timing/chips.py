"""The clock's constants of each chip, each with how it is known and its source.

Clocks are those of an SM, rates bytes per clock. `measured`: on the project's own GPUs, one thing at a time.
`published`: by the vendor, or in a paper. `assumed`: neither; a microbenchmark should replace it.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ptxkit.compile.target import short_name


class Constant(NamedTuple):
    value: float
    source: str
    how: str  # measured, published or assumed


class ChipClock(NamedTuple):
    name: str
    arch: int
    constants: dict[str, Constant]
    clusters: dict[int, int]  # CTAs of a cluster -> clusters that are resident at once, at one CTA per SM

    def __getattr__(self, name):
        try:
            return self.constants[name].value
        except KeyError:
            raise AttributeError(f"{self.name} has no constant {name}") from None

    def __repr__(self):
        return self.name

    def slots(self, size):
        """Return how many clusters of this many CTAs run at once, at one CTA per SM."""
        return self.clusters.get(size, int(self.sms) // size)


assumed = partial(Constant, how="assumed")
MICROBENCHMARKS = ("measured", "H200, 2026-11-23: microbenchmarks")    # docs/microbenchmarks.md
GPCS = {1: 132, 2: 66, 4: 30, 6: 17, 8: 15, 12: 7, 16: 7}  # measured on an H200: cudaOccupancyMaxActiveClusters


def _chips():
    """Yield the chips of chips.txt, which says what its lines mean."""
    sections = {}
    for line in Path(__file__).with_name("chips.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if head := re.fullmatch(r"\[(\w+)\](?: sm_(\d+))?(?:: (.*))?", line):
            name, arch, below = head[1], int(head[2] or 0), head[3].split(", ") if head[3] else []
            constants = sections[name] = {key: constant for each in below for key, constant in sections[each].items()}
            if arch:
                yield ChipClock(name, arch, constants, GPCS if arch == 90 else {})
        elif line:
            key, value, *said = re.split(" {2,}", line)
            how, source = said or MICROBENCHMARKS
            constants[key] = Constant(_value(value), source, how)


def _value(text):
    """Return what numbers with * and / between them give, from left to right."""
    first, *rest = ((int if word.isdigit() else float)(word) if word not in "*/" else word for word in text.split())
    for sign, number in zip(rest[::2], rest[1::2]):
        first = first * number if sign == "*" else first / number
    return first


CHIPS = {chip.name: chip for chip in _chips()}
OF_ARCH = {80: "a100", 89: "rtx4090", 90: "h200", 100: "b200"}


def of_card(card, arch):
    """Return the chip that a card is, by the name that people or its driver give it; None if that one has no constants.
    Variants with fewer SMs or other memory, such as an H100 PCIe, are none of these."""
    short = short_name(card).removeprefix("rtx")
    names = {name.removeprefix("rtx"): chip for name, chip in CHIPS.items() if chip.arch == arch}
    return next((chip for name, chip in names.items() if re.fullmatch(rf"{name}(sxm\d?|\d+gb|hbm\d)*", short)), None)


def chip_of(name, arch):
    """Return the chip of that name, or (True) the default one of an arch such as 90; a ChipClock is returned unchanged.
    ValueError if there is none for that arch."""
    if isinstance(name, ChipClock):
        return name
    if name is True:
        if arch not in OF_ARCH:
            raise ValueError(f"clock=True: no chip of sm_{arch} has a clock; there are {', '.join(CHIPS)}")
        name = OF_ARCH[arch]
    if name not in CHIPS:
        raise ValueError(f"clock={name!r} is not a chip with a clock; there are {', '.join(CHIPS)}")
    if CHIPS[name].arch != arch:
        raise ValueError(f"clock={name!r} is a chip of sm_{CHIPS[name].arch}, and the kernel runs on sm_{arch}")
    return CHIPS[name]
