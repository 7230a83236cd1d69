"""Group 7: copies by the copy engine. Latency from the issue to the wake of a waiting warp, bytes a clock by size and
by copies in flight, boxes of tensor maps, multicast, stores, copies to a neighbour in the cluster, prefetch to L2."""

from __future__ import annotations

from . import frame
from .bench import Bench, Tensor
from .memory import HBM, L2, MIB, ONE_CTA

KIB = 1024
SIZES = 16, 128, 512, 1 * KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB
IN_FLIGHT, STAGES = 64 * KIB, 8              # at most, of a CTA
BOXES = (64, 1), (64, 8), (64, 16), (64, 32), (64, 64), (64, 128), (64, 256), (32, 64), (16, 64)  # bf16 columns, rows
WIDE = 2048                                  # columns of the tensor whose boxes are copied
SWIZZLES = {64: 128, 32: 64, 16: 32}
TRIPS = 128
PARAMS = "char* memory, u64 size, u32 bytes"     # what is copied; the size is a power of two, so that places wrap
HELPERS = (frame.HERE / "bulk.cuh").read_text()
BEGINS = f"""__shared__ __align__(8) u64 bars[{2 * STAGES}];
  u32 bar = address(bars), begin = address(smem), step = 0;"""
INIT = f"""{BEGINS}
  if (threadIdx.x == 0) {{ for (u32 s = 0; s < {STAGES}; ++s) init(bar + 8 * s, 1); fence_init(); }}
  sync_all();"""
SHOW = "if (blockIdx.x == 0 && threadIdx.x < 4) out[threadIdx.x] = ((u32*)smem)[threadIdx.x];"
NEXT = "memory + ((u64)(step * gridDim.x + blockIdx.x) * bytes & (size - 1))"     # what this CTA copies in this step
LOAD = f"load_bulk(to, {NEXT}, bytes, here);"


def loop(body: str, begins: str, params: str = PARAMS, ends: str = f"sync_all(); {SHOW}", drain: str = "",
         threads: int = 32) -> str:
    return frame.loop(body, begins, ends, params, threads=threads, outside=HELPERS, drain=drain)


def one_at_a_time(issue: str, params: str = PARAMS) -> str:
    """Return a loop in which thread 0 expects, copies and waits before it begins the next copy."""
    return loop(f"""if (threadIdx.x == 0) {{
        u32 here = bar, to = begin;
        expect(here, bytes);
        {issue}
        wait(here, step & 1);
        ++step;
      }}""", INIT, params)


def in_flight(issue: str, stages: int, params: str = PARAMS) -> str:
    """Thread 0 keeps `stages` copies on their way; each has its own place and mbarrier."""
    body = f"""if (threadIdx.x == 0) {{
        #pragma unroll
        for (u32 s = 0; s < {stages}; ++s, ++step) {{
          u32 here = bar + 8 * s, to = begin + s * bytes;
          if (step >= {stages}) wait(here, (step / {stages} - 1) & 1);
          expect(here, bytes);
          {issue}
        }}
      }}"""
    drain = f"if (threadIdx.x == 0) for (u32 s = 0; s < {stages}; ++s) wait(bar + 8 * s, (step / {stages} - 1) & 1);"
    return loop(body, INIT, params, drain=drain)


def ones(bench: Bench) -> str:
    words = bench.results(4)
    return bench.wrong(f"shared memory holds {words[0]:#x}", set(words) == {1})


