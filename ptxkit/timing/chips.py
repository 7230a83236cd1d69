"""The clock's constants of each chip, each with how it is known and its source.

Clocks are those of an SM, rates bytes per clock. `measured`: on the project's own GPUs, one thing at a time.
`published`: by the vendor, or in a paper. `assumed`: neither; a microbenchmark should replace it.
"""

from __future__ import annotations

import re
from functools import partial
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


measured, published, assumed = (partial(Constant, how=how) for how in ("measured", "published", "assumed"))
micro = partial(measured, source="H200, 2026-11-23: microbenchmarks")  # docs/microbenchmarks.md
_ON_AN_H200 = "H200, 2026-11-21"
_WHITE = "H100 white paper: lanes of each unit"
_AMPERE = "A100 white paper"
_ADA = "Ada white paper"
_LIKE_H200 = "as the H200"

# clocks that a warp's instruction keeps a unit of its quarter, latencies, and what synchronises
_HOPPER = {
    "fma_busy": micro(1),
    "alu_busy": micro(2),
    "special_busy": micro(8),
    "mio_busy": micro(4),                   # LDS, SHFL: one of a quarter every 4 clocks
    "operands_read": micro(2),              # a clock and quarter: FFMA whose three operands change issues 0.66
    "fma_latency": micro(4),
    "alu_latency": micro(4),
    "special_latency": micro(17),
    "shuffle_latency": micro(26),
    "parameter_latency": assumed(8, "a constant cache that hits"),
    # multiply-adds of 16-bit elements per clock and quarter
    "mma_rate": micro(332),                 # m16n8k16: 6.17 clocks
    "mma_latency": micro(24),
    "wgmma_rate": micro(512),
    "wgmma_latency": micro(60),             # groups of 4 and 8 steps: 62 beyond their work, two of them issue
    "wgmma_alone": micro(10),               # more, where a group has one step
    "wgmma_registers": micro(8),            # more of each step, in a chain with A in registers
    "shared_latency": micro(21),            # 23, 26, 32 by width: 21, and 2 for each pass
    "shared_pass": micro(2),
    "l1_latency": micro(32),
    "l2_latency": micro(289),               # the median line; 263 to 312 by distance
    "hbm_latency": micro(660),
    "l2_rate_sm": micro(85),                # one SM alone
    "hbm_rate_sm": micro(35.6),
    "l1_bytes": published(256 << 10, _WHITE),
    "barrier_base": micro(12.6),
    "barrier_warp": micro(2),
    "mbarrier_wake": micro(45),             # a hop between two warps: 46 clocks
    "mbarrier_ready": micro(36),            # a try_wait of a phase that is over, and its branch: 42
    "arrival": micro(6),                    # 7.2 from one to the next
    "remote_arrival": micro(354),           # a hop to the neighbour: 403
    "cluster_wake": micro(358),
    "fence_cta": micro(10),
    "fence_gpu": micro(266),
    "fence_proxy": micro(33),
    "tma_latency": micro(165),              # 548 from issue to wake of 4 KiB in L2: L2, 4 KiB at the rate, the wake
    "tma_rate": micro(92),                  # bytes a clock of one SM's engine
    "tma_store_rate": micro(32),
    "dsmem_latency": micro(440),            # 858 for 128 bytes to the neighbour and an arrival back
    "dsmem_rate": micro(21),
    "cp_async_latency": micro(35),          # 332 with its wait, from L2
    "async_latency": assumed(500, "work of no other kind, such as try_cancel"),
    "start": micro(574),                    # from the end of the CTA before, to the first instruction
    "start_cluster": micro(680),
    "launch": micro(3810),                  # from the end of a kernel to the first instruction of the next
    "window": assumed(48, "how far ptxas moves an instruction ahead of where PTX has it"),
    "ahead_registers": assumed(64, "a quarter of a thread's, for loads that ptxas moves ahead"),
    "queue_fma": assumed(0, "none"),
    "queue_alu": assumed(4, "two instructions"),
    "queue_special": micro(0),              # one warp issues a MUFU every 8 clocks from the second on
    "queue_mio": micro(0),                  # and an LDS every 4
    "queue_registers": assumed(4, "two instructions"),
    "queue_shared": assumed(24, "passes over shared memory"),
}
_NO_TENSOR_MEMORY = {name: assumed(0, "there is none") for name in ("tensor_rate", "tensor_latency", "tensor_short",
                                                                      "tmem_latency", "tmem_column")}
