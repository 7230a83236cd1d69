"""Group 8, first part: mbarriers, named barriers, the barrier of a cluster, fences, and registers handed over.

A hop is from one party's arrival to the other's wake: two parties hand a turn to each other, and a trip has two hops.
"""

from __future__ import annotations

from . import frame
from .bench import Bench

TRIPS, UNROLLED = 256, 16
WARPS = 1, 2, 4, 8, 12, 16, 24, 32
CLUSTERS = 2, 4, 8, 16
HOPS = (1, 32), (32, 32), (1, 128), (4, 128), (128, 128)     # arrivals of a phase, threads of a party
FENCES = {
    "fence.acq_rel.cta": "MEMBAR", "fence.acq_rel.cluster": "MEMBAR", "fence.acq_rel.gpu": "MEMBAR",
    "fence.proxy.async.shared::cta": "FENCE", "griddepcontrol.wait": "ACQBULK",
    "griddepcontrol.launch_dependents": "PREEXIT",
}


def parties(mine: str, first: str, second: str, setup: str, ends: str = "") -> str:
    """Two parties, each with its own loop of eight hops a trip; `parity` is that of the hop."""

    def turns(one: str) -> str:
        return "\n".join(f"{{ const u32 parity = {n % 2}; {one} }}" for n in range(8))

    body = f"""
  {setup}
  u64 start = 0;
  if ({mine}) {{
    #pragma unroll 1
    for (int i = 0; i < n + {frame.WARM}; ++i) {{ if (i == {frame.WARM}) start = now();
{turns(first)} }}
  }} else {{
    #pragma unroll 1
    for (int i = 0; i < n + {frame.WARM}; ++i) {{ if (i == {frame.WARM}) start = now();
{turns(second)} }}
  }}
  note(spans, start, now());
  {ends}
"""
    return frame.kernel(body, "int n")


