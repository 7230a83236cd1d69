"""The kernels of the Hopper forward, each on its own: `python -m benchmarks.hopper --shape h64-8k [--stages 3,6]`.

Results are held against the portable backend first; then a call is timed as a whole, from a graph, and with events
around each kernel.  Milliseconds, medians.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import sys
from collections import defaultdict
from typing import Any

import torch

import kda
from kda.backends.common.routine import Draft, forget_routines
from kda.backends.common.training_plan import NO_CLUSTERS
from kda.backends.sm90 import launch, plan
from kda.backends.sm90.configs import ChainConfig
from kda.backends.sm90.forms import FIT
from kda.backends.sm90.plan import KERNELS
from kda.model.bundles import Save
from kda.model.force import forced, forcing
from kda.model.host import detect
from kda.tools.measure.shapes import SHAPES, BenchShape
from kda.tools.verify.cases import make_inputs
from ptxkit.compile.kernel import Bound
from ptxkit.temporary import replaced

from . import common
from .launches import each_timed, events, median

CALLS, CLOSE = 31, 1e-2
FEW = {f"h{H}-{T}k": BenchShape(f"{H} heads", T=1024 * T, H=H)
       for H, T in ((22, 4), (24, 8), (32, 1), (40, 8), (128, 8))}
NAMED = SHAPES | FEW | {"h64-64x128": BenchShape("many short ones", H=64, lengths=(128,) * 64)}
EVERY = ("h64-8k", "h64-8x1k", "h64-mixed", "h8-32k", "h16-8k", "h32-8k", "h96-8k", "h64-1k",
         "h64-64x128")


def whole(call) -> float:
    pairs = []
    for _ in range(CALLS):
        pairs.append(events())
        pairs[-1][0].record()
        call()
        pairs[-1][1].record()
    return median(pairs)


def replayed(call) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return whole(graph.replay)


def name_of(bound: Bound) -> str:
    return " ".join((KERNELS[type(bound.config)], getattr(bound.config, "walk", ""))).strip()


def each(call) -> dict[str, float]:
    """Return the time of each kernel of a call."""
    with each_timed(name_of) as pairs:
        for _ in range(CALLS):
            call()
    return {name: median(times) for name, times in pairs.items()}


def timeline(call) -> dict[str, float]:
    """Kernels of calls one after the other, as they lie on the GPU, and what lies between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    times, before = defaultdict(list), None
    for event in sorted((e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA),
                        key=lambda e: e.time_range.start):
        name = next((n for n in KERNELS.values() if n + n.capitalize() in event.name), event.name[:20])
        times[name].append(event.time_range.end - event.time_range.start)
        if before is not None:
            times["before " + name].append(event.time_range.start - before)
        before = event.time_range.end
    return {name: round(statistics.median(us) / 1e3, 4) for name, us in times.items()}


def measured(case, stages: int, plain: bool = False, cluster: int = 0) -> dict[str, float]:
    """Time calls whose chains have so many stages; 0: as planned.  `plain`: no kernel starts before the other ends.
    `cluster`: so many CTAs of a chain, which read the same tiles, are neighbours; 0: as planned."""

    describe = Draft.launch

    def changed(draft, config, grid, **arguments):
        if stages and isinstance(config, ChainConfig):
            config = dataclasses.replace(config, stages=stages)
        before = len(draft._launches)
        describe(draft, config, grid, **arguments)
        for bound, _ in draft._launches[before:]:
            near = (cluster, 1, 1) if cluster and isinstance(config, ChainConfig) else bound.shape.cluster
            bound.shape = bound.shape._replace(cluster=near, pdl=bound.shape.pdl and not plain)

    def call():
        return kda.chunk_kda_fwd(**case.keywords, backend="sm90").o

    expected = kda.chunk_kda_fwd(**case.keywords, backend="triton").o
    with contextlib.ExitStack() as stack:
        stack.callback(forget_routines)
        stack.enter_context(replaced(Draft, launch=changed))
        forget_routines()
        error = common.off(call(), expected)
        times = dict(error=error, call=whole(call), graph=replayed(call), timeline=timeline(call))
        return times | each(call)


def keeping(case) -> dict[str, Any]:
    """A forward that keeps what its backward reads, and a backward that makes all of it again: in one kernel as asked,
    and in kernels apart, whose bits they have; so have gradients of what was kept."""
    x, results, times = case.inputs, {}, {}
    for name, form in (("apart", "two kernels"), ("at once", forced().form)):
        with forcing(form=form):
            p, backward = case.problem(), case.problem("backward")
            calls = {
                "forward": functools.partial(launch.forward, p, x, Save.OWN),
                "backward": functools.partial(launch.backward, backward, x, case.do, case.dht),
            }
            torch.use_deterministic_algorithms(True)                           # memory of nothing is the same, too
            out, grads = calls["forward"](), calls["backward"]()
            of_kept = launch.backward(backward, x, case.do, case.dht, out.saved)
            results[name] = [y for y in (out.o, out.final_state, *grads, *of_kept) if y is not None]
            torch.use_deterministic_algorithms(False)
            times[name] = {kind: replayed(call) for kind, call in calls.items()}
    times["clusters"] = getattr(plan.training_plan(p, detect(p.device).sms).making, "clusters", None)
    return times | {"same bits": all(map(torch.equal, *results.values()))}