def fresh(memory: Tensor, run: int) -> Tensor:
    """Return another 64 MiB for every run, so that nothing of it lies in L2."""
    return memory[(run + 2) * 64 * MIB // 4 :]


def loads(bench: Bench, memory: Tensor) -> None:
    trips, sms = bench.trips(TRIPS), bench.sms
    built = bench.build(one_at_a_time(LOAD), {"UBLKCP": 1})
    for size in SIZES:
        clocks = bench.clocks(built, trips, memory, 64 * KIB, size, block=32, dynamic_shared=max(size, 128))
        bench.each(f"bulk load of {size}, L2 hit: latency", clocks, trips, built.fault, ones(bench))
    for size in (128, 4 * KIB, 16 * KIB) if bench.gpu else ():
        bench.flush()
        shape = dict(block=32, dynamic_shared=size, runs=1)
        places = [fresh(memory, n) for n in range(bench.runs)]
        clocks = [bench.clocks(built, trips, place, 64 * MIB, size, **shape)[0] for place in places]
        bench.each(f"bulk load of {size}, HBM: latency", clocks, trips, built.fault)
    for size in SIZES[1:]:
        stages = min(STAGES, IN_FLIGHT // size)
        text = in_flight(LOAD, stages)
        built = bench.build(text, {"UBLKCP": stages})
        for ctas in (1, sms):
            times = bench.trips(max(8, min(TRIPS, MIB // (size * stages))))
            clocks = bench.clocks(built, times, memory, L2, size, grid=ctas, block=32, dynamic_shared=ONE_CTA)
            name = f"bulk loads of {size}, {stages} in flight, L2 hits, {ctas} SMs"
            bench.rate(name, times * stages * size, clocks, built.fault, ones(bench))
        if size >= 4 * KIB:
            times = bench.trips(4 * MIB // (size * stages))
            args, shape = (times, memory, memory.numel() * 4, size), dict(grid=sms, block=32, dynamic_shared=ONE_CTA)
            name, moved = f"bulk loads of {size}, {stages} in flight, HBM, all SMs", times * stages * size
            bench.rate(name, moved, bench.clocks(built, *args, cold=True, **shape), built.fault)
            took = bench.nanoseconds(bench.build(text, NANOSECONDS=1), *args, cold=True, **shape)
            bench.figure(f"{name}, of all", [moved * sms / ns / 1e3 for ns in took], "TB/s", built.fault)


def boxes(bench: Bench, memory: Tensor) -> None:
    trips, rows = bench.trips(TRIPS), min(L2, memory.numel() * 4) // (2 * WIDE)
    params = "const __grid_constant__ Map map, u32 bytes, u32 rows, u32 columns, u32 high, const void* memory"
    coordinates = f"step * columns & {WIDE - 1}, (step * columns / {WIDE} * gridDim.x + blockIdx.x) * high & (rows - 1)"
    issue = f"load_box(to, &map, {coordinates}, here);"
    single = bench.build(one_at_a_time(issue, params), {"UTMALDG": 1})
    for columns, high in BOXES:
        map_ = bench.tensor_map(memory, (WIDE, rows), (columns, high), SWIZZLES[columns])
        size = 2 * columns * high
        args, name = (map_, size, rows, columns, high, memory), f"box of {columns} x {high} bf16"
        clocks = bench.clocks(single, trips, *args, block=32, dynamic_shared=max(size, 128))
        bench.each(f"{name}, L2 hit: latency", clocks, trips, single.fault, ones(bench))
        stages = min(STAGES, IN_FLIGHT // size)
        built = bench.build(in_flight(issue, stages, params), {"UTMALDG": stages})
        for ctas in (1, bench.sms):
            times = bench.trips(max(8, min(TRIPS, MIB // (size * stages))))
            clocks = bench.clocks(built, times, *args, grid=ctas, block=32, dynamic_shared=ONE_CTA)
            moved = times * stages * size
            bench.rate(f"{name}, {stages} in flight, {ctas} SMs", moved, clocks, built.fault, ones(bench))


def stores(bench: Bench, memory: Tensor) -> None:
    """Time stores until shared memory may be written again, and until they are done; count bytes a clock."""
    trips = bench.trips(TRIPS)
    fill = f"{BEGINS}\n  for (u32 i = threadIdx.x; i < bytes / 4; i += 32) ((u32*)smem)[i] = 0;\n  fence_async();"
    done = f"if (threadIdx.x == 0) {frame.asm('cp.async.bulk.wait_group 0;')}"

    def source(which: str, wait: str) -> str:
        issue = f"{which}({NEXT}, begin, bytes); ++step; commit_bulk();"
        body = f"if (threadIdx.x == 0) {{ {issue}\n{frame.asm(wait)} }}"
        return loop(body, fill, ends="", drain=done)

    for name, wait in (("read", "cp.async.bulk.wait_group.read 0;"), ("done", "cp.async.bulk.wait_group 0;")):
        built = bench.build(source("store", wait), {"UBLKCP": 1})
        for size in (128, KIB, 4 * KIB, 16 * KIB, 32 * KIB):
            clocks = bench.clocks(built, trips, memory, 64 * KIB, size, block=32, dynamic_shared=size)
            bench.each(f"bulk store of {size} until {name}", clocks, trips, built.fault)
    for which, name, sass in (("store", "stores", "UBLKCP"), ("add", "reductions of f32", "UBLKRED")):
        built = bench.build(source(which, "cp.async.bulk.wait_group.read 4;"), {sass: 1})
        for size in (KIB, 4 * KIB, 16 * KIB):
            for ctas in (1, bench.sms):
                times = bench.trips(max(32, 2 * MIB // size))
                shape = dict(grid=ctas, block=32, dynamic_shared=ONE_CTA)
                clocks = bench.clocks(built, times, memory, 4 * MIB, size, **shape)
                bench.rate(f"bulk {name} of {size}, L2, {ctas} SMs", times * size, clocks, built.fault)


# ------------------------------------------------------------------------------------------------------------ clusters


def shared_out(size: int, mask: int | str, expected: str) -> str:
    """A barrier of the cluster, then each CTA loads its part for those of `mask`, and waits for `expected` bytes."""
    part = f"u32 part = bytes / {size};"
    from_ = "memory + ((u64)(step * gridDim.x + blockIdx.x) * part & (size - 1))"
    body = f"""{part}
      if (threadIdx.x == 0) expect(bar, {expected});
      cluster_sync();
      if (threadIdx.x == 0) {{
        multicast(begin + rank * part, {from_}, part, bar, {mask});
        wait(bar, step & 1);
        ++step;
      }}"""
    return loop(body, f"{INIT} cluster_sync(); u32 rank = cluster_rank();", ends=f"cluster_sync(); {SHOW}")


def multicasts(size: int) -> str:
    """Eight stages of `bytes`. One warp sends its part of a stage to all once all of them have the last one; another
    waits for the parts and tells everybody."""
    part = f"u32 part = bytes / {size};"
    from_ = "memory + ((u64)(step * gridDim.x + blockIdx.x) * part & (size - 1))"
    body = f"""{part}
      #pragma unroll 1
      for (u32 s = 0; s < {STAGES}; ++s, ++step) {{
        if (threadIdx.x == 0) {{
          wait_cluster(free + 8 * s, (step / {STAGES} & 1) ^ 1);
          multicast(begin + s * bytes + rank * part, {from_}, part, bar + 8 * s, {(1 << size) - 1});
        }} else if (threadIdx.x == 32) {{
          wait_cluster(bar + 8 * s, step / {STAGES} & 1);
          expect(bar + 8 * s, bytes);
          #pragma unroll
          for (u32 r = 0; r < {size}; ++r) arrive_remote(remote(free + 8 * s, r));
        }}
      }}"""
    begins = f"""{BEGINS}
  u32 free = bar + {8 * STAGES}, rank = cluster_rank();
  if (threadIdx.x == 0) {{
    for (u32 s = 0; s < {STAGES}; ++s) {{ init(bar + 8 * s, 1); init(free + 8 * s, {size}); }}
    fence_init();
    for (u32 s = 0; s < {STAGES}; ++s) expect(bar + 8 * s, bytes);
  }}
  cluster_sync();"""
    return loop(body, begins, ends="cluster_sync();", threads=64)


def clusters(bench: Bench, memory: Tensor) -> None:
    trips = bench.trips(TRIPS)
    for size in (2, 4):
        every = (1 << size) - 1
        for name, mask, expected in (("to all", every, "bytes"), ("to itself alone", "1 << rank", f"bytes / {size}")):
            built = bench.build(shared_out(size, mask, expected), {"UBLKCP": 1})
            for whole in (4 * KIB, 16 * KIB, 32 * KIB):
                shape = dict(grid=size, cluster=size, block=32, dynamic_shared=whole)
                clocks = bench.clocks(built, trips, memory, 64 * KIB, whole, **shape)
                fault = ones(bench) if name == "to all" else ""
                called = f"cluster of {size}, barrier, {whole // size} each {name}"
                bench.each(called, clocks, trips, built.fault, fault)
        built = bench.build(multicasts(size), {"UBLKCP": 1})
        ctas = min(bench.sms // size * size, 120 if size == 4 else 132)     # what an H200 runs at once
        for stage in (4 * KIB, 8 * KIB, 16 * KIB):
            times, shape = bench.trips(64), dict(grid=ctas, cluster=size, block=64, dynamic_shared=ONE_CTA)
            clocks = bench.clocks(built, times, memory, L2, stage, **shape)
            name = f"multicast in clusters of {size}, {stage} a stage, {STAGES} stages, all SMs: received"
            bench.rate(name, times * STAGES * stage, clocks, built.fault)


def sends(bench: Bench) -> None:
    """Shared memory of one CTA to that of its neighbour: there and an arrival back; and one behind the other."""
    trips = bench.trips(TRIPS)
    begins = f"""{BEGINS}
  u32 rank = cluster_rank();
  if (threadIdx.x == 0) {{
    init(bar, rank == 0 ? COUNT : 1);
    for (u32 s = 1; s < {STAGES}; ++s) init(bar + 8 * s, 1);
    fence_init();
  }}
  for (u32 i = threadIdx.x; i < FILLED / 4; i += 32) ((u32*)smem)[i] = 1;
  fence_async(); cluster_sync();
  u32 there = remote(begin, rank ^ 1), there_bar = remote(bar, rank ^ 1);"""
    ends = f"cluster_sync(); {SHOW}"
    body = """if (rank == 0 && threadIdx.x == 0) {
        expect(bar, 0);
        send(there, begin, bytes, there_bar);
        wait_cluster(bar, step++ & 1);
      } else if (threadIdx.x == 0) {
        expect(bar, bytes);
        wait_cluster(bar, step++ & 1);
        arrive_remote(there_bar);
      }"""
    text = loop(body, begins.replace("COUNT", "2").replace("FILLED", "bytes"), "u32 bytes", ends)
    built = bench.build(text, {"UBLKCP": 1})
    for size in SIZES[1:]:
        clocks = bench.clocks(built, trips, size, grid=2, cluster=2, block=32, dynamic_shared=size)
        bench.each(f"{size} to a neighbour, and an arrival back", clocks, trips, built.fault, ones(bench))
    body = f"""if (rank == 0 && threadIdx.x == 0) {{
        #pragma unroll
        for (u32 s = 0; s < {STAGES}; ++s, ++step) {{
          if (step >= {STAGES}) wait_cluster(bar + 8 * s, (step / {STAGES} - 1) & 1);
          send(there + s * bytes, begin + s * bytes, bytes, there_bar + 8 * s);
        }}
      }} else if (threadIdx.x == 0) {{
        #pragma unroll
        for (u32 s = 0; s < {STAGES}; ++s, ++step) {{
          expect(bar + 8 * s, bytes);
          wait_cluster(bar + 8 * s, step / {STAGES} & 1);
          arrive_remote(there_bar + 8 * s);
        }}
      }}"""
    drain = f"""if (rank == 0 && threadIdx.x == 0)
      for (u32 s = 0; s < {STAGES}; ++s) wait_cluster(bar + 8 * s, (step / {STAGES} - 1) & 1);
    cluster_sync();"""
    text = loop(body, begins.replace("COUNT", "1").replace("FILLED", f"({STAGES} * bytes)"), "u32 bytes", ends, drain)
    built = bench.build(text, {"UBLKCP": STAGES})
    for size in (KIB, 4 * KIB, 16 * KIB):
        for where, pairs in (("one pair", 1), ("every pair", bench.sms // 2)):
            times, shape = bench.trips(64), dict(grid=2 * pairs, cluster=2, block=32, dynamic_shared=ONE_CTA)
            clocks = bench.clocks(built, times, size, **shape)
            bench.rate(f"sends of {size}, {STAGES} in flight, {where}", times * STAGES * size, clocks, built.fault)


def prefetches(bench: Bench, memory: Tensor) -> None:
    """A load of what was prefetched to L2 some time before, beside one of what was not."""
    if not bench.gpu:
        return
    for name, ahead in (("no prefetch", 0), ("a prefetch 4,000 clocks before", 1)):
        fetch = frame.asm("cp.async.bulk.prefetch.L2.global [%0], %1;", "", '"l"(from), "r"(bytes)') if ahead else ""
        body = f"""if (threadIdx.x == 0) {{
        const char* from = {NEXT};
        {fetch}
        for (u64 until = clocks() + 4000; clocks() < until;) {{}}
        u64 began = clocks();
        expect(bar, bytes);
        load_bulk(begin, from, bytes, bar);
        wait(bar, step++ & 1);
        all += clocks() - began;
      }}"""
        built = bench.build(loop(body, f"{INIT} u64 all = 0;", ends="note(spans, 0, all);"), {"UBLKCP": 1})
        for size in (KIB, 16 * KIB):
            bench.flush()
            shape, trips = dict(block=32, dynamic_shared=size, runs=1), 32
            places = [fresh(memory, n) for n in range(bench.runs)]
            clocks = [bench.clocks(built, trips, place, 64 * MIB, size, **shape)[0] for place in places]
            bench.each(f"bulk load of {size} after {name}", clocks, trips + frame.WARM, built.fault)


def measure(bench: Bench) -> None:
    memory = bench.zeros((HBM if bench.gpu else MIB) // 4)
    memory.fill_(1)
    loads(bench, memory)
    boxes(bench, memory)
    clusters(bench, memory)
    sends(bench)
    prefetches(bench, memory)
    stores(bench, memory)
