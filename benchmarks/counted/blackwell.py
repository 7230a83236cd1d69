"""What the Blackwell forward costs on paper: counted in the simulator, at published rates.

    python -m benchmarks.counted.blackwell        prints what the forward costs, and which resource limits it
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from kda.backends.common.cute.tile import C
from kda.backends.sm100 import plan
from kda.backends.sm100.configs import CTAS
from kda.model.problem import Problem
from kda.tools.measure.predicted import Prediction, predict
from kda.tools.measure.shapes import BenchShape
from ptxkit.timing.chips import CHIPS

from ..pages import table_row
from . import forward, moved, mufu

B200 = CHIPS["b200"]
SMS, GHZ = int(B200.sms), B200.gigahertz
HBM = B200.hbm_rate * GHZ * 1e9              # bytes a second
ISSUED = 1.9                                 # a clock, without moves, as Hopper's kernel of the same code on an H200
MUFU = 16                                    # lanes a clock
HOPS, HOP, LOADS = 4, 80, 360                # the chain: hops, clocks of a hop, and of loads of tensor memory
LAUNCH, EDGE = 8e-6, 2.4e-6                  # seconds of two kernels more, and of a segment in compose (as on an H200)
HEADS = 8, 16, 32, 64, 96
COUNTS = "warp_instructions", "moves", "mufu"


class Chunk(NamedTuple):
    """Clocks of a CTA, that a chunk of one value head takes of each resource; bytes of both."""

    instructions: float
    exponentials: float
    tensor: float
    shared: float
    memory: float
    chain: float
    bytes: float

    @property
    def clocks(self) -> float:
        return max(self[:-1])

    @property
    def binds(self) -> str:
        return max(self._fields[:-1], key=lambda name: getattr(self, name))


def counters(T: int, gate: str = "bounded", K: int = 128) -> dict[str, float]:
    (run,) = forward(T, gate, "sm100", K).runs
    return run.counters | {"moves": run.instructions.get("mov", 0), "mufu": mufu(run), "bytes": moved(run)}


def of_a_chunk(shorter: int = 512, longer: int = 1024, gate: str = "bounded", K: int = 128) -> dict[str, float]:
    a, b = counters(shorter, gate, K), counters(longer, gate, K)
    return {name: (b[name] - a[name]) / ((longer - shorter) / C) for name in b}


def product(M: int, N: int, K: int) -> float:
    """Return the clocks of a product of bfloat16 whose operands lie in shared memory."""
    work, operands = max(M, 128) * N * K / B200.tensor_rate, 2 * (M + N) * K / B200.operand_rate
    return max(work, operands)


def chain_clocks() -> float:
    """Return the clocks of products between a state and the next one: [kE; qg] S, KT^T X, and [-v; 0] of a chunk."""
    return product(64, 64, 128) + product(128, 64, 32) + product(64, 64, 32)


def tensor_clocks() -> float:
    """Return the clocks of all products, those ahead of the chain in every second chunk."""
    return chain_clocks() + product(64, 64, 32) + (product(64, 32, 128) + product(128, 32, 32)) / CTAS


def chunk(counts: dict[str, float]) -> Chunk:
    issued = counts["warp_instructions"] - counts["moves"]
    shared = counts["shared_wavefronts"] + counts["shared_bytes_past_warps"] / B200.operand_rate
    return Chunk(
        issued / CTAS / ISSUED, counts["mufu"] / CTAS * 32 / MUFU, tensor_clocks(), shared / CTAS,
        counts["bytes"] / CTAS / (B200.hbm_rate / SMS), HOPS * HOP + chain_clocks() + LOADS, counts["bytes"],
    )


def seconds(one: Chunk, T: int, H: int) -> tuple[float, int]:
    """Return the time of a forward with B = 1, and the number of its segments."""
    p = Problem.parse(f"bounded l2norm bfloat16 K=128 V=128 T={T} H={H}")
    pieces, chunks = plan.segments_of(p, SMS), -(-T // C)
    longest = -(-chunks // pieces)
    walked = max(longest, H * (2 * chunks - longest) / (SMS // CTAS)) * one.clocks / (GHZ * 1e9)
    joined = LAUNCH + EDGE * pieces + 6 * 256 * H * T / HBM if pieces > 1 else 0.0
    return walked + joined, pieces


# What pages say of heads of 128 and of 64 channels, and of times that the clock predicts.

DIMS, T = (128, 64), 8192


@functools.cache
def clocked(H: int, K: int = 128, gate: str = "bounded") -> Prediction:
    return predict("sm_100a", "b200", "sm100", BenchShape(T=T, H=H, K=K, V=K, gate=gate), False)


def of_clock() -> Iterator[str]:
    one = chunk(of_a_chunk())
    for H in HEADS:
        yield table_row(H, f"{1e3 * seconds(one, T, H)[0]:.3f}", f"{clocked(H).milliseconds():.3f}")


def of_dims(gate: str) -> list[str]:
    of_each = (of_a_chunk(gate=gate, K=K) for K in DIMS)
    return [f"{counts[name]:,.0f}" for counts in of_each for name in ("warp_instructions", "mufu", "shared_wavefronts")]


def bytes_of_dims() -> list[str]:
    return [f"{of_a_chunk(K=K)['bytes'] / C:,.0f}" for K in DIMS]


def memory_of_dims() -> list[str]:
    configs = (plan.fused_config(Problem.parse(f"bounded l2norm bfloat16 K={K} V={K}"), None) for K in DIMS)
    return [f"{n:,}" for config in configs for n in (config.shared, config.tmem.end)]


def clocks_of(K: int, gate: str = "bounded") -> str:
    """Return the clocks of a chunk in a cluster that walks along a row by itself."""
    return f"{clocked(64, K, gate).kernel('fused').clocks / (T // C):,.0f}"


def clocks_of_dims() -> list[str]:
    return [clocks_of(K, gate) for K in DIMS for gate in ("bounded", "given")]


def main() -> None:
    counts = of_a_chunk()
    one = chunk(counts)
    print({name: round(value, 1) for name, value in counts.items()})
    for gate in ("softplus", "given"):
        print(gate, {name: value for name, value in of_a_chunk(gate=gate).items() if name in COUNTS})
    print({name: round(value) for name, value in one._asdict().items()}, "binds:", one.binds)
    for T in (8192, 32768):
        for H in HEADS:
            time, pieces = seconds(one, T, H)
            print(f"B1 T{T} H{H}: {time * 1e3:.3f} ms, {pieces} segments")


if __name__ == "__main__":
    main()
