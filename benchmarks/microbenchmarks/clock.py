"""Group 9: the clock under load. Kernels of some milliseconds follow each other; each CTA reads its SM's clock and the
nanoseconds that all SMs share, at its start and its end."""

from __future__ import annotations

import torch

from . import frame
from .bench import Bench, Built
from .memory import HBM, MIB, ONE_CTA

SECONDS = 0.6                                # of each load
FIRST = "nothing but a spin"


def spinning(work: str, setup: str = "", finish: str = "", params: str = "", threads: int = 1024, outside: str = "") -> str:
    """`work` until so many nanoseconds are over; notes clocks and nanoseconds."""
    return frame.kernel(
        f"""
  {setup}
  u64 start = clocks(), began = nanoseconds(), ended = began;
  #pragma unroll 1
  for (u32 i = 0; ended - began < lasts; ++i, ended = nanoseconds()) {{
{work}
  }}
  u64 end = clocks();
  note(spans, ended - began, end - start);
  {finish}
""",
        "u64 lasts" + (", " + params if params else ""),
        threads,
        outside,
    )


def sources(bench: Bench) -> dict[str, tuple[str, int]]:
    """By name: a kernel and its threads."""
    fma = "\n".join(f'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x{n % 8}) : "f"(b), "f"(c));' for n in range(512))
    floats = f"float {', '.join(f'x{n} = threadIdx.x * 1.1f + {n}' for n in range(8))}, b = 1.0001f, c = 0.31f;"
    total = f"out[threadIdx.x] = __float_as_uint({' + '.join(f'x{n}' for n in range(8))});"
    found = {
        FIRST: (spinning("__nanosleep(1000);"), 32),
        "FMA on every SM": (spinning(fma, floats, total), 512),
    }
    from . import mma

    product = mma.SHAPES[0]
    lines = "\n".join(mma.line(product, f"d{n % 4}_", "a") for n in range(128))
    names = [f"d{chain}_{n}" for chain in range(4) for n in range(4)]
    random = ", ".join(f"{r}{n} = scrambled(threadIdx.x * 8 + {n + 4 * (r == 'b')})" for r in "ab" for n in range(4))
    found["mma.sync on every SM, random operands"] = (
        spinning(lines, f"u32 {', '.join(f'{d} = 0' for d in names)}, {random};", f"out[threadIdx.x] = {' ^ '.join(names)};",
                 threads=512, outside=SCRAMBLED), 512)  # fmt: skip
    if bench.hopper:
        from . import wgmma

        one = wgmma.Product(128)
        for name, fill in (("random operands", "scrambled(i)"), ("ones", "0x3F803F80")):
            setup = wgmma.setup(one).replace("((u32*)smem)[i] = 0x3F803F80;", f"((u32*)smem)[i] = {fill};")
            work = wgmma.group(one, 16) + wgmma.waiting(0)
            found[f"wgmma on every SM, {name}"] = (
                spinning(work, setup, "out[threadIdx.x] = __float_as_uint(d[0] + d[17]);", threads=256, outside=SCRAMBLED), 256)  # fmt: skip
    read = """const uint4_* p = memory + (u64)((i * gridDim.x + blockIdx.x) * 8192ull) % count + threadIdx.x;
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      u32 a, b, c, d;
      asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(p + n * 1024) : "memory");
      all += a + b + c + d;
    }"""
    found["reading HBM on every SM"] = (
        spinning(read, "u32 all = 0;", "out[threadIdx.x] = all;", "const uint4_* memory, u64 count",
                 outside="struct alignas(16) uint4_ { u32 x, y, z, w; };"), 1024)  # fmt: skip
    return found


SCRAMBLED = """INLINE u32 scrambled(u32 n) {                // two bf16 between 1 and 2, of either sign
  n *= 0x9E3779B1u; n ^= n >> 15; n *= 0x85EBCA77u; n ^= n >> 13;
  return (n & 0x807F807Fu) | 0x3F803F80u;
}
"""


def megahertz(spans: torch.Tensor) -> float:
    return (1e3 * spans[:, :, 1].double() / spans[:, :, 0].double().clamp(min=1)).mean().item()


def power() -> float | None:
    """Watts, where NVIDIA's management library for Python is installed."""
    try:
        return torch.cuda.power_draw() / 1e3
    except Exception:                        # the package may be missing, the driver may refuse
        return None


def loaded(bench: Bench, built: Built, block: int, *args) -> tuple[list[float], list[float]]:
    lasts = bench.trips(20_000_000, 300)
    found, watts = [], []
    for launch in range(int(SECONDS * 1e9 / lasts) if bench.way == "gpu" else 1):
        spans = bench.zeros(bench.sms * block // 32 * 2, torch.int64)
        bench.launch(built, spans, bench.out, lasts, *args, grid=bench.sms, block=block, dynamic_shared=ONE_CTA)
        if launch % 8 == 7 and (drawn := power()) is not None:
            watts.append(drawn)
        noted = spans if bench.way == "gpu" else spans + 1000
        found.append(megahertz(noted.cpu().view(bench.sms, -1, 2)))
    return found, watts


def events(bench: Bench, built: Built) -> None:
    """Nanoseconds in the kernel beside the events around it."""
    if bench.way != "gpu":
        return
    ratios, lasts = [], 5_000_000
    for _ in range(bench.runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spans = bench.zeros(2, torch.int64)
        begin.record()
        bench.launch(built, spans, bench.out, lasts, grid=1, block=32, dynamic_shared=ONE_CTA)
        end.record()
        end.synchronize()
        ratios.append(1e6 * begin.elapsed_time(end) / spans[0].item())
    fault = bench.unlikely("events and %globaltimer disagree", 0.99 < min(ratios) and max(ratios) < 1.05)
    bench.figure("events over %globaltimer, 5 ms", ratios, "1", built.fault, fault)


def resolution(bench: Bench) -> None:
    body = """u64 last = nanoseconds(), least = ~0ull;
  for (int i = 0; i < 4000; ++i) { u64 t = nanoseconds(); if (t != last && t - last < least) least = t - last; last = t; }
  note(spans, 0, least);"""
    built = bench.build(frame.kernel(body, threads=32))
    bench.figure("step of %globaltimer", bench.clocks(built), "ns", built.fault)


def measure(bench: Bench) -> None:
    memory = bench.zeros((HBM if bench.way == "gpu" else MIB) // 4)
    memory.random_() if bench.way == "gpu" else None
    for name, (text, block) in sources(bench).items():
        built = bench.build(text)
        args = (memory, memory.numel() // 4) if "HBM" in name else ()
        found, watts = loaded(bench, built, block, *args)
        bench.figure(f"clock, {name}", found[len(found) // 4 :], "MHz", built.fault)
        if watts:
            bench.figure(f"power, {name}", watts, "W")
        if name == FIRST:
            events(bench, built)
    resolution(bench)
