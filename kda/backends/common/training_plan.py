"""Shapes of a recorded call, a forward that keeps and its backward, to what is launched, on every arch that has kernels
for it.  No torch, no cutlass.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
NOT_KEPT = {Save.OWN: 0, Save.STATES: 1}     # how many of SavedBytes, from the first on, a backward makes again
WORTH_ONE_GRID = 512                         # items of grads: with fewer, those that walk are waited for
COLUMNS = 64                                 # columns of a state or of M that a CTA has where sequences are cut


class Clusters(NamedTuple):
    """The clusters of the kernel that both makes tiles and walks over them."""

    ctas: int                                # CTAs of each; 0: no such kernel, or prepare and record are faster
    sharing: int                             # clusters that share all walks; 0: each has a walk of its own

    def grid(self, p: Problem) -> tuple[int, int, int]:
        return (self.ctas, self.sharing, 1) if self.sharing else (self.ctas, p.HV, p.N)


NO_CLUSTERS = Clusters(0, 0)


@dataclass(frozen=True)
class Sizes(cutting.Cut):
    entries: int                             # entries of the table of chunks
    entries_grid: tuple[int, int]            # y and z of a grid over them


def sizes_of(p: Problem, length: int) -> Sizes:
    """Return the sizes for segments of `length` chunks; 0: whole sequences."""
    sizes = cutting.cut_into(p, C, length)
    chunks = sizes[0]
    entries = p.T // C + p.N + 1 if p.packed else p.B * chunks                 # tokens of no sequence may need one more
    return Sizes(*sizes, entries, grid(entries) if p.packed else (chunks, p.B))


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
    reverse: Callable[[Problem, bool, Save], Any] = lambda p, cut, save: None  # walk and grads in one grid
    walking: float = 1                       # fraction of a grid's CTAs, at least, that walk beside gradients
    clusters: tuple[Clusters, ...] = ()      # every Clusters that one_kernel returns, but for the value of `sharing`
    chain: Callable[[Problem, bool, bool], Any] = lambda p, cut, alone: None   # cut, alone; keeps nothing


@dataclass(frozen=True)
class Apart:
    """Prepare and a chain make all that a backward reads, one after the other; where sequences are cut, carry and
    compose find the states that enter segments."""

    prepare: KernelConfig
    record: KernelConfig                     # the chain of a forward
    again: KernelConfig                      # the same without results
    carry: Any = None
    compose: ComposeConfig | None = None

    def configs(self, results: bool) -> Iterator[Any]:
        yield from (self.prepare, self.carry, self.compose, self.record if results else self.again)

    def launches(self, d: Any, parts: Any, results: bool, cleared: Any, **out: Any) -> None:
        """Describe the launches in a Description, for Parts; rows of `cleared` outside every sequence are cleared."""
        d.make_tables()
        d.make_tiles(self.prepare, parts.tiles, cleared)
        h0 = d.entering_segments(self.carry, self.compose, parts.tiles, parts.M)
        d.launch_walk(self.record if results else self.again, tiles=parts.tiles, v=d.draft["v"], h0=h0, r=parts.r,
                      h=parts.h, segment_table=d.tables.segment, **out)


@dataclass(frozen=True)
class AtOnce:
    """One kernel makes all that a backward reads, of whole sequences."""

    clusters: Clusters
    record: Any                              # the kernel of a forward
    again: Any                               # the same without results
    carry: ClassVar[None] = None

    def configs(self, results: bool) -> Iterator[Any]:
        yield self.record if results else self.again

    def launches(self, d: Any, parts: Any, results: bool, cleared: Any, **out: Any) -> None:
        """Describe the launch, as Apart does."""
        edges = d.edges(self.clusters)
        d.make_tables()
        d.draft.launch(
            self.record if results else self.again, self.clusters.grid(d.p), **d.forward, **edges, o=cleared,
            ht=out.get("ht"), segment_table=d.tables.segment, tiles=parts.tiles, r=parts.r, h=parts.h,
        )


class Reverse(NamedTuple):
    """Walk and grads in one grid."""

    config: Any
    spare: int                               # bytes behind tiles that were made again, for dh of items that have one
    grid: int
    walks: int                               # segments, at least one of a sequence, and value heads
    walkers: int                             # CTAs that walk, before they compute gradients


@dataclass(frozen=True)
class TrainingPlan(Sizes):
    """The sizes and kernels of a forward that keeps what its backward reads, and of that backward, which recomputes it
    if nothing was kept.  Keys of tiles are multiplied by b, and a state is kept for every two chunks.  Packed, there
    may be fewer states."""

    states: int                              # kept states of a row; if packed, entries of their table
    all_states: int
    saved: SavedBytes
    scratch: tuple[int, ...]                 # bytes of training.Scratch
    grads_grid: int
    making: Apart | AtOnce                   # what makes all that the backward reads
    prepare: KernelConfig                    # makes the tiles alone, if the backward has all but these
    carry_back: KernelConfig | None          # where sequences are cut
    compose_back: ComposeConfig | None
    walk: KernelConfig
    grads: KernelConfig
    reverse: Mapping[Save, Reverse]          # instead of both, where this was saved
    shares: SharesConfig | None              # where the gate has parameters

    def configs(self, save: Save, backward: bool) -> Iterator[Any]:
        """Yield the configurations of a direction's kernels; a backward recomputes what was not kept."""
        if not backward:
            yield from self.making.configs(results=True)
            return
        if save is Save.STATES:
            yield self.prepare
        elif save is not Save.OWN:
            yield from self.making.configs(results=False)
        yield from (*self.back(save), self.shares_of(save))

    def back(self, save: Save) -> tuple[Any, ...]:
        """The kernels of a backward between what makes tiles and `shares`."""
        one = self.reverse.get(save)
        return self.carry_back, self.compose_back, *((one.config,) if one else (self.walk, self.grads))

    def shares_of(self, save: Save) -> SharesConfig | None:
        one = self.reverse.get(save)
        return self.shares and dataclasses.replace(self.shares, over_h=bool(one and one.config.grads.shares_over_h))


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
    sizes, all_states = sizes_of(p, length), p.B * states
    if p.packed:                                                               # tokens of no sequence may need one more
        states = all_states = p.T // TOKENS + p.N + 1
    cut, grads, prepare = length > 0, make.grads(p), make.prepare(p)
    state, of_segments = p.HV * p.K * p.V, sizes.all_segments * cut
    saved = SavedBytes(*places(
        sizes.entries * p.HV * make.tile_bytes(p.K), 4 * of_segments * p.HV * p.K * p.K, 2 * all_states * state,
        2 * p.B * p.T * p.HV * p.V,
    ))
    scratch = places(2 * all_states * state, *[4 * of_segments * state] * 2, *[4 * all_states * p.HV * p.K] * 2)
    ctas = p.HV * sizes.all_segments
    alone, carry_alone = (columns // COLUMNS * ctas <= sms for columns in (p.V, p.V + p.K))
    clusters = NO_CLUSTERS if cut else make.one_kernel(p, sms, sizes.entries)
    making: Apart | AtOnce
    if clusters.ctas:
        making = AtOnce(clusters, make.fused(p, clusters, True), make.fused(p, clusters, False))
    else:
        between = (make.carry(p, carry_alone), compose_config(p)) if cut else ()
        making = Apart(prepare, make.record(p, cut, alone, True), make.record(p, cut, alone, False), *between)
    grads_grid = min(all_states * p.HV, sms * grads.ctas) if p.T else 0        # type: ignore[attr-defined]
    return TrainingPlan(
        **vars(sizes), states=states, all_states=all_states, saved=saved, scratch=scratch,
        grads_grid=grads_grid,
        making=making,
        prepare=prepare,
        carry_back=make.carry_back(p, alone) if cut else None,
        compose_back=compose_back_config(p) if cut else None,
        walk=make.walk(p, cut, alone),
        grads=grads,
        reverse=reverse_of(make, p, cut, grads_grid, all_states * p.HV, ctas),
        shares=shares_config(p),
    )


def reverse_of(make: Makers, p: Problem, cut: bool, grid: int, items: int, walks: int) -> dict[Save, Reverse]:
    """Return the one kernel for walk and grads, of so many CTAs, if it is faster than two, or prescribed, by what was
    saved.  As many CTAs walk as keep up with grads, where dv and dh are read while L2 has them."""
    if not grid or not walks or (p.force.reverse is None and items < WORTH_ONE_GRID):
        return {}
    rounds, odd = max(1, int(walks / (make.walking * grid))), p.packed or -(-p.T // C) % 2
    spare = 2 * p.N * p.HV * COLUMNS * p.V if p.K > COLUMNS and odd else 0
    walkers = min(p.force.walkers or -(-walks // rounds), walks, grid)
    return {save: Reverse(config, spare, grid, walks, walkers) for save, config in in_one_grid(make, p, cut).items()}


def in_one_grid(make: Makers, p: Problem, cut: bool) -> dict[Save, Any]:
    """Return the configurations of walk and grads in one grid, by what was saved.

    Where tiles are made again, two kernels have dq, dk and dg in their memory after the walk.  One has dh there, and r
    where dq comes unless r was saved.  It is taken if that needs no more memory, or if it is prescribed: in dh a token
    has as many rows of K numbers as there are panels.
    """
    if p.force.reverse is False:
        return {}
    c: Any = make.grads(p)
    gates = 0 if c.per_head else 1 + c.wide_g                                  # rows of dg
    rows = {Save.OWN: 0, Save.NOTHING: 1 + gates, Save.STATES: 2 + gates}      # and of dk, and of dq
    found = {save: make.reverse(p, cut, save) for save, n in rows.items() if n <= c.panels or p.force.reverse}
    return {save: config for save, config in found.items() if config}


@dataclass(frozen=True)
class HalvesPlan(Sizes):
    """The plan of a forward in two halves, of one sequence whose parts are on several GPUs.  The first half makes tiles
    and the maps of segments, the second one walks over the tiles from the state that enters.  The first half alone is
    the map of the sequence."""

    saved: SavedBytes                        # if nothing is kept, tiles and M
    M_apart: int                             # bytes of M, if they are not among these
    added: int                               # bytes of what segments add to states
    prepare: KernelConfig
    carry: Any                               # None if there is one segment and no map is wanted
    compose: ComposeConfig | None            # finds the states that enter segments, if there are several
    chain: KernelConfig
    compose_added: ComposeConfig             # composes what segments add
    compose_M: ComposeConfig                 # composes M: the state that enters is the identity, and nothing is added


def halves_plan_of(
    make: Makers, p: Problem, sms: int, kept: SavedBytes | None, length: int, of_map: bool
) -> HalvesPlan:
    """Return the plan for segments of `length` chunks, 0: the whole sequence.  `kept` is what a forward that keeps has
    memory for; `of_map`: the map of the sequence is wanted."""
    sms, cut = p.force.sms or sms, length > 0
    sizes, walked = sizes_of(p, length), cut or of_map
    alone, carry_alone = (columns // COLUMNS * p.HV * sizes.segments <= sms for columns in (p.V, p.V + p.K))
    M, added = (4 * walked * sizes.segments * p.HV * p.K * columns for columns in (p.K, p.V))
    chain = make.record(p, cut, alone, True) if kept else make.chain(p, cut, alone)
    return HalvesPlan(
        **vars(sizes),
        saved=kept or SavedBytes(sizes.chunks * p.HV * make.tile_bytes(p.K), M, 0, 0),
        M_apart=0 if not kept or kept.M else M, added=added,
        prepare=make.prepare(p), carry=make.carry(p, carry_alone) if walked else None,
        compose=compose_config(p) if cut else None, chain=chain,
        compose_added=compose_config(p),
        compose_M=compose_config(dataclasses.replace(p, V=p.K, state_dtype="float32")),
    )


def length_of_a_map(p: Problem, sms: int) -> int:
    """Return the chunks of a segment, so that each SM has two CTAs, where the map of a sequence alone is wanted."""
    chunks, ctas, sms = -(-p.T // C), (p.K + p.V) // COLUMNS * p.HV, p.force.sms or sms
    wanted = 1 if p.batch_invariant else max(1, 2 * sms // ctas)
    return cutting.prescribed_length(p, WHOLE) or cutting.length_for(chunks, wanted, SHORTEST, WHOLE)


def all_configs(make: Makers, p: Problem) -> Iterator[KernelConfig | None]:
    """Yield the configuration of every kernel that a recorded call of this class can want, some of them twice."""
    shares = shares_config(p)
    yield from (make.prepare(p), make.grads(p), shares)
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
            for one in in_one_grid(make, backward, cut).values():
                yield from (one, shares and dataclasses.replace(shares, over_h=one.grads.shares_over_h))
            if cut:
                yield from (make.carry_back(backward, alone), compose_config(p), compose_back_config(backward))
        yield from (make.fused(backward, clusters, results) for clusters in make.clusters for results in (True, False))
        if not p.batch_invariant:
            yield make.carry(backward, alone)


def configs_of_call(
    planned: Callable[[Problem, int], TrainingPlan], p: Problem, sms: int, save: Save, offsets: str | None
) -> Iterator[Any]:
    """Yield the configurations of a forward that keeps something of its own, or of a backward, which recomputes what
    was not kept.  Whether the final states have gradients is not known before the call."""
    backward = p.direction == "backward"
    yield from filter(None, planned(p, sms).configs(save, backward))
    if backward:
        yield from filter(None, planned(dataclasses.replace(p, final_state=False), sms).back(save))
    if offsets:
        yield from (TablesConfig(offsets), states_table(offsets))[: 1 + backward]


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
    return SharesConfig(p.K, p.A_log, p.dt_bias, p.gate_per_head) if p.A_log or p.dt_bias else None


def segment_length(p: Problem, sms: int) -> int:
    """Return the chunks of a segment, 0 for whole sequences: one CTA on an SM walks COLUMNS columns of a state."""
    return cutting.segment_length(p, C, p.V // COLUMNS, sms, SHORTEST, WHOLE)


def grid(programs: int) -> tuple[int, int]:
    return min(programs, GRID), -(-programs // GRID)
