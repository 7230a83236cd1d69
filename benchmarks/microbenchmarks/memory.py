"""Group 6: global memory. Latency by a chase, alone and while other SMs read; bytes a clock by SMs, warps and loads in
flight; L2 by distance and by readers of one line; stores, reductions, cp.async, and spills."""

from __future__ import annotations

import torch

from . import frame
from .bench import Bench

UNROLLED, TRIPS, LINE = 64, 32, 128
MIB = 1 << 20
RATE = "bytes per clock and SM"
ONE_CTA = 200 * 1024                         # dynamic shared memory that leaves an SM to one CTA
L2, HBM = 16 * MIB, 4096 * MIB               # regions that are read
NEAR = 512                                   # lines whose distance is measured
CHASE = '      asm volatile("ld.global.{}.u64 %0, [%0];" : "+l"(at) :: "memory");\n'


def ring(bench: Bench, size: int, stride: int) -> torch.Tensor:
    """Every `stride` bytes a word holds the address of another such word, all of them in one random ring."""
    count = size // stride if bench.way == "gpu" else 8
    memory = bench.zeros(count * stride // 8, torch.int64)
    order = torch.randperm(count, device=bench.device)
    memory[order * (stride // 8)] = memory.data_ptr() + order.roll(-1) * stride
    return memory


def chased(bench: Bench) -> None:
    finish = "out[0] = (u32)at; out[1] = (u32)(at >> 32);"
    built = {
        how: bench.build(
            frame.loop(CHASE.format(how) * UNROLLED, "u64 at = first;", finish, "u64 first, const void* memory", threads=32),
            {"LDG": UNROLLED},
        )
        for how in ("ca", "cg")
    }
    trips = bench.trips(TRIPS)
    for name, how, size, stride, cold in (
        ("L1 hit", "ca", 8192, LINE, False),
        ("L2 hit in 1 MiB", "cg", MIB, LINE, False), ("L2 hit in 8 MiB", "cg", 8 * MIB, LINE, False),
        ("L2 hit in 24 MiB", "cg", 24 * MIB, LINE, False), ("L2 hit through L1, 1 MiB", "ca", MIB, LINE, False),
        ("HBM in 256 MiB", "cg", 256 * MIB, 4096, True), ("HBM in 4 GiB", "cg", 4096 * MIB, 16384, True),
    ):  # fmt: skip
        memory, found = ring(bench, size, stride), []
        if cold:
            bench.flush()
        at = memory.data_ptr()
        for _ in range(bench.runs):
            found += bench.clocks(built[how], trips, at, memory, block=1, runs=1)
            low, high = bench.results(2)
            at = low | high << 32 if bench.way == "gpu" else at
        inside = memory.data_ptr() <= at < memory.data_ptr() + memory.numel() * 8
        fault = bench.wrong("the chase left its ring", inside)
        bench.figure(f"{name}: latency", [c / (trips * UNROLLED) for c in found], "clocks", built[how].fault, fault)


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
{CHASE.format("cg") * 16}
      at += {8 * MIB // NEAR};
      if (at >= first + {8 * MIB}) at -= {8 * MIB};
    }}
    out[0] = (u32)at;
    note(spans, 0, 1);
  }}
