"""What host code may ask the device that a capture stands in for, and which code that runs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ptxkit.compile.target import Target

from ..chips import Chip

UNKNOWN_REGISTERS = 32                       # an estimate for a thread, where no cubin tells
_KB = 1 << 10


def _rows() -> Iterator[tuple[int, str, list[str]]]:
    """Yield (a number of cudaDeviceAttr, what devices.txt answers, what torch and the runtime call it)."""
    for line in Path(__file__).with_name("devices.txt").read_text().splitlines():
        if row := line.partition("#")[0].split():
            yield int(row[0]), row[1], row[2:]


def _answer(answer: str) -> Callable[[Chip], int]:
    return (lambda chip: int(answer)) if answer.isdigit() else operator.attrgetter(answer)


# cudaDeviceAttr -> what this device answers
ATTRIBUTES: dict[int, Callable[[Chip], int]] = {number: _answer(answer) for number, answer, _ in _rows()} | {
    75: lambda d: d.target.cc[0],
    76: lambda d: d.target.cc[1],
    106: lambda d: 32 if d.threads_sm == 2048 else 24,  # blocks of a multiprocessor
    120: lambda d: int(d.cluster > 1),
}
# some of them -> what torch calls them ("-": it does not), and what the runtime does
PROPERTIES = {number: names for number, _, names in _rows() if names}


def runs(ptx: str, target: Target) -> bool:
    """Return whether a device runs a PTX text: later ones run sm_90, its family sm_100f, and one alone sm_90a."""
    if not (match := re.search(r"^\s*\.target\s+sm_(\d+)([af]?)", ptx, re.MULTILINE)):
        return False
    built, wanted = int(match[1]), target.number
    return {"a": built == wanted, "f": built <= wanted < built - built % 10 + 10, "": built <= wanted}[match[2]]


def resident(device: Chip, registers: int | None, shared: int | None, threads: int, dynamic_shared: int) -> int:
    """Return how many CTAs of a kernel a multiprocessor can hold."""
    by_shared = device.shared_sm // ((shared or 0) + dynamic_shared + _KB)
    by_registers = 65536 // max((registers or UNKNOWN_REGISTERS) * threads, 1)
    return min(by_shared, device.threads_sm // max(threads, 1), by_registers, ATTRIBUTES[106](device))
