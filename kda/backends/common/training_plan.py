"""Shapes of a recorded call, a forward that keeps and its backward, to what is launched, on every arch that has kernels
for it.  No torch, no cutlass.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kda.model.bundles import Save
from kda.model.problem import Problem

from . import cutting
from .arguments import TILE_ALIGNMENT, KernelConfig
from .cute.configs import ComposeConfig, SharesConfig, TablesConfig
from .cute.tile import C
from .cute.training import TOKENS
from .rules import GRID

OFFSETS = ("int32", "int64")                 # dtypes of cu_seqlens
SHORTEST = 32                                # chunks of a segment
WHOLE = 2                                    # chunks of 64 tokens are not cut
COLUMNS = 64                                 # columns of a state or of M that a CTA has where sequences are cut


class Clusters(NamedTuple):
    """The clusters of the kernel that both makes tiles and walks over them."""

    ctas: int                                # CTAs of each; 0: no such kernel, or prepare and record are faster
    sharing: int                             # clusters that share all walks; 0: each has a walk of its own

    def grid(self, p: Problem) -> tuple[int, int, int]:
        return (self.ctas, self.sharing, 1) if self.sharing else (self.ctas, p.HV, p.N)


NO_CLUSTERS = Clusters(0, 0)


class Makers(NamedTuple):
    """An arch's configurations.  `cut`: sequences are; `alone`: there is an SM for each CTA."""

    tile_bytes: Callable[[int], int]                                           # as a function of K
    prepare: Callable[[Problem], KernelConfig]
    record: Callable[[Problem, bool, bool, bool], KernelConfig]                # cut, alone; with results, or without
    carry: Callable[[Problem, bool], KernelConfig]                             # alone
    walk: Callable[[Problem, bool, bool], KernelConfig]                        # cut, alone
    carry_back: Callable[[Problem, bool], KernelConfig]                        # alone
    grads: Callable[[Problem], KernelConfig]
    one_kernel: Callable[[Problem, int, int], Clusters] = lambda p, sms, chunks: NO_CLUSTERS   # uncut sequences
    fused: Callable[[Problem, Clusters, bool], KernelConfig | None] = lambda p, clusters, results: None
    clusters: tuple[Clusters, ...] = ()      # every Clusters that one_kernel returns, but for the value of `sharing`


@dataclass(frozen=True)
class TrainingPlan(cutting.Cut):
    """The sizes and kernels of a forward that keeps what its backward reads, and of that backward, which recomputes it
    if nothing was kept.  Keys of tiles are multiplied by b, and a state is kept for every two chunks.  Packed, there
    may be fewer states."""

    entries: int                             # entries of the table of chunks
    entries_grid: tuple[int, int]            # y and z of a grid over them
    states: int                              # kept states of a row; if packed, entries of their table
    all_states: int
    saved: SavedBytes
    scratch: tuple[int, ...]                 # bytes of dh, what segments add to it, where it leaves them; shares
    grads_grid: int
    prepare: KernelConfig
    carry: KernelConfig | None               # where sequences are cut
    compose: ComposeConfig | None
    record: KernelConfig                     # the forward
    again: Any                               # the same without results
    carry_back: KernelConfig | None          # where sequences are cut
    compose_back: ComposeConfig | None
    walk: KernelConfig
    grads: KernelConfig
    shares: SharesConfig | None              # where the gate has parameters
    clusters: Clusters
    fused: Any                               # instead of prepare and record
    fused_again: Any                         # instead of prepare and again

    def kernels(self, kind: str) -> dict[str, Any]:
        """Return the configurations of kernels by name; None for one that `kind` does not launch."""
        at_once = self.fused and kind in ("forward", "backward")
        return vars(self) | dict.fromkeys((*NOT_LAUNCHED[kind], *(AT_ONCE if at_once else ("fused", "fused_again"))))


