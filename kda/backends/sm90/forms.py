"""The forms of a Hopper forward, each with its kernels and launches, and which of them a call takes.

  TwoKernels   prepare makes tiles of all chunks, a chain walks over them; segments are walked at the same time
  OneKernel    clusters that make tiles and walk over them
  Stream       some CTAs make tiles and others walk; of one segment of each sequence, or of several

No torch, no cutlass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from kda.model.problem import Problem

from ..common import training_plan as shared
from ..common.cute.configs import JOIN_ROWS, ComposeConfig, join_states_config
from ..common.cute.tile import C
from ..common.cute.training import TOKENS
from ..common.cutting import launch_segments, length_for, prescribed_length
from ..common.training_plan import NO_CLUSTERS, Clusters, Sizes
from . import costs
from .configs import CLUSTER_SIZES, COLUMNS, ChainConfig, FusedConfig, PairsConfig, PrepareConfig, StreamConfig, tile
from .kernels import (
    STAGES,
    chain_config,
    fused_config,
    join_config,
    pairs_config,
    prepare_config,
    stream_config,
)

if TYPE_CHECKING:
    from ptxkit.compile.launch_list import Location

    from ..common.training import Description

FIT = {1: 132, 2: 66, 4: 30}                 # clusters of so many CTAs that run at once on 132 SMs, of H200s: measured
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

Products = tuple["Location | None", "Location | None"]     # A_qk and A_inv, if they are saved
NO_PRODUCTS: Products = (None, None)


@dataclass(frozen=True)
class TwoKernels:
    p: Problem
    sms: int
    length: int = 0                          # chunks of a segment; 0: sequences are whole
    saves: bool = False                      # whether A_qk and A_inv are saved
    name: ClassVar = "two kernels"

    @cached_property
    def sizes(self) -> Sizes:
        return shared.sizes_of(self.p, self.length)

    @cached_property
    def prepare(self) -> PrepareConfig:
        return prepare_config(self.p, self.saves)

    @cached_property
    def pairs(self) -> PairsConfig | None:
        """The kernel that makes what is saved for chunks of 64 tokens, of two tiles each."""
        return pairs_config(self.p) if self.saves and self.p.C > C and self.halves else None

    @cached_property
    def chain(self) -> ChainConfig:
        return self._chain("segments" if self.length else "sequences")

    @cached_property
    def carry(self) -> ChainConfig | None:
        return self._chain("carry") if self.length else None

    @cached_property
    def compose(self) -> ComposeConfig | None:
        return shared.compose_config(self.p) if self.length else None

    @property
    def all_chunks(self) -> int:
        """The number of all chunks, at most; an entry of the table may be of tokens of no sequence."""
        return self.sizes.entries - self.p.packed

    @property
    def halves(self) -> int:
        """One of two neighbours is the second half of a chunk of 64."""
        return (self.sizes.entries + 1) // 2 if self.p.packed else self.sizes.chunks // 2

    def _chain(self, walk: str) -> ChainConfig:
        alone, several = (chain_config(self.p, walk, stages) for stages in STAGES)
        return alone if alone.strips * self.p.HV * self.sizes.all_segments <= self.sms else several

    def configs(self, offsets: str | None) -> Iterator[Any]:
        yield from (self.prepare, self.pairs, self.chain, self.carry, self.compose)

    def launches(self, d: Description, o: Location, ht: Location | None) -> Products:
        p, sizes = self.p, self.sizes
        tiles = d.scratch.part(self.all_chunks * p.HV * tile(p.K).bytes)
        A_qk, A_inv = (d.draft.tensor((p.B * p.T, p.HV, p.C), p.dtype) if self.saves else None for _ in range(2))
        d.make_tables()
        d.make_tiles(self.prepare, tiles, cleared=o, A_qk=A_qk, A_inv=A_inv)
        halves = shared.grid(self.halves) if p.packed else (self.halves, p.B)
        d.draft.launch(self.pairs, (p.HV, *halves), T=p.T, chunks=sizes.entries, HV=p.HV, tiles=tiles,
                       beta=d.draft["beta"], A_qk=A_qk, A_inv=A_inv, chunk_table=d.tables.chunk)
        M = d.states(sizes.all_segments, p.K) if self.carry else None
        h0 = d.entering_segments(self.carry, self.compose, tiles, M)           # they come first
        d.launch_walk(self.chain, tiles=tiles, v=d.draft["v"], h0=h0, o=o, ht=ht, segment_table=d.tables.segment,
                      **_states(d, always=True))
        return A_qk, A_inv


@dataclass(frozen=True)
class OneKernel:
    p: Problem
    clusters: Clusters
    name: ClassVar = "one kernel"

    @cached_property
    def sizes(self) -> Sizes:
        return shared.sizes_of(self.p, 0)

    @cached_property
    def fused(self) -> FusedConfig:
        config = fused_config(self.p, self.clusters.sharing > 0, self.clusters.ctas)
        assert config
        return config

    def configs(self, offsets: str | None) -> Iterator[Any]:
        yield self.fused

    def launches(self, d: Description, o: Location, ht: Location | None) -> Products:
        edges = d.edges(self.clusters)
        d.make_tables()
        d.draft.launch(
            self.fused, self.clusters.grid(self.p), **d.forward, **edges, **_states(d, always=False), o=o, ht=ht,
            segment_table=d.tables.segment,
        )
        return NO_PRODUCTS


@dataclass(frozen=True)
class Stream:
    p: Problem
    makers: int                              # CTAs that make tiles
    segments: int                            # segments of each sequence; what joins them follows several
    name: ClassVar = "stream"

    @cached_property
    def sizes(self) -> Sizes:
        return shared.sizes_of(self.p, 0)

    @cached_property
    def stream(self) -> StreamConfig:
        config = stream_config(self.p, self.segments > 1)
        assert config
        return config

    def configs(self, offsets: str | None) -> Iterator[Any]:
        yield self.stream
        if self.segments > 1:
            yield from (join_states_config(self.p), join_config(self.p, offsets))

    def launches(self, d: Description, o: Location, ht: Location | None) -> Products:
        p, segments = self.p, self.segments
        steps = (self.sizes.entries - p.packed + p.N) // 2                     # each has two chunks of one sequence
        ready = d.draft.tensor((steps * p.HV,), "int32", zeroed=True)
        tiles = d.scratch.part(2 * steps * p.HV * tile(p.K).bytes)
        d.make_tables()
        grid = (self.makers + self.stream.walks(segments) * p.HV * p.N, 1, 1)
        arguments = dict(**d.forward, makers=self.makers, segment_table=d.tables.segment, tiles=tiles, ready=ready)
        if segments == 1:
            d.draft.launch(self.stream, grid, **arguments, o=o, ht=ht)
            return NO_PRODUCTS
        blocks = -(-(-(-p.T // (TOKENS * segments)) * TOKENS) // JOIN_ROWS)
        join = join_config(p, d.offsets), blocks
        launch_segments(d.draft, p, (self.stream, grid), join_states_config(p), join, segments, o, ht, **arguments)
        return NO_PRODUCTS


Form = TwoKernels | OneKernel | Stream


def _states(d: Description, always: bool) -> dict[str, Location]:
    """Return where the states that enter chunks are stored."""
    if d.p.checkpoints:
        return d.draft.only("pool", "place")
    return d.draft.only("h") if always or d.p.intermediate_states else {}


# what each form would take


def clusters_of(p: Problem, sms: int, ctas: int) -> int:
    """Return how many clusters of `ctas` CTAs run at once and have something to walk."""
    return min(p.N * p.HV, p.force.clusters or max(1, sms * FIT[ctas] // 132))


def wraps(p: Problem, sms: int, ctas: int) -> bool:
    """Whether the one kernel's clusters have equal shares of walks, instead of a walk each.  CTAs alone always do:
    without shares ptxas keeps 22 registers more of addresses than there are."""
    return ctas == 1 or (clusters_of(p, sms, ctas) < p.N * p.HV and p.T > 0)


def makers_of_stream(p: Problem, sms: int, cost: costs.Costs, segments: int = 1) -> int:
    """CTAs that make tiles, where some make and others walk: as many as keep up with walks, since tiles that are made
    long before they are read leave L2.  None may be left."""
    if p.force.makers is not None:
        return p.force.makers
    heads, strips, of_M = p.N * p.HV, p.V // COLUMNS, p.K // COLUMNS
    walking = heads * (strips + (segments - 1) * (strips + of_M))
    enough = min(math.ceil(heads * segments * cost.making / cost.walked), -(-p.T // TOKENS) * heads)
    return max(min(sms - walking, enough), 0)


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

    def of(self, form: Form) -> float:
        if isinstance(form, Stream):
            return self.of_stream(form.makers, form.segments)
        if isinstance(form, TwoKernels):
            return self.apart()
        return {1: self.alone, 2: self.of_two, 4: self.of_four}[form.clusters.ctas]()

    def of_close(self, form: TwoKernels | OneKernel) -> float:
        """Return the time by which two kernels, CTAs alone and clusters of two are compared, which are close."""
        if isinstance(form, OneKernel):
            return self.of(form) if self.strips == 1 else self.of_two(FIRST_CHUNK)
        if self.length:
            return self.apart()
        both = self.cost.both * self.all_slots + LAUNCH + WALK * self.p.N * self.p.HV
        return both if self.strips > 1 and wraps(self.p, self.sms, 2) else max(both, self.apart())

    def fastest(self, rivals: Sequence[Form], best: Form) -> Form:
        """Return the fastest of the rivals if it saves some hundredths of the time of what is best so far."""
        if not rivals:
            return best
        return min([*rivals, best], key=lambda form: self.of(form) * (AT_MOST if form is best else 1))

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

    def of_map(self) -> float:
        """Return the time of the map of a sequence alone."""
        return (self.cost.prepared + self.cost.carried) * self.all_slots + GAP

    def of_halves(self, length: int, of_map: bool, at_once: float) -> float:
        """Return when a forward in two halves ends, on a rank that waits for one that takes `at_once`."""
        steps, segments = length or self.all_chunks, -(-self.all_chunks // (length or self.all_chunks))
        carried = max(self.cost.carried * self.all_slots, self.cost.step * steps) if length or of_map else 0
        first = self.cost.prepared * self.all_slots + carried
        second = max(self.cost.chained * self.all_slots, self.cost.step * steps) + GAP + SEGMENT * segments
        return max(first, at_once) + second

    def of_stream(self, makers: int, segments: int) -> float:
        """Return the time of a stream with `segments` segments of each sequence.  A walk is not shared, so the longest
        one counts, which only the GPU knows."""
        several = self.p.packed and self.p.N > 1
        chunks = min(SPREAD * self.all_chunks / self.p.N, self.all_chunks) if several else self.all_chunks / self.p.N
        making, walked = self.cost.making * self.all_slots / makers, self.cost.walked * chunks / segments
        joined = JOIN + JOINED * self.all_slots * (segments - 1) / segments + STREAM_SEGMENT * segments
        return max(making, walked) + self.cost.begin + joined * (segments > 1)


# which form a call takes


def one_kernels(times: Times) -> list[OneKernel]:
    """Return the one kernel in clusters of each size that a call can have.  CTAs alone share walks, of some tokens; a
    pair walks over nothing that two kernels would cut; shares are counted in 32 bits."""
    p, sms, strips = times.p, times.sms, times.strips
    if not fused_config(p) or not p.N * p.HV or times.all_slots >= 2**31:
        return []
    sizes = (ctas for ctas in CLUSTER_SIZES[strips] if (ctas > 1 or p.T) and not (times.length and ctas == strips == 2))
    return [OneKernel(p, Clusters(n, clusters_of(p, sms, n) if wraps(p, sms, n) else 0)) for n in sizes]


def streams(times: Times) -> list[Stream]:
    """Return the streams that a call can have: few heads leave CTAs without a walk for more segments.  Their bits are
    not those of the other forms."""
    p = times.p
    if p.batch_invariant or stream_config(p) is None:
        return []
    most = max(times.sms // (2 * p.N * p.HV), 1)
    numbers: Iterable[int] = [p.force.segments] if p.force.segments else range(1, most + 1)
    makers = {n: makers_of_stream(p, times.sms, times.cost, n) for n in numbers}
    return [Stream(p, makers[n], n) for n in makers if makers[n]]


def chosen(times: Times, two: TwoKernels, ones: Sequence[OneKernel] = (), streams: Sequence[Stream] = ()) -> Form:
    """Return the fastest form, or the one that is prescribed.  Clusters of four and streams are taken where they save
    some hundredths of the time."""
    force = times.p.force
    if force.form == "stream" and streams:
        return min(streams, key=times.of)
    if force.form in ("one kernel", "two kernels"):
        fitting = (one for one in ones if force.ctas in (None, one.clusters.ctas))
        return next(fitting, two) if force.form == "one kernel" else two
    close: list[TwoKernels | OneKernel] = [one for one in ones if one.clusters.ctas < 4]
    best: Form = min([*close, two], key=times.of_close) if close else two
    best = times.fastest([one for one in ones if one.clusters.ctas == 4], best)
    return times.fastest(streams, best)


def form_of(p: Problem, sms: int, saves: bool) -> Form:
    """Return the form of a forward."""
    length = shared.segment_length(p, sms)
    return TwoKernels(p, sms, length, saves) if saves else fastest(p, sms, length)[0]


def fastest(p: Problem, sms: int, length: int) -> tuple[Form, Times]:
    """Return the form of a forward that keeps nothing, and what decided."""
    two = TwoKernels(p, sms, length)
    cost = costs_of(p, costs.STATES if p.intermediate_states else costs.FORWARD)
    times = Times(p, sms, two.all_chunks, length, cost)
    return chosen(times, two, one_kernels(times), streams(times)), times


def fastest_that_keeps(p: Problem, sms: int, chunks: int) -> tuple[TwoKernels | OneKernel, Times]:
    """Return the same for what a backward reads, of whole sequences."""
    times = Times(p, sms, chunks, 0, costs_of(p, costs.KEEPING))
    return chosen(times, TwoKernels(p, sms), one_kernels(times)), times  # type: ignore[return-value]


def clusters_that_keep(p: Problem, sms: int, chunks: int) -> Clusters:
    """Return the clusters of the one kernel for what a backward reads, of whole sequences, where it is the fastest."""
    form, _ = fastest_that_keeps(p, sms, chunks)
    return form.clusters if isinstance(form, OneKernel) else NO_CLUSTERS


def fastest_in_halves(p: Problem, sms: int, keeps: bool, of_map: bool) -> int | None:
    """Return the chunks of a segment of a forward in two halves, on a rank that waits for a state, 0 for one segment;
    None if all at once is faster, behind the map if another rank waits for it.  What is kept has M of segments if the
    backward is cut, of the same ones; otherwise the second half may be cut for itself."""
    length = shared.segment_length(p, sms)
    form, times = fastest_that_keeps(p, sms, shared.sizes_of(p, 0).entries) if keeps else fastest(p, sms, length)
    lengths = [length] if keeps and length else lengths_in_halves(p, sms)
    at_once = times.of(form)
    if keeps and length:
        at_once = times.of_halves(length, False, 0)                            # in the same kernels
    best = min(lengths, key=lambda length: times.of_halves(length, of_map, at_once))
    gains = times.of_halves(best, of_map, at_once) < at_once + max(at_once, times.of_map() * of_map)
    return best if p.force.halves or (p.force.halves is None and gains) else None


def lengths_in_halves(p: Problem, sms: int) -> list[int]:
    """Return the lengths of a segment that a forward in two halves may have: 0 for one segment; and so many segments
    that each SM has a walk."""
    if (prescribed := prescribed_length(p, shared.WHOLE)) is not None:
        return [prescribed]
    chunks, segments = -(-p.T // C), 1 if p.batch_invariant else sms // (p.V // COLUMNS * p.HV)
    length = length_for(chunks, max(segments, 1), shared.SHORTEST, shared.WHOLE)
    return [0, length] if length < chunks else [0]


def costs_of(p: Problem, known: costs.Table) -> costs.Costs:
    """Return the costs from the table; those of K = V = 128 where dims are not in it."""
    in_blocks = prepare_config(p, saves=False).in_blocks
    return known.get((p.K, p.V, in_blocks)) or known[128, 128, in_blocks]
