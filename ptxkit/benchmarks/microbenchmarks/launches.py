"""Group 8, second part: launches, the gap between two kernels with and without programmatic launches, and between two
CTAs on one SM. Every CTA notes its SM and both clocks, so that gaps on an SM are in clocks of that SM."""

from __future__ import annotations

import time

import torch

from . import frame
from .bench import Bench, Built
from .memory import ONE_CTA

NOTED = 6                                    # SM, start, after the wait, end in clocks; start, end in nanoseconds
KERNELS, WAVES, WORK = 8, 5, 6000
SHAPES = ((128, 1024), (128, ONE_CTA), (384, ONE_CTA), (1024, ONE_CTA))
LAUNCHES = 200


def source(pdl: str) -> str:
    """`pdl`: "" for none, "early" tells dependents to start at once, "late" at the end of the work."""
    tell = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    return frame.kernel(f"""
  u64 start = clocks(), began = nanoseconds();
  {tell if pdl == "early" else ""}
  {wait if pdl else ""}
  u64 after = clocks();
  while (clocks() < after + work) {{}}
  sync_all();
  {tell if pdl == "late" else ""}
  u64 end = clocks(), ended = nanoseconds();
  if (threadIdx.x == 0) {{
    u64* noted = spans + {NOTED} * ((u64)launch * gridDim.x + blockIdx.x);
    noted[0] = smid(); noted[1] = start; noted[2] = after; noted[3] = end; noted[4] = began; noted[5] = ended;
  }}
""", "int launch, u64 work")


def records(bench: Bench, built: Built, launches: int, ctas: int, **shape) -> torch.Tensor:
    """Return (launches, CTAs, NOTED) of kernels queued one behind the other."""
    noted = bench.zeros(launches * ctas * NOTED, torch.int64)
    if bench.gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)                                         # the host queues all of them meanwhile
    for launch in range(launches):
        bench.launch(built, noted, bench.out, launch, WORK if bench.gpu else 10, grid=ctas, **shape)
    times = noted.cpu().view(launches, ctas, NOTED)
    if not bench.gpu:
        times[:, :, 0] = torch.arange(ctas) % bench.sms
        times[:, :, 1:] = torch.arange(launches * ctas).view(launches, ctas, 1) * 100 + torch.arange(5)
    return times


def between(times: torch.Tensor, last: int, first: int) -> list[float]:
    """Return the median over SMs of clocks from `last` of one launch to `first` of the next, for each pair."""
    gaps = []
    for one, other in zip(times[1:], times[2:]):                             # the first launch warms the caches
        ends, starts = ({row[0]: row for row in x.tolist()} for x in (one, other))
        found_ = [float(starts[sm][first] - ends[sm][last]) for sm in ends if sm in starts]
        gaps.append(torch.tensor(found_).median().item())
    return gaps


HOW = {"": "plain", "early": "programmatic, told at the start", "late": "programmatic, told at the end"}


def gaps(bench: Bench) -> None:
    built = {pdl: bench.build(source(pdl)) for pdl in HOW if not pdl or bench.target.cc >= (9, 0)}
    for block, shared in SHAPES:
        for pdl, one in built.items():
            shape = dict(block=block, dynamic_shared=shared, pdl=bool(pdl))
            records(bench, one, 2, bench.sms, **shape)                       # loads the kernel
            times = records(bench, one, KERNELS, bench.sms, **shape)
            called = f"{block} threads, {shared // 1024} KiB, {HOW[pdl]}"
            same = f"kernel to kernel on an SM, {called}"
            bench.figure(f"{same}: to its start", between(times, 3, 1), "clocks", one.fault)
            if pdl:
                bench.figure(f"{same}: to its work", between(times, 3, 2), "clocks", one.fault)
            gap = times[2:, :, 4].amin(1) - times[1:-1, :, 5].amax(1)
            bench.figure(f"last end to first start, {called}", gap.double().tolist(), "ns", one.fault)
            if not pdl:
                ramp = (times[1:, :, 4].amax(1) - times[1:, :, 4].amin(1)).double().tolist()
                bench.figure(f"first start to last start, {called}", ramp, "ns", one.fault)


def waves(bench: Bench) -> None:
    """Time from the end of a CTA to the start of the next on its SM."""
    built = bench.build(source(""))
    for cluster in (1, 2, 4, 8) if bench.target.cc >= (9, 0) else (1,):
        for block, shared in SHAPES[1:] if cluster == 1 else SHAPES[2:3]:
            medians = []
            for _ in range(bench.runs):
                ctas = bench.sms * WAVES // cluster * cluster
                (times,) = records(bench, built, 1, ctas, block=block, dynamic_shared=shared, cluster=cluster)
                by_sm: dict[int, list] = {}
                for row in times.tolist():
                    by_sm.setdefault(row[0], []).append(row)
                steps = []
                for rows in by_sm.values():
                    rows.sort(key=lambda row: row[1])
                    steps += [float(b[1] - a[3]) for a, b in zip(rows, rows[1:])]
                medians.append(torch.tensor(steps or [0.0]).median().item())
            near = f"clusters of {cluster}, " if cluster > 1 else ""
            bench.figure(f"CTA to CTA on an SM, {near}{block} threads", medians, "clocks", built.fault)


def replayed(bench: Bench, call, *tensors) -> list[float]:
    """Return microseconds of a kernel in a graph of many."""
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call(*tensors)
    graph.replay()
    for _ in range(bench.runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / LAUNCHES)
    return times


def host(bench: Bench) -> None:
    """Kernels that do next to nothing, by the host's clock and from a graph."""
    built = {
        "an empty kernel": bench.build(frame.kernel("if (spans == nullptr) out[0] = 1;")),
        "a kernel of one store": bench.build(frame.kernel("if (threadIdx.x == 0) out[blockIdx.x] = 1;")),
    }
    if not bench.gpu:
        return
    for ctas, where in ((1, "one CTA"), (bench.sms, "a CTA on every SM")):
        for name, one in built.items():
            call, times = one.kernel.bound(ctas, block=128), []
            for _ in range(bench.runs + 1):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(LAUNCHES):
                    call(bench.out, bench.out)
                times.append(1e6 * (time.perf_counter() - began) / LAUNCHES)
            if "empty" in name:
                bench.figure(f"a launch by the host, {where}", times[1:], "us", one.fault)
            bench.figure(f"{name} in a graph, {where}", replayed(bench, call, bench.out, bench.out), "us", one.fault)
    times = []
    for _ in range(4 * bench.runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(bench.out, bench.out)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    bench.figure("a launch and a wait for its end, by the host", times, "us", one.fault)


def measure(bench: Bench) -> None:
    host(bench)
    gaps(bench)
    waves(bench)