def hops(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    for arrivals, threads in HOPS:
        who = {threads: "true", threads // 32: "LANE == 0"}.get(arrivals, f"threadIdx.x % {threads} == 0")
        setup = f"""__shared__ __align__(8) u64 bars[2];
  u32 bar = address(bars);
  bool tells = {who};
  if (threadIdx.x == 0) {{ init(bar, {arrivals}); init(bar + 8, {arrivals}); fence_init(); }}
  sync_all();"""
        first = "if (tells) arrive(bar); wait(bar + 8, parity);"
        second = "wait(bar, parity); if (tells) arrive(bar + 8);"
        built = bench.build(parties(f"threadIdx.x < {threads}", first, second, setup), {"SYNCS": 32})
        clocks = bench.clocks(built, trips, block=2 * threads)
        what = f"{arrivals} arrivals, {threads // 32} warps wait"
        bench.each(f"mbarrier hop, {what}", clocks, 16 * trips, built.fault)
        if bench.target.cc < (9, 0):
            continue
        setup += "\n  cluster_sync(); u32 other = remote(bar, cluster_rank() ^ 1);"
        first = "if (tells) arrive_remote(other); wait_cluster(bar, parity);"
        second = "wait_cluster(bar, parity); if (tells) arrive_remote(other);"
        built = bench.build(parties("cluster_rank() == 0", first, second, setup, "cluster_sync();"), {"SYNCS": 16})
        clocks = bench.clocks(built, trips, grid=2, cluster=2, block=threads)
        bench.each(f"mbarrier hop to a neighbour, {what}", clocks, 16 * trips, built.fault)


def alone(bench: Bench) -> None:
    """What one warp pays for an instruction on an mbarrier that nobody else uses."""
    trips = bench.trips(TRIPS // 8)
    for name, count, tells, waits in (
        ("arrive, its own phase's wait", 1, "if (LANE == 0) arrive(bar);", "wait(bar, step++ & 1);"),
        ("arrive of 32 lanes, and the wait", 32, "arrive(bar);", "wait(bar, step++ & 1);"),
        ("expect_tx of nothing, and the wait", 1, "if (LANE == 0) expect(bar, 0);", "wait(bar, step++ & 1);"),
        ("wait for a phase that is over", 1, "", "wait(bar, 1);"),
        ("arrive, nobody waits", 1, "if (LANE == 0) arrive(bar);", ""),
        ("arrive of 32 lanes, nobody waits", 32, "arrive(bar);", ""),
    ):
        setup = f"""__shared__ __align__(8) u64 bars[1]; u32 bar = address(bars), step = 0;
  if (threadIdx.x == 0) {{ init(bar, {count}); fence_init(); }}"""
        text = frame.loop(f"{tells} {waits}\n" * UNROLLED, setup, threads=32)
        built = bench.build(text, {"SYNCS": UNROLLED * (bool(tells) + bool(waits))})
        clocks = bench.clocks(built, trips, block=32)
        bench.each(f"mbarrier: {name}", clocks, trips * UNROLLED, built.fault)


def named(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    built = bench.build(frame.loop("sync_all();\n" * UNROLLED), {"BAR": UNROLLED})
    for warps in WARPS:
        clocks = bench.clocks(built, trips, block=32 * warps)
        bench.each(f"bar.sync of {warps} warps", clocks, trips * UNROLLED, built.fault)
    for warps in (1, 4, 8):
        tell, wait = ([frame.asm(f"bar.{how} {n}, {64 * warps};") for n in (1, 2)] for how in ("arrive", "sync"))
        first, second = tell[0] + wait[1], wait[0] + tell[1]
        built = bench.build(parties(f"threadIdx.x < {32 * warps}", first, second, "sync_all();"), {"BAR": 32})
        clocks = bench.clocks(built, trips, block=64 * warps)
        bench.each(f"named barriers in turn, {warps} and {warps} warps: a hop", clocks, 16 * trips, built.fault)


def clusters(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    built = bench.build(frame.loop("cluster_sync();\n" * 4, finish="cluster_sync();"), {"UCGABAR_ARV": 4})
    for size in CLUSTERS if bench.gpu else (2, 4):
        for block in (128, 384):
            clocks = bench.clocks(built, trips, grid=size, cluster=size, block=block)
            bench.each(f"barrier of a cluster of {size}, {block} threads each", clocks, 4 * trips, built.fault)


def fences(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    for name, sass in FENCES.items():
        if name.startswith("griddep") and bench.target.cc < (9, 0):
            continue
        built = bench.build(frame.loop("\n".join([frame.asm(f"{name};")] * UNROLLED)), {sass: UNROLLED})
        clocks = bench.clocks(built, trips, block=32)
        bench.each(f"{name}, nothing to wait for", clocks, trips * UNROLLED, built.fault)
    store = frame.asm("st.global.b32 [%0], %1;", "", '"l"(out + 1024 + threadIdx.x), "r"(i)')
    text = frame.loop(store + frame.asm("fence.acq_rel.gpu;"), threads=32)
    built = bench.build(text, {"STG": 1, "MEMBAR": 1})
    clocks = bench.clocks(built, trips, block=32)
    bench.each("STG and fence.acq_rel.gpu", clocks, trips, built.fault)


def handed_over(bench: Bench) -> None:
    """Registers: a warpgroup gives up 72 of 128 and asks for 48."""
    trips = bench.trips(TRIPS)
    line = frame.asm("setmaxnreg.dec.sync.aligned.u32 56;\\nsetmaxnreg.inc.sync.aligned.u32 104;")
    built = bench.build(frame.loop("\n".join([line] * 4), threads=512), {"USETMAXREG": 8})
    for groups in (1, 4):
        clocks = bench.clocks(built, trips, block=128 * groups)
        bench.each(f"setmaxnreg down and up, {groups} warpgroups", clocks, 4 * trips, built.fault)


def measure(bench: Bench) -> None:
    hops(bench)
    alone(bench)
    named(bench)
    fences(bench)
    if bench.target.cc >= (9, 0):
        clusters(bench)
        handed_over(bench)
