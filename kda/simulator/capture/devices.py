"""The GPUs that a capture stands in for: what host code may ask a device, and which code it runs."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...compile.target import Target, parse


class Device(NamedTuple):
    """One GPU.  Sizes are bytes."""

    target: Target
    sms: int
    shared_optin: int                        # of a CTA that asks for more than the 48 KiB everyone gets
    shared_sm: int                           # of a multiprocessor
    threads_sm: int
    cluster: int                             # CTAs of a cluster, at most; 1: there are none
    l2: int


_KB, _MB = 1 << 10, 1 << 20
DEVICES = {
    name: Device(parse(name), *numbers)
    for name, numbers in {
        "sm80": (108, 163 * _KB, 164 * _KB, 2048, 1, 40 * _MB),              # A100
        "sm86": (84, 99 * _KB, 100 * _KB, 1536, 1, 6 * _MB),                 # A40
        "sm89": (142, 99 * _KB, 100 * _KB, 1536, 1, 96 * _MB),               # L40S
        "sm90": (132, 227 * _KB, 228 * _KB, 2048, 16, 60 * _MB),             # H200
        "sm100": (148, 227 * _KB, 228 * _KB, 2048, 16, 126 * _MB),           # B200
        "sm103": (148, 227 * _KB, 228 * _KB, 2048, 16, 126 * _MB),           # B300
        "sm120": (170, 99 * _KB, 100 * _KB, 1536, 8, 96 * _MB),              # RTX 5090
    }.items()
}

# cudaDeviceAttr -> what this device answers
ATTRIBUTES = {
    1: lambda d: 1024,                       # threads of a block
    2: lambda d: 1024,                       # block.x, .y, .z
    3: lambda d: 1024,
    4: lambda d: 64,
    5: lambda d: 2**31 - 1,                  # grid.x, .y, .z
    6: lambda d: 65535,
    7: lambda d: 65535,
    8: lambda d: 48 * _KB,                   # shared memory of a block
    10: lambda d: 32,                        # threads of a warp
    12: lambda d: 65536,                     # registers of a block
    16: lambda d: d.sms,
    38: lambda d: d.l2,
    39: lambda d: d.threads_sm,
    75: lambda d: d.target.cc[0],
    76: lambda d: d.target.cc[1],
    81: lambda d: d.shared_sm,
    82: lambda d: 65536,                     # registers of a multiprocessor
    95: lambda d: 1,                         # cooperative launch
    97: lambda d: d.shared_optin,
    106: lambda d: 32 if d.threads_sm == 2048 else 24,  # blocks of a multiprocessor
    111: lambda d: _KB,                      # shared memory that the system keeps
}  # fmt: skip


def runs(ptx: str, target: Target) -> bool:
    """Whether a device runs a PTX text: sm_90 runs on all later ones, sm_100f on its family, sm_90a on itself alone."""
    found = re.search(r"^\s*\.target\s+sm_(\d+)([af]?)", ptx, re.MULTILINE)
    if not found:
        return False
    built, own = int(found[1]), 10 * target.cc[0] + target.cc[1]
    return {"a": built == own, "f": built <= own < built - built % 10 + 10, "": built <= own}[found[2]]
