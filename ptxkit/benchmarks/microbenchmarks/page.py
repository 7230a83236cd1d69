"""The page of constants, from results on record; ptxkit/docs/from_data.py writes it.

A figure that is missing or has a fault is shown as not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .expected import EXPECTED, Expected

RESULTS = Path(__file__).resolve().parents[1] / "results" / "h200-microbenchmarks.json"
NOT_YET, NOTHING = "not measured", "-"
LETTERS = {"measured": "S", "published": "L", "assumed": "?", "predicted": "P"}
CLOSE, FAR = 0.25, 1.5                       # a share of the figure; a factor
INTRODUCTION = """# The constants of an H200

Medians of what the [microbenchmarks](microbenchmarks.md) measured. Before: L published, S this project's H200,
? assumed by the prototype, P predicted for the first run; all were written down before that.

"""


class Row(NamedTuple):
    constant: str
    figures: list[str]                       # names of figures in the section's group
    how: str = ""


class Section(NamedTuple):
    title: str
    group: str
    rows: list[Row]


def each(text: str, *values: Any) -> list[str]:
    return [text.format(value) for value in values]


def op(name: str) -> list[str]:
    return [f"{name}: latency", f"{name}: rate, 4 warps"]


def mma(shape: str) -> list[str]:
    return [f"{shape}: latency through C", f"{shape}: rate, 4 warps"]


def mixes(*mixes: str) -> list[str]:
    return [f"mix {mix}: 4 warps" for mix in mixes]


FETCHED = 24, 32, 40, 64, 128
SECTIONS = [
    Section("Issue: latency in clocks; clocks of a scheduler for one warp instruction", "issue", [
        Row("FFMA (FADD, FMUL too)", op("fma.f32"), "a chain of 256; four chains in each of 16 warps, and so below"),
        Row("IMAD", op("mad.s32")),
        Row("LOP3 (SHF, PRMT, SEL, FMNMX, VIMNMX too)", op("lop3")),
        Row("ISETP, then SEL", op("setp, selp")),
        Row("VIADD, then LOP3", op("add.s32, xor")),
        Row("HFMA2 of bf16", op("fma.bf16x2"), "ptxas puts HFMA2 and HFMA2.MMA in turn"),
        Row("F2FP, two f32 to bf16x2", op("cvt.bf16x2.f32")),
        Row("f32 to tf32", op("cvt.tf32.f32"), "FSETP, LOP3, IMAD: there is no instruction"),
        Row("I2FP", op("cvt.f32.s32")),
        Row("MUFU (ex2, lg2, rcp, rsqrt, sqrt, tanh); F2I, POPC, FLO", op("ex2")),
        Row("ex2 of bf16x2", op("ex2.bf16x2"), "two MUFU"),
        Row("SHFL", op("shfl")),
        Row("ISETP, then VOTE", op("vote")),
        Row("REDUX, and back to a register", op("redux")),
        Row("MOVM", op("movmatrix")),
        Row("8, 32 LDS of one warp, until issued", each("lds: burst of {}", 8, 32), "results are not awaited"),
        Row("8, 32 MUFU of one warp, until issued", each("ex2: burst of {}", 8, 32), "results are not awaited"),
    ]),
    Section("Mixes: instructions per clock and scheduler, 4 warps", "issue", [
        Row("FFMA, LOP3", mixes("1 fma.f32+1 lop3"), "in turn, all operands in registers, and so below"),
        Row("FFMA, IMAD", mixes("1 fma.f32+1 mad.s32")),
        Row("LOP3, IMAD", mixes("1 lop3+1 mad.s32")),
        Row("FFMA, F2FP", mixes("1 fma.f32+1 cvt.bf16x2.f32")),
        Row("FFMA, HFMA2", mixes("1 fma.f32+1 fma.bf16x2")),
        Row("LOP3, PRMT; LOP3, F2FP", mixes("1 lop3+1 prmt", "1 lop3+1 cvt.bf16x2.f32")),
        Row("7 FFMA, MUFU; 7 LOP3, MUFU", mixes("7 fma.f32+1 ex2", "7 lop3+1 ex2")),
        Row("3 FFMA, LDS; 3 FFMA, SHFL", mixes("3 fma.f32+1 lds", "3 fma.f32+1 shfl")),
        Row("7 FFMA, 4 LOP3, 2 LDS, F2FP, PRMT, MUFU",
            mixes("7 fma.f32+4 lop3+1 cvt.bf16x2.f32+2 lds+1 prmt+1 ex2"), "about as our kernels mix them"),
        Row("FFMA of 4 registers in turn", mixes("1 fma.f32 of 4 registers"), "no operand twice in a row"),
        Row("FFMA, LOP3, each with an immediate",
            mixes("1 fma.f32, immediate+1 lop3, immediate"), "two registers each"),
        Row("FFMA, LOP3, the LOP3 with an immediate; the FFMA",
            mixes("1 fma.f32+1 lop3, immediate", "1 fma.f32, immediate+1 lop3")),
    ]),
    Section("Fetch: instructions per clock and SM, straight code in a loop", "fetch", [
        Row("FFMA, 24, 32, 40, 64, 128 KiB", each("fma {} KiB, 4 warps in step", *FETCHED), "4 warps, in step"),
        Row("FFMA, the same sizes",
            each("fma {} KiB, 4 warps apart", *FETCHED), "4 warps, a quarter of the body apart"),
        Row("the mix of 16, the same sizes", each("mix {} KiB, 4 warps in step", *FETCHED), "4 warps, in step"),
        Row("FFMA, 32, 128 KiB", each("fma {} KiB, 16 warps in step", 32, 128), "16 warps, in step"),
        Row("2, 8, 32 KiB the first time: clocks more for 128 bytes", each("first time through {} KiB", 2, 8, 32),
            "128 KiB of other code before"),
    ]),
    Section("Shared memory: clocks", "shared", [
        Row("LDS.32, .64, .128: latency", each("LDS.{}: latency", 32, 64, 128), "a chase"),
        Row("LDSM.x1, .x2, .x4: latency", each("LDSM.x{}: latency", 1, 2, 4), "a chase"),
        Row("LDS.32 of 2, 8, 32 ways: latency", each("LDS.32, {} ways: latency", 2, 8, 32), "a chase"),
        Row("LDS.32, .64, .128: of an SM", each("LDS.{}: rate", 32, 64, 128), "16 warps"),
        Row("STS.32, .64, .128: of an SM", each("STS.{}: rate", 32, 64, 128), "16 warps"),
        Row("LDS.32 of 2, 8, 32 ways: of an SM", each("LDS.32, {} ways: rate", 2, 8, 32), "16 warps"),
        Row("LDSM.x4, STSM.x4: of an SM", each("{}.x4: rate", "LDSM", "STSM"), "16 warps; .trans is the same"),
        Row("STS.32 and LDS.32 of it", ["STS.32 and LDS.32 of it: latency"], "a chain"),
        Row("atom.shared.add, after a LOP3", ["atom.shared.add, after LOP3: latency"], "a chain"),
        Row("proxy fence, 1, 4 warps", each("0 STS.128, proxy fence, {} warps", 1, 4), "a loop of it"),
        Row("4, 8 STS.128 and the fence, 4 warps", each("{} STS.128, proxy fence, 4 warps", 4, 8), "a loop of them"),
        Row("4, 8 STS.128, the fence, a barrier",
            each("{} STS.128, proxy fence, barrier, 4 warps", 4, 8), "a loop of them"),
        Row("a neighbour's LDS.32: latency", ["neighbour's LDS.32: latency"], "a chase in a cluster of two"),
        Row("a neighbour's LDS.128, STS.128: bytes per clock and SM",
            each("neighbour's {}.128: rate, one pair", "LDS", "STS"),
            "16 warps"),
    ]),
    Section("mma.sync: latency in clocks; clocks of a scheduler", "mma", [
        Row("m16n8k16 of bf16 (f16, and k32 of s8, too)",
            mma("m16n8k16 bf16"), "chains through C; four in each of 16 warps"),
        Row("m16n8k8 of bf16", mma("m16n8k8 bf16")),
        Row("m16n8k8 of tf32", mma("m16n8k8 tf32")),
        Row("m16n8k4 of tf32", mma("m16n8k4 tf32")),
        Row("m16n8k16 of bf16, m16n8k8 of tf32, through A",
            each("{}: latency through A", "m16n8k16 bf16", "m16n8k8 tf32")),
    ]),
    Section("wgmma: clocks", "wgmma", [
        Row("a step, SS, n = 8, 16, 32",
            each("n{} SS: a step, no waits", 8, 16, 32), "groups of four, one wait at the end"),
        Row("a step, SS, n = 64, 128, 256", each("n{} SS: a step, no waits", 64, 128, 256),
            "tf32, B transposed, 2 and 3 warpgroups are the same"),
        Row("a step, RS, n = 8, 16, 32", each("n{} RS: a step, no waits, 2 warpgroups", 8, 16, 32), "two warpgroups"),
        Row("a step, RS, n = 64, 128, 256", each("n{} RS: a step, no waits", 64, 128, 256)),
        Row("n64 SS, 1, 4, 8 steps and a wait", each("n64 SS: {} steps and a wait", 1, 4, 8), "each trip"),
        Row("n128 SS, 1, 4, 8 steps and a wait", each("n128 SS: {} steps and a wait", 1, 4, 8), "each trip"),
        Row("n256 SS, 1, 4, 8 steps and a wait", each("n256 SS: {} steps and a wait", 1, 4, 8), "each trip"),
        Row("n64 RS, 1, 4, 8 steps and a wait", each("n64 RS: {} steps and a wait", 1, 4, 8),
            "the same with one A for all steps"),
        Row("n64 SS, 1, 2, 4 steps, one group ahead", each("n64 SS: {} steps, one group ahead", 1, 2, 4),
            "two accumulators in turn"),
        Row("n64, 4 steps and a wait, 2, 3 warpgroups", each("n64 SS: 4 steps and a wait, {} warpgroups", 2, 3),
            "of all of them"),
        Row("4 steps of n64; after a barrier; a fence; 4 STS.128, too",
            each("n64 SS: {}",
                 "product", "barrier, product", "fence, barrier, product", "4 STS.128, fence, barrier, product"),
            "descriptors rebuilt"),
        Row("a step of n64 SS beside nothing, LDS.32, LDS.128",
            each("n64 SS: a step beside {}", "nothing", "LDS.32", "LDS.128"),
            "16 steps and a wait; 8 other warps"),
        Row("LDS.32, LDS.128, STS.128 beside n64 SS: of an SM",
            each("{} beside n64 SS", "LDS.32", "LDS.128", "STS.128")),
        Row("LDS.128 beside n256 SS, n64 RS, n128 RS", each("LDS.128 beside {}", "n256 SS", "n64 RS", "n128 RS")),
    ]),
    Section("Global memory: latency in clocks", "memory", [
        Row("L1", ["L1 hit: latency"], "a chase"),
        Row("L2, 1, 8, 24 MiB", each("L2 hit in {} MiB: latency", 1, 8, 24), "a chase"),
        Row("lines of L2 from one SM", each("L2 lines from one SM, {}", "nearest tenth", "median", "farthest tenth"),
            "nearest tenth, median, farthest tenth; 7 SMs"),
        Row("HBM, 256 MiB, 4 GiB", each("HBM in {}: latency", "256 MiB", "4 GiB"), "a chase"),
        Row("L2 while 32, 96, 131 SMs read", each("L2 latency, {} SMs reading", 32, 96, 131), "a chase"),
        Row("HBM while 32, 64, 96, 131 SMs read", each("HBM latency, {} SMs reading", 32, 64, 96, 131), "a chase"),
        Row("cp.async of 16 bytes and its wait, L2", ["cp.async of 16 bytes and its wait, L2 hit"], "a loop"),
        Row("a spilled word and its reload", ["spill and reload: latency"], "a chain"),
        Row("STL, LDL: clocks of an SM", each("spill {}, 16 warps", "stores", "reloads"), "16 warps"),
    ]),
    Section("Global memory: bytes per clock and SM", "memory", [
        Row("L1, LDG.128", ["L1 hits, LDG.128"], "32 warps"),
        Row("L2, 1, 66, 132 SMs", each("L2 hits, {} SMs", 1, 66, 132), "32 warps of 8 LDG.128"),
        Row("L2, 132 SMs: TB/s", ["L2 hits, 132 SMs, of all"]),
        Row("L2 by cp.async, 1, 16, 132 SMs", each("cp.async, L2 hits, {} SMs, 32 warps of 3 x 4", 1, 16, 132),
            "32 warps, 12 in flight each"),
        Row("L2, each line read by 2, 16, 132 SMs", each("L2 hits, each line read by {} SMs", 2, 16, 132), "132 SMs"),
        Row("HBM, 1, 33, 66, 132 SMs", each("HBM, {} SMs", 1, 33, 66, 132), "32 warps of 8 LDG.128"),
        Row("HBM, 66, 99, 132 SMs: TB/s", each("HBM, {} SMs, of all", 66, 99, 132)),
        Row("stores to L2, 1, 132 SMs", each("stores to L2, {} SMs", 1, 132), "16 bytes per thread"),
        Row("stores to HBM; a copy: TB/s", ["stores to HBM, of all", "copy in HBM, bytes read and written, of all"]),
        Row("red.add.f32, 1, 132 SMs; .v4, 132 SMs",
            ["red.add.f32, 1 SMs", "red.add.f32, 132 SMs", "red.add.v4.f32, all SMs"]),
    ]),
    Section("Copy engine: clocks", "bulk", [
        Row("bulk load of 1, 16 KiB, prefetched to L2",
            each("bulk load of {} after a prefetch 4,000 clocks before", 1024, 16384),
            "from issue to wake"),
        Row("bulk load of 1, 16 KiB from HBM",
            each("bulk load of {} after no prefetch", 1024, 16384), "from issue to wake"),
        Row("bulk load of 16 bytes, 16 KiB, L2", each("bulk load of {}, L2 hit: latency", 16, 16384), "a loop"),
        Row("box of 64 x 32, 64, 256 bf16, L2", each("box of 64 x {} bf16, L2 hit: latency", 32, 64, 256), "a loop"),
        Row("bulk store of 4 KiB, until read, done", each("bulk store of 4096 until {}", "read", "done"), "a loop"),
        Row("128, 4096, 32768 bytes to a neighbour, an arrival back",
            each("{} to a neighbour, and an arrival back", 128, 4096, 32768), "a cluster of two"),
    ]),
    Section("Copy engine: bytes per clock and SM", "bulk", [
        Row("bulk loads of 128 bytes, 1, 8 KiB, L2, one SM",
            each("bulk loads of {}, 8 in flight, L2 hits, 1 SMs", 128, 1024, 8192),
            "8 in flight, one thread"),
        Row("boxes of 64 x 32, 64, 128 bf16, L2, one SM",
            each("box of 64 x {} in flight, 1 SMs", "32 bf16, 8", "64 bf16, 8", "128 bf16, 4"), "8, 8, 4 in flight"),
        Row("bulk loads of 16 KiB, L2, HBM, all SMs",
            each("bulk loads of 16384, 4 in flight, {}", "L2 hits, 132 SMs", "HBM, all SMs"), "4 in flight"),
        Row("boxes of 64 x 256 bf16, L2, all SMs", ["box of 64 x 256 bf16, 2 in flight, 132 SMs"], "2 in flight"),
        Row("bulk stores of 16 KiB, L2, 1, 132 SMs", each("bulk stores of 16384, L2, {} SMs", 1, 132), "4 in flight"),
        Row("the same, f32 added", each("bulk reductions of f32 of 16384, L2, {} SMs", 1, 132), "4 in flight"),
        Row("sends of 1, 4, 16 KiB to a neighbour", each("sends of {}, 8 in flight, one pair", 1024, 4096, 16384),
            "8 in flight"),
    ]),
    Section("Barriers: clocks", "barriers", [
        Row("bar.sync of 1, 4, 8, 12 warps", each("bar.sync of {} warps", 1, 4, 8, 12), "one behind the other"),
        Row("bar.sync of 16, 24, 32 warps", each("bar.sync of {} warps", 16, 24, 32), "one behind the other"),
        Row("mbarrier hop, 1, 128 arrivals", each("mbarrier hop, {} warps wait", "1 arrivals, 1", "128 arrivals, 4"),
            "two parties in turn"),
        Row("the same to a neighbour",
            each("mbarrier hop to a neighbour, {} warps wait", "1 arrivals, 1", "128 arrivals, 4"),
            "a cluster of two"),
        Row("an arrival and its own wait", ["mbarrier: arrive, its own phase's wait"], "one warp"),
        Row("a wait that need not wait", ["mbarrier: wait for a phase that is over"], "one warp"),
        Row("an arrival of one lane, of 32", each("mbarrier: arrive{}, nobody waits", "", " of 32 lanes"), "one warp"),
        Row("named barriers in turn, a hop", ["named barriers in turn, 4 and 4 warps: a hop"], "4 and 4 warps"),
        Row("barrier of a cluster of 2, 4, 8, 16", each("barrier of a cluster of {}, 128 threads each", 2, 4, 8, 16),
            "128 threads each"),
        Row("the same", each("barrier of a cluster of {}, 384 threads each", 2, 4, 8, 16), "384 threads each"),
        Row("fence.acq_rel.cta, .gpu",
            each("fence.acq_rel.{}, nothing to wait for", "cta", "gpu"), "nothing to wait for"),
        Row("STG and fence.acq_rel.gpu", ["STG and fence.acq_rel.gpu"], "a loop of them"),
        Row("setmaxnreg down and up", ["setmaxnreg down and up, 4 warpgroups"], "4 warpgroups"),
    ]),
    Section("Launches: clocks unless said", "launches", [
        Row("from CTA to CTA on an SM, 128, 384, 1024 threads", each("CTA to CTA on an SM, {} threads", 128, 384, 1024),
            "end to start, waves of a grid"),
        Row("the same in clusters of 2, 4, 8",
            each("CTA to CTA on an SM, clusters of {}, 384 threads", 2, 4, 8), "384 threads"),
        Row("from kernel to kernel on an SM", ["kernel to kernel on an SM, 384 threads, 200 KiB, plain: to its start"],
            "end to start"),
        Row("the same, programmatic, told at the start, at the end",
            each("kernel to kernel on an SM, 384 threads, 200 KiB, programmatic, told at the {}: to its work",
                 "start", "end"),
            "end to what follows griddepcontrol.wait"),
        Row("first to last start of a grid: ns",
            ["first start to last start, 384 threads, 200 KiB, plain"], "%globaltimer"),
        Row("an empty kernel in a graph: us", ["an empty kernel in a graph, one CTA"], "200 of them"),
        Row("a launch, of the host: us", ["a launch by the host, one CTA"], "through Python"),
    ]),
    Section("Clock: MHz", "clock", [
        Row("nothing but a spin", ["clock, nothing but a spin"], "clock64 over %globaltimer, 0.6 s, and so below"),
        Row("FMA on every SM", ["clock, FMA on every SM"]),
        Row("mma.sync on every SM", ["clock, mma.sync on every SM, random operands"], "random operands"),
        Row("wgmma on every SM",
            each("clock, wgmma on every SM, {}", "random operands", "ones"), "random operands; ones"),
        Row("reading HBM on every SM", ["clock, reading HBM on every SM"]),
        Row("events over %globaltimer", ["events over %globaltimer, 5 ms"], "a kernel of 5 ms"),
    ]),
]


def shown(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["fault"]:
        return NOT_YET
    value = figure["value"]
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def before(expected: Expected | None) -> str:
    return f"{expected.value:g} {LETTERS[expected.source]}" if expected else NOTHING


def joined(cells: Sequence[str]) -> str:
    """Join the cells; if all of them say nothing, one is enough."""
    return cells[0] if set(cells) in ({NOT_YET}, {NOTHING}) else "; ".join(cells)


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return all sections, as Markdown."""
    known, lines = {(figure["group"], figure["name"]): figure for figure in figures}, []
    for title, group, rows in SECTIONS:
        lines += [f"## {title}", "", "| constant | measured | before | how |", "|---|---|---|---|"]
        for row in rows:
            measured = joined([shown(known.get((group, name))) for name in row.figures])
            said = joined([before(EXPECTED.get((group, name))) for name in row.figures])
            lines.append(f"| {row.constant} | {measured} | {said} | {row.how} |")
        lines.append("")
    return "\n".join(lines)


