"""What is wrong with the PTX that some Tritons write for the tensor cores of sm_90 and sm_100, and how it is put right.

A kernel whose PTX was repaired is assembled again, by Triton's own ptxas.
docs/decisions/triton.md lists their symptoms.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from packaging.version import Version

TENSOR_CORES = re.compile(r"wgmma\.mma_async|tcgen05\.mma")


class Repair(NamedTuple):
    what: str
    until: Version                           # the first Triton that needs it no more
    pattern: re.Pattern[str]
    to: str | Callable[[re.Match[str]], str]


def added_in_two_steps(add: re.Match[str]) -> str:
    """Add the upper 48 bits first: the second step then carries nothing."""
    to, x, constant = add[1], add[2], int(add[3])
    low = constant & 0xFFFF
    return f"add.s64 \t{to}, {x}, {constant - low};\n\tadd.s64 \t{to}, {to}, {low};"


REPAIRS = (
    Repair(
        "ptxas of CUDA 12.8 adds to unwritten registers, in descriptors of tiles with rows of 32 or 64 bytes.",
        Version("3.9"),
        re.compile(r"add\.s64 \t(%rd\d+), (%rd\d+), (-\d{17,});"),
        added_in_two_steps,
    ),
    Repair(
        "The fence is left out between a cp.async and the tensor core that reads what it copied.",
        Version("3.8"),
        re.compile(r"(cp\.async\.wait_group \t\d+;\n)(?=\tbar\.sync)"),
        r"\1\tfence.proxy.async.shared::cta;\n",
    ),
    Repair(
        "The same between a store to shared memory and the tensor core, where one to tensor memory follows.",
        Version("3.8"),
        re.compile(r"(tcgen05\.wait::st\.sync\.aligned;\n)"),
        r"\1\tfence.proxy.async.shared::cta;\n",
    ),
)


def repaired(ptx: str, triton: str) -> str:
    """Return what a version of Triton wrote; the same string where there is nothing to repair."""
    if TENSOR_CORES.search(ptx):
        for repair in REPAIRS:
            if Version(triton) < repair.until:
                ptx = repair.pattern.sub(repair.to, ptx)
    return ptx
