"""What host code may ask the device that a capture stands in for, and which code that runs."""

from __future__ import annotations

import re

from ptxkit.compile.target import Target

from ..chips import Chip

UNKNOWN_REGISTERS = 32                       # an estimate for a thread, where no cubin tells
_KB = 1 << 10

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
    9: lambda d: 64 * _KB,                   # constant memory
    11: lambda d: 2**31 - 1,                 # pitch of a copy
    15: lambda d: 1,                         # copies while a kernel runs
    17: lambda d: 0,                         # a limit of a kernel's time
    18: lambda d: 0,                         # memory shared with the CPU
    19: lambda d: 1,                         # mapped memory of the CPU
    20: lambda d: 0,                         # compute mode: default
    31: lambda d: 1,                         # kernels side by side
    32: lambda d: 0,                         # ECC
    33: lambda d: 0, 34: lambda d: 0, 50: lambda d: 0,  # PCI bus, device and domain
    40: lambda d: 3,                         # copy engines
    41: lambda d: 1,                         # unified addresses
    78: lambda d: 1,                         # priorities of streams
    83: lambda d: 1,                         # managed memory
    88: lambda d: 0,                         # memory of the CPU, by its own address
    89: lambda d: 1,                         # managed memory, used on both sides at once
    95: lambda d: 1,                         # cooperative launch
    97: lambda d: d.shared,
    106: lambda d: 32 if d.threads_sm == 2048 else 24,  # blocks of a multiprocessor
    111: lambda d: _KB,                      # shared memory that the system keeps
    115: lambda d: 1,                        # pools of memory
    120: lambda d: int(d.cluster > 1),       # clusters
}
# some of them -> what torch calls them ("": it does not), and what the runtime does
PROPERTIES = {
    1: ("max_threads_per_block", "maxThreadsPerBlock"), 8: ("shared_memory_per_block", "sharedMemPerBlock"),
    10: ("warp_size", "warpSize"), 12: ("", "regsPerBlock"), 16: ("multi_processor_count", "multiProcessorCount"),
    38: ("L2_cache_size", "l2CacheSize"), 39: ("max_threads_per_multi_processor", "maxThreadsPerMultiProcessor"),
    75: ("major", "major"), 76: ("minor", "minor"),
    81: ("shared_memory_per_multiprocessor", "sharedMemPerMultiprocessor"),
    82: ("regs_per_multiprocessor", "regsPerMultiprocessor"),
    97: ("shared_memory_per_block_optin", "sharedMemPerBlockOptin"), 120: ("", "clusterLaunch"),
}


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
