"""Group 6: global memory. Latency by a chase, alone and while other SMs read; bytes a clock by SMs, warps and loads in
flight; L2 by distance and by readers of one line; stores, reductions, cp.async, and spills."""

from __future__ import annotations

import torch

from . import frame
from .bench import Bench

UNROLLED, TRIPS, LINE = 64, 32, 128
MIB = 1 << 20
ONE_CTA = 200 * 1024                         # dynamic shared memory that leaves an SM to one CTA
L2, HBM = 16 * MIB, 4096 * MIB               # regions that are read: powers of two, so that places wrap by a mask
NEAR = 512                                   # lines whose distance is measured
SM = "clocks of an SM"


def chase(how: str, count: int) -> str:
    return "\n".join([frame.asm(f"ld.global.{how}.u64 %0, [%0];", '"+l"(at)')] * count)


def ring(bench: Bench, size: int, stride: int) -> torch.Tensor:
    """Every `stride` bytes a word holds the address of another such word, all of them in one random ring."""
    count = size // stride if bench.gpu else 8
    memory = bench.zeros(count * stride // 8, torch.int64)
    order = torch.randperm(count, device=bench.device)
    memory[order * (stride // 8)] = memory.data_ptr() + order.roll(-1) * stride
    return memory


def chased(bench: Bench) -> None:
    finish, params = "out[0] = (u32)at; out[1] = (u32)(at >> 32);", "u64 first, const void* memory"
    built, trips = {}, bench.trips(TRIPS)
    for how in ("ca", "cg"):
        text = frame.loop(chase(how, UNROLLED), "u64 at = first;", finish, params, threads=32)
        built[how] = bench.build(text, {"LDG": UNROLLED})
    for name, how, size, stride in (
        ("L1 hit", "ca", 8192, LINE), ("L2 hit in 1 MiB", "cg", MIB, LINE), ("L2 hit in 8 MiB", "cg", 8 * MIB, LINE),
        ("L2 hit in 24 MiB", "cg", 24 * MIB, LINE), ("L2 hit through L1, 1 MiB", "ca", MIB, LINE),
        ("HBM in 256 MiB", "cg", 256 * MIB, 4096), ("HBM in 4 GiB", "cg", 4096 * MIB, 16384),
    ):
        memory, clocks = ring(bench, size, stride), []
        if "HBM" in name:
            bench.flush()
        elif bench.gpu:
            memory.sum()                     # into L2, wherever the writes have left it
        address = memory.data_ptr()
        for _ in range(bench.runs):
            clocks += bench.clocks(built[how], trips, address, memory, block=1, runs=1)
            low, high = bench.results(2)
            address = low | high << 32 if bench.gpu else address
        inside = memory.data_ptr() <= address < memory.data_ptr() + memory.numel() * 8
        fault = bench.wrong("the chase left its ring", inside)
        bench.each(f"{name}: latency", clocks, trips * UNROLLED, built[how].fault, fault)


def distances(bench: Bench) -> None:
    """Lines of 8 MiB as one SM sees them: sixteen loads of each, one after the other; each run is on another SM."""
    body = f"""
  if (smid() == target) {{
    u64 at = first, from = 0;
    #pragma unroll 1
    for (int line = 0; line < 2 * lines; ++line) {{
      u64 start = now();
      if (line > lines) times[line - lines - 1] = (u32)(start - from);
      from = start;
{chase("cg", 16)}
      at += {8 * MIB // NEAR};
      if (at >= first + {8 * MIB}) at -= {8 * MIB};
    }}
    out[0] = (u32)at;
    note(spans, 0, 1);
  }}
"""
    params = "u64 first, u32* times, u32 target, int lines, const void* memory"
    built, lines = bench.build(frame.kernel(body, params, 32), {"LDG": 16}), bench.trips(NEAR, 4)
    memory = bench.zeros(8 * MIB // 8, torch.int64)
    memory.copy_(torch.arange(memory.numel(), device=bench.device) * 8 + memory.data_ptr())
    parts: dict[str, list[float]] = {"nearest tenth": [], "median": [], "farthest tenth": []}
    for run in range(bench.runs):
        times, target = bench.zeros(NEAR), run * (bench.sms // bench.runs) if bench.gpu else 0
        args = memory.data_ptr(), times, target, lines, memory
        bench.spans(built, *args, grid=bench.sms, block=1, runs=1)
        each = (times[: lines - 1].sort().values / 16).tolist()
        for name, share in zip(parts, (0.05, 0.5, 0.95)):
            parts[name].append(each[int(share * len(each))])
    for name, values in parts.items():
        bench.figure(f"L2 lines from one SM, {name}", values, "clocks", built.fault)


# ------------------------------------------------------------------------------------------------------- bytes a clock


SASS = {"read": "LDG", "L1": "LDG", "write": "STG", "copy": "LDG", "red": "RED|REDG", "red.v4": "RED|REDG"}


def stream_source(kind: str, unrolled: int) -> str:
    """Each trip a CTA goes over its next blockDim x unrolled x 16 bytes; `same` CTAs go over the same ones."""
    first, second = [], []
    for n in range(unrolled):
        address = f'"l"(p + {n} * blockDim.x)'
        if kind == "write":
            first.append(frame.asm("st.global.v4.b32 [%0], {%1, %1, %1, %1};", "", f'{address}, "r"(one)'))
        elif kind == "red":
            first.append(frame.asm("red.global.add.f32 [%0], %1;", "", f'{address}, "r"(zero)'))
        elif kind == "red.v4":
            first.append(frame.asm("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};", "", f'{address}, "r"(zero)'))
        elif kind == "L1":
            outs = frame.registers("=r", [f"a{n}.{w}" for w in "xyzw"])
            first.append(f"Four a{n};\n" + frame.asm("ld.global.ca.v4.b32 {%0, %1, %2, %3}, [%4];", outs, address))
        else:
            first.append(f"      Four a{n} = load(p + {n} * blockDim.x);")
        if kind in ("read", "L1"):
            second.append(f"      all += a{n}.x + a{n}.y + a{n}.z + a{n}.w;")
        elif kind == "copy":
            second.append(f"      p[{n} * blockDim.x + half] = a{n};")
    step = "trip" if kind == "L1" else "(trip * (gridDim.x / same) + blockIdx.x / same)"
    place = f"((u64){step} * blockDim.x * {unrolled} & (count - 1))"
    start = f"      Four* p = memory + {place} + threadIdx.x;\n      ++trip;"
    return frame.loop(
        "\n".join([start, *first, *second]),
        "u32 trip = 0, all = 0, zero = out[4096], one = 1 + zero; u64 half = count;",
        "out[threadIdx.x] = all + zero;",
        "Four* memory, u64 count, u32 same",
    )


class Streams:
    """Reads, writes and copies of a large tensor of ones."""

    def __init__(self, bench: Bench):
        self.bench, self.size = bench, HBM if bench.gpu else MIB
        self.memory = bench.zeros(self.size // 4)
        self.memory.fill_(1)

    def rate(self, name: str, kind: str, region: int, ctas: int, warps: int, unrolled: int, same: int = 1,
             total: bool = False) -> None:
        """`total`: also what all SMs move together, by the clock that they share."""
        bench, text = self.bench, stream_source(kind, unrolled)
        width = 4 if kind == "red" else 16
        moved = 32 * warps * unrolled * width * (2 if kind == "copy" else 1)             # by a CTA in a trip
        region = min(region, self.size // 2 if kind == "copy" else self.size)
        trips = bench.trips(max((8 if region > L2 else 2) * MIB // moved, 4))
        args = trips, self.memory, region // 16, same
        shape = dict(grid=ctas, block=32 * warps, dynamic_shared=1024 if kind == "L1" else ONE_CTA)
        built = bench.build(text, {SASS[kind]: unrolled})
        bench.spans(built, *args, runs=1, **shape)
        shape["cold"] = region > L2
        clocks = bench.clocks(built, *args, **shape)
        summed, ends = bench.results(1)[0], 4 * unrolled * (trips + frame.WARM) if kind in ("read", "L1") else 0
        fault = bench.wrong(f"the sum is {summed}, not {ends}", summed == ends)
        bench.rate(name, moved * trips, clocks, built.fault, fault)
        if total:
            took = bench.nanoseconds(bench.build(text, NANOSECONDS=1), *args, **shape)
            bench.figure(f"{name}, of all", [moved * trips * ctas / ns / 1e3 for ns in took], "TB/s", fault)


def streams(bench: Bench) -> None:
    sms, some = bench.sms, Streams(bench)
    counts = sorted({n for n in (1, 2, 4, 8, 16, 33, 66, 99, 132, sms) if n <= sms})
    some.rate("L1 hits, LDG.128", "L1", 32 * 1024, 1, 32, 1)
    for ctas in counts:
        some.rate(f"L2 hits, {ctas} SMs", "read", L2, ctas, 32, 8, total=ctas == sms)
    for same in (n for n in (2, 4, 16, sms) if n <= sms):
        some.rate(f"L2 hits, each line read by {same} SMs", "read", L2, sms // same * same, 32, 8, same)
    for ctas in counts:
        some.rate(f"HBM, {ctas} SMs", "read", HBM, ctas, 32, 8, total=ctas >= 33)
    for warps, unrolled in ((1, 1), (1, 4), (1, 8), (4, 4), (8, 4), (16, 4), (32, 1), (32, 4)):
        what = f"{warps} warps of {unrolled} LDG.128"
        some.rate(f"L2 hits, one SM, {what}", "read", L2, 1, warps, unrolled)
        if warps * unrolled >= 16:
            some.rate(f"HBM, all SMs, {what}", "read", HBM, sms, warps, unrolled, total=True)
    for ctas in (1, sms):
        some.rate(f"stores to L2, {ctas} SMs", "write", 4 * MIB, ctas, 32, 8)
        some.rate(f"red.add.f32, {ctas} SMs", "red", 4 * MIB, ctas, 32, 8)
    some.rate("red.add.v4.f32, all SMs", "red.v4", 4 * MIB, sms, 32, 8)
    some.rate("stores to HBM", "write", HBM, sms, 32, 8, total=True)
    some.rate("copy in HBM, bytes read and written", "copy", HBM // 2, sms, 32, 4, total=True)


# --------------------------------------------------------------------------------------------- latency against load


LOADED = f"""
  u64 until = now() + window, start = now(), end = start;
  if (blockIdx.x == 0) {{
    u64 at = first, steps = 0;
    if (threadIdx.x == 0) {{
      while (now() < start + window / 4) {{}}
      start = now();
      #pragma unroll 1
      for (; end < until; end = now(), steps += 16) {{
{chase("cg", 16)}
      }}
      out[0] = (u32)at; out[1] = (u32)(at >> 32);
    }}
    note(spans, steps, end - start);
  }} else if (blockIdx.x <= busy) {{
    u32 all = 0;
    u64 trip = begin;
    #pragma unroll 1
    for (; end < until; end = now(), ++trip) {{
      const Four* p = memory + ((trip * busy + blockIdx.x - 1) * blockDim.x * 8 & (count - 1)) + threadIdx.x;
      Four x[8];
      #pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = load(p + n * blockDim.x);
      #pragma unroll
      for (int n = 0; n < 8; ++n) all += x[n].x + x[n].y + x[n].z + x[n].w;
    }}
    note(spans, (trip - begin) * 8 * 512, end - start);
    out[64 + threadIdx.x] = all;
  }}
"""


def loaded(bench: Bench) -> None:
    """CTA 0 chases; CTAs 1 to `busy` read as much as they can, for `window` clocks."""
    params = "u64 window, u64 first, u64 begin, u32 busy, const Four* memory, u64 count, const void* chased"
    built = bench.build(frame.kernel(LOADED, params), {"LDG": 24})
    memory, window = bench.zeros((HBM if bench.gpu else MIB) // 4), bench.trips(200_000, 1000)
    shape = dict(grid=bench.sms, block=1024, dynamic_shared=ONE_CTA, runs=1)
    for name, size, stride, region in (("L2", 8 * MIB, LINE, L2), ("HBM", 1024 * MIB, 4096, HBM)):
        chain, begin = ring(bench, size, stride), 0
        address, count = chain.data_ptr(), min(region, memory.numel() * 4) // 16
        if name == "HBM":
            bench.flush()
        for busy in (0, 8, 16, 32, 64, 96, bench.sms - 1) if bench.gpu else (0, bench.sms - 1):
            waits, moved = [], []
            for _ in range(bench.runs):
                begin += 3500 // max(busy, 1)                                # no launch reads what the last one read
                (spans,) = bench.spans(built, window, address, begin, busy, memory, count, chain, **shape)
                low, high = bench.results(2)
                address = low | high << 32 if bench.gpu else address
                steps, took = spans[0, 0].tolist()
                waits.append(took / max(steps, 1))
                others = spans[1 : busy + 1].double()
                each = others[:, :, 0].sum(1) / others[:, :, 1].amax(1).clamp(min=1) if busy else torch.zeros(1)
                moved.append(each.mean().item())
            bench.figure(f"{name} latency, {busy} SMs reading", waits, "clocks", built.fault)
            if busy:
                bench.figure(f"{name}, what {busy} SMs read meanwhile", moved, "bytes per clock and SM", built.fault)


# -------------------------------------------------------------------------------------------------- cp.async, spills


def copy_source(count: int, left: int) -> str:
    """Groups of `count` copies of 16 bytes a thread, waited for when no more than `left` groups are on their way."""
    step = f"(trip++ * gridDim.x + blockIdx.x) * {16 * count} * blockDim.x"
    lines = [f"      const char* from = memory + ((u64){step} & (size - 1)) + 16 * threadIdx.x;"]
    for n in range(count):
        addresses = f'"r"(to + {n} * 16 * blockDim.x), "l"(from + {n} * 16 * blockDim.x)'
        lines.append(frame.asm("cp.async.cg.shared.global [%0], [%1], 16;", "", addresses))
    lines += [frame.asm("cp.async.commit_group;"), frame.asm(f"cp.async.wait_group {left};")]
    setup = "u32 trip = 0, to = address(smem) + 16 * threadIdx.x;"
    ends = "sync_all(); out[threadIdx.x] = smem[threadIdx.x];"
    drain = frame.asm("cp.async.wait_all;")
    return frame.loop("\n".join(lines), setup, ends, "const char* memory, u64 size", drain=drain)


def copied(bench: Bench) -> None:
    memory, trips = bench.zeros(L2 // 4), bench.trips(256)
    built = bench.build(copy_source(1, 0), {"LDGSTS": 1})
    clocks = bench.clocks(built, trips, memory, 64 * 1024, block=32, dynamic_shared=512)
    bench.each("cp.async of 16 bytes and its wait, L2 hit", clocks, trips, built.fault)
    built = bench.build(copy_source(4, 2), {"LDGSTS": 4})
    for ctas in (1, 2, 16, bench.sms) if bench.gpu else (1, bench.sms):
        for warps in (4, 8, 32) if ctas in (1, bench.sms) else (32,):
            shape = dict(grid=ctas, block=32 * warps, dynamic_shared=max(ONE_CTA, 4 * 512 * warps))
            clocks = bench.clocks(built, trips, memory, L2, **shape)
            name = f"cp.async, L2 hits, {ctas} SMs, {warps} warps of 3 x 4"
            bench.rate(name, 4 * 512 * warps * trips, clocks, built.fault)


def spilled(bench: Bench) -> None:
    """Words of local memory, stored and loaded again as a compiler spills them."""
    setup = """u32 kept[64], x = threadIdx.x;
  #pragma unroll 1
  for (u32 n = 0; n < 64; ++n) kept[n ^ zero] = 0;
  u64 at, same;
  asm volatile("cvta.to.local.u64 %0, %1;" : "=l"(at) : "l"(kept));
  same = at + zero;"""
    finish, trips = "out[threadIdx.x] = x + kept[zero];", bench.trips(TRIPS)

    def build(lines: list[str], **sass: int):
        return bench.build(frame.loop("\n".join(lines), setup, finish, "u32 zero", threads=512), sass)

    both = frame.asm("st.local.b32 [%1], %0; ld.local.b32 %0, [%2];", '"+r"(x)', '"l"(at), "l"(same)')
    built = build([both] * UNROLLED, STL=UNROLLED, LDL=UNROLLED)
    clocks = bench.clocks(built, trips, 0, block=32)
    fault = bench.wrong("a spilled word changed", bench.results(32) == [2 * n for n in range(32)])
    bench.each("spill and reload: latency", clocks, trips * UNROLLED, built.fault, fault)
    stores = [frame.asm("st.local.b32 [%0], %1;", "", f'"l"(at + {4 * n}), "r"(x)') for n in range(UNROLLED)]
    loads = [f"u32 {', '.join(f'y{n}' for n in range(UNROLLED))}; at += zero;"]
    loads += [frame.asm("ld.local.b32 %0, [%1];", f'"=r"(y{n})', f'"l"(at + {4 * n})') for n in range(UNROLLED)]
    loads += [f"x ^= {' ^ '.join(f'y{n}' for n in range(UNROLLED))};"]
    for kind, built in (("stores", build(stores, STL=UNROLLED)), ("reloads", build(loads, LDL=UNROLLED))):
        for warps in (4, 16):
            clocks = bench.clocks(built, trips, 0, block=32 * warps)
            bench.each(f"spill {kind}, {warps} warps", clocks, trips * UNROLLED * warps, built.fault, unit=SM)


def measure(bench: Bench) -> None:
    chased(bench)
    distances(bench)
    loaded(bench)
    copied(bench)
    spilled(bench)
    streams(bench)
