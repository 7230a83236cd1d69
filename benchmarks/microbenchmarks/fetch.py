"""Group 1: straight code of so many bytes in a loop, and how much of it an SM issues.

In step, all warps begin together; apart, each warp begins where the others are not, one after the other through the
body. The first time, no cache of the SM has the code: another kernel of 128 KiB has run before.
"""

from __future__ import annotations

from . import frame, issue
from .bench import Bench, Built

KIB = 1024
BYTES = KIB // 2, 2 * KIB, 8 * KIB, 16 * KIB, 24 * KIB, 32 * KIB, 40 * KIB, 48 * KIB, 64 * KIB, 128 * KIB
INSTRUCTION = 16                             # bytes
WARPS = 4, 8, 16                             # of an SM
LEAST = 1 << 15                              # instructions of a warp
COLD = 2 * KIB, 8 * KIB, 32 * KIB
KINDS = {"fma": "f", "mix": "ffafcaflfapfamfl"}


def source_of(pattern: str, count: int) -> tuple[str, dict[str, int]]:
    """`count` instructions; `gap` clocks lie between the beginnings of two warps."""
    lines, setup, finish, sass = issue.mixed(pattern, count)
    text = frame.loop(
        lines, setup, finish, "u32 zero, const u32* given, int gap", threads=512,
        before="u64 until = now() + (u64)WARP * gap;", late="while (now() < until) {}",
    )  # fmt: skip
    return text, sass


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


def rate(spans, instructions: int) -> float:
    """Instructions a clock of the SM: the sum of what its warps do."""
    took = (spans[:, :, 1] - spans[:, :, 0]).double()
    return (instructions / took).sum().item()


def measure(bench: Bench) -> None:
    built: dict[tuple[str, int], Built] = {}
    for kind, pattern in KINDS.items():
        given = bench.words(issue.operands(pattern))
        for size in BYTES:
            count = size // INSTRUCTION
            text, sass = source_of(pattern, count)
            built[kind, size] = one = bench.build(text, sass)
            trips = bench.trips(max(LEAST // count, 8))
            for warps in WARPS:
                for place, gap in (("in step", 0), ("apart", count // 4)):
                    if place == "apart" and bench.way == "sim":
                        continue
                    runs = bench.spans(one, trips, 0, given, gap, block=32 * warps, dynamic_shared=128 * warps)
                    found = [rate(spans, trips * count) for spans in runs]
                    over = bench.unlikely("more than four schedulers can issue", max(found) < 4.04)
                    name = f"{kind} {size / KIB:g} KiB, {warps} warps {place}"
                    bench.figure(name, found, "per clock and SM", one.fault, over)
    given = bench.words(issue.operands(KINDS["fma"]))
    other, most = built["fma", max(BYTES)], bench.trips(2)
    for size in COLD:
        text, sass = cold_source(size // INSTRUCTION)
        one, found = bench.build(text, sass), []
        for _ in range(bench.runs):
            bench.spans(other, most, 0, given, 0, block=128, runs=1, dynamic_shared=512)
            (spans,) = bench.spans(one, 0, given, block=128, runs=1, dynamic_shared=512)
            first, again = spans.double().amax(1)[0].tolist()
            found.append((first - again) / (size / 128))
        bench.figure(f"first time through {size // KIB} KiB", found, "clocks more for 128 bytes", one.fault)