# What does not launch some kernels of a TrainingPlan.
NOT_LAUNCHED: dict[str, tuple[str, ...]] = {
    "forward": ("again", "fused_again", "carry_back", "compose_back", "walk", "grads", "shares"),
    "backward": ("record", "fused"),
    "backward of what was kept": ("prepare", "carry", "compose", "record", "again"),
    "backward of kept states": ("carry", "compose", "record", "again"),
    "map of a backward": ("record", "again"),
}
BACKWARD_OF = {Save.OWN: "backward of what was kept", Save.STATES: "backward of kept states"}
AT_ONCE = ("prepare", "record", "again")     # what fused and fused_again do


class SavedBytes(NamedTuple):
    """Bytes of all that a backward reads beside inputs, as it lies in memory that a forward keeps."""

    tiles: int
    M: int                                   # bytes of the matrices M of segments
    h: int
    r: int


def places(*sizes: int) -> tuple[int, ...]:
    """The bytes that parts of memory have, so that each begins where a tile may."""
    return tuple(-(-size // TILE_ALIGNMENT) * TILE_ALIGNMENT for size in sizes)


def plan_of(make: Makers, p: Problem, sms: int) -> TrainingPlan:
    """Return the plan, which has the same segments in both directions."""
    sms = p.force.sms or sms
    length, states = segment_length(p, sms), -(-p.T // TOKENS)
    chunks, _, _, all_segments = sizes = cutting.cut_into(p, C, length)
    all_chunks, all_states = p.B * chunks, p.B * states
    if p.packed:                                                               # tokens of no sequence may need one more
        all_chunks, all_states = p.T // C + p.N + 1, p.T // TOKENS + p.N + 1
        states = all_states
    cut, grads = length > 0, make.grads(p)
    state, of_segments = p.HV * p.K * p.V, all_segments * cut
    saved = SavedBytes(*places(
        all_chunks * p.HV * make.tile_bytes(p.K), 4 * of_segments * p.HV * p.K * p.K, 2 * all_states * state,
        2 * p.B * p.T * p.HV * p.V,
    ))
    scratch = places(2 * all_states * state, *[4 * of_segments * state] * 2, *[4 * all_states * p.HV * p.K] * 2)
    ctas = p.HV * all_segments
    alone, carry_alone = (columns // COLUMNS * ctas <= sms for columns in (p.V, p.V + p.K))
    clusters = NO_CLUSTERS if cut else make.one_kernel(p, sms, all_chunks)
    return TrainingPlan(
        *sizes, all_chunks, grid(all_chunks) if p.packed else (chunks, p.B), states,
        all_states, saved, scratch, min(all_states * p.HV, sms * grads.ctas) if p.T else 0,  # type: ignore[attr-defined]
        prepare=make.prepare(p),
        carry=make.carry(p, carry_alone) if cut else None,
        compose=compose_config(p) if cut else None,
        record=make.record(p, cut, alone, True),
        again=make.record(p, cut, alone, False),
        carry_back=make.carry_back(p, alone) if cut else None,
        compose_back=compose_back_config(p) if cut else None,
        walk=make.walk(p, cut, alone),
        grads=grads,
        shares=shares_config(p),
        clusters=clusters,
        fused=make.fused(p, clusters, True),
        fused_again=make.fused(p, clusters, False),
    )


@dataclass(frozen=True)
class MapPlan:
    """The plan that composes M and the added states of the segments of a sequence whose parts are on several GPUs."""

    chunks: int
    segments: int
    segment: int                             # chunks of a segment
    tiles: int                               # bytes
    prepare: KernelConfig
    carry: Any
    compose: ComposeConfig                   # composes what is added
    compose_M: ComposeConfig                 # composes M: the state that enters is the identity, and nothing is added


def map_plan_of(make: Makers, p: Problem, sms: int) -> MapPlan:
    """Return the plan with as many segments as give each SM two CTAs."""
    chunks, ctas, sms = -(-p.T // C), (p.K + p.V) // COLUMNS * p.HV, p.force.sms or sms
    wanted = 1 if p.batch_invariant else max(1, 2 * sms // ctas)
    segment = cutting.prescribed_length(p, WHOLE) or cutting.length_for(chunks, wanted, SHORTEST, WHOLE)
    segments = -(-chunks // segment)
    square = dataclasses.replace(p, V=p.K, state_dtype="float32")
    return MapPlan(
        chunks, segments, segment, chunks * p.HV * make.tile_bytes(p.K), make.prepare(p),
        make.carry(p, ctas * segments <= sms), compose_config(p), compose_config(square),
    )


def all_configs(make: Makers, p: Problem) -> Iterator[KernelConfig | None]:
    """Yield the configuration of every kernel that a recorded call of this class can want, some of them twice."""
    yield from (make.prepare(p), make.grads(p), shares_config(p))
    if p.packed:
        for dtype in OFFSETS:
            yield from (TablesConfig(dtype), states_table(dtype))
    for final_state, alone in itertools.product((False, True), repeat=2):
        backward = dataclasses.replace(p, direction="backward", final_state=final_state)
        for cut in (False, True)[: 1 if p.batch_invariant else 2]:
            if cut and not (alone or p.packed):
                continue                                                       # segments of a row have an SM each
            yield from (make.record(backward, cut, alone, results) for results in (True, False))
            yield make.walk(backward, cut, alone)
            if cut:
                yield from (make.carry_back(backward, alone), compose_config(p), compose_back_config(backward))
        yield from (make.fused(backward, clusters, results) for clusters in make.clusters for results in (True, False))
        if not p.batch_invariant:
            yield make.carry(backward, alone)


def configs_in(plan: Any) -> Iterator[Any]:
    """Return the configurations of the kernels of a plan."""
    return (config for config in vars(plan).values() if isinstance(config, KernelConfig))


def configs_of_call(
    planned: Callable[[Problem, int], TrainingPlan], p: Problem, sms: int, save: Save, offsets: str | None
) -> Iterator[Any]:
    """Yield the configurations of a forward that keeps something of its own, or of a backward, which recomputes what
    was not kept.  Whether the final states have gradients is not known before the call."""
    backward = p.direction == "backward"
    kind = BACKWARD_OF.get(save, "backward") if backward else "forward"
    yield from (config for config in planned(p, sms).kernels(kind).values() if isinstance(config, KernelConfig))
    if backward:
        without = planned(dataclasses.replace(p, final_state=False), sms)
        yield from (config for config in (without.walk, without.compose_back) if config)
    if offsets:
        yield from (TablesConfig(offsets), states_table(offsets))


def call_in_one_piece(name: str, p: Problem, packed: bool, save: Save) -> tuple[Problem, Save]:
    """Stages that are a forward in one piece, with all its results and what it saves; or a backward in one piece, for
    which nothing was kept."""
    p = dataclasses.replace(
        p, final_state=True, state_v_first=False, state_dtype=p.state_dtype or "float32", packed=packed
    )
    if name.startswith("fwd"):
        return dataclasses.replace(p, direction="forward", intermediate_states=True), save
    return dataclasses.replace(p, direction="backward"), Save.NOTHING


def compose_config(p: Problem) -> ComposeConfig:
    return ComposeConfig(p.K, p.V, p.packed, p.state_dtype, v_first=p.state_v_first)


def compose_back_config(p: Problem) -> ComposeConfig:
    of_dht = "float32" if p.final_state else None
    return ComposeConfig(p.K, p.V, p.packed, of_dht, v_first=p.state_v_first, back=True)


def states_table(offsets: str) -> TablesConfig:
    return TablesConfig(offsets, TOKENS, segments=False)


def shares_config(p: Problem) -> SharesConfig | None:
    return SharesConfig(p.K, p.A_log, p.dt_bias) if p.A_log or p.dt_bias else None


def segment_length(p: Problem, sms: int) -> int:
    """Return the chunks of a segment, 0 for whole sequences: one CTA on an SM walks COLUMNS columns of a state."""
    return cutting.segment_length(p, C, p.V // COLUMNS, sms, SHORTEST, WHOLE)


def grid(programs: int) -> tuple[int, int]:
    return min(programs, GRID), -(-programs // GRID)
