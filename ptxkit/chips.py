"""The GPUs that are stood in for: what a launch and host code may ask of each."""

from __future__ import annotations

from typing import NamedTuple

from ptxkit.compile.target import TARGETS, Target, parse


class Chip(NamedTuple):
    """One GPU.  Sizes are bytes."""

    name: str
    target: Target
    sms: int  # multiprocessors
    shared: int  # shared memory of a CTA that asks for more than the 48 KiB everyone gets
    shared_sm: int  # shared memory of a multiprocessor
    threads_sm: int
    cluster: int  # CTAs of a cluster, at most; 1: there are none
    l2: int


_KB, _MB = 1 << 10, 1 << 20   # docs/simulator.md says where the numbers of Thor and GB10 are published
CHIPS = {
    t.number: Chip(name, t, *numbers)
    for t, (name, *numbers) in {
        TARGETS["sm80"]: ("A100", 108, 163 * _KB, 164 * _KB, 2048, 1, 40 * _MB),
        TARGETS["sm86"]: ("A40", 84, 99 * _KB, 100 * _KB, 1536, 1, 6 * _MB),
        TARGETS["sm89"]: ("L40S", 142, 99 * _KB, 100 * _KB, 1536, 1, 96 * _MB),
        TARGETS["sm90"]: ("H200", 132, 227 * _KB, 228 * _KB, 2048, 16, 60 * _MB),
        TARGETS["sm100"]: ("B200", 148, 227 * _KB, 228 * _KB, 2048, 16, 126 * _MB),
        TARGETS["sm103"]: ("B300", 148, 227 * _KB, 228 * _KB, 2048, 16, 126 * _MB),
        TARGETS["sm110"]: ("Thor", 20, 227 * _KB, 228 * _KB, 1536, 8, 32 * _MB),
        TARGETS["sm120"]: ("RTX 5090", 170, 99 * _KB, 100 * _KB, 1536, 8, 96 * _MB),
        TARGETS["sm121"]: ("GB10", 48, 99 * _KB, 100 * _KB, 1536, 8, 24 * _MB),
    }.items()
}


def number_of(arch: str) -> int:
    """Return 100 for "sm_100a", "sm100", "compute_100" or "100"; ValueError for an arch that is not simulated."""
    try:
        return parse(str(arch).replace("compute", "sm")).number
    except ValueError:
        known = ", ".join(f"sm_{n}" for n in CHIPS)
        raise ValueError(f"arch={arch!r} is not simulated; there are {known}") from None
