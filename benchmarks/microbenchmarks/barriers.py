"""Group 8, first part: mbarriers, named barriers, the barrier of a cluster, fences, and registers handed over.

A hop is from one party's arrival to the other's wake: two parties hand a turn to each other, and a trip has two hops.
"""

from __future__ import annotations

from . import frame
from .bench import Bench

TRIPS, UNROLLED = 256, 16
WARPS = 1, 2, 4, 8, 12, 16, 24, 32
CLUSTERS = 2, 4, 8, 16
FENCES = {
    "fence.acq_rel.cta": "fence.acq_rel.cta;", "fence.acq_rel.cluster": "fence.acq_rel.cluster;",
    "fence.acq_rel.gpu": "fence.acq_rel.gpu;", "fence.proxy.async": "fence.proxy.async.shared::cta;",
    "fence.mbarrier_init": "fence.mbarrier_init.release.cluster;", "bar.warp.sync": "bar.warp.sync -1;",
    "griddepcontrol.wait": "griddepcontrol.wait;", "griddepcontrol.launch_dependents": "griddepcontrol.launch_dependents;",
    "elect.sync": "{ .reg .pred p; elect.sync _|p, -1; }",
}  # fmt: skip


def hops(bench: Bench) -> None:
    """(arrivals of a phase, threads of a party): an arrival by each thread, or by its first alone."""
    trips = bench.trips(TRIPS)
    for arrivals, threads in ((1, 32), (32, 32), (1, 128), (4, 128), (128, 128)):
        who = {1: "threadIdx.x % size == 0", 4: "LANE == 0"}.get(arrivals, "true") if threads > 32 or arrivals == 1 else "true"
        arrival, shared = f"if ({who}) ", "__shared__ __align__(8) u64 bars[2]; u32 bar = address(bars), size = blockDim.x / 2;"
        setup = f"{shared} u32 step = 0;\n  if (threadIdx.x == 0) {{ init(bar, {arrivals}); init(bar + 8, {arrivals}); fence_init(); }}"
        ready = f"""if (threadIdx.x < size) {{
        {arrival}arrive(bar);
        wait(bar + 8, step & 1);
      }} else {{
        wait(bar, step & 1);
        {arrival}arrive(bar + 8);
      }}
      ++step;"""
        built = bench.build(frame.loop(ready, setup), {"SYNCS": 4})
        clocks = bench.clocks(built, trips, block=2 * threads)
        name = f"mbarrier hop, {arrivals} arrivals, {threads // 32} warps wait"
        bench.figure(name, [c / (2 * trips) for c in clocks], "clocks", built.fault)
        setup += "\n  cluster_sync(); u32 other = remote(bar, cluster_rank() ^ 1);"
        setup = setup.replace("blockDim.x / 2", "blockDim.x")
        apart = f"""if (cluster_rank() == 0) {{
        {arrival}arrive_remote(other);
        wait_cluster(bar, step & 1);
      }} else {{
        wait_cluster(bar, step & 1);
        {arrival}arrive_remote(other);
      }}
      ++step;"""
        built = bench.build(frame.loop(apart, setup, "cluster_sync();"), {"SYNCS": 3})
        clocks = bench.clocks(built, trips, grid=2, cluster=2, block=threads)
        name = f"mbarrier hop to a neighbour, {arrivals} arrivals, {threads // 32} warps wait"
        bench.figure(name, [c / (2 * trips) for c in clocks], "clocks", built.fault)


