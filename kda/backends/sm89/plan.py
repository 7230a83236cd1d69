"""Problem and number of SMs to what is launched: configurations, grids and the workspace.  No torch, no CUDA."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from kda.bundles import chunk_bound
from kda.compile import nvrtc
from kda.compile.errors import BuildError
from kda.compile.target import parse
from kda.host import Host
from kda.problem import Problem

from .configs import SMALLEST, ChainConfig, Config, PrepareConfig, TablesConfig

TARGET = parse("sm89")                       # the PTX of it runs on every later GPU
OFFSETS = {"int32": 32, "int64": 64}         # dtypes of cu_seqlens
COLUMNS = (32, 16, 8)                        # of a state in a CTA: the first that leaves few SMs idle
BUSY = 0.75                                  # of all SMs
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Plan:
    """What the shapes of a call say.  Packed, there may be fewer chunks."""

    chunks: int                              # of a row of T tokens
    tiles: int                               # chunks and value heads, at most
    prepare_grid: int                        # packed, one more chunk may be needed for tokens of no sequence
    chain_grid: int
    tables: TablesConfig | None
    prepare: PrepareConfig
    chain: ChainConfig


def plan(p: Problem, sms: int, offsets: str | None, keep: bool = False) -> Plan:
    """`offsets`: dtype of cu_seqlens."""
    packed = OFFSETS[offsets] if p.packed else 0
    chunks = chunk_bound(p.B, p.T, p.N, p.C, p.packed)
    chain = chain_config(p, columns(p, sms), packed)
    return Plan(
        -(-p.T // p.C), chunks * p.HV, (chunks + p.packed) * p.HV, p.N * p.HV * chain.parts,
        TablesConfig(p.C, packed) if packed else None, prepare_config(p, packed, keep), chain,
    )  # fmt: skip


def columns(p: Problem, sms: int) -> int:
    states = p.N * p.HV * p.V
    return next((c for c in COLUMNS if states // c >= BUSY * sms), COLUMNS[-1])


def prepare_config(p: Problem, packed: int, keep: bool = False) -> PrepareConfig:
    return PrepareConfig(p.K, p.V, p.C, p.gate, p.qk_l2norm, p.A_log, p.dt_bias, p.beta, packed, keep)


def chain_config(p: Problem, columns: int, packed: int) -> ChainConfig:
    return ChainConfig(p.K, p.V, p.C, columns, packed, p.state_v_first)


def source_of(config: Config) -> nvrtc.Source:
    headers = {path.name: path.read_text() for path in sorted((HERE / "parts").glob("*.cuh"))}
    return nvrtc.Source((HERE / config.file).read_text(), config.kernel, config.defines, headers, config.file)


def recipe(config: Config) -> nvrtc.Recipe:
    return nvrtc.Recipe("kda.backends.sm89.plan:source_of", config, TARGET)


def recipes(p: Problem, host: Host) -> list[nvrtc.Recipe]:
    """All kernels that a call of this class can want, whatever B, T, N and the number of heads."""
    configs: list[Config] = []
    for packed in OFFSETS.values() if p.packed else (0,):
        configs += [TablesConfig(p.C, packed)] if packed else []
        configs += [prepare_config(p, packed), *(chain_config(p, c, packed) for c in COLUMNS)]
    return [recipe(config) for config in configs]


def check_memory(config: Config, host: Host) -> None:
    """A GPU may allow a CTA less than a kernel asks for."""
    allowed = host.smem or SMALLEST
    if config.shared > allowed:
        raise BuildError(
            f"{config.kernel} of K={config.K} V={config.V} C={config.C} asks for {config.shared:,} bytes of shared "
            f"memory a CTA; {host} allows {allowed:,}. Use backend='triton'."
        )


@functools.cache
def sizes(p: Problem) -> dict[str, int]:
    """Elements of a tile of each operand that `prepare` hands to `chain`."""
    K, V, C = p.K, p.V, p.C
    return {"w": C * K, "qg": C * K, "kg_t": K * C, "u": C * V, "A_qk": C * C, "gc_last": K}
