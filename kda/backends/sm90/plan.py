"""Problem and number of SMs to what is launched: configurations, and how sequences are cut.  No torch, no cutlass."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from kda.compile import cutedsl
from kda.compile.target import parse
from kda.host import Host
from kda.problem import Problem

from ..common.cute.configs import LIMIT, ComposeConfig, SharesConfig, TablesConfig, chunk_options
from ..common.cute.recorded import TOKENS
from ..common.cute.tile import C
from .capability import BACKWARD
from .configs import (
    COLUMNS,
    RING,
    ChainConfig,
    FusedConfig,
    GradsConfig,
    PairsConfig,
    PrepareConfig,
    WalkConfig,
    tile,
)

TARGET = parse("sm90")
Forward = TablesConfig | PrepareConfig | PairsConfig | ChainConfig | ComposeConfig | FusedConfig
Config = Forward | WalkConfig | GradsConfig | SharesConfig
KERNELS = {
    TablesConfig: "common.cute.tables", PrepareConfig: "sm90.fwd.prepare", PairsConfig: "sm90.fwd.pairs",
    ChainConfig: "sm90.fwd.chain", ComposeConfig: "common.cute.compose", FusedConfig: "sm90.fwd.fused",
    WalkConfig: "sm90.bwd.walk", GradsConfig: "sm90.bwd.grads", SharesConfig: "common.cute.shares",
}  # fmt: skip
OFFSETS = ("int32", "int64")                 # dtypes of cu_seqlens
STAGES = (6, 3)                              # of a chain: where a CTA is alone on an SM, and where two are there
RECORD_STAGES = (5, 2)                       # the same of a chain that keeps, beside results
WALK_STAGES = (6, 2)                         # and of other walks of a recorded call
TILE_ALIGNMENT = 1024
SHORTEST = 32                                # chunks of a segment
INVARIANT = 128                              # the same with batch_invariant
FUSED = None                                 # one kernel where that is sooner; True, False: where it can be, nowhere
CHUNKS = 50                                  # that prepare and chain make while a cluster makes one of its sequence
FIRST_CHUNK = 5                              # more chunks that a cluster's first one takes
LAUNCH = 400                                 # chunks that a second launch takes


@dataclass(frozen=True)
class Plan:
    """What the shapes of a call say.  Packed, there may be fewer chunks and segments."""

    chunks: int                              # of a row of T tokens
    segments: int                            # of a row
    segment: int                             # chunks of a segment
    all_chunks: int
    all_segments: int
    entries: int                             # of the table of chunks
    entries_grid: tuple[int, int]            # y and z of a grid over them
    halves_grid: tuple[int, int]             # the same over second halves of chunks of 64
    scratch: int                             # bytes of all tiles
    prepare: PrepareConfig
    pairs: PairsConfig | None                # where chunks of 64 are kept
    chain: ChainConfig
    carry: ChainConfig | None                # where sequences are cut
    compose: ComposeConfig | None
    fused: FusedConfig | None                # instead of all but the tables


@functools.lru_cache(maxsize=1024)
def plan(p: Problem, sms: int, kept: bool = False) -> Plan:
    length, chunks = split(p, sms), -(-p.T // C)
    segment = length or max(chunks, 1)
    segments = max(1, -(-chunks // segment))
    if p.packed:
        all_chunks, all_segments = p.T // C + p.N, p.N + (p.T // (length * C) if length else 0)
    else:
        all_chunks, all_segments = p.B * chunks, p.B * segments

    def chain(walk: str) -> ChainConfig:
        alone, several = (chain_config(p, walk, stages) for stages in STAGES)
        return alone if alone.strips * p.HV * all_segments <= sms else several

    cut, entries = length > 0, all_chunks + p.packed                           # tokens of no sequence may need one more
    halves = (entries + 1) // 2 if p.packed else chunks // 2                   # of two neighbours one is a second
    return Plan(
        chunks, segments, segment, all_chunks, all_segments, entries,
        grid(entries) if p.packed else (chunks, p.B), grid(halves) if p.packed else (halves, p.B),
        all_chunks * p.HV * tile(p.K).bytes,
        prepare_config(p, kept),
        pairs_config(p) if kept and p.C > C and halves else None,
        chain("segments" if cut else "sequences"), chain("carry") if cut else None,
        compose_config(p) if cut else None,
        None if cut or kept or not one_kernel(p, sms, all_chunks) else fused_config(p),
    )  # fmt: skip


@dataclass(frozen=True)
class RecordedPlan:
    """Of a forward that keeps what its backward reads, and of that backward, which makes it again if nothing was kept:
    on tiles with b on keys, a state of every two chunks.  Packed, there may be fewer chunks, segments and states."""

    chunks: int                              # of a row of T tokens, as the forward has them
    segments: int                            # of a row
    segment: int                             # chunks of a segment
    all_segments: int
    entries: int                             # of the table of chunks
    entries_grid: tuple[int, int]            # y and z of a grid over them
    states: int                              # of a row; packed, entries of their table
    all_states: int
    kept: Kept
    scratch: tuple[int, ...]                 # bytes of dh, what segments add to it, where it leaves them; shares
    grads_grid: int
    prepare: PrepareConfig
    carry: ChainConfig | None                # where sequences are cut
    compose: ComposeConfig | None
    record: ChainConfig                      # the forward
    again: ChainConfig                       # the same without results
    carry_back: WalkConfig | None            # where sequences are cut
    compose_back: ComposeConfig | None
    walk: WalkConfig
    grads: GradsConfig
    shares: SharesConfig | None              # where the gate has parameters


class Kept(NamedTuple):
    """Bytes of all that a backward reads beside inputs, as it lies in memory that a forward keeps."""

    tiles: int
    M: int                                   # of segments
    h: int
    r: int


def places(*sizes: int) -> tuple[int, ...]:
    """The bytes that parts of memory have, so that each begins where a tile may."""
    return tuple(-(-size // TILE_ALIGNMENT) * TILE_ALIGNMENT for size in sizes)


@functools.lru_cache(maxsize=1024)
def recorded_plan(p: Problem, sms: int) -> RecordedPlan:
    """The same segments for both directions."""
    length, chunks, states = split(p, sms), -(-p.T // C), -(-p.T // TOKENS)
    segment = length or max(chunks, 1)
    segments = max(1, -(-chunks // segment))
    all_chunks, all_states, all_segments = p.B * chunks, p.B * states, p.B * segments
    if p.packed:                                                               # tokens of no sequence may need one more
        all_chunks, all_segments = p.T // C + p.N + 1, p.N + (p.T // (length * C) if length else 0)
        all_states = states = p.T // TOKENS + p.N + 1
    cut = length > 0
    state, of_segments = p.HV * p.K * p.V, all_segments * cut
    kept = Kept(*places(
        all_chunks * p.HV * tile(p.K).bytes, 4 * of_segments * p.HV * p.K * p.K, 2 * all_states * state,
        2 * p.B * p.T * p.HV * p.V,
    ))  # fmt: skip
    scratch = places(2 * all_states * state, *[4 * of_segments * state] * 2, *[4 * all_states * p.HV * p.K] * 2)
    ctas = p.HV * all_segments
    alone = p.V // COLUMNS * ctas <= sms
    carries = recorded_carries(p, (p.V + p.K) // COLUMNS * ctas <= sms, alone) if cut else (None,) * 4
    return RecordedPlan(
        chunks, segments, segment, all_segments, all_chunks, grid(all_chunks) if p.packed else (chunks, p.B), states,
        all_states, kept, scratch, min(all_states * p.HV, sms) if p.T else 0, recorded_prepare(p), *carries[:2],
        *recorded_chains(p, cut, alone), *carries[2:], recorded_walk(p, cut, alone), grads_config(p), shares_config(p),
    )  # fmt: skip


def recorded_prepare(p: Problem) -> PrepareConfig:
    return dataclasses.replace(prepare_config(p, kept=False), b_on_keys=True)


def recorded_chains(p: Problem, cut: bool, alone: bool) -> tuple[ChainConfig, ChainConfig]:
    """The forward with its results, and without."""
    record = ChainConfig(
        p.K, p.V, p.packed, "segments" if cut else "sequences", "float32" if cut else p.state_dtype, ht=p.final_state,
        v_first=p.state_v_first, h=True, every=TOKENS // C, stages=RECORD_STAGES[not alone], recorded=True,
    )  # fmt: skip
    return record, dataclasses.replace(record, ht=False, o=False, stages=WALK_STAGES[not alone])


def recorded_walk(p: Problem, cut: bool, alone: bool) -> WalkConfig:
    walk = "segments" if cut else "sequences"
    return WalkConfig(
        p.K, p.V, p.packed, walk, p.final_state or cut, p.state_dtype, p.state_v_first, WALK_STAGES[not alone]
    )


def recorded_carries(p: Problem, up_alone: bool, back_alone: bool) -> tuple[Config, ...]:
    """What says which states enter segments, and which gradients of states leave them."""
    carry = dataclasses.replace(
        chain_config(p, "carry", WALK_STAGES[not up_alone]), recorded=True, every=TOKENS // C, v_first=False
    )
    back = WalkConfig(p.K, p.V, p.packed, "carry", False, "float32", False, WALK_STAGES[not back_alone])
    of_dht = "float32" if p.final_state else None
    compose_back = ComposeConfig(p.K, p.V, p.packed, of_dht, v_first=p.state_v_first, back=True)
    return carry, compose_config(p), back, compose_back


def states_table(offsets: str) -> TablesConfig:
    return TablesConfig(offsets, TOKENS, segments=False)


def grads_config(p: Problem) -> GradsConfig:
    return GradsConfig(**chunk_options(p), packed=p.packed)


def shares_config(p: Problem) -> SharesConfig | None:
    return SharesConfig(p.K, p.A_log, p.dt_bias) if p.A_log or p.dt_bias else None


def recipe(config: Config) -> cutedsl.Recipe:
    return cutedsl.Recipe(f"kda.backends.{KERNELS[type(config)]}:build", config, TARGET)


def recipes(p: Problem, host: Host) -> list[cutedsl.Recipe]:
    """All kernels that a call of this class can want, whatever B, T, N and the number of heads.

    Whether heads share q and k is of the class.
    """
    configs: list[Config | None] = [TablesConfig(dtype) for dtype in OFFSETS if p.packed]
    configs += [prepare_config(p, kept) for kept in (False, True)]
    configs += [pairs_config(p)] * (p.C > C)
    configs += [chain_config(p, walk, stages) for walk in ("sequences", "carry", "segments") for stages in STAGES]
    configs += [compose_config(p), fused_config(p)]
    backward = dataclasses.replace(p, direction="backward")
    if all(rule.holds(backward, host) for rule in BACKWARD):
        configs += [recorded_prepare(p), grads_config(p), shares_config(p)]
        configs += [states_table(dtype) for dtype in OFFSETS if p.packed]
        for final_state, alone in itertools.product((False, True), repeat=2):
            asked = dataclasses.replace(backward, final_state=final_state)
            for cut in (False, True):
                configs += [*recorded_chains(asked, cut, alone), recorded_walk(asked, cut, alone)]
            configs += recorded_carries(asked, alone, alone)
    return [recipe(config) for config in dict.fromkeys(configs) if config]


def split(p: Problem, sms: int) -> int:
    """Chunks of a segment, 0 for whole sequences: cut where heads and sequences leave the chip idle.

    With batch_invariant a sequence's cut does not depend on its neighbours.
    """
    sequences = max(p.N, 1)
    wanted = sms // (p.V // COLUMNS * p.HV * (1 if p.batch_invariant else sequences))
    if wanted < 3:
        return 0
    if p.batch_invariant:
        return INVARIANT
    chunks = -(-p.T // C) // (sequences if p.packed else 1)
    length = max(SHORTEST, -(-chunks // wanted) + 1 & -2)                      # whole chunks of 64
    return length if chunks > 2 * length else 0


def prepare_config(p: Problem, kept: bool) -> PrepareConfig:
    return PrepareConfig(**chunk_options(p), packed=p.packed, kept_C=p.C * kept)


def fused_config(p: Problem) -> FusedConfig | None:
    """Where prepare makes one product of a chunk, two CTAs share a head, and only o and final states are asked for."""
    prepare = prepare_config(p, kept=False)
    if not prepare.one_product or not p.K == p.V == 2 * COLUMNS or p.intermediate_states:
        return None
    return FusedConfig(prepare, dataclasses.replace(chain_config(p, "sequences", RING), every=1))


def one_kernel(p: Problem, sms: int, all_chunks: int) -> bool:
    """Whether a cluster of two for each sequence and head is sooner than two kernels: where waves of them are full, and
    sequences not short."""
    clusters, at_once = p.N * p.HV, sms // 2
    if FUSED is not None or not clusters:
        return bool(FUSED and clusters)
    of_one = -(-all_chunks // p.N)
    return -(-clusters // at_once) * (of_one + FIRST_CHUNK) * CHUNKS <= all_chunks * p.HV + LAUNCH


def pairs_config(p: Problem) -> PairsConfig:
    return PairsConfig(p.K, p.beta, p.packed, p.beta_dtype)


def chain_config(p: Problem, walk: str, stages: int) -> ChainConfig:
    h0 = {"sequences": p.state_dtype, "carry": None, "segments": "float32"}[walk]
    ends = walk != "carry"                                                     # at states that are asked for
    return ChainConfig(
        p.K, p.V, p.packed, walk, h0, ht=ends and p.final_state, v_first=p.state_v_first,
        h=ends and p.intermediate_states, every=p.C // C, stages=stages,
    )  # fmt: skip


def compose_config(p: Problem) -> ComposeConfig:
    return ComposeConfig(p.K, p.V, p.packed, p.state_dtype, v_first=p.state_v_first)


def grid(programs: int) -> tuple[int, int]:
    return min(programs, LIMIT), -(-programs // LIMIT)
