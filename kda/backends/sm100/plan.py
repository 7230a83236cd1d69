"""Problem and number of SMs to what is launched, and how sequences are cut.  No torch, no cutlass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kda.model.bundles import Save
from kda.model.host import Host
from kda.model.problem import Problem
from ptxkit.compile import cutedsl
from ptxkit.compile.recipes import AnyRecipe
from ptxkit.compile.target import Target, parse

from ..common import training_plan as shared
from ..common.cute.configs import (
    JOIN_ROWS,
    ComposeConfig,
    JoinConfig,
    SharesConfig,
    TablesConfig,
    chunk_options,
    join_states_config,
)
from ..common.cute.tile import HALF, C
from ..common.cutting import chunks_of_a_sequence, launch_segments
from ..common.pool.plan import inner
from ..common.pool.plan import recipes as pool_recipes
from .configs import (
    CTAS,
    FusedConfig,
    GradsConfig,
    KeepingConfig,
    OperandsConfig,
    RecordConfig,
    WalkConfig,
    record_tile,
)
from .reverse_config import ReverseConfig

if TYPE_CHECKING:
    from ptxkit.compile.launch_list import Location

    from ..common.routine import Draft

Forward = FusedConfig | ComposeConfig | JoinConfig
Recorded = (
    TablesConfig | KeepingConfig | OperandsConfig | RecordConfig | WalkConfig | GradsConfig | ReverseConfig
    | SharesConfig
)
Config = Forward | Recorded
KERNELS = {
    FusedConfig: "sm100.fwd.fused", ComposeConfig: "common.cute.compose", JoinConfig: "sm100.fwd.join",
    KeepingConfig: "sm100.fwd.fused",
    TablesConfig: "common.cute.tables", OperandsConfig: "sm100.fwd.operands", RecordConfig: "sm100.fwd.record",
    WalkConfig: "sm100.bwd.walk", GradsConfig: "sm100.bwd.grads", SharesConfig: "common.cute.shares",
    ReverseConfig: "sm100.bwd.reverse",
}

# Chunks that a cluster walks over in the time of two more launches, of a segment more in compose, for so many heads at
# once, and of a chunk of one head in join.
LAUNCHES, EDGE, AT_ONCE, JOINED = 16, 2, 16, 1 / 225
PAIRS = shared.Clusters(CTAS, 0)             # those of the one kernel that keeps what a backward reads, a walk each


@dataclass(frozen=True)
class Whole:
    """One kernel, whose clusters have equal shares of all sequences and heads."""

    fused: FusedConfig
    ctas: int

    def configs(self) -> tuple[Any, ...]:
        return (self.fused,)

    def launches(self, draft: Draft, p: Problem, o: Location, ht: Location | None, **arguments: Any) -> None:
        crossing = states_that_cross(draft, p, self.ctas) if shares_end_in_walks(p, self.ctas) else {}
        draft.launch(self.fused, (self.ctas, 1, 1), **arguments, **crossing, segments=1, o=o, ht=ht)


@dataclass(frozen=True)
class InSegments:
    """The same over segments of every sequence at once, and two kernels that put their results together."""

    fused: FusedConfig
    ctas: int
    segments: int                            # segments of each sequence
    compose: ComposeConfig
    join: JoinConfig
    blocks: int                              # blocks of JOIN_ROWS rows in a segment

    def configs(self) -> tuple[Any, ...]:
        return self.fused, self.compose, self.join

    def launches(self, draft: Draft, p: Problem, o: Location, ht: Location | None, **arguments: Any) -> None:
        if self.ctas:
            arguments |= states_that_cross(draft, p, self.ctas)
            first, join = (self.fused, (self.ctas, 1, 1)), (self.join, self.blocks)
            launch_segments(draft, p, first, self.compose, join, self.segments, o, ht, **arguments)


Form = Whole | InSegments


def plan(p: Problem, sms: int, offsets: str | None) -> Form:
    sms = p.force.sms or sms
    segments = segments_of(p, sms)
    ctas = CTAS * min(p.N * p.HV * (2 * segments - 1), sms // CTAS)
    if segments == 1:
        return Whole(fused_config(p, offsets), ctas)
    chunks = -(-p.T // C)
    length = -(-chunks // segments) * C                                        # the longest that a segment can be
    return InSegments(
        fused_config(p, offsets, cut=True), ctas, segments, join_states_config(p), JoinConfig(offsets, p.K, p.V, C),
        -(-length // JOIN_ROWS),
    )


def shares_end_in_walks(p: Problem, ctas: int) -> bool:
    """Return whether equal shares of whole sequences may end inside a walk."""
    return ctas > 0 and (p.N * p.HV * CTAS % ctas > 0 or (p.packed and p.N > 1))


def states_that_cross(draft: Draft, p: Problem, ctas: int) -> dict[str, Location]:
    """Return memory for the states that leave a share inside a walk, and flags that say that they are there."""
    flags = draft.tensor((ctas,), "int32", zeroed=True)
    return dict(edges=draft.memory().part(4 * ctas // CTAS * p.K * p.V), crossed=flags)


def segments_of(p: Problem, sms: int) -> int:
    """Return the number of segments per sequence: if few heads would leave clusters idle, two walks over a part of it
    are faster than one over all.  Roundings then differ, and states that enter chunks are not available."""
    if p.force.segments or p.batch_invariant or p.intermediate_states or p.checkpoints or not p.N:
        return p.force.segments or 1
    clusters, chunks, heads = sms // CTAS, max(chunks_of_a_sequence(p, C), 1), p.N * p.HV

    def time(segments: int) -> float:
        longest = -(-chunks // segments)
        walked = max(longest, heads * (2 * chunks - longest) / clusters)       # shares are equal
        if segments == 1:
            return walked
        return walked + LAUNCHES + EDGE * segments * -(-heads // AT_ONCE) + JOINED * heads * (chunks - longest)

    return min(range(1, 2 + clusters // (2 * heads)), key=time)


def fused_config(p: Problem, offsets: str | None, cut: bool = False) -> FusedConfig:
    return FusedConfig(
        **chunk_options(p), offsets=offsets, h0=p.state_dtype, ht=p.final_state and not cut, v_first=p.state_v_first,
        cut=cut, checkpoints=p.checkpoints,
    )


def record_config(p: Problem, cut: bool, alone: bool, results: bool) -> RecordConfig:
    """Return the configuration of a forward that keeps, or of the same without its results."""
    walk, h0 = ("segments", "float32") if cut else ("sequences", p.state_dtype)
    options = dict(ht=results and p.final_state, v_first=p.state_v_first, o=results)
    return RecordConfig(p.packed, walk, h0, **options, K=p.K, V=p.V)


def walk_config(p: Problem, cut: bool, alone: bool) -> WalkConfig:
    walk = "segments" if cut else "sequences"
    return WalkConfig(p.packed, walk, p.final_state or cut, p.state_dtype, p.state_v_first, K=p.K, V=p.V)


class Clocks(NamedTuple):
    """The clocks of a chunk of a call that keeps."""

    operands: int                            # for an SM
    record: int                              # for a step
    fused: int                               # for a step, in a cluster


# As the clock predicts them for a B200, by whether one product makes all pairs.
KEEPING = {True: Clocks(2960, 1800, 2200), False: Clocks(4480, 1800, 2900)}


def one_kernel_that_keeps(p: Problem, sms: int, chunks: int) -> shared.Clusters:
    """Return the clusters of the one kernel that keeps what a backward reads, where it is faster than operands and
    record.  They have equal shares of all sequences and value heads, or, if none ends inside a walk, one walk each.
    Bits are the same."""
    walks, longest, at_once = p.N * p.HV, max(chunks_of_a_sequence(p, C), 1), sms // CTAS
    config = keeping_config(p, PAIRS, True)
    if not config or not walks or not at_once or p.force.form == "two kernels":
        return shared.NO_CLUSTERS
    clocks = KEEPING[config.one_product]
    apart = clocks.operands * chunks * p.HV / sms + clocks.record * longest * -(-walks // sms)
    faster = clocks.fused * longest * max(1, walks / at_once) < apart
    if not faster and p.force.form != "one kernel":
        return shared.NO_CLUSTERS
    at_once = min(walks, at_once)
    return shared.Clusters(CTAS, at_once) if shares_end_in_walks(p, CTAS * at_once) else PAIRS


def keeping_config(p: Problem, clusters: shared.Clusters, results: bool) -> KeepingConfig | None:
    """Return the one kernel's configuration; without `results` if a backward recomputes what was not kept."""
    if p.K != p.V or p.V // CTAS != HALF:
        return None
    return KeepingConfig(
        **chunk_options(p), offsets=None, h0=p.state_dtype, ht=results and p.final_state, v_first=p.state_v_first,
        packed=p.packed, o=results,
    )


