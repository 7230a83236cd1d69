"""Group 4: mma.sync. A rate is the clocks of a scheduler that one takes, a latency that of a chain through C or A."""

from __future__ import annotations

from typing import NamedTuple

from . import frame
from .bench import Bench
from .issue import bits

UNROLLED, TRIPS, CHAINS, SCHEDULERS = 64, 32, 4, 4
WARPS = 1, 2, 4                              # per scheduler
ONES = {"bf16": 0x3F803F80, "f16": 0x3C003C00, "tf32": 0x3F800000, "e4m3": 0x38383838, "s8": 0x01010101}
DEPTHS = {"bf16": 16, "tf32": 8}             # k of a step of wgmma and tcgen05.mma


class Mma(NamedTuple):
    n: int
    k: int
    type: str
    a: int                                   # registers of A
    b: int
    sass: str

    @property
    def name(self) -> str:
        return f"m16n{self.n}k{self.k} {self.type}"

    @property
    def ptx(self) -> str:
        d = "s32" if self.type == "s8" else "f32"
        lists = (range(4), range(4, 4 + self.a), range(4 + self.a, 4 + self.a + self.b), range(4))
        regs = ", ".join("{" + ", ".join(f"%{n}" for n in each) + "}" for each in lists)
        return f"mma.sync.aligned.m16n{self.n}k{self.k}.row.col.{d}.{self.type}.{self.type}.{d} {regs};"


SHAPES = (
    Mma(8, 16, "bf16", 4, 2, "HMMA.16816"), Mma(8, 8, "bf16", 2, 1, "HMMA.1688"), Mma(8, 16, "f16", 4, 2, "HMMA.16816"),
    Mma(8, 8, "tf32", 4, 2, "HMMA.1688"), Mma(8, 4, "tf32", 2, 1, "HMMA.1684"), Mma(8, 32, "s8", 4, 2, "IMMA.16832"),
)


def line(one: Mma, d: str, a: str) -> str:
    outs = frame.registers("+r", [f"{d}{n}" for n in range(4)])
    ins = frame.registers("r", [f"{a}{n}" for n in range(one.a)] + [f"b{n}" for n in range(one.b)])
    return f'      asm volatile("{one.ptx}" : {outs} : {ins});'


def source_of(one: Mma, chains: int, through_a: bool = False) -> str:
    """D starts at zero and grows by k with each product of ones; through A, D is the next A and C is D of long ago."""
    if through_a:
        lines, chains = [line(one, f"d{n % 2}_", f"d{(n + 1) % 2}_") for n in range(UNROLLED)], 2
    else:
        lines = [line(one, f"d{n % chains}_", "a") for n in range(UNROLLED)]
    names = [f"d{chain}_{n}" for chain in range(chains) for n in range(4)]
    agree = " ".join(f"all = all == {d} ? all : 0xdeadbeef;" for d in names)
    return frame.loop(
        "\n".join(lines),
        setup=f"""u32 zero = out[4096 + threadIdx.x], {", ".join(f"{d} = zero" for d in names)};
  u32 {", ".join(f"a{n} = one + zero" for n in range(4))}, {", ".join(f"b{n} = one + zero" for n in range(2))};""",
        finish=f"u32 all = d0_0; {agree} out[threadIdx.x] = all;",
        params="u32 one",
        threads=32 * SCHEDULERS * max(WARPS),
    )


def chain(bench: Bench, one: Mma, chains: int, warps: int) -> tuple[list[float], str, str]:
    """Return clocks and faults; `warps` of a scheduler, 0 for one alone."""
    built, trips = bench.build(source_of(one, chains), {one.sass: UNROLLED}), bench.trips(TRIPS)
    clocks = bench.clocks(built, trips, ONES[one.type], block=32 * max(SCHEDULERS * warps, 1))
    total = one.k * (trips + frame.WARM) * UNROLLED // chains
    ends, results = total if one.type == "s8" else bits(float(total)), bench.results(32)
    return clocks, built.fault, bench.wrong(f"D is {results[0]:#x}, not {ends:#x}", set(results) == {ends})


def measure(bench: Bench) -> None:
    products = bench.trips(TRIPS) * UNROLLED
    for one in SHAPES:
        clocks, *faults = chain(bench, one, 1, 0)
        bench.each(f"{one.name}: latency through C", clocks, products, *faults)
        for warps in WARPS:
            clocks, *faults = chain(bench, one, CHAINS, warps)
            name, count = f"{one.name}: rate, {warps} warps", products * warps
            bench.each(name, clocks, count, *faults, unit="clocks of a scheduler")
        if one.a == 4 and one.type != "s8":
            built = bench.build(source_of(one, 2, through_a=True), {one.sass: UNROLLED})
            clocks = bench.clocks(built, bench.trips(TRIPS), 0, block=32)
            bench.each(f"{one.name}: latency through A", clocks, products, built.fault)
