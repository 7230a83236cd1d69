"""Problem and number of SMs to what is launched.  No torch, no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

from kda.compile import cutedsl
from kda.compile.target import Target, parse
from kda.host import Host
from kda.problem import Problem

from ..common.cute.tile import BOUND, C
from .configs import CTAS, FusedConfig

OFFSETS = ("int32", "int64")                 # dtypes of cu_seqlens


@dataclass(frozen=True)
class Plan:
    fused: FusedConfig
    ctas: int                                # two for each that walks, over one sequence and head after the other


def plan(p: Problem, sms: int, offsets: str | None) -> Plan:
    return Plan(fused_config(p, offsets), CTAS * min(p.N * p.HV, sms // CTAS))


def fused_config(p: Problem, offsets: str | None) -> FusedConfig:
    block = p.gate == "bounded" and p.lower_bound >= BOUND and p.qk_l2norm
    return FusedConfig(
        p.gate, block=block, norm=p.qk_l2norm, rate=p.A_log, bias=p.dt_bias, beta=p.beta, grouped=p.HV != p.H,
        g_dtype=p.g_dtype, beta_dtype=p.beta_dtype, offsets=offsets, h0=p.state_dtype, ht=p.final_state,
        h=p.intermediate_states, every=p.C // C, v_first=p.state_v_first,
    )  # fmt: skip


def target(cc: tuple[int, int]) -> Target:
    return parse(f"sm{cc[0]}{cc[1]}")


def recipe(config: FusedConfig, arch: Target) -> cutedsl.Recipe:
    return cutedsl.Recipe("kda.backends.sm100.fwd.fused:build", config, arch)


def recipes(p: Problem, host: Host) -> list[cutedsl.Recipe]:
    """All kernels that a call of this class can want, whatever B, T, N and the number of heads."""
    return [recipe(fused_config(p, offsets), target(host.cc)) for offsets in (OFFSETS if p.packed else (None,))]
