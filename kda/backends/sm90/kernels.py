"""Problem to the configuration of each kernel.  No torch, no cutlass."""

from __future__ import annotations

import dataclasses

from kda.model.bundles import Save
from kda.model.problem import Problem

from ..common.cute.configs import JoinConfig, chunk_options
from ..common.cute.tile import C
from ..common.cute.training import TOKENS
from ..common.training_plan import Clusters
from .configs import (
    CHANNELS_OF_ROWS,
    CLUSTER_SIZES,
    COLUMNS,
    RING,
    ChainConfig,
    FusedConfig,
    GradsConfig,
    PairsConfig,
    PrepareConfig,
    StreamConfig,
    WalkConfig,
)
from .reverse_config import ReverseConfig

STAGES = (6, 3)                              # stages of a chain with one CTA on an SM, and with two
RECORD_STAGES = (5, 2)                       # the same of a chain that keeps, beside results
WALK_STAGES = (6, 2)                         # and of other walks of a recorded call
REVERSE_STAGES = 4                           # where walk and grads are one grid


def prepare_config(p: Problem, saves: bool) -> PrepareConfig:
    return PrepareConfig(**chunk_options(p), packed=p.packed, kept_C=p.C * saves)


def fused_config(p: Problem, wrapped: bool = False, ctas: int = 0) -> FusedConfig | None:
    """Return the one kernel if prepare needs no halving.  A cluster has `ctas` CTAs; 0: one for each 64 columns."""
    prepare, strips = prepare_config(p, saves=False), p.V // COLUMNS
    ctas = ctas or strips
    staged = ctas > 2 or prepare.in_blocks if p.force.staged is None else p.force.staged
    if not (prepare.one_product or prepare.in_blocks) or ctas not in CLUSTER_SIZES.get(strips, ()):
        return None
    chain = chain_config(p, "sequences", RING)
    chain = dataclasses.replace(chain, every=chain.every if chain.h else 1)
    return FusedConfig(prepare, chain, wrapped, ctas, staged and prepare.stageable)


def stream_config(p: Problem, cut: bool = False) -> StreamConfig | None:
    """Return the stream if prepare needs no halving, and no states that enter chunks are requested."""
    prepare = prepare_config(p, saves=False)
    if p.intermediate_states or p.checkpoints or p.K != CHANNELS_OF_ROWS or not p.N * p.HV * p.T:
        return None
    staged = prepare.stageable and p.force.staged is not False
    chain = dataclasses.replace(chain_config(p, "sequences", 1), every=1)
    return StreamConfig(prepare, dataclasses.replace(chain, ht=True) if cut else chain, staged, cut)


def join_config(p: Problem, offsets: str | None) -> JoinConfig:
    return JoinConfig(offsets, p.K, p.V, TOKENS)


def pairs_config(p: Problem) -> PairsConfig:
    return PairsConfig(p.K, p.beta, p.packed, p.beta_dtype)


def chain_config(p: Problem, walk: str, stages: int) -> ChainConfig:
    h0 = {"sequences": p.state_dtype, "carry": None, "segments": "float32"}[walk]
    ends = walk != "carry"                                                     # at states that are requested
    return ChainConfig(
        p.K, p.V, p.packed, walk, h0, ht=ends and p.final_state, v_first=p.state_v_first,
        h=ends and p.intermediate_states, every=p.C // C, stages=stages,
        checkpoints=p.checkpoints if ends else None,
    )


def record_config(p: Problem, cut: bool, alone: bool, results: bool) -> ChainConfig:
    """Return a chain that keeps what a backward reads, with the results of a forward or without."""
    return ChainConfig(
        p.K, p.V, p.packed, "segments" if cut else "sequences", "float32" if cut else p.state_dtype,
        ht=results and p.final_state, v_first=p.state_v_first, h=True, every=TOKENS // C,
        stages=(RECORD_STAGES if results else WALK_STAGES)[not alone], o=results, recorded=True,
    )


def walk_config(p: Problem, cut: bool, alone: bool) -> WalkConfig:
    walk = "segments" if cut else "sequences"
    return WalkConfig(
        p.K, p.V, p.packed, walk, p.final_state or cut, p.state_dtype, p.state_v_first, WALK_STAGES[not alone]
    )


def keeping_config(p: Problem, clusters: Clusters, results: bool) -> FusedConfig | None:
    """Return the one kernel that keeps what a backward reads; without `results` if a backward recomputes that."""
    fused = fused_config(p, clusters.sharing > 0, clusters.ctas) if clusters.ctas else None
    if not fused or (fused.ctas == 2 and fused.prepare.in_blocks):
        return None
    prepare = dataclasses.replace(fused.prepare, b_on_keys=True)
    chain = dataclasses.replace(record_config(p, False, True, results), stages=RING)
    return dataclasses.replace(fused, prepare=prepare, chain=chain)


def grads_config(p: Problem) -> GradsConfig:
    return GradsConfig(**chunk_options(p), packed=p.packed)


def reverse_config(p: Problem, cut: bool, save: Save) -> ReverseConfig:
    """Return walk and grads in one grid.  A walk has its stages where rows of g are later; if there are none in shared
    memory it has one less."""
    grads = dataclasses.replace(grads_config(p), shares_over_h=save is Save.NOTHING)
    stages = REVERSE_STAGES if "g" in grads.rows.fields else REVERSE_STAGES - 1
    walk = dataclasses.replace(walk_config(p, cut, False), stages=stages)
    return ReverseConfig(walk, grads, save is not Save.OWN)
