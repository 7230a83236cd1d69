"""What a training step on Blackwell costs on paper: counted in the simulator, at published rates.

Counts are of 64 tokens and one value head, of a bounded gate with l2norms and a sigmoid: those of a longer sequence
less those of a shorter one.  A kernel takes as long as the resource that it uses most; record and walk, where a CTA
has a head, at least the latency of their chunks, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from kda.backends.common.cute.tile import C
from kda.backends.common.cute.training import TOKENS
from kda.backends.common.training_plan import all_configs
from kda.backends.sm100 import launch, plan
from kda.backends.sm100.configs import GradsConfig, OperandsConfig, RecordConfig, WalkConfig
from kda.model.force import forcing
from kda.model.problem import Problem
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.target import parse

from ..pages import table_row
from . import GATES, LONG, SHORT, Counts, between, step
from .blackwell import B200, GHZ, HEADS, HOP, HOPS, ISSUED, LAUNCH, LOADS, MUFU, SMS, product

FORWARD, BACKWARD = ("operands", "record"), ("walk", "grads", "shares")
AGAIN = ("operands", "again")                # first of a backward that nothing was kept for: record without o
PRODUCTS = {                                 # clocks of those between a state and the next one
    "record": product(128, 64, 128) + product(128, 128, 32), "walk": product(128, 32, 128) + product(128, 128, 32),
}
COMPOSE = 2.4e-6                             # seconds of a segment, as on an H200
OF_KERNELS = ("| kernel | warp instructions | MUFU | MFLOP | wavefronts of shared memory | its KiB for products and "
              "copies | bytes per token | launches |")
STATES = "state_dtype=float32 final_state=true"
OF_CODE = "| registers | bounded by -5 | any other gate |"
OF_SPILLS = "| bytes that grads spills | whole sequences | packed |"
OF_BYTES = "| bytes of HBM per token and head, step that keeps | reads | writes | sum |"
OF_HEADS = "| heads | operands | record | walk | grads | shares | forward | backward |"


def clocks_of(one: Counts, rate: float) -> dict[str, float]:
    """Return the clocks of one SM that reads and writes so many bytes of memory a clock, by resource."""
    return {
        "issue slots": (one.warp_instructions - one.moves) / ISSUED, "exponentials": one.mufu * 32 / MUFU,
        "tensor cores": one.tensor_flops / 2 / B200.tensor_rate,
        "shared memory": one.shared_wavefronts + one.shared_bytes / B200.operand_rate,
        "memory": one.bytes * TOKENS / rate,
    }


@functools.cache
def counts(K: int = 128, shorter: int = SHORT, longer: int = LONG) -> dict[str, Counts]:
    """Return the counts of each kernel."""
    kernels = {}
    for saves, names in ((True, FORWARD + BACKWARD), (False, AGAIN)):
        pairs = list(zip(step(shorter, saves, "sm100", K).runs, step(longer, saves, "sm100", K).runs))
        kernels = {name: between(*pair, longer - shorter) for name, pair in zip(names, pairs, strict=saves)} | kernels
    return {name: kernels[name] for name in (*FORWARD, *BACKWARD, *AGAIN)}


def total(kernels: dict[str, Counts], names: tuple[str, ...]) -> Counts:
    return sum((kernels[name] for name in names), Counts(*[0.0] * len(Counts._fields)))


def seconds(kernels: dict[str, Counts], T: int, H: int) -> dict[str, tuple[float, str]]:
    """Return each kernel's time with B = 1, and the resource that limits it; nothing is recomputed."""
    p = Problem.parse(f"bounded l2norm bfloat16 K=128 V=128 T={T} H={H}")
    pl, times = plan.training_plan(p, SMS), {}
    for name in FORWARD + BACKWARD:
        one = kernels[name]
        binds, clocks = max(clocks_of(one, B200.hbm_rate / SMS).items(), key=lambda pair: pair[1])
        time = clocks * T / TOKENS * H / SMS / (GHZ * 1e9)
        if name in PRODUCTS:
            waves = -(-pl.all_segments * H // SMS)
            of_chunk = {why: x * C / TOKENS for why, x in clocks_of(one, B200.hbm_rate_sm).items()}
            of_chunk["latency"] = HOPS * HOP + PRODUCTS[name] + LOADS
            why, step = max(of_chunk.items(), key=lambda pair: pair[1])
            alone = waves * pl.segment * step / (GHZ * 1e9)
            if pl.making.carry:                                                # two CTAs of each segment walk ahead
                ahead = -(-2 * pl.all_segments * H // SMS) * alone / waves
                alone += ahead + COMPOSE * pl.segments + LAUNCH / 2
            time, binds = max((time, binds), (alone, f"{why} of one SM" if why != "latency" else why))
        times[name] = time, binds
    return times


SUMS = {"forward that keeps": FORWARD, "backward": BACKWARD, "backward, nothing kept": AGAIN + BACKWARD}


def of_kernels(kernels: dict[str, Counts]) -> list[str]:
    """Rows of the page's first table."""
    sums = {name: total(kernels, names) for name, names in SUMS.items()}
    launches = dict.fromkeys(kernels, 1) | {name: len(names) for name, names in SUMS.items()}
    shown = {name: name if name != "again" else "record without o" for name in kernels} | {n: f"**{n}**" for n in SUMS}
    return [
        table_row(shown[name], f"{x.warp_instructions:,.0f}", f"{x.mufu:,.0f}", f"{x.tensor_flops / 1e6:.1f}",
                  f"{x.shared_wavefronts:,.0f}", f"{x.shared_bytes / 1024:,.0f}", f"{x.bytes:,.0f}", launches[name])
        for name, x in (kernels | sums).items()
    ]


def of_bytes() -> list[str]:
    """Rows of a table: what each kernel of a step that keeps reads and writes.  What a launch reads more than once,
    or has written itself (dv, and dh of every 64 tokens), comes from L2."""
    with forcing(form="one kernel", reverse=True):
        pairs = zip(step(SHORT, True, "sm100").runs, step(LONG, True, "sm100").runs, strict=True)
    tokens, from_L2 = LONG - SHORT, {"reverse": 2 * 128 + 2 * 128 * 128 // TOKENS}
    rows, reads, writes = [], 0.0, 0.0
    for name, (short, long) in zip(("fused", "reverse", "shares"), pairs, strict=True):
        read, written = ((long.counters[f"global_floor_{way}"] - short.counters[f"global_floor_{way}"]) / tokens
                         for way in ("read", "written"))
        read -= from_L2.get(name, 0)
        reads, writes = reads + read, writes + written
        rows.append(table_row(name, f"{read:,.0f}", f"{written:,.0f}", f"{read + written:,.0f}"))
    return [*rows, table_row("**step**", f"{reads:,.0f}", f"{writes:,.0f}", f"{reads + writes:,.0f}")]


def of_heads(kernels: dict[str, Counts], T: int = 8192) -> list[str]:
    """Rows of the page's second table."""
    rows = []
    for H in HEADS:
        times = seconds(kernels, T, H)
        both = [sum(times[name][0] for name in names) * 1e3 for names in (FORWARD, BACKWARD)]
        each = [f"{times[name][0] * 1e3:.3f} {times[name][1]}" for name in (*FORWARD, *BACKWARD)]
        rows.append(table_row(H, *each, *(f"{time:.3f}" for time in both)))
    return rows


# What the page says of heads of 128 and of 64 channels.

DIMS, EACH = (128, 64), (*FORWARD, *BACKWARD[:2])


def of_dims(resource: str) -> list[str]:
    """Return what each kernel takes of a resource."""
    return [f"{getattr(counts(K)[name], resource):,.0f}" for K in DIMS for name in EACH]


def built(words: str, packed: bool) -> dict[type, list[Kernel]]:
    """All kernels of a class of calls, by their configurations' types."""
    p = Problem.parse(f"bfloat16 {words} l2norm beta=sigmoid {STATES}{' packed' * packed}")
    kernels: dict[type, list[Kernel]] = {}
    for config in filter(None, dict.fromkeys(all_configs(plan.TRAINING, p))):
        kernels.setdefault(type(config), []).append(launch.kernel(config, parse("sm100")))
    return kernels


def of_code() -> Iterator[str]:
    """Registers of a thread, the least and the most."""
    for name, kind in {"operands": OperandsConfig, "record": RecordConfig, "walk": WalkConfig}.items():
        cells = [name]
        for bounded in (True, False):
            gates = [words for gate, words in GATES.items() if gate.startswith("bounded by -5") == bounded]
            registers = {k.registers for words in gates for packed in (False, True) for k in built(words, packed)[kind]}
            cells.append(" to ".join(map(str, sorted({min(registers), max(registers)}))))
        yield table_row(*cells)


def of_spills() -> Iterator[str]:
    """Yield a table's lines: the bytes that a thread of grads spills."""
    for name, words in GATES.items():
        taken = [k.spills for packed in (False, True) for k in built(words, packed)[GradsConfig]]
        yield table_row(name, *taken)