def grads_config(p: Problem) -> GradsConfig:
    return GradsConfig(**chunk_options(p), packed=p.packed)


def reverse_config(p: Problem, cut: bool, save: Save) -> ReverseConfig | None:
    """Return walk and grads in one grid, if a CTA has all of an SM.  A walk has a stage more where grads has rows of
    g."""
    grads = dataclasses.replace(grads_config(p), shares_over_h=save is Save.NOTHING)
    if grads.ctas > 1:
        return None
    walk = walk_config(p, cut, False)
    if "g" in grads.rows.fields:
        walk = dataclasses.replace(walk, stages=walk.stages + 1)
    return ReverseConfig(walk, grads, save is not Save.OWN)


TRAINING = shared.Makers(
    tile_bytes=lambda K: record_tile(K).bytes,
    prepare=lambda p: OperandsConfig(**chunk_options(p), packed=p.packed),
    record=record_config,
    carry=lambda p, alone: RecordConfig(
        p.packed, "carry", None, ht=False, v_first=False, o=False, K=p.K, V=p.V
    ),
    walk=walk_config,
    carry_back=lambda p, alone: WalkConfig(p.packed, "carry", False, "float32", False, K=p.K, V=p.V),
    grads=grads_config,
    reverse=reverse_config,
    walking=0.2,
    one_kernel=one_kernel_that_keeps,
    fused=keeping_config,
    clusters=(PAIRS,),
)


