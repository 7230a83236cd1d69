"""Problem and number of SMs to what is launched: configurations, and how sequences are cut.  No torch, no cutlass."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kda.model.bundles import Save
from kda.model.host import Host
from kda.model.problem import Problem
from ptxkit.compile import cutedsl
from ptxkit.compile.recipes import AnyRecipe
from ptxkit.compile.target import parse

from ..common import cutting
from ..common import training_plan as shared
from ..common.cute.configs import (
    ComposeConfig,
    JoinConfig,
    SharesConfig,
    TablesConfig,
    chunk_options,
    join_states_config,
)
from ..common.cute.tile import C
from ..common.cute.training import TOKENS
from ..common.pool.plan import inner
from ..common.pool.plan import recipes as pool_recipes
from . import costs
from .capability import BACKWARD
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
    tile,
)

TARGET = parse("sm90")
Forward = (
    TablesConfig | PrepareConfig | PairsConfig | ChainConfig | ComposeConfig | FusedConfig | StreamConfig | JoinConfig
)
Config = Forward | WalkConfig | GradsConfig | SharesConfig
KERNELS = {
    TablesConfig: "common.cute.tables", PrepareConfig: "sm90.fwd.prepare", PairsConfig: "sm90.fwd.pairs",
    ChainConfig: "sm90.fwd.chain", ComposeConfig: "common.cute.compose", FusedConfig: "sm90.fwd.fused",
    WalkConfig: "sm90.bwd.walk", GradsConfig: "sm90.bwd.grads", SharesConfig: "common.cute.shares",
    StreamConfig: "sm90.fwd.stream", JoinConfig: "common.cute.join",
}
STAGES = (6, 3)                              # stages of a chain with one CTA on an SM, and with two
RECORD_STAGES = (5, 2)                       # the same of a chain that keeps, beside results
WALK_STAGES = (6, 2)                         # and of other walks of a recorded call
FIT = {1: 132, 2: 66, 4: 30}                 # clusters of so many CTAs that run at once on 132 SMs, of H200s: measured
CLUSTERS_OF_ONE = tuple(shared.Clusters(ctas, n) for ctas in FIT for n in (0, 1)[ctas == 1 :])   # see `wraps`
# What decides between one kernel and two, as measured on an H200 (docs/decisions/hopper.md); clusters of
# four from times of 4 to 10 shapes, most of which it meets within 5%.  In the unit of costs.py.
FIRST_CHUNK = 5                              # more chunks that a cluster's first one takes
FIRST_OF_TWO, FIRST_OF_FOUR = 1.5, 11        # the same, beside clusters of four, and of those
SHARE_OF_FOUR = 4                            # more chunks, where walks outnumber the clusters
LAUNCH, WALK = 400, 0.8                      # costs of a second launch, and of a walk of `chain`
GAP = 300                                    # beside these
CUT_GAP, CUT_WALKED = 1300, 400              # beside segments: if all of them bind, or the way of a state through two
SEGMENT = 65                                 # the cost of a segment in compose
JOIN, JOINED, STREAM_SEGMENT = 500, 0.36, 35 # costs after segments of a stream: fixed, for a chunk, for a segment
SPREAD = 2                                   # times the mean: what the longest of several packed sequences may have
AT_MOST = 0.98                               # fraction of the time of what would run otherwise


@dataclass(frozen=True)
class Plan(cutting.Cut):
    """Sizes that follow from a call's shapes."""

    sequences: int
    all_chunks: int
    entries: int                             # entries of the table of chunks
    entries_grid: tuple[int, int]            # y and z of a grid over them
    halves_grid: tuple[int, int]             # the same over second halves of chunks of 64
    scratch: int                             # bytes of all tiles
    prepare: PrepareConfig
    pairs: PairsConfig | None                # where chunks of 64 are kept
    chain: ChainConfig
    carry: ChainConfig | None                # where sequences are cut
    compose: ComposeConfig | None
    fused: FusedConfig | None                # instead of all but the tables
    clusters: shared.Clusters                # clusters of fused
    stream: StreamConfig | None              # instead of all but the tables
    makers: int                              # its CTAs that make tiles
    stream_segments: int                     # segments of every sequence; more than one: `compose` and join follow

    @property
    def all_steps(self) -> int:
        """The number of steps of two chunks each; every sequence begins with a step of its own."""
        return (self.all_chunks + self.sequences) // 2