"""
    built = bench.build(frame.kernel(body, "u64 first, u32* times, u32 target, int lines, const void* memory", 32), {"LDG": 16})
    lines = NEAR if bench.way == "gpu" else 4
    memory = bench.zeros(8 * MIB // 8, torch.int64)
    memory.copy_(torch.arange(memory.numel(), device=bench.device) * 8 + memory.data_ptr())
    parts: dict[str, list[float]] = {"nearest tenth": [], "median": [], "farthest tenth": []}
    for run in range(bench.runs):
        times = bench.zeros(NEAR)
        target = run * (bench.sms // max(bench.runs, 1)) if bench.way == "gpu" else 0
        bench.spans(built, memory.data_ptr(), times, target, lines, memory, grid=bench.sms, block=1, runs=1)
        each = (times[: lines - 1].sort().values / 16).tolist()
        for name, share in zip(parts, (0.05, 0.5, 0.95)):
            parts[name].append(each[int(share * len(each))])
    for name, values in parts.items():
        bench.figure(f"L2 lines from one SM, {name}", values, "clocks", built.fault)


# ------------------------------------------------------------------------------------------------------- bytes a clock


def stream_source(kind: str, unrolled: int) -> str:
    """Each trip a CTA goes over its next blockDim x unrolled x 16 bytes; `same` CTAs go over the same ones."""
    lines = []
    for n in range(unrolled):
        place = f"p + {n} * blockDim.x"
        if kind == "write":
            lines.append(f'asm volatile("st.global.v4.b32 [%0], {{%1, %1, %1, %1}};" :: "l"({place}), "r"(one) : "memory");')
        elif kind == "red":
            lines.append(f'asm volatile("red.global.add.f32 [%0], %1;" :: "l"((u32*)({place}) ), "r"(zero) : "memory");')
        elif kind == "red.v4":
            lines.append(f'asm volatile("red.global.add.v4.f32 [%0], {{%1, %1, %1, %1}};" :: "l"({place}), "r"(zero) : "memory");')
        else:
            how = "ca" if kind == "L1" else "cg"
            lines.append(f'u32 a{n}, b{n}, c{n}, d{n}; asm volatile("ld.global.{how}.v4.b32 {{%0, %1, %2, %3}}, [%4];" '
                         f': "=r"(a{n}), "=r"(b{n}), "=r"(c{n}), "=r"(d{n}) : "l"({place}) : "memory");')  # fmt: skip
    if kind in ("read", "L1"):
        lines += [f"all += a{n} + b{n} + c{n} + d{n};" for n in range(unrolled)]
    elif kind == "copy":
        lines += [f'asm volatile("st.global.v4.b32 [%0], {{%1, %2, %3, %4}};" :: "l"({f"p + {n} * blockDim.x"} + half), "r"(a{n}), '
                  f'"r"(b{n}), "r"(c{n}), "r"(d{n}) : "memory");' for n in range(unrolled)]  # fmt: skip
    step = "(trip * (gridDim.x / same) + blockIdx.x / same)" if kind != "L1" else "trip"
    inner = "\n      ".join(lines)
    return frame.loop(
        f"""      const uint4_* p = memory + (u64)({step} * blockDim.x * {unrolled}) % count + threadIdx.x;
      ++trip;
      {inner}""",
        "u64 trip = 0, half = count; u32 all = 0, zero = out[4096], one = 1 + zero;",
        "out[threadIdx.x] = all + zero;",
        "uint4_* memory, u64 count, int same",
        outside="struct alignas(16) uint4_ { u32 x, y, z, w; };",
    )


def streams(bench: Bench) -> None:
    gpu = bench.way == "gpu"
    size = HBM if gpu else MIB
    memory = bench.zeros(size // 4)
    memory.fill_(1)
    sms = bench.sms
    everyone = [1, 2, 4, 8, 16, 33, 66, 99, 132, sms]
    counts = sorted({n for n in everyone if n <= sms})

    def rate(name: str, kind: str, region: int, ctas: int, warps: int, unrolled: int, same: int = 1, total: bool = False) -> None:
        sass = {"read": "LDG", "L1": "LDG", "write": "STG", "copy": "LDG", "red": "RED|REDG", "red.v4": "RED|REDG"}[kind]
        text = stream_source(kind, unrolled)
        width = 4 if kind == "red" else 16
        moved = 32 * warps * unrolled * width * (2 if kind == "copy" else 1)     # of a CTA and trip
        region = min(region, size // 2 if kind == "copy" else size)
        wanted = 8 * MIB if kind in ("read", "copy", "write") and region > L2 else 2 * MIB
        trips = bench.trips(max(wanted // moved, 4))
        args, shape = (trips, memory, region // 16, same), dict(grid=ctas, block=32 * warps, dynamic_shared=1024 if kind == "L1" else ONE_CTA)
        built = bench.build(text, {sass: unrolled})
        bench.spans(built, *args, runs=1, **shape)
        shape["cold"] = region > L2
        clocks = bench.clocks(built, *args, **shape)
        found, ends = bench.results(1)[0], 4 * unrolled * (trips + frame.WARM) if kind in ("read", "L1") else 0
        fault = bench.wrong(f"the sum is {found}, not {ends}", found == ends)
        bench.figure(name, [moved * trips / c for c in clocks], RATE, built.fault, fault)
        if total:
            built = bench.build(text, {sass: unrolled}, NANOSECONDS=1)
            took = bench.nanoseconds(built, *args, **shape)
            bench.figure(f"{name}, of all", [moved * trips * ctas / ns / 1e3 for ns in took], "TB/s", built.fault)

    rate("L1 hits, LDG.128", "L1", 32 * 1024, 1, 32, 1)
    for ctas in counts:
        rate(f"L2 hits, {ctas} SMs", "read", L2, ctas, 32, 8, total=ctas == sms)
    for same in (n for n in (2, 4, 16, sms) if n <= sms):
        rate(f"L2 hits, each line read by {same} SMs", "read", L2, sms // same * same, 32, 8, same)
    for ctas in counts:
        rate(f"HBM, {ctas} SMs", "read", HBM, ctas, 32, 8, total=ctas >= 33)
    for warps, unrolled in ((1, 1), (1, 4), (1, 8), (4, 4), (8, 4), (16, 4), (32, 1), (32, 4)):
        rate(f"L2 hits, one SM, {warps} warps of {unrolled} LDG.128", "read", L2, 1, warps, unrolled)
        if warps * unrolled >= 16:
            rate(f"HBM, all SMs, {warps} warps of {unrolled} LDG.128", "read", HBM, sms, warps, unrolled, total=True)
    for ctas in (1, sms):
        rate(f"stores to L2, {ctas} SMs", "write", 4 * MIB, ctas, 32, 8)
        rate(f"red.add.f32, {ctas} SMs", "red", 4 * MIB, ctas, 32, 8)
    rate("red.add.v4.f32, all SMs", "red.v4", 4 * MIB, sms, 32, 8)
    memory.fill_(1)
    rate("stores to HBM", "write", HBM, sms, 32, 8, total=True)
    rate("copy in HBM, bytes read and written", "copy", HBM // 2, sms, 32, 4, total=True)


# --------------------------------------------------------------------------------------------- latency against load


def loaded(bench: Bench) -> None:
    """CTA 0 chases; CTAs 1 to `busy` read as much as they can."""
    body = f"""
  u64 until = now() + window, start = now(), end = start;
  if (blockIdx.x == 0) {{
    u64 at = first, steps = 0;
    if (threadIdx.x == 0) {{
      while (now() < start + window / 4) {{}}
      start = now();
      #pragma unroll 1
      for (; end < until; end = now(), steps += 16) {{
{CHASE.format("cg") * 16}
      }}
      out[0] = (u32)at; out[1] = (u32)(at >> 32);
    }}
    note(spans, steps, end - start);
  }} else if (blockIdx.x <= busy) {{
    u32 all = 0;
    u64 trip = begin;
    #pragma unroll 1
    for (; end < until; end = now(), ++trip) {{
      const uint4_* p = memory + (u64)((trip * busy + blockIdx.x - 1) * blockDim.x * 8) % count + threadIdx.x;
      #pragma unroll
      for (int n = 0; n < 8; ++n) {{
        u32 a, b, c, d;
        asm volatile("ld.global.cg.v4.b32 {{%0, %1, %2, %3}}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(p + n * blockDim.x) : "memory");
        all += a + b + c + d;
      }}
    }}
    note(spans, (trip - begin) * 8 * 512, end - start);
    out[64 + threadIdx.x] = all;
  }}
"""
    params = "u64 window, u64 first, u64 begin, u32 busy, const uint4_* memory, u64 count, const void* chased"
    built = bench.build(frame.kernel(body, params, outside="struct alignas(16) uint4_ { u32 x, y, z, w; };"), {"LDG": 24})
    gpu = bench.way == "gpu"
    memory, window = bench.zeros((HBM if gpu else MIB) // 4), bench.trips(200_000, 1000)
    for name, size, stride, region in (("L2", 8 * MIB, LINE, L2), ("HBM", 1024 * MIB, 4096, HBM)):
        chain = ring(bench, size, stride)
        at = chain.data_ptr()
        begin = 0
        if name == "HBM":
            bench.flush()
        for busy in (0, 8, 16, 32, 64, 96, bench.sms - 1) if gpu else (0, bench.sms - 1):
            waits, moved = [], []
            for _ in range(bench.runs):
                shape = dict(grid=bench.sms, block=1024, dynamic_shared=ONE_CTA, runs=1)
                begin = begin + 3500 // max(busy, 1)                         # no launch reads what the one before it read
                (spans,) = bench.spans(built, window, at, begin, busy, memory, min(region, memory.numel() * 4) // 16, chain, **shape)
                low, high = bench.results(2)
                at = low | high << 32 if gpu else at
                steps, took = spans[0, 0].tolist()
                waits.append(took / max(steps, 1))
                others = spans[1 : busy + 1].double()
                moved.append((others[:, :, 0].sum(1) / others[:, :, 1].amax(1).clamp(min=1)).mean().item() if busy else 0.0)
            bench.figure(f"{name} latency, {busy} SMs reading", waits, "clocks", built.fault)
            if busy:
                bench.figure(f"{name}, what {busy} SMs read meanwhile", moved, RATE, built.fault)


# -------------------------------------------------------------------------------------------------- cp.async, spills


def copied(bench: Bench) -> None:
    memory = bench.zeros(L2 // 4)
    copy = 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + {}), "l"(from + {}) : "memory");'
    commit = 'asm volatile("cp.async.commit_group;" ::: "memory");'

    def source(count: int, left: int) -> str:
        waits = f'asm volatile("cp.async.wait_group {left};" ::: "memory");'
        lines = [copy.format(f"{n} * 16 * blockDim.x", f"{n} * 16 * blockDim.x") for n in range(count)]
        body = f"const char* from = memory + ((trip++ * gridDim.x + blockIdx.x) * {16 * count} * blockDim.x) % size + 16 * threadIdx.x;\n"
        return frame.loop(body + "\n".join([*lines, commit, waits]), "u64 trip = 0; u32 to = address(smem) + 16 * threadIdx.x;",
                          'asm volatile("cp.async.wait_all;" ::: "memory"); sync_all(); out[threadIdx.x] = smem[threadIdx.x];',
                          "const char* memory, u64 size")  # fmt: skip

    trips = bench.trips(256)
    built = bench.build(source(1, 0), {"LDGSTS": 1})
    clocks = bench.clocks(built, trips, memory, 64 * 1024, block=32, dynamic_shared=512)
    bench.figure("cp.async of 16 bytes and its wait, L2 hit", [c / trips for c in clocks], "clocks", built.fault)
    built = bench.build(source(4, 2), {"LDGSTS": 4})
    for ctas in (1, bench.sms):
        for warps in (4, 8, 32):
            shape = dict(grid=ctas, block=32 * warps, dynamic_shared=max(ONE_CTA, 4 * 512 * warps))
            clocks = bench.clocks(built, trips, memory, L2, **shape)
            name = f"cp.async, L2 hits, {ctas} SMs, {warps} warps of 3 x 4"
            bench.figure(name, [4 * 512 * warps * trips / c for c in clocks], RATE, built.fault)


def spilled(bench: Bench) -> None:
    """Words of local memory, stored and loaded again as a compiler spills them."""
    line = '      asm volatile("st.local.b32 [%1], %0; ld.local.b32 %0, [%2];" : "+r"(x) : "l"(at), "l"(same) : "memory");\n'
    setup = """u32 kept[64]; kept[zero & 63] = 0; u32 x = threadIdx.x; u64 at, same;
  asm volatile("cvta.to.local.u64 %0, %1;" : "=l"(at) : "l"(kept));
  same = at + zero;"""
    trips = bench.trips(TRIPS)
    built = bench.build(frame.loop(line * UNROLLED, setup, "out[threadIdx.x] = x;", "u32 zero", threads=512),
                        {"STL": UNROLLED, "LDL": UNROLLED})  # fmt: skip
    clocks = bench.clocks(built, trips, 0, block=32)
    fault = bench.wrong("a spilled word changed", bench.results(32) == list(range(32)))
    bench.figure("spill and reload: latency", [c / (trips * UNROLLED) for c in clocks], "clocks", built.fault, fault)
    for kind, sass, text in (("stores", "STL", 'asm volatile("st.local.b32 [%1], %0;" :: "r"(x), "l"(at + {}) : "memory");'),
                             ("reloads", "LDL", 'asm volatile("ld.local.b32 %0, [%1];" : "=r"(y{}) : "l"(at + {}) : "memory");')):  # fmt: skip
        if kind == "stores":
            lines = "\n".join(text.format(4 * n) for n in range(UNROLLED))
        else:
            lines = f"u32 {', '.join(f'y{n}' for n in range(UNROLLED))};\n"
            lines += "\n".join(text.format(n, 4 * n) for n in range(UNROLLED)) + "\nx ^= " + " ^ ".join(f"y{n}" for n in range(UNROLLED)) + ";"
        filled = setup + "\n  #pragma unroll 1\n  for (u32 n = 0; n < 64; ++n) kept[n ^ zero] = 0;"
        built = bench.build(frame.loop(lines, filled, "out[threadIdx.x] = x + kept[zero];", "u32 zero", threads=512), {sass: UNROLLED})
        for warps in (4, 16):
            clocks = bench.clocks(built, trips, 0, block=32 * warps)
            bench.figure(f"spill {kind}, {warps} warps", [c / (trips * UNROLLED * warps) for c in clocks], "clocks of an SM", built.fault)


def measure(bench: Bench) -> None:
    chased(bench)
    distances(bench)
    loaded(bench)
    copied(bench)
    spilled(bench)
    streams(bench)
