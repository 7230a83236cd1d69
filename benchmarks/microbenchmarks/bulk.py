"""Group 7: copies by the copy engine. Latency from the issue to the wake of a waiting warp, bytes a clock by size and by
copies in flight, boxes of tensor maps, multicast, stores, copies to a neighbour in the cluster, prefetch to L2."""

from __future__ import annotations

from . import frame
from .bench import Bench
from .memory import HBM, L2, MIB, ONE_CTA, RATE

KIB = 1024
SIZES = 16, 128, 512, 1 * KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB
IN_FLIGHT = 64 * KIB
BOXES = (64, 1), (64, 8), (64, 16), (64, 32), (64, 64), (64, 128), (64, 256), (32, 64), (16, 64)  # columns of bf16, rows
WIDE = 2048                                  # columns of the tensor whose boxes are copied
SWIZZLES = {64: 128, 32: 64, 16: 32}
TRIPS = 128
BARS = "__shared__ __align__(8) u64 bars[8]; u32 bar = address(bars);"
INIT = """if (threadIdx.x == 0) { for (u32 s = 0; s < 8; ++s) init(bar + 8 * s, COUNT); fence_init(); }
  sync_all();"""
STEP = "u64 step = 0;"
FROM = "memory + (u64)((step * gridDim.x + blockIdx.x) * bytes) % size"
TENSOR = """INLINE void load_box(u32 to, const Map* map, u32 x, u32 y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
INLINE void multicast(u32 to, const void* from, u32 bytes, u32 bar, u32 mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(bar), "h"((u16)mask) : "memory");
}
INLINE void send(u32 to, u32 from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "r"(from), "r"(bytes), "r"(bar) : "memory");
}
"""


def one_at_a_time(issue: str, params: str) -> str:
    """Thread 0: expect, copy, wait; then the next."""
    body = f"""if (threadIdx.x == 0) {{
        expect(bar, bytes);
        {issue}
        wait(bar, step & 1);
        ++step;
      }}"""
    setup = f"{BARS} {STEP} u32 to = address(smem); {INIT.replace('COUNT', '1')}"
    return frame.loop(body, setup, "sync_all(); if (blockIdx.x == 0 && threadIdx.x < 4) out[threadIdx.x] = ((u32*)smem)[threadIdx.x];", params, threads=32, outside=TENSOR)


def in_flight(issue: str, params: str, stages: int) -> str:
    """Thread 0 keeps `stages` copies on their way; each has its own place and mbarrier."""
    body = f"""if (threadIdx.x == 0) {{
        #pragma unroll
        for (u32 s = 0; s < {stages}; ++s, ++step) {{
          u32 here = bar + 8 * s, to = begin + s * bytes;
          if (step >= {stages}) wait(here, (step / {stages} - 1) & 1);
          expect(here, bytes);
          {issue.replace("bar)", "here)").replace("bar, ", "here, ")}
        }}
      }}"""
    drain = f"""if (threadIdx.x == 0) {{
      for (u32 s = 0; s < {stages}; ++s) wait(bar + 8 * s, (step / {stages} - 1) & 1);
    }}"""
    setup = f"{BARS} {STEP} u32 begin = address(smem); {INIT.replace('COUNT', '1')}"
    return frame.loop(body, setup, "sync_all(); if (blockIdx.x == 0 && threadIdx.x < 4) out[threadIdx.x] = ((u32*)smem)[threadIdx.x];", params, threads=32, outside=TENSOR,
                      drain=drain)  # fmt: skip


LOAD, LOAD_PARAMS = f"load_bulk(to, {FROM}, bytes, bar);", "const char* memory, u64 size, u32 bytes"