def alone(bench: Bench) -> None:
    """What one warp pays for an instruction on an mbarrier that nobody else uses."""
    trips = bench.trips(TRIPS)
    bars = "__shared__ __align__(8) u64 bars[1]; u32 bar = address(bars), step = 0;"
    for name, count, lines in (
        ("arrive, its own phase's wait", 1, "if (LANE == 0) arrive(bar); wait(bar, step++ & 1);"),
        ("arrive of 32 lanes, and the wait", 32, "arrive(bar); wait(bar, step++ & 1);"),
        ("expect_tx of nothing, and the wait", 1, "if (LANE == 0) expect(bar, 0); wait(bar, step++ & 1);"),
        ("wait for a phase that is over", 1, "wait(bar, 1);"),
        ("arrive, nobody waits", 1, "if (LANE == 0) arrive(bar);"),
        ("arrive of 32 lanes, nobody waits", 32, "arrive(bar);"),
    ):
        setup = f"{bars} if (threadIdx.x == 0) {{ init(bar, {count}); fence_init(); }}"
        built = bench.build(frame.loop(f"{lines}\n" * UNROLLED, setup, threads=32), {"SYNCS": UNROLLED * (2 if "wait(" in lines and "arrive(" in lines else 1)})
        clocks = bench.clocks(built, trips // 8 + 1, block=32)
        bench.figure(f"mbarrier: {name}", [c / ((trips // 8 + 1) * UNROLLED) for c in clocks], "clocks", built.fault)


def named(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    built = bench.build(frame.loop("sync_all();\n" * UNROLLED), {"BAR": UNROLLED + 1})
    for warps in WARPS:
        clocks = bench.clocks(built, trips, block=32 * warps)
        bench.figure(f"bar.sync of {warps} warps", [c / (trips * UNROLLED) for c in clocks], "clocks", built.fault)
    turn = """if (threadIdx.x < size) {
        asm volatile("bar.arrive 1, %0;" :: "r"(2 * size) : "memory");
        asm volatile("bar.sync 2, %0;" :: "r"(2 * size) : "memory");
      } else {
        asm volatile("bar.sync 1, %0;" :: "r"(2 * size) : "memory");
        asm volatile("bar.arrive 2, %0;" :: "r"(2 * size) : "memory");
      }"""
    built = bench.build(frame.loop(turn, "u32 size = blockDim.x / 2;"), {"BAR": 5})
    for warps in (1, 4, 8):
        clocks = bench.clocks(built, trips, block=64 * warps)
        bench.figure(f"named barriers in turn, {warps} and {warps} warps: a hop", [c / (2 * trips) for c in clocks], "clocks", built.fault)


def clusters(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    built = bench.build(frame.loop("cluster_sync();\n" * 4, finish="cluster_sync();"), {"UCGABAR_ARV": 5})
    for size in CLUSTERS if bench.way == "gpu" else (2, 4):
        for block in (128, 384):
            clocks = bench.clocks(built, trips, grid=size, cluster=size, block=block)
            bench.figure(f"barrier of a cluster of {size}, {block} threads each", [c / (4 * trips) for c in clocks], "clocks", built.fault)


def fences(bench: Bench) -> None:
    trips = bench.trips(TRIPS)
    for name, ptx in FENCES.items():
        line = f'asm volatile("{ptx}" ::: "memory");\n'
        built = bench.build(frame.loop(line * UNROLLED))
        clocks = bench.clocks(built, trips, block=32)
        bench.figure(f"{name}, nothing to wait for", [c / (trips * UNROLLED) for c in clocks], "clocks", built.fault)
    line = """asm volatile("st.global.b32 [%0], %1;" :: "l"(out + 4096 + threadIdx.x), "r"(i) : "memory");
      asm volatile("fence.acq_rel.gpu;" ::: "memory");"""
    built = bench.build(frame.loop(line, threads=32), {"STG": 1, "MEMBAR": 1})
    clocks = bench.clocks(built, trips, block=32)
    bench.figure("STG and fence.acq_rel.gpu", [c / trips for c in clocks], "clocks", built.fault)
    bench.out.zero_()
    line = 'asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\\nsetmaxnreg.inc.sync.aligned.u32 104;" ::: "memory");\n'
    built = bench.build(frame.loop(line * 4, threads=512), {"USETMAXREG": 8})
    for groups in (1, 4):
        clocks = bench.clocks(built, trips, block=128 * groups)
        name = f"setmaxnreg down and up, {groups} warpgroups"
        bench.figure(name, [c / (4 * trips) for c in clocks], "clocks", built.fault)


def measure(bench: Bench) -> None:
    hops(bench)
    alone(bench)
    named(bench)
    if bench.target.cc >= (9, 0):
        clusters(bench)
    fences(bench)
