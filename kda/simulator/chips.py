"""The GPUs that are stood in for: what a launch has to know of each, and each as a Host."""

from __future__ import annotations

import platform
import re
from typing import NamedTuple

from kda.compile.target import TARGETS
from kda.host import Host, installed_versions


class Chip(NamedTuple):
    name: str
    sms: int                                 # multiprocessors
    shared: int                              # bytes of shared memory that a CTA may have
    cluster: int                             # CTAs of a cluster, at most


CHIPS = {
    80: Chip("A100", 108, 166912, 1),
    86: Chip("A10", 72, 101376, 1),
    89: Chip("L40S", 142, 101376, 1),
    90: Chip("H200", 132, 232448, 16),
    100: Chip("B200", 148, 232448, 16),
    103: Chip("B300", 148, 232448, 16),
    120: Chip("RTX PRO 6000", 188, 101376, 8),
}


def number_of(arch: str) -> int:
    """100 for "sm_100a", "sm100", "compute_100" or "100"; raises ValueError for an arch that is not simulated."""
    found = re.fullmatch(r"(?:sm|compute)?_?(\d+)[af]?", str(arch).lower())
    if not found or int(found[1]) not in CHIPS:
        raise ValueError(f"arch={arch!r} is not simulated; there are {', '.join(f'sm_{n}' for n in CHIPS)}")
    return int(found[1])


def host_of(arch: str) -> Host:
    """What `kda.host.detect` shall see while CPU tensors stand for those of such a GPU."""
    number = number_of(arch)
    chip, target = CHIPS[number], TARGETS[f"sm{number}"]
    system = (platform.system(), platform.machine())
    return Host(device=f"simulated {target.spelling}", name=f"simulated {chip.name}", cc=target.cc, sms=chip.sms, smem=chip.shared,
                memory=1 << 36, system=system, versions=installed_versions(), simulated=True)  # fmt: skip
