"""Group 9: the clock under load. Kernels of some twenty milliseconds follow each other; each CTA reads its SM's clock
and the nanoseconds that all SMs share, at its start and its end."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import frame, mma, wgmma
from .bench import Bench, Built
from .memory import HBM, MIB, ONE_CTA

SECONDS, LAUNCH = 0.6, 40_000_000            # seconds of each load; about the clocks of a launch
SPIN, READ = "nothing but a spin", "reading HBM on every SM"
SCRAMBLED = """INLINE u32 scrambled(u32 n) {                // two bf16 between 1 and 2, of either sign
  n *= 0x9E3779B1u; n ^= n >> 15; n *= 0x85EBCA77u; n ^= n >> 13;
  return (n & 0x807F807Fu) | 0x3F803F80u;
}
"""


class Load(NamedTuple):
    text: str
    threads: int
    clocks: float                            # about the clocks of a trip


def running(work: str, threads: int, clocks: float, setup: str = "", finish: str = "") -> Load:
    """`work` so many times; notes nanoseconds and clocks. (All warps of a warpgroup go through as many trips.)"""
    body = f"""
  {setup}
  sync_all();
  u64 start = clocks(), began = nanoseconds();
  #pragma unroll 1
  for (u32 i = 0; i < n; ++i) {{
{work}
  }}
  u64 ended = nanoseconds();
  note(spans, ended - began, clocks() - start);
  {f"if (blockIdx.x == 0) {{ {finish} }}" if finish else ""}
"""
    return Load(frame.kernel(body, "u32 n, const Four* memory, u64 count", threads, SCRAMBLED), threads, clocks)


def loads(bench: Bench) -> dict[str, Load]:
    floats = f"float {', '.join(f'x{n} = threadIdx.x * 1.1f + {n}' for n in range(8))}, b = 1.0001f, c = 0.31f;"
    fma = [f'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x{n % 8}) : "f"(b), "f"(c));' for n in range(512)]
    total = f"out[threadIdx.x] = __float_as_uint({' + '.join(f'x{n}' for n in range(8))});"
    names = [f"d{chain}_{n}" for chain in range(4) for n in range(4)]
    operands = ", ".join(f"{'ab'[n // 4]}{n % 4} = scrambled(threadIdx.x * 8 + {n})" for n in range(8))
    random = f"u32 {', '.join(f'{d} = 0' for d in names)}, {operands};"
    mixed = f"out[threadIdx.x] = {' ^ '.join(names)};"
    products = [mma.line(mma.SHAPES[0], f"d{n % 4}_", "a") for n in range(128)]
    read = """const Four* p = memory + ((u64)(i * gridDim.x + blockIdx.x) * 8192 & (count - 1)) + threadIdx.x;
    #pragma unroll
    for (int n = 0; n < 8; ++n) { Four x = load(p + n * 1024); all += x.x + x.y + x.z + x.w; }"""
    by_name = {
        SPIN: running("asm volatile(\"nanosleep.u32 500;\");", 32, 1000),
        "FMA on every SM": running("\n".join(fma), 512, 2048, floats, total),
        "mma.sync on every SM, random operands": running("\n".join(products), 512, 3300, random, mixed),
    }
    if bench.hopper:
        one = wgmma.Wgmma(128)
        work = wgmma.group(one, 16) + wgmma.waiting(0)
        some = "out[threadIdx.x] = __float_as_uint(d[0] + d[17]);"
        for name, fill in (("random operands", "scrambled(i)"), ("ones", "")):
            setup = wgmma.setup(one, fill=fill)
            by_name[f"wgmma on every SM, {name}"] = running(work, 256, 2100, setup, some)
    by_name[READ] = running(read, 1024, 7700, "u32 all = 0;", "out[threadIdx.x] = all;")
    return by_name


def power() -> float | None:
    """Return watts, where NVIDIA's management library for Python is installed."""
    try:
        return torch.cuda.power_draw() / 1e3
    except Exception:                        # the package may be missing, the driver may refuse
        return None


def loaded(bench: Bench, built: Built, load: Load, memory: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the megahertz of each launch, and watts while they ran."""
    megahertz, watts, trips = [], [], bench.trips(int(LAUNCH / load.clocks))
    for _ in range(int(SECONDS * 2e9 / LAUNCH) if bench.gpu else 1):
        spans = bench.zeros(bench.sms * load.threads // 32 * 2, torch.int64)
        shape = dict(grid=bench.sms, block=load.threads, dynamic_shared=ONE_CTA)
        bench.launch(built, spans, bench.out, trips, memory, memory.numel() // 4, **shape)
        if (drawn := power()) is not None:
            watts.append(drawn)
        noted = spans.cpu().view(-1, 2).double()
        megahertz.append((1e3 * noted[:, 1] / noted[:, 0].clamp(min=1)).mean().item())
    return megahertz, watts


def events(bench: Bench, built: Built, load: Load, memory: torch.Tensor) -> None:
    """Nanoseconds in the kernel beside the events around it."""
    ratios = []
    for _ in range(bench.runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spans = bench.zeros(2, torch.int64)
        begin.record()
        bench.launch(built, spans, bench.out, int(LAUNCH / 4 / load.clocks), memory, 1, block=32)
        end.record()
        end.synchronize()
        ratios.append(1e6 * begin.elapsed_time(end) / spans[0].item())
    fault = bench.unlikely("events and %globaltimer disagree", min(ratios) > 0.99 and max(ratios) < 1.05)
    bench.figure("events over %globaltimer, 5 ms", ratios, "1", built.fault, fault)


def resolution(bench: Bench) -> None:
    body = """u64 last = nanoseconds(), least = ~0ull;
  for (int i = 0; i < 4000; ++i) {
    u64 t = nanoseconds();
    if (t != last && t - last < least) least = t - last;
    last = t;
  }
  note(spans, 0, least);"""
    built = bench.build(frame.kernel(body, threads=32))
    bench.figure("step of %globaltimer", bench.clocks(built), "ns", built.fault)


def measure(bench: Bench) -> None:
    memory = bench.zeros((HBM if bench.gpu else MIB) // 4)
    memory.random_()
    for name, load in loads(bench).items():
        built = bench.build(load.text)
        megahertz, watts = loaded(bench, built, load, memory)
        bench.figure(f"clock, {name}", megahertz[len(megahertz) // 4 :], "MHz", built.fault)
        if watts:
            bench.figure(f"power, {name}", watts[len(watts) // 4 :], "W")
        if name == SPIN and bench.gpu:
            events(bench, built, load, memory)
    resolution(bench)