def loads(bench: Bench, memory) -> None:
    trips, sms = bench.trips(TRIPS), bench.sms
    built = bench.build(one_at_a_time(LOAD, LOAD_PARAMS), {"UBLKCP": 1})
    for size in SIZES:
        clocks = bench.clocks(built, trips, memory, 64 * KIB, size, block=32, dynamic_shared=max(size, 128))
        fault = ones(bench)
        bench.figure(f"bulk load of {size}, L2 hit: latency", [c / trips for c in clocks], "clocks", built.fault, fault)
    if bench.way == "gpu":
        for size in (128, 4 * KIB, 16 * KIB):
            bench.flush()
            clocks = [bench.clocks(built, trips, memory[n * 64 * MIB // 4 :], 64 * MIB, size, block=32, dynamic_shared=size, runs=1)[0]
                      for n in range(2, 2 + bench.runs)]  # fmt: skip
            bench.figure(f"bulk load of {size}, HBM: latency", [c / trips for c in clocks], "clocks", built.fault)
    for size in SIZES[1:]:
        stages = min(8, IN_FLIGHT // size)
        built = bench.build(in_flight(LOAD, LOAD_PARAMS, stages), {"UBLKCP": stages})
        for ctas in (1, sms):
            times = bench.trips(max(8, min(TRIPS, MIB // (size * stages))))
            clocks = bench.clocks(built, times, memory, L2, size, grid=ctas, block=32, dynamic_shared=ONE_CTA)
            moved = times * stages * size
            name = f"bulk loads of {size}, {stages} in flight, L2 hits, {ctas} SMs"
            bench.figure(name, [moved / c for c in clocks], RATE, built.fault, ones(bench))
        if size >= 4 * KIB:
            times = bench.trips(4 * MIB // (size * stages))
            args = (times, memory, memory.numel() * 4, size)
            clocks = bench.clocks(built, *args, grid=sms, block=32, dynamic_shared=ONE_CTA, cold=True)
            bench.figure(f"bulk loads of {size}, {stages} in flight, HBM, all SMs", [times * stages * size / c for c in clocks], RATE,
                         built.fault)  # fmt: skip


def ones(bench: Bench) -> str:
    found = bench.results(4)
    return bench.wrong(f"shared memory holds {found[0]:#x}", set(found) == {1})


def boxes(bench: Bench, memory) -> None:
    trips = bench.trips(TRIPS)
    rows = min(L2, memory.numel() * 4) // (2 * WIDE)
    params = "const __grid_constant__ Map map, u32 bytes, u32 rows, u32 columns, u32 high, const void* memory"
    coordinates = f"(u32)(step * columns) % {WIDE}, ((u32)(step / ({WIDE} / columns)) * gridDim.x + blockIdx.x) * high % rows"
    issue = f"load_box(to, &map, {coordinates}, bar);"
    single = bench.build(one_at_a_time(issue, params), {"UTMALDG": 1})
    for columns, high in BOXES:
        map_ = bench.tensor_map(memory, (WIDE, rows), (columns, high), SWIZZLES[columns])
        bytes_ = 2 * columns * high
        args, name = (map_, bytes_, rows, columns, high, memory), f"box of {columns} x {high} bf16"
        clocks = bench.clocks(single, trips, *args, block=32, dynamic_shared=max(bytes_, 128))
        bench.figure(f"{name}, L2 hit: latency", [c / trips for c in clocks], "clocks", single.fault, ones(bench))
        stages = min(8, IN_FLIGHT // bytes_)
        built = bench.build(in_flight(issue, params, stages), {"UTMALDG": stages})
        for ctas in (1, bench.sms):
            times = bench.trips(max(8, min(TRIPS, MIB // (bytes_ * stages))))
            clocks = bench.clocks(built, times, *args, grid=ctas, block=32, dynamic_shared=ONE_CTA)
            moved = times * stages * bytes_
            bench.figure(f"{name}, {stages} in flight, {ctas} SMs", [moved / c for c in clocks], RATE, built.fault, ones(bench))


def stores(bench: Bench, memory) -> None:
    """Until shared memory may be written again, and until the stores are done."""
    trips = bench.trips(TRIPS)
    for name, wait in (("read", "cp.async.bulk.wait_group.read 0;"), ("done", "cp.async.bulk.wait_group 0;")):
        body = f"""if (threadIdx.x == 0) {{
        store_bulk(memory + (u64)((step++ * gridDim.x + blockIdx.x) * bytes) % size, from, bytes);
        commit_bulk();
        asm volatile("{wait}" ::: "memory");
      }}"""
        built = bench.build(stored(body), {"UBLKCP": 1})
        for size in (128, KIB, 4 * KIB, 16 * KIB, 32 * KIB):
            clocks = bench.clocks(built, trips, memory, 64 * KIB, size, block=32, dynamic_shared=size)
            bench.figure(f"bulk store of {size} until {name}", [c / trips for c in clocks], "clocks", built.fault)
    body = """if (threadIdx.x == 0) {
        store_bulk(memory + (u64)((step++ * gridDim.x + blockIdx.x) * bytes) % size, from, bytes);
        commit_bulk();
        asm volatile("cp.async.bulk.wait_group.read 4;" ::: "memory");
      }"""
    built = bench.build(stored(body), {"UBLKCP": 1})
    add = body.replace("store_bulk(", "add_bulk(")
    added = bench.build(stored(add), {"UBLKRED": 1})
    for size in (KIB, 4 * KIB, 16 * KIB):
        for ctas in (1, bench.sms):
            times = bench.trips(max(32, 2 * MIB // size))
            for name, one, region in (("stores", built, 4 * MIB), ("reductions of f32", added, 4 * MIB)):
                clocks = bench.clocks(one, times, memory, region, size, grid=ctas, block=32, dynamic_shared=ONE_CTA)
                bench.figure(f"bulk {name} of {size}, L2, {ctas} SMs", [times * size / c for c in clocks], RATE, one.fault)


def stored(body: str) -> str:
    add = """INLINE void add_bulk(void* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(to), "r"(from), "r"(bytes) : "memory");
}
"""
    setup = f"{STEP} u32 from = address(smem); for (u32 i = threadIdx.x; i < bytes / 4; i += 32) ((u32*)smem)[i] = 1;\n  fence_async();"
    drain = 'if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");'
    return frame.loop(body, setup, params="char* memory, u64 size, u32 bytes", threads=32, outside=add, drain=drain)


def clusters(bench: Bench, memory) -> None:
    """Each CTA loads its part and hands it to all of its cluster; and copies from one CTA's shared memory to another's."""
    trips = bench.trips(TRIPS)
    part = "memory + (u64)((step * gridDim.x + blockIdx.x) * part) % size"
    shared = f"{BARS} {STEP} u32 begin = address(smem), rank = cluster_rank(); {INIT.replace('COUNT', '1')} cluster_sync();"
    ends = "cluster_sync(); if (blockIdx.x == 0 && threadIdx.x < 4) out[threadIdx.x] = ((u32*)smem)[threadIdx.x];"
    for size in (2, 4):
        issue = f"multicast(begin + rank * part, {part}, part, bar, {(1 << size) - 1});"
        body = f"""if (threadIdx.x == 0) {{
        u32 part = bytes / {size};
        expect(bar, bytes);
      }}
      cluster_sync();
      if (threadIdx.x == 0) {{
        u32 part = bytes / {size};
        {issue}
        wait(bar, step & 1);
        ++step;
      }}"""
        text = frame.loop(body, shared, ends, LOAD_PARAMS, threads=32, outside=TENSOR)
        built = bench.build(text, {"UBLKCP": 1})
        plain = bench.build(text.replace(f", part, bar, {(1 << size) - 1});", ", part, bar, 1 << rank);").replace("expect(bar, bytes)", "expect(bar, bytes / %d)" % size))
        for bytes_ in (4 * KIB, 16 * KIB, 32 * KIB):
            for name, one in (("to all", built), ("to itself alone", plain)):
                clocks = bench.clocks(one, trips, memory, 64 * KIB, bytes_, grid=size, cluster=size, block=32, dynamic_shared=bytes_)
                fault = ones(bench) if one is built else ""
                bench.figure(f"cluster of {size}, barrier, {bytes_ // size} each {name}", [c / trips for c in clocks], "clocks", one.fault, fault)
        built = bench.build(multicast_rate(size), {"UBLKCP": 4})
        for bytes_ in (8 * KIB, 16 * KIB):
            ctas = bench.sms // size * size
            times = bench.trips(64)
            fits = 4 * bytes_ + 1024
            clocks = bench.clocks(built, times, memory, L2, bytes_, grid=min(ctas, 120) if size == 4 else ctas, cluster=size, block=32,
                                  dynamic_shared=max(fits, 110 * KIB))  # fmt: skip
            bench.figure(f"multicast in clusters of {size}, {bytes_} a stage, 4 stages, all SMs: received", [times * 4 * bytes_ / c for c in clocks], RATE, built.fault)
    body = """if (rank == 0 && threadIdx.x == 0) {
        expect(bar, 0);
        send(there, begin, bytes, there_bar);
        wait_cluster(bar, step & 1);
        ++step;
      } else if (threadIdx.x == 0) {
        expect(bar, bytes);
        wait_cluster(bar, step & 1);
        ++step;
        arrive_remote(back);
      }"""
    setup = f"""{BARS} {STEP} u32 begin = address(smem), rank = cluster_rank();
  if (threadIdx.x == 0) {{ init(bar, rank == 0 ? 2 : 1); fence_init(); }}
  for (u32 i = threadIdx.x; i < bytes / 4; i += 32) ((u32*)smem)[i] = 1;
  fence_async(); cluster_sync();
  u32 there = remote(begin, rank ^ 1), there_bar = remote(bar, rank ^ 1), back = there_bar;"""
    built = bench.build(frame.loop(body, setup, ends, "u32 bytes", threads=32, outside=TENSOR), {"UBLKCP": 1})
    for size in SIZES[1:]:
        clocks = [lengths for lengths in bench.clocks(built, trips, size, grid=2, cluster=2, block=32, dynamic_shared=size)]
        bench.figure(f"{size} to a neighbour, and an arrival back", [c / trips for c in clocks], "clocks", built.fault, ones(bench))
    body = """if (rank == 0 && threadIdx.x == 0) {
        #pragma unroll
        for (u32 s = 0; s < 4; ++s, ++step) {
          if (step >= 4) wait_cluster(bar + 8 * s, (step / 4 - 1) & 1);
          send(there + s * bytes, begin + s * bytes, bytes, there_bar + 8 * s);
        }
      } else if (threadIdx.x == 0) {
        #pragma unroll
        for (u32 s = 0; s < 4; ++s, ++step) {
          expect(bar + 8 * s, bytes);
          wait_cluster(bar + 8 * s, step / 4 & 1);
          arrive_remote(back + 8 * s);
        }
      }"""
    setup = setup.replace("init(bar, rank == 0 ? 2 : 1);", "for (u32 s = 0; s < 4; ++s) init(bar + 8 * s, 1);").replace("i < bytes / 4", "i < bytes")
    drain = """if (rank == 0 && threadIdx.x == 0)
      for (u32 s = 0; s < 4; ++s) { wait_cluster(bar + 8 * s, (step / 4 - 1) & 1); }
    cluster_sync();"""
    built = bench.build(frame.loop(body, setup, ends, "u32 bytes", threads=32, outside=TENSOR, drain=drain), {"UBLKCP": 4})
    for size in (KIB, 4 * KIB, 16 * KIB):
        for ctas in (2, bench.sms // 2 * 2):
            clocks = bench.clocks(built, bench.trips(64), size, grid=ctas, cluster=2, block=32, dynamic_shared=max(4 * size, 110 * KIB))
            where = "one pair" if ctas == 2 else "every pair"
            bench.figure(f"sends of {size}, 4 in flight, {where}", [bench.trips(64) * 4 * size / c for c in clocks], RATE, built.fault)


def multicast_rate(size: int) -> str:
    """Four stages of `bytes`; a stage is sent again once all of the cluster have it."""
    body = f"""if (threadIdx.x == 0) {{
        u32 part = bytes / {size};
        #pragma unroll
        for (u32 s = 0; s < 4; ++s, ++step) {{
          wait_cluster(free + 8 * s, (step / 4 & 1) ^ 1);
          multicast(begin + s * bytes + rank * part, memory + (u64)((step * gridDim.x + blockIdx.x) * part) % size, part, bar + 8 * s, {(1 << size) - 1});
        }}
        #pragma unroll
        for (u32 s = 0; s < 4; ++s) {{
          wait_cluster(bar + 8 * s, (step / 4 - 1) & 1);
          expect(bar + 8 * s, bytes);
          for (u32 r = 0; r < {size}; ++r) arrive_remote(remote(free + 8 * s, r));
        }}
      }}"""
    setup = f"""__shared__ __align__(8) u64 bars[8]; u32 bar = address(bars), free = bar + 32, begin = address(smem), rank = cluster_rank();
  {STEP}
  if (threadIdx.x == 0) {{
    for (u32 s = 0; s < 4; ++s) {{ init(bar + 8 * s, 1); init(free + 8 * s, {size}); }}
    fence_init();
    for (u32 s = 0; s < 4; ++s) expect(bar + 8 * s, bytes);
  }}
  cluster_sync();"""
    return frame.loop(body, setup, "cluster_sync();", LOAD_PARAMS, threads=32, outside=TENSOR)


def prefetches(bench: Bench, memory) -> None:
    """A load of what was prefetched to L2 some time before, beside one of what was not."""
    if bench.way != "gpu":
        return
    for name, ahead in (("no prefetch", 0), ("a prefetch 4,000 clocks before", 1)):
        fetch = 'asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");' if ahead else ""
        body = f"""if (threadIdx.x == 0) {{
        const char* from = {FROM};
        {fetch}
        for (u64 until = clocks() + 4000; clocks() < until;) {{}}
        u64 begin = clocks();
        expect(bar, bytes);
        load_bulk(to, from, bytes, bar);
        wait(bar, step & 1);
        all += clocks() - begin;
        ++step;
      }}"""
        setup = f"{BARS} {STEP} u64 all = 0; u32 to = address(smem); {INIT.replace('COUNT', '1')}"
        text = frame.loop(body, setup, "note(spans, 0, all);", LOAD_PARAMS, threads=32)
        built, trips = bench.build(text, {"UBLKCP": 1}), 32
        for size in (KIB, 16 * KIB):
            bench.flush()
            found = [bench.clocks(built, trips, memory[n * 64 * MIB // 4 :], 64 * MIB, size, block=32, dynamic_shared=size, runs=1)[0]
                     for n in range(2, 2 + bench.runs)]  # fmt: skip
            bench.figure(f"bulk load of {size} after {name}", [c / (trips + frame.WARM) for c in found], "clocks", built.fault)


def measure(bench: Bench) -> None:
    memory = bench.zeros((HBM if bench.way == "gpu" else MIB) // 4)
    memory.fill_(1)
    loads(bench, memory)
    boxes(bench, memory)
    clusters(bench, memory)
    prefetches(bench, memory)
    stores(bench, memory)