def surprises(figures: Sequence[Mapping[str, Any]]) -> str:
    """Say how many expectations were met, and list those that were far off, the worst first."""
    known = {(figure["group"], figure["name"]): figure for figure in figures if not figure["fault"]}
    pairs = [(known[name], expected) for name, expected in EXPECTED.items() if name in known]
    close = sum(abs(figure["value"] - expected.value) <= CLOSE * figure["value"] for figure, expected in pairs)
    far = sorted((max(figure["value"] / expected.value, expected.value / figure["value"]), figure["group"],
                  figure["name"], shown(figure), before(expected)) for figure, expected in pairs)
    lines = [
        "## Surprises", "", f"Of {len(pairs)} expectations {close} are within a quarter of the measured figure. These "
        f"are off by a factor of {FAR} or more:", "", "| group | figure | measured | before |", "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(cells)} |" for factor, *cells in reversed(far) if factor >= FAR]
    return "\n".join([*lines, ""])


def page(results: Mapping[str, Any]) -> str:
    figures = results["figures"]
    steady = sum(figure["high"] <= 1.02 * figure["low"] for figure in figures)
    faults = sum(bool(figure["fault"]) for figure in figures)
    run = f"{results['device']}, {results['date']}, driver {results['driver']}, torch {results['versions']['torch']}"
    seconds = sum(results["seconds"].values())
    summary = (
        f"One {run}:\n{len(figures)} figures in {seconds:.0f} seconds, {faults} of them with a fault. For {steady} the "
        "smallest and the largest are\nwithin 2%; the others are mostly of launches, memory and copies."
    )
    return "\n".join([INTRODUCTION + summary, "", table(figures), surprises(figures)])