FORMS: dict[str, dict[str, Any]] = {         # forms of a forward -> what is prescribed
    "two kernels": dict(form="two kernels"),
    "CTAs alone": dict(form="one kernel", ctas=1),
    "clusters of two": dict(form="one kernel", ctas=2),
    "clusters of four": dict(form="one kernel", ctas=4),
    "some make, others walk": dict(form="stream"),
    "as planned": dict(form=None),
}


def forms(case, **words: bool) -> dict[str, Any]:
    """A forward in each form that can run it, from a graph, and whether results have the bits of two kernels, and by
    how much they differ from Triton's."""
    rows, of_two, sms = {}, [], detect(case.problem().device).sms
    out = kda.chunk_kda_fwd(**case.keywords, **words, backend="triton")
    expected = [y.float() for y in (out.o, out.final_state, out.h) if y is not None]

    def call():
        return kda.chunk_kda_fwd(**case.keywords, **words, backend="sm90")

    for name, prescribed in FORMS.items():
        with forcing(**prescribed):
            chosen = plan.plan(dataclasses.replace(case.problem(), intermediate_states=bool(words)), sms)
            ctas, sharing = getattr(chosen, "clusters", NO_CLUSTERS)
            if prescribed.get("form") not in (None, chosen.name) or prescribed.get("ctas") not in (None, ctas):
                continue
            torch.cuda.empty_cache()
            torch.full((2**28,), float("nan"), device="cuda")                  # what results must not depend on
            out = call()
            results = [y.float() for y in (out.o, out.final_state, out.h) if y is not None]
            of_two = of_two or results
            errors = [common.off(y, z) for y, z in zip(results, expected, strict=True)]
            rows[name] = dict(ms=replayed(call), same=all(map(torch.equal, results, of_two)), errors=errors)
        rows[name] |= dict(sharing=sharing, segments=getattr(chosen, "segments", 0))
        rows[name]["is"] = "stream" if chosen.name == "stream" else ctas
        print(f"  {name}: {rows[name]}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = common.parser(__spec__, __doc__)
    parser.add_argument("--shape", action="append", choices=NAMED)
    parser.add_argument("--regime", default="slow")
    parser.add_argument("--gate", default="bounded")
    parser.add_argument("--stages", type=common.numbers, default=[0], help="of chain; 0: as planned")
    parser.add_argument("--plain", action="store_true", help="no kernel starts before the one ahead of it has ended")
    parser.add_argument("--cluster", type=int, default=0, help="CTAs of a chain that lie together; 0: as planned")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction,
                        help="prepare and chain as one kernel, where that can be; without: where it is sooner")
    parser.add_argument("--ctas", type=int, choices=FIT, help="of its clusters, with --fused")
    parser.add_argument("--staged", action=argparse.BooleanOptionalAction,
                        help="the one kernel's rows go through shared memory; without: in clusters of four")
    parser.add_argument("--keeps", action="store_true", help="a forward that keeps, and a backward that makes it again")
    parser.add_argument("--forms", action="store_true", help="a forward in each form that can run it, bits compared")
    parser.add_argument("--states", action="store_true", help="with --forms: states that enter chunks are returned")
    parser.add_argument("--K", type=int, choices=(64, 128), help="instead of the shape's")
    parser.add_argument("--V", type=int, choices=(64, 128), help="instead of the shape's")
    args = parser.parse_args()
    form = None if args.fused is None else "one kernel" if args.fused else "two kernels"
    with forcing(form=form, ctas=args.ctas, staged=args.staged):
        measure(args)


def measure(args: argparse.Namespace) -> None:
    rows = []
    for label in args.shape or EVERY:
        shape = NAMED[label]
        sizes = {name: getattr(args, name, None) or getattr(shape, name) for name in ("B", "T", "H", "K", "V")}
        case = make_inputs(shape.lengths or None, **sizes, gate=args.gate, regime=args.regime, initial_state=False,
                           device="cuda")
        if args.keeps:
            print(json.dumps(dict(shape=label, gate=args.gate, **keeping(case))), flush=True)
            continue
        if args.forms:
            words = dict(return_intermediate_states=True) if args.states else {}
            row = dict(shape=label, gate=args.gate, regime=args.regime, K=sizes["K"], V=sizes["V"], **words)
            rows.append(row | dict(forms=forms(case, **words)))
            print(json.dumps(rows[-1]), flush=True)
            continue
        for stages in args.stages:
            row = dict(shape=label, gate=args.gate, regime=args.regime, stages=stages, plain=args.plain,
                       cluster=args.cluster, fused=args.fused, ctas=args.ctas, staged=args.staged)
            row |= measured(case, stages, args.plain, args.cluster)
            print(json.dumps(row), flush=True)
            rows.append(row)
            if not row["error"] < CLOSE:
                raise SystemExit(f"{label}: off by {row['error']}")
    common.write(args.json, rows)


if __name__ == "__main__":
    main()