_H200 = _HOPPER | _NO_TENSOR_MEMORY | {
    "sms": published(132, "H200 data sheet"),
    "gigahertz": measured(1.98, _ON_AN_H200),
    "l2_rate": micro(34.4 * 132),
    "hbm_rate": micro(17.0 * 132),              # 4.4 TB/s of reads
}
_ON_AN_H100 = "H100 80GB HBM3, 2026-11-26"
_H100 = _H200 | {
    "gigahertz": measured(1.98, _ON_AN_H100),
    "hbm_rate": measured(17.0 * 132 * 2.94 / 4.22,
                         f"{_ON_AN_H100}: the H200's reads, less as copies are: 2.94 for 4.22 TB/s"),
}
_B200 = _HOPPER | {
    "sms": published(148, "B200: cudaDeviceProp"),
    "gigahertz": assumed(1.85, "the rate at which tensor figures of the data sheet hold"),
    "l2_rate": assumed(34.4 * 148, _LIKE_H200),
    "hbm_rate": assumed(0.9 * 8e12 / 1.85e9, "nine tenths of the published rate"),
    "tensor_rate": published(4096, "B200 data sheet: 2.25 PFLOP/s of bf16"),
    "tensor_latency": assumed(90, "from the end of the products to the arrival of a commit"),
    "tensor_short": assumed(16, "tcgen05.cp and shift"),
    "tmem_latency": assumed(25, "tcgen05.ld and st of a column"),
    "tmem_column": assumed(1, "32 cells a clock and warp"),
}
_GB200 = _B200 | {
    "sms": published(152, "GB200: cudaDeviceProp"),
    "gigahertz": assumed(1.92, "higher power"),
    "l2_rate": assumed(34.4 * 152, _LIKE_H200),
    "hbm_rate": assumed(0.9 * 8e12 / 1.92e9, "nine tenths of the published rate"),
}
_NO_WGMMA = {"wgmma_rate": assumed(1, "there is none"), "wgmma_latency": assumed(0, "there is none")}
_A100 = _HOPPER | _NO_TENSOR_MEMORY | _NO_WGMMA | {
    "sms": published(108, _AMPERE),
    "gigahertz": published(1.41, _AMPERE),
    "l2_rate": published(5120, _AMPERE),
    "hbm_rate": assumed(0.88 * 2.04e12 / 1.41e9, "a share of the published rate of the 80 GB form"),
    "l1_bytes": published(192 << 10, _AMPERE),
    "fma_busy": published(2, _AMPERE),
    "special_busy": published(8, _AMPERE),
    "mma_rate": published(256, _AMPERE),
    "mma_latency": published(25, "papers on Ampere's mma.sync: m16n8k16"),
    "l2_latency": published(200, "papers on Ampere's memory latencies"),
    "hbm_latency": published(466, "papers on Ampere's memory latencies"),
}
_RTX4090 = _HOPPER | _NO_TENSOR_MEMORY | _NO_WGMMA | {
    "sms": published(128, _ADA),
    "gigahertz": published(2.52, _ADA),
    "l2_rate": assumed(2048, "half of the A100's a clock"),
    "hbm_rate": assumed(0.92 * 1.008e12 / 2.52e9, "a share of the published rate"),
    "l1_bytes": published(128 << 10, _ADA),
    "special_busy": published(8, _ADA),
    "mma_rate": published(64, f"{_ADA}: 165 TFLOP/s with sums in f32"),
    "l2_latency": assumed(270, "papers on Ada's memory latencies: 260 to 280"),
    "hbm_latency": assumed(540, "papers on Ada's memory latencies"),
}

_GPCS = {1: 132, 2: 66, 4: 30, 6: 17, 8: 15, 12: 7, 16: 7}  # measured on an H200: cudaOccupancyMaxActiveClusters
CHIPS = {
    name: ChipClock(name, arch, constants, _GPCS if arch == 90 else {})
    for name, arch, constants in (
        ("h200", 90, _H200), ("h100", 90, _H100), ("b200", 100, _B200), ("gb200", 100, _GB200), ("a100", 80, _A100),
        ("rtx4090", 89, _RTX4090),
    )
}
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