@functools.lru_cache(maxsize=1024)
def plan(p: Problem, sms: int, saves: bool = False) -> Plan:
    sms = p.force.sms or sms
    length, chunks = shared.segment_length(p, sms), -(-p.T // C)
    all_chunks = p.T // C + p.N if p.packed else p.B * chunks
    one, can_stream = (None, False) if saves else (fused_config(p), stream_config(p) is not None)
    cost = costs_of(p, costs.STATES if p.intermediate_states else costs.FORWARD)
    times, makers, in_stream, stream = Times(p, sms, all_chunks, length, cost), 0, 0, None
    clusters = clusters_of_one_kernel(times) if one else shared.NO_CLUSTERS
    if can_stream and streams(times, clusters.ctas):
        clusters, in_stream = shared.NO_CLUSTERS, segments_of_stream(times)
        makers, stream = makers_of_stream(p, sms, cost, in_stream), stream_config(p, in_stream > 1)
    fused = fused_config(p, clusters.sharing > 0, clusters.ctas) if clusters.ctas else None
    length = 0 if fused or stream else length
    chunks, _, _, all_segments = sizes = cutting.cut_into(p, C, length)

    def chain(walk: str) -> ChainConfig:
        alone, several = (chain_config(p, walk, stages) for stages in STAGES)
        return alone if alone.strips * p.HV * all_segments <= sms else several

    cut, entries = length > 0, all_chunks + p.packed                           # tokens of no sequence may need one more
    halves = (entries + 1) // 2 if p.packed else chunks // 2                   # one of two neighbours is a second half
    return Plan(
        *sizes, p.N, all_chunks, entries,
        shared.grid(entries) if p.packed else (chunks, p.B), shared.grid(halves) if p.packed else (halves, p.B),
        all_chunks * p.HV * tile(p.K).bytes,
        prepare_config(p, saves),
        pairs_config(p) if saves and p.C > C and halves else None,
        chain("segments" if cut else "sequences"), chain("carry") if cut else None,
        shared.compose_config(p) if cut else join_states_config(p) if in_stream > 1 else None,
        fused, clusters, stream, makers, in_stream,
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


def keeping_clusters(p: Problem, sms: int, chunks: int) -> shared.Clusters:
    """Return the clusters of the one kernel that keeps what a backward reads."""
    one = fused_config(p)
    if not one:
        return shared.NO_CLUSTERS
    clusters = clusters_of_one_kernel(Times(p, sms, chunks, 0, costs_of(p, costs.KEEPING)))
    return clusters if keeping_config(p, clusters, True) else shared.NO_CLUSTERS


def keeping_config(p: Problem, clusters: shared.Clusters, results: bool) -> FusedConfig | None:
    """Return the one kernel that keeps what a backward reads; without `results` if a backward recomputes that."""
    fused = fused_config(p, clusters.sharing > 0, clusters.ctas) if clusters.ctas else None
    if not fused or (fused.ctas == 2 and fused.prepare.in_blocks):
        return None
    prepare = dataclasses.replace(fused.prepare, b_on_keys=True)
    chain = dataclasses.replace(record_config(p, False, True, results), stages=RING)
    return dataclasses.replace(fused, prepare=prepare, chain=chain)


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
    grads=lambda p: GradsConfig(**chunk_options(p), packed=p.packed),
    one_kernel=keeping_clusters,
    fused=keeping_config,
    clusters=CLUSTERS_OF_ONE,
)


@functools.lru_cache(maxsize=1024)
def training_plan(p: Problem, sms: int) -> shared.TrainingPlan:
    return shared.plan_of(TRAINING, p, sms)


@functools.lru_cache(maxsize=1024)
def map_plan(p: Problem, sms: int) -> shared.MapPlan:
    return shared.map_plan_of(TRAINING, p, sms)


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
    if p.direction == "backward" or save in shared.BACKWARD_OF:
        configs: list[Any] = [*shared.configs_of_call(training_plan, p, host.sms, save, offsets)]
    else:
        forward = plan(p, host.sms, save is Save.PRODUCTS)
        configs = [TablesConfig(offsets)] if offsets else []
        if forward.stream:
            configs += [forward.stream, forward.compose, join_config(p, offsets) if forward.compose else None]
        else:
            configs += [forward.fused] if forward.fused else shared.configs_in(forward)
    return [recipe(config) for config in dict.fromkeys(configs) if config]


def prepare_config(p: Problem, saves: bool) -> PrepareConfig:
    return PrepareConfig(**chunk_options(p), packed=p.packed, kept_C=p.C * saves)


def fused_config(p: Problem, wrapped: bool = False, ctas: int = 0) -> FusedConfig | None:
    """Return the one kernel if prepare needs no halving.  A cluster has `ctas` CTAs; 0: one for each 64 columns."""
    prepare, strips = prepare_config(p, saves=False), p.V // COLUMNS
    ctas = ctas or strips
    staged = p.g_dtype == "bfloat16" and (ctas > 2 or prepare.in_blocks if p.force.staged is None else p.force.staged)
    if not (prepare.one_product or prepare.in_blocks) or ctas not in CLUSTER_SIZES.get(strips, ()):
        return None
    chain = chain_config(p, "sequences", RING)
    chain = dataclasses.replace(chain, every=chain.every if chain.h else 1)
    return FusedConfig(prepare, chain, wrapped, ctas, staged)


def costs_of(p: Problem, known: Mapping[tuple[int, int, bool], costs.Costs]) -> costs.Costs:
    """Return the costs from the table; those of K = V = 128 where dims are not in it."""
    in_blocks = prepare_config(p, saves=False).in_blocks
    return known.get((p.K, p.V, in_blocks)) or known[128, 128, in_blocks]


def stream_config(p: Problem, cut: bool = False) -> StreamConfig | None:
    """Return the stream if prepare needs no halving, and no states that enter chunks are requested."""
    prepare = prepare_config(p, saves=False)
    if p.intermediate_states or p.checkpoints or p.K != CHANNELS_OF_ROWS or not p.N * p.HV * p.T:
        return None
    staged = p.g_dtype == "bfloat16" and p.force.staged is not False
    chain = dataclasses.replace(chain_config(p, "sequences", 1), every=1)
    return StreamConfig(prepare, dataclasses.replace(chain, ht=True) if cut else chain, staged, cut)


def join_config(p: Problem, offsets: str | None) -> JoinConfig:
    return JoinConfig(offsets, p.K, p.V, TOKENS)


def makers_of_stream(p: Problem, sms: int, cost: costs.Costs, segments: int = 1) -> int:
    """CTAs that make tiles, where some make and others walk: as many as keep up with walks, since tiles that are made
    long before they are read leave L2.  None may be left."""
    if p.force.makers is not None:
        return p.force.makers
    heads, strips, of_M = p.N * p.HV, p.V // COLUMNS, p.K // COLUMNS
    walking = heads * (strips + (segments - 1) * (strips + of_M))
    enough = min(math.ceil(heads * segments * cost.making / cost.walked), -(-p.T // TOKENS) * heads)
    return max(min(sms - walking, enough), 0)


def segments_of_stream(times: Times) -> int:
    """Return the number of segments of every sequence; few heads leave CTAs without a walk.  0: no place for makers."""
    p = times.p
    most = max(times.sms // (2 * max(p.N * p.HV, 1)), 1)
    numbers = [p.force.segments] if p.force.segments else range(1, most + 1)
    makers = {n: makers_of_stream(p, times.sms, times.cost, n) for n in numbers}
    return min((n for n in makers if makers[n]), key=lambda n: times.of_stream(makers[n], n), default=0)


def clusters_of(p: Problem, sms: int, ctas: int) -> int:
    """Return how many clusters of `ctas` CTAs run at once and have something to walk."""
    return min(p.N * p.HV, p.force.clusters or max(1, sms * FIT[ctas] // 132))


def wraps(p: Problem, sms: int, ctas: int) -> bool:
    """Whether the one kernel's clusters have equal shares of walks, instead of a walk each.  CTAs alone always do:
    without shares ptxas keeps 22 registers more of addresses than there are."""
    return ctas == 1 or (clusters_of(p, sms, ctas) < p.N * p.HV and p.T > 0)


@dataclass(frozen=True)
class Times:
    """The time that each form of a forward would take."""

    p: Problem
    sms: int
    all_chunks: int
    length: int                              # chunks of a segment in two kernels; 0: of whole sequences
    cost: costs.Costs

    @property
    def strips(self) -> int:
        return self.p.V // COLUMNS

    @property
    def all_slots(self) -> int:
        return self.all_chunks * self.p.HV

    def longest(self, ctas: int, first: float) -> float:
        """Return the time of the cluster that has most chunks, in chunks."""
        walks, clusters = self.p.N * self.p.HV, clusters_of(self.p, self.sms, ctas)
        piece = self.cost.piece * min(ctas, 2) / 2
        return -(-self.all_slots // clusters) + first + piece * (walks / clusters - 1)

    def alone(self) -> float:
        """Return the time with CTAs alone."""
        return self.cost.alone * self.longest(1, FIRST_OF_TWO)

    def of_two(self, first: float = FIRST_OF_TWO) -> float:
        shared = self.cost.sharing if wraps(self.p, self.sms, 2) else 1
        return self.cost.pair * shared * self.longest(2, first)

    def of_four(self) -> float:
        return self.cost.four * self.longest(4, FIRST_OF_FOUR + SHARE_OF_FOUR * wraps(self.p, self.sms, 4))

    def apart(self) -> float:
        """Return the time in two kernels."""
        prepared, chunks = self.cost.prepared * self.all_slots, self.all_chunks / self.p.N
        if self.length:
            walked = prepared + 2 * self.cost.step * self.length + CUT_WALKED
            return max(self.cost.cut * self.all_slots + CUT_GAP, walked) + SEGMENT * chunks / self.length
        return prepared + max(self.cost.chained * self.all_slots, self.cost.step * chunks) + GAP

    def of_stream(self, makers: int, segments: int) -> float:
        """Return the time of a stream with `segments` segments of each sequence.  A walk is not shared, so the longest
        one counts, which only the GPU knows."""
        several = self.p.packed and self.p.N > 1
        chunks = min(SPREAD * self.all_chunks / self.p.N, self.all_chunks) if several else self.all_chunks / self.p.N
        making, walked = self.cost.making * self.all_slots / makers, self.cost.walked * chunks / segments
        joined = JOIN + JOINED * self.all_slots * (segments - 1) / segments + STREAM_SEGMENT * segments
        return max(making, walked) + self.cost.begin + joined * (segments > 1)

    def with_clusters(self, ctas: int) -> float:
        """Return the time with clusters of `ctas` CTAs; 0: in two kernels."""
        return {0: self.apart, 1: self.alone, 2: self.of_two, 4: self.of_four}[ctas]()


def clusters_of_one_kernel(times: Times) -> shared.Clusters:
    p, sms, ctas = times.p, times.sms, ctas_of_one_kernel(times)
    return shared.Clusters(ctas, clusters_of(p, sms, ctas) if ctas and wraps(p, sms, ctas) else 0)


def ctas_of_one_kernel(times: Times) -> int:
    """CTAs of the clusters of one kernel, where that is faster than two kernels; 0: it is not."""
    p, cut, cost, strips = times.p, times.length > 0, times.cost, times.strips
    walks, all_slots = p.N * p.HV, times.all_slots
    sizes = CLUSTER_SIZES.get(strips, ())
    forms = [ctas for ctas in sizes if ctas > 1 or p.T]                        # CTAs alone share walks, of some tokens
    if p.force.form in ("one kernel", "two kernels") or not walks:
        ctas = (p.force.ctas or forms[0]) if p.force.form == "one kernel" and walks else 0
        return 0 if (cut and ctas == strips) or ctas not in forms else ctas
    if all_slots >= 2**31:                                                     # share.py counts them in 32 bits
        return 0
    two_kernels = cost.both * all_slots + LAUNCH + WALK * walks
    if strips == 1:
        one = min(forms, key=times.with_clusters)
        otherwise = times.apart() if cut else max(times.apart(), two_kernels)
        return one if times.with_clusters(one) <= otherwise else 0
    pair = not cut and times.of_two(FIRST_CHUNK) <= two_kernels
    if not cut:
        pair = pair or (not wraps(p, times.sms, 2) and times.of_two(FIRST_CHUNK) <= times.apart())
    otherwise = times.with_clusters(2 * pair)
    return 4 if times.of_four() <= AT_MOST * otherwise else 2 * pair


def streams(times: Times, ctas: int) -> bool:
    """Whether some CTAs make tiles and others walk, which is faster than clusters of so many CTAs.  Its bits are not
    those of the other forms."""
    segments, form = 0 if times.p.batch_invariant else segments_of_stream(times), times.p.force.form
    if not segments or form:
        return bool(segments and form == "stream")
    makers = makers_of_stream(times.p, times.sms, times.cost, segments)
    return times.of_stream(makers, segments) <= AT_MOST * times.with_clusters(ctas)


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
