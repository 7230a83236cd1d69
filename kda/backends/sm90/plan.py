"""Problem and number of SMs to what is launched: configurations, and how sequences are cut.  No torch, no cutlass."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from kda.problem import Problem

from .configs import (
    BOUND, COLUMNS, LIMIT, STAGES, ChainConfig, ComposeConfig, FusedConfig, PairsConfig, PrepareConfig,
)  # fmt: skip
from .parts.tile import C

SHORTEST = 32                                # chunks of a segment
INVARIANT = 128                              # the same with batch_invariant
FUSED = False                                # one kernel where it can be: not measured yet


@dataclass(frozen=True)
class Plan:
    """What the shapes of a call say.  Packed, there may be fewer chunks and segments."""

    chunks: int                              # of a row of T tokens
    pieces: int                              # segments of a row
    segment: int                             # chunks of a segment
    all_chunks: int
    all_segments: int
    entries: int                             # of the table of chunks
    entries_grid: tuple[int, int]            # y and z of a grid over them
    halves_grid: tuple[int, int]             # the same over second halves of chunks of 64
    prepare: PrepareConfig
    pairs: PairsConfig | None                # where chunks of 64 are kept
    chain: ChainConfig
    carry: ChainConfig | None                # where sequences are cut
    compose: ComposeConfig | None
    fused: FusedConfig | None                # in place of all but the tables


@functools.lru_cache(maxsize=1024)
def plan(p: Problem, sms: int, kept: bool = False) -> Plan:
    length, chunks = split(p, sms), -(-p.T // C)
    segment = length or max(chunks, 1)
    pieces = max(1, -(-chunks // segment))
    if p.packed:
        all_chunks, all_segments = p.T // C + p.N, p.N + (p.T // (length * C) if length else 0)
    else:
        all_chunks, all_segments = p.B * chunks, p.B * pieces

    def chain(walk: str, h0: str | None, ht: bool) -> ChainConfig:
        kept = p.intermediate_states and walk != "carry"
        config = ChainConfig(p.K, p.V, p.packed, walk, h0, ht, p.state_v_first, kept, p.C // C, stages=3)
        alone = config.parts * p.HV * all_segments <= sms                      # on an SM; else two are there
        return dataclasses.replace(config, stages=6) if alone else config

    cut, entries = length > 0, all_chunks + p.packed                           # tokens of no sequence may need one more
    halves = (entries + 1) // 2 if p.packed else chunks // 2                   # of two neighbours one is a second
    return Plan(
        chunks, pieces, segment, all_chunks, all_segments, entries,
        grid(entries) if p.packed else (chunks, p.B), grid(halves) if p.packed else (halves, p.B),
        prepare_config(p, kept),
        PairsConfig(p.K, p.beta, p.packed, p.beta_dtype) if kept and p.C > C and halves else None,
        chain("segments", "float32", p.final_state) if cut else chain("sequences", p.state_dtype, p.final_state),
        chain("carry", None, False) if cut else None,
        ComposeConfig(p.K, p.V, p.packed, p.state_dtype, v_first=p.state_v_first) if cut else None,
        fused_config(p, cut, kept),
    )  # fmt: skip


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
    block = p.gate == "bounded" and p.lower_bound >= BOUND and p.qk_l2norm
    return PrepareConfig(
        p.K, p.V, p.gate, block=block, norm=p.qk_l2norm, rate=p.A_log, bias=p.dt_bias, beta=p.beta, packed=p.packed,
        grouped=p.HV != p.H, g_dtype=p.g_dtype, beta_dtype=p.beta_dtype, keep=p.C * kept,
    )  # fmt: skip


def fused_config(p: Problem, cut: bool, kept: bool) -> FusedConfig | None:
    """Where prepare makes one product of a chunk, two CTAs share a head, and nothing but o and final states goes out."""
    prepare = prepare_config(p, kept)
    fits = prepare.block and p.K == p.V == 2 * COLUMNS and p.N * p.HV > 0
    if not FUSED or not fits or cut or kept or p.intermediate_states:
        return None
    chain = ChainConfig(
        p.K, p.V, p.packed, "sequences", p.state_dtype, p.final_state, p.state_v_first, h=False, every=1, stages=STAGES
    )
    return FusedConfig(prepare, chain)


def grid(programs: int) -> tuple[int, int]:
    return min(programs, LIMIT), -(-programs // LIMIT)
