"""What a training step on Blackwell costs on paper: counted in the simulator, at published rates.  No GPU:

    python benchmarks/counted_step.py

Counts are of 64 tokens and one value head, of a bounded gate with l2norms and a sigmoid: those of a longer sequence
less those of a shorter one.  A kernel takes as long as the resource that it uses most; record and walk, where a CTA
has a head, at least the latency of their chunks, one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from counted import GHZ, HBM, HEADS, HOP, HOPS, ISSUED, LAUNCH, MMA, MUFU, SMS

import kda
from kda.backends.common.cute.recorded import TOKENS
from kda.backends.sm100 import plan
from kda.problem import Problem
from kda.simulator import capture
from kda.verify.cases import make_inputs

FORWARD, BACKWARD = ("operands", "record"), ("walk", "grads", "shares")
AGAIN = ("operands", "again")                # first of a backward that nothing was kept for: record without o
LOADS = 360                                  # clocks of a chunk, of loads and stores of the state
PRODUCTS = {                                 # clocks of those between a state and the next one: M, N, K
    "record": 2 * 128 * (64 * 128 + 128 * 32) / MMA[128], "walk": 2 * 128 * (32 * 128 + 128 * 32) / MMA[128],
}  # fmt: skip
COMPOSE = 2.4e-6                             # seconds of a segment, as on an H200


class Counts(NamedTuple):
    """Of 64 tokens and one value head."""

    warp_instructions: float
    mufu: float
    tensor_flops: float
    shared_wavefronts: float
    bytes: float                             # of a token

    def __add__(self, other):
        return Counts(*(a + b for a, b in zip(self, other)))

    @property
    def clocks(self) -> dict[str, float]:
        """Of one SM, by resource."""
        return {
            "issue slots": self.warp_instructions / ISSUED, "exponentials": self.mufu * 32 / MUFU,
            "tensor cores": self.tensor_flops / MMA[128], "shared memory": self.shared_wavefronts,
            "memory": self.bytes * TOKENS / (HBM / SMS / (GHZ * 1e9)),
        }  # fmt: skip


def runs(T: int, kept: bool) -> list:
    case = make_inputs(T=T, H=1, K=128, V=128, gate="bounded", initial_state=False)
    keywords = case.keywords | {"backend": "sm100", "output_final_state": False}
    with capture(arch="sm100") as session:
        saved = kda.chunk_kda_fwd(**keywords, disable_recompute=True).saved if kept else None
        kda.chunk_kda_bwd(do=case.do, saved=saved, **keywords)
    return session.runs


def counts(shorter: int = 256, longer: int = 512) -> dict[str, Counts]:
    """Of each kernel."""
    found = {}
    for kept, names in ((True, FORWARD + BACKWARD), (False, AGAIN)):
        pairs = list(zip(runs(shorter, kept), runs(longer, kept)))
        for name, pair in zip(names, pairs, strict=kept):
            if name not in found:
                a, b = (values(run) for run in pair)
                found[name] = Counts(*((y - x) * TOKENS / (longer - shorter) for x, y in zip(a, b)))
    return {name: x._replace(bytes=x.bytes / TOKENS) for name, x in found.items()}


def values(run) -> Counts:
    of = run.counters
    mufu = sum(run.instructions.get(name, 0) for name in ("ex2", "rcp", "rsqrt", "lg2"))
    moved = of["global_bytes_read"] + of["global_bytes_written"]
    return Counts(of["warp_instructions"], mufu, of["tensor_flops"], of["shared_wavefronts"], moved)


def total(found: dict[str, Counts], names: tuple[str, ...]) -> Counts:
    return sum((found[name] for name in names), Counts(0, 0, 0, 0, 0))


def seconds(found: dict[str, Counts], T: int, H: int) -> dict[str, tuple[float, str]]:
    """Of B = 1, each kernel, and what binds there; nothing is made again."""
    p = Problem.parse(f"bounded l2norm bfloat16 K=128 V=128 T={T} H={H}")
    pl, times = plan.recorded_plan(p, SMS), {}
    for name in FORWARD + BACKWARD:
        binds, clocks = max(found[name].clocks.items(), key=lambda pair: pair[1])
        time = clocks * T / TOKENS * H / SMS / (GHZ * 1e9)
        if name in PRODUCTS:
            waves = -(-pl.all_segments * H // SMS)
            alone = waves * pl.segment * (HOPS * HOP + PRODUCTS[name] + LOADS) / (GHZ * 1e9)
            if pl.carry:                                                       # two CTAs of each segment walk ahead
                ahead = -(-2 * pl.all_segments * H // SMS) * alone / waves
                alone += ahead + COMPOSE * pl.segments + LAUNCH / 2
            time, binds = max((time, binds), (alone, "latency"))
        times[name] = time, binds
    return times


SUMS = {"forward that keeps": FORWARD, "backward": BACKWARD, "backward, nothing kept": AGAIN + BACKWARD}


def of_kernels(found: dict[str, Counts]) -> list[str]:
    """Rows of the page's first table."""
    sums = {name: total(found, names) for name, names in SUMS.items()}
    launches = dict.fromkeys(found, 1) | {name: len(names) for name, names in SUMS.items()}
    shown = {name: name if name != "again" else "record without o" for name in found} | {n: f"**{n}**" for n in SUMS}
    return [
        f"| {shown[name]} | {x.warp_instructions:,.0f} | {x.mufu:,.0f} | {x.tensor_flops / 1e6:.1f} | "
        f"{x.shared_wavefronts:,.0f} | {x.bytes:,.0f} | {launches[name]} |"
        for name, x in (found | sums).items()
    ]  # fmt: skip


def of_heads(found: dict[str, Counts], T: int = 8192) -> list[str]:
    """Rows of the page's second table."""
    rows = []
    for H in HEADS:
        times = seconds(found, T, H)
        both = [sum(times[name][0] for name in names) * 1e3 for names in (FORWARD, BACKWARD)]
        each = [f"{times[name][0] * 1e3:.3f} {times[name][1]}" for name in (*FORWARD, *BACKWARD)]
        rows.append(f"| {H} | {' | '.join(each)} | {both[0]:.3f} | {both[1]:.3f} |")
    return rows


def main() -> None:
    found = counts()
    print("| kernel | warp instructions | MUFU | MFLOP | wavefronts of shared memory | bytes per token | launches |",
          "|---|---|---|---|---|---|---|", *of_kernels(found), sep="\n")  # fmt: skip
    print("", "| heads | operands | record | walk | grads | shares | forward | backward |",
          "|---|---|---|---|---|---|---|---|", *of_heads(found), sep="\n")  # fmt: skip


if __name__ == "__main__":
    main()
