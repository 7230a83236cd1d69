"""Group 1: straight code of so many bytes in a loop, and how much of it an SM issues.

In step, all warps begin together; apart, each warp begins a quarter of the body behind the one before it. The first
time, no cache of the SM has the code: another kernel of 128 KiB has run before.
"""

from __future__ import annotations

from . import frame, issue
from .bench import Bench, Built

KIB = 1024
BYTES = KIB // 2, 2 * KIB, 8 * KIB, 16 * KIB, 24 * KIB, 32 * KIB, 40 * KIB, 48 * KIB, 64 * KIB, 128 * KIB
INSTRUCTION = 16                             # bytes
WARPS = 4, 8, 16                             # per SM
LEAST = 1024                                 # instructions between two looks at the clock
WINDOW = 300_000                             # clocks
COLD = 2 * KIB, 8 * KIB, 32 * KIB
KINDS = {"fma": "f", "mix": "ffafcaflfapfamfl"}


def source_of(pattern: str, count: int) -> tuple[str, dict[str, int]]:
    """Each warp goes round a body of `count` instructions until `window` clocks are over; it notes how often."""
    lines, setup, finish, sass = issue.mixed(pattern, count)
    body = f"""
  {setup}
  u64 trips = 0;
  sync_all();
  u64 begin = now(), start = begin, end = begin;
  while (start < begin + (u64)WARP * gap) start = now();
  #pragma unroll 1
  for (end = start; end < begin + window; end = now()) {{
    #pragma unroll 1
    for (u32 i = 0; i < {max(LEAST // count, 1)}; ++i, ++trips) {{
{lines}
    }}
  }}
  note(spans, trips, end - start);
  {finish}
"""
    return frame.kernel(body, "u32 zero, const u32* given, u32 gap, u64 window", threads=512), sass


def cold_source(count: int) -> tuple[str, dict[str, int]]:
    """One trip, then the same trip again."""
    lines, setup, finish, sass = issue.mixed(KINDS["fma"], count)
    body = f"""
  {setup}
  u64 took[2];
  #pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {{
    sync_all();
    u64 start = now();
{lines}
    took[pass] = now() - start;
  }}
  note(spans, took[0], took[1]);
  {finish}
"""
    return frame.kernel(body, "u32 zero, const u32* given", threads=512), sass


def measure(bench: Bench) -> None:
    built: dict[tuple[str, int], Built] = {}
    window = bench.trips(WINDOW, 2000)
    for kind, pattern in KINDS.items():
        given = bench.words(issue.operands(pattern))
        for size in BYTES:
            count = size // INSTRUCTION
            text, sass = source_of(pattern, count)
            built[kind, size] = one = bench.build(text, sass)
            for warps in WARPS:
                for place, gap in (("in step", 0), ("apart", count // 4)):
                    shape = dict(block=32 * warps, dynamic_shared=128 * warps)
                    bench.spans(one, 0, given, gap, window, runs=1, **shape)             # fills the caches
                    runs = bench.spans(one, 0, given, gap, window, **shape)
                    values = [(s[0, :, 0] * count / s[0, :, 1].double()).sum().item() for s in runs]
                    over = bench.unlikely("more than four schedulers can issue", max(values) < 4.02)
                    name = f"{kind} {size / KIB:g} KiB, {warps} warps {place}"
                    bench.figure(name, values, "per clock and SM", one.fault, over)
    given = bench.words(issue.operands(KINDS["fma"]))
    for size in COLD:
        text, sass = cold_source(size // INSTRUCTION)
        one, values = bench.build(text, sass), []
        for _ in range(bench.runs):
            shape = dict(block=128, runs=1, dynamic_shared=512)
            bench.spans(built["fma", max(BYTES)], 0, given, 0, window, **shape)
            (spans,) = bench.spans(one, 0, given, **shape)
            first, again = spans.double().amax(1)[0].tolist()
            values.append((first - again) / (size / 128))
        bench.figure(f"first time through {size // KIB} KiB", values, "clocks more for 128 bytes", one.fault)
