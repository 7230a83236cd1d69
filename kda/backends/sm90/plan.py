"""Problem and number of SMs to what is launched, and all kernels of a class of calls.  No torch, no cutlass."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from kda.model.bundles import Save
from kda.model.host import Host
from kda.model.problem import Problem
from ptxkit.compile import cutedsl
from ptxkit.compile.recipes import AnyRecipe
from ptxkit.compile.target import parse

from ..common import training_plan as shared
from ..common.cute.configs import (
    ComposeConfig,
    JoinConfig,
    SharesConfig,
    TablesConfig,
    join_states_config,
)
from ..common.cute.tile import C
from ..common.cute.training import TOKENS
from ..common.pool.plan import inner
from ..common.pool.plan import recipes as pool_recipes
from .capability import BACKWARD
from .configs import (
    ChainConfig,
    FusedConfig,
    GradsConfig,
    PairsConfig,
    PrepareConfig,
    StreamConfig,
    WalkConfig,
    tile,
)
from .forms import FIT, Form, clusters_that_keep, fastest_in_halves, form_of
from .kernels import (
    STAGES,
    WALK_STAGES,
    chain_config,
    fused_config,
    grads_config,
    join_config,
    keeping_config,
    pairs_config,
    prepare_config,
    record_config,
    reverse_config,
    stream_config,
    walk_config,
)
from .reverse_config import ReverseConfig

TARGET = parse("sm90")
Forward = (
    TablesConfig | PrepareConfig | PairsConfig | ChainConfig | ComposeConfig | FusedConfig | StreamConfig | JoinConfig
)
Config = Forward | WalkConfig | GradsConfig | ReverseConfig | SharesConfig
KERNELS = {
    TablesConfig: "common.cute.tables", PrepareConfig: "sm90.fwd.prepare", PairsConfig: "sm90.fwd.pairs",
    ChainConfig: "sm90.fwd.chain", ComposeConfig: "common.cute.compose", FusedConfig: "sm90.fwd.fused",
    WalkConfig: "sm90.bwd.walk", GradsConfig: "sm90.bwd.grads", SharesConfig: "common.cute.shares",
    ReverseConfig: "sm90.bwd.reverse", StreamConfig: "sm90.fwd.stream", JoinConfig: "common.cute.join",
}
CLUSTERS_OF_ONE = tuple(shared.Clusters(ctas, n) for ctas in FIT for n in (0, 1)[ctas == 1 :])   # see `wraps`


def one_kernel_that_keeps(p: Problem, sms: int, chunks: int) -> shared.Clusters:
    """Return the clusters of the one kernel that keeps what a backward reads."""
    clusters = clusters_that_keep(p, sms, chunks)
    return clusters if keeping_config(p, clusters, True) else shared.NO_CLUSTERS


TRAINING = shared.Makers(
    tile_bytes=lambda K: tile(K).bytes,
    prepare=lambda p: dataclasses.replace(prepare_config(p, saves=False), b_on_keys=True),
    record=record_config,
    carry=lambda p, alone: dataclasses.replace(
        chain_config(p, "carry", WALK_STAGES[not alone]), recorded=True, every=TOKENS // C, v_first=False
    ),
    walk=walk_config,
    carry_back=lambda p, alone: WalkConfig(
        p.K, p.V, p.packed, "carry", False, "float32", False, WALK_STAGES[not alone]
    ),
    grads=grads_config,
    reverse=reverse_config,
    walking=0.23,
    one_kernel=one_kernel_that_keeps,
    fused=keeping_config,
    clusters=CLUSTERS_OF_ONE,
    chain=lambda p, cut, alone: chain_config(p, "segments" if cut else "sequences", STAGES[not alone]),
)


@functools.lru_cache(maxsize=1024)
def plan(p: Problem, sms: int, saves: bool = False) -> Form:
    return form_of(p, p.force.sms or sms, saves)


@functools.lru_cache(maxsize=1024)
def training_plan(p: Problem, sms: int) -> shared.TrainingPlan:
    return shared.plan_of(TRAINING, p, sms)


@functools.lru_cache(maxsize=1024)
def halves_plan(
    p: Problem, sms: int, kept: shared.SavedBytes | None, length: int, of_map: bool
) -> shared.HalvesPlan:
    return shared.halves_plan_of(TRAINING, p, sms, kept, length, of_map)


@functools.lru_cache(maxsize=1024)
def length_in_halves(p: Problem, sms: int, save: Save, of_map: bool) -> int | None:
    return fastest_in_halves(p, p.force.sms or sms, save is not Save.NOTHING, of_map)


def recipe(config: Config) -> cutedsl.Recipe:
    return cutedsl.Recipe(f"kda.backends.{KERNELS[type(config)]}:build", config, TARGET)


def recipes(p: Problem, host: Host, training: bool = True) -> list[AnyRecipe]:
    """Return all kernels that a call of this class can need, whatever B, T, N and the number of heads.

    Whether heads share q and k is of the class.  `training`: also if gradients of the call are wanted.
    """
    if p.slots:
        return [*pool_recipes(p, C, TARGET), *recipes(inner(p), host, training)]
    has_backward = all(rule.holds(dataclasses.replace(p, direction="backward"), host) for rule in BACKWARD)
    for_others = training and not has_backward                                 # Triton's backward reads what is kept
    configs: list[Any] = [TablesConfig(dtype) for dtype in shared.OFFSETS if p.packed]
    configs += [prepare_config(p, saves) for saves in (False, True)[: 1 + for_others]]
    configs += [pairs_config(p)] * (for_others and p.C > C)
    for walk in ("sequences", "carry", "segments")[: 1 if p.batch_invariant else 3]:
        alone = walk == "segments" and not p.packed                            # segments of a row have an SM each
        configs += [chain_config(p, walk, stages) for stages in STAGES[: 1 if alone else 2]]
    configs += [None if p.batch_invariant else shared.compose_config(p)]
    configs += [fused_config(p, sharing > 0, ctas) for ctas, sharing in CLUSTERS_OF_ONE]
    if not p.batch_invariant and stream_config(p):
        configs += [stream_config(p), stream_config(p, cut=True), join_states_config(p)]
        configs += [join_config(p, offsets) for offsets in (shared.OFFSETS if p.packed else (None,))]
    if training and has_backward:
        configs += shared.all_configs(TRAINING, p)
    return [recipe(config) for config in dict.fromkeys(configs) if config]


def call_of_stage(name: str, p: Problem, packed: bool) -> tuple[Problem, Save]:
    return shared.call_in_one_piece(name, p, packed, Save.PRODUCTS)


def recipes_of_call(p: Problem, host: Host, offsets: str | None, save: Save) -> list[AnyRecipe]:
    if p.direction == "backward" or save in shared.NOT_KEPT:
        configs: list[Any] = [*shared.configs_of_call(training_plan, p, host.sms, save, offsets)]
    else:
        configs = [TablesConfig(offsets)] if offsets else []
        configs += plan(p, host.sms, save is Save.PRODUCTS).configs(offsets)
    return [recipe(config) for config in dict.fromkeys(configs) if config]
