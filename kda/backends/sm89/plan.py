"""Problem and number of SMs to what is launched: configurations, grids and the workspace.  No torch, no CUDA."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from kda.model.bundles import Save, chunk_bound
from kda.model.host import Host
from kda.model.problem import Problem
from ptxkit.compile import nvrtc
from ptxkit.compile.errors import BuildError
from ptxkit.compile.target import parse

from .configs import (
    COLUMNS,
    OFFSETS,
    SLICE,
    SMALLEST,
    WIDEST_BACK,
    ChainBwdConfig,
    ChainConfig,
    Config,
    IntraConfig,
    NormsConfig,
    PrepareConfig,
    SumsConfig,
    TablesConfig,
    WyConfig,
)

TARGET = parse("sm89")                       # its PTX runs on every later GPU
BUSY = 0.75                                  # the share of all SMs that has to have work


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from a call's shapes.  A packed call may have fewer chunks."""

    chunks: int                              # chunks of a row of T tokens
    tiles: int                               # chunks and value heads, at most
    steps: dict[str, tuple[Config, int]]     # kernel -> its configuration, and CTAs; without a CTA it is left out

    __hash__ = None                          # type: ignore[assignment]


def plan(p: Problem, sms: int, offsets: str | None, save: Save = Save.NOTHING) -> Plan:
    """Return the plan.  `offsets` is the dtype of cu_seqlens; `save` says what this forward saves, or what this
    backward's has saved."""
    chunks, states, backward = chunk_bound(p.B, p.T, p.N, p.C, p.packed), p.N * p.HV, p.direction == "backward"
    places = (chunks + p.packed) * p.HV                                        # one may hold tokens of no sequence
    chain = chain_config(p, columns(p, sms), offsets, output=not backward)
    steps: dict[str, tuple[Any, int]] = {
        "prepare": (prepare_config(p, offsets, save), places), "chain": (chain, states * chain.parts),
    }
    if offsets:
        steps["tables"] = TablesConfig(p.C, offsets), 1
    if backward:
        back = ChainBwdConfig(p.K, p.V, p.C, min(chain.columns, WIDEST_BACK), offsets, p.state_v_first)
        steps |= {
            "chain_bwd": (back, states * back.parts),
            "wy_bwd": (WyConfig(p.V, p.C, offsets), places),
            "intra_bwd": (
                IntraConfig(p.K, p.V, p.C, p.gate, p.A_log, p.dt_bias, offsets, p.gate_per_head),
                places * (p.K // SLICE),
            ),
            "norms_bwd": (NormsConfig(p.K, p.qk_l2norm, p.beta, offsets, p.gate_per_head), -(-p.B * p.T * p.H // 8)),
        }
        if p.A_log or p.dt_bias:
            steps["sum_chunks"] = SumsConfig(p.K, p.A_log, p.dt_bias, offsets, p.gate_per_head), p.HV
    for config, _ in steps.values():
        config.require_valid()
    return Plan(-(-p.T // p.C), chunks * p.HV, {name: step for name, step in steps.items() if step[1]})


def columns(p: Problem, sms: int) -> int:
    states, sms = p.N * p.HV * p.V, p.force.sms or sms
    return p.force.columns or next((c for c in COLUMNS if states // c >= BUSY * sms), COLUMNS[-1])


def prepare_config(p: Problem, offsets: str | None, save: Save = Save.NOTHING) -> PrepareConfig:
    backward = p.direction == "backward"
    return PrepareConfig(
        p.K, p.V, p.C, p.gate, p.qk_l2norm, p.A_log, p.dt_bias, p.beta, offsets, save, backward,
        p.gate_per_head,
    )


def chain_config(p: Problem, columns: int, offsets: str | None, output: bool = True) -> ChainConfig:
    """Return the chain's configuration; without `output` it is a backward's, whose states h are (K, V)."""
    return ChainConfig(p.K, p.V, p.C, columns, offsets, p.state_v_first, output)


def recipe(config: Config) -> nvrtc.Recipe:
    return nvrtc.Recipe("kda.backends.sm89.source:source_of", config, TARGET)


def recipes(p: Problem, host: Host, training: bool = True) -> list[nvrtc.Recipe]:
    """Return all kernels that a call of this class can need, whatever B, T, N and HV are; `training`: also if its
    gradients are wanted."""
    small = dataclasses.replace(p, B=1, T=1, N=1, H=1, HV=1)
    configs: dict[Config, None] = {}
    for offsets, c in itertools.product(filter(None, OFFSETS) if p.packed else (None,), COLUMNS):
        for save in (Save.NOTHING, Save.PRODUCTS)[: 1 + training]:
            sms = int(p.V / c / BUSY)                                          # the SMs for which c is chosen
            configs |= {config: None for config, _ in plan(small, sms, offsets, save).steps.values()}
    return [recipe(config) for config in configs]


def call_of_stage(name: str, p: Problem, packed: bool) -> tuple[Problem, Save]:
    p = dataclasses.replace(p, final_state=True, state_v_first=False, state_dtype="float32", packed=packed)
    if name.startswith("fwd"):
        return dataclasses.replace(p, direction="forward"), Save.PRODUCTS
    return dataclasses.replace(p, direction="backward"), Save.NOTHING


def recipes_of_call(p: Problem, host: Host, offsets: str | None, save: Save) -> list[nvrtc.Recipe]:
    return [recipe(config) for config, _ in plan(p, host.sms, offsets, save).steps.values()]


def check_memory(config: Any, host: Host) -> None:
    """Refuse a GPU that allows a CTA less than a kernel needs."""
    allowed = host.smem or SMALLEST
    if config.shared > allowed:
        raise BuildError(
            f"{config.kernel} of K={config.K} V={config.V} C={config.C} needs {config.shared:,} bytes of shared "
            f"memory per CTA; {host} allows {allowed:,}. Use backend='triton'."
        )


FORWARD = ("w", "qg", "kg_t", "u", "A_qk", "gc_last")
BACKWARD = (*FORWARD, "w_t", "kg")
WITHIN = ("A_inv", "of_rows")                # what a backward needs until its end


def sizes(p: Problem, names: tuple[str, ...]) -> dict[str, int]:
    """Return the elements of a tile of each operand."""
    K, V, C = p.K, p.V, p.C
    elements = {"u": C * V, "A_qk": C * C, "A_inv": C * C, "gc_last": K, "of_rows": 3 * C}
    return {name: elements.get(name, C * K) for name in names}