@functools.lru_cache(maxsize=1024)
def training_plan(p: Problem, sms: int) -> shared.TrainingPlan:
    return shared.plan_of(TRAINING, p, sms)


def target(cc: tuple[int, int]) -> Target:
    return parse(f"sm{cc[0]}{cc[1]}")


def recipe(config: Config, arch: Target) -> cutedsl.Recipe:
    return cutedsl.Recipe(f"kda.backends.{KERNELS[type(config)]}:build", config, arch)


def call_of_stage(name: str, p: Problem, packed: bool) -> tuple[Problem, Save]:
    return shared.call_in_one_piece(name, p, packed, Save.NOTHING)


def recipes_of_call(p: Problem, host: Host, offsets: str | None, save: Save) -> list[AnyRecipe]:
    if p.direction == "backward" or save in shared.NOT_KEPT:
        configs: Iterable[Any] = shared.configs_of_call(training_plan, p, host.sms, save, offsets)
    else:
        configs = plan(p, host.sms, offsets).configs()
    return [recipe(config, target(host.cc)) for config in dict.fromkeys(configs)]  # type: ignore[arg-type]


def recipes(p: Problem, host: Host, training: bool = True) -> list[AnyRecipe]:
    """All kernels that a call of this class can need, whatever B, T, N and the number of heads; `training`: also if its
    gradients are wanted."""
    configs: list[Any] = []
    if p.slots:
        return [*pool_recipes(p, C, target(host.cc)), *recipes(inner(p), host, training)]  # type: ignore[arg-type]
    cut = not (p.batch_invariant or p.intermediate_states or p.checkpoints)
    for offsets in shared.OFFSETS if p.packed else (None,):
        configs += [fused_config(p, offsets)]
        configs += [fused_config(p, offsets, cut), JoinConfig(offsets, p.K, p.V, C)] * cut
    configs += [join_states_config(p)] * cut
    if training:
        configs += shared.all_configs(TRAINING, p)
    return [recipe(config, target(host.cc)) for config in dict.fromkeys(configs) if config]  # type: ignore[arg-type]
