"""The launches of a forward that keeps what its backward reads, and of that backward.

  forward   prepare, with b on keys;  carry and compose if sequences are cut;  a chain: o, h of every two chunks, r;
            or one kernel for all of it (`fused`)
  backward  the same without results, or of it what was not kept;  the walk back over the chunks;  grads
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kda.model.bundles import Grads, OpaqueSaved, Outputs, Products, Save, Saved, SegmentSummary
from kda.model.host import detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.code import Place
from ptxkit.compile.errors import BuildError
from ptxkit.compile.kernel import Kernel

from .arguments import KernelConfig, NamedLaunch
from .cute.configs import ROUNDED_TO, RUN, ChunkTable, ComposeConfig, SegmentTable, TablesConfig
from .cute.tile import BF16, C, swizzle_128B
from .cute.training import TOKENS
from .launcher import (
    backward_as_stage,
    chunks_of,
    forward_as_stage,
    gate_numbers,
    inputs_of,
    launch_of,
    outputs,
    rows_of,
    segment_summary,
    walk_numbers,
)
from .tensors import aligned, laid_out, offsets_on, on_its_device
from .training_plan import BACKWARD_OF, COLUMNS, MapPlan, TrainingPlan, states_table

Tensor = torch.Tensor

# What a backward rounds, by the names that the stages have for what is as large: kE, qg, b kg, A_qk b, T', states, r,
# z and dv; G, Qu, Ku and Kd; results.
ROUNDED_IN_BACKWARD = dict.fromkeys(
    ("A_qk", "A_inv", "w", "u", "qg", "kb", "kg", "h", "v_new", "dh", "dv_new", "P", "kD", "qD", "dA_k", "dA_q",
     "r", "G", "Qu", "Ku", "Kd", "dq", "dk", "dv", "dg", "dbeta"), "bfloat16",
)


class PackedTables(NamedTuple):
    """Tables of chunks, segments and pairs of chunks, on the GPU; None unless sequences are packed."""

    chunk: Tensor | None = None
    segment: Tensor | None = None
    state: Tensor | None = None
    first_segment: Tensor | None = None


NO_TABLES = PackedTables()


class Parts(NamedTuple):
    """What a backward reads beside the inputs: tensors or Places; in the order of `SavedBytes`."""

    tiles: Any
    M: Any
    h: Any
    r: Any


# How many of Parts, from the first on, a backward makes again, by what the forward kept.
NOT_KEPT = {Save.OWN: 0, Save.STATES: 1}


class TrainingLaunches(NamedTuple):
    """A plan and its launches, to be called with tensors; None if there is nothing to do."""

    plan: TrainingPlan
    tables: NamedLaunch | None               # makes the tables of chunks and of segments
    states: NamedLaunch | None               # makes the table of pairs of chunks
    prepare: NamedLaunch | None
    carry: NamedLaunch | None
    compose: NamedLaunch | None
    record: NamedLaunch | None
    again: NamedLaunch | None
    fused: NamedLaunch | None                # instead of prepare and one of these
    carry_back: NamedLaunch | None
    compose_back: NamedLaunch | None
    walk: NamedLaunch | None
    grads: NamedLaunch | None
    shares: NamedLaunch | None


@functools.lru_cache(maxsize=1024)
def steps(
    backend: TrainingBackend, p: Problem, cc: tuple[int, int], sms: int, offsets: str | None, what: str
) -> TrainingLaunches:
    """Return the launches of `what`, a key of NOT_LAUNCHED.  `offsets` is the dtype of `cu_seqlens`.  In a backward,
    `p.final_state` says whether final states have gradients."""
    pl = backend.plan(p, sms)
    kernels = pl.kernels(what)
    step = functools.partial(launch_of, lambda config: backend.kernel(config, cc))
    gate, walk = gate_numbers(p), walk_numbers(p, pl)
    compose = dict(segments=pl.segments, HV=p.HV)
    walks = pl.all_segments if p.N else 0

    def walker(config):
        return config and step(config, (config.strips, p.HV, walks), **walk)

    def maker(config):
        return config and step(config, pl.clusters.grid(p), chunks=pl.chunks, N=p.N, **gate)

    def composer(config):
        return config and step(config, (config.strips, p.HV, p.N), **compose)

    return TrainingLaunches(
        pl,
        step(TablesConfig(offsets) if offsets else None, (runs(C, p), 1, 1), T=p.T, N=p.N, segment=pl.segment,
             every=pl.again.every, chunk_entries=pl.entries, segment_entries=pl.all_segments),
        step(states_table(offsets) if offsets else None, (runs(TOKENS, p), 1, 1), T=p.T, N=p.N, segment=1, every=1,
             chunk_entries=pl.states, segment_entries=0),
        step(kernels["prepare"], (p.HV, *pl.entries_grid), chunks=pl.entries, **gate),
        walker(kernels["carry"]), composer(kernels["compose"]), walker(kernels["record"]), walker(kernels["again"]),
        maker(kernels["fused"] or kernels["fused_again"]),
        walker(kernels["carry_back"]), composer(kernels["compose_back"]), walker(kernels["walk"]),
        step(kernels["grads"], (pl.grads_grid, 1, 1), chunks=pl.states, items=pl.all_states * p.HV, zero=0.0, one=1.0,
             **gate),
        step(kernels["shares"], (p.HV, 1, 1), chunks=pl.all_states * (p.T > 0), HV=p.HV),
    )


def runs(rows: int, p: Problem) -> int:
    """Return the number of CTAs that write tables."""
    return max(1, -(-p.T // (rows * RUN))) if p.N else 0


@functools.lru_cache(maxsize=1024)
def with_dht(p: Problem, dht: bool) -> Problem:
    return dataclasses.replace(p, final_state=dht)


class MapLaunches(NamedTuple):
    plan: MapPlan
    prepare: NamedLaunch | None
    carry: NamedLaunch | None
    compose: NamedLaunch | None
    compose_M: NamedLaunch | None


@functools.lru_cache(maxsize=1024)
def map_steps(backend: TrainingBackend, p: Problem, cc: tuple[int, int], sms: int) -> MapLaunches:
    assert backend.map_plan
    pl = backend.map_plan(p, sms)
    step = functools.partial(launch_of, lambda config: backend.kernel(config, cc))

    def composer(config: ComposeConfig) -> NamedLaunch | None:                 # one more segment: see segment_map
        return step(config, (config.strips, p.HV, 1), segments=pl.segments + 1, HV=p.HV)

    return MapLaunches(
        pl,
        step(pl.prepare, (p.HV, pl.chunks, 1), chunks=pl.chunks, **gate_numbers(p)),
        step(pl.carry, (pl.carry.strips, p.HV, pl.segments), **walk_numbers(p, pl)),
        composer(pl.compose), composer(pl.compose_M),
    )


class TrainingBackend:
    """The functions of an arch's `launch` that have to do with gradients, or with a forward alone as a stage."""

    def __init__(
        self, plan: Callable[[Problem, int], TrainingPlan], kernel: Callable[[KernelConfig, tuple[int, int]], Kernel],
        plain_forward: Callable[..., Outputs], call_of_stage: Callable[[str, Problem, bool], tuple[Problem, Save]], *,
        v_first: bool, map_plan: Callable[[Problem, int], MapPlan] | None = None,
    ) -> None:
        self.plan, self.kernel = plan, kernel      # for this number of SMs; for a compute capability
        self.plain_forward, self.call_of_stage = plain_forward, call_of_stage
        self.v_first = v_first                     # rows of saved states are those of v
        self.map_plan = map_plan                   # where there is a segment_map
        self.backward, self.segment_map_bwd = on_its_device(self._backward), on_its_device(self._segment_map_bwd)

    def rounded_to(self, p: Problem) -> dict[str, str]:
        return ROUNDED_IN_BACKWARD if p.direction == "backward" else ROUNDED_TO

    def saved_bytes(self, p: Problem, save: Save) -> int:
        return sum(self.plan(p, detect(p.device).sms).saved[NOT_KEPT[save]:])

    def saved_in(self, p: Problem, saved: OpaqueSaved | None) -> Save:
        """Return what a forward has kept, which the size of its memory tells."""
        if saved is None:
            return Save.NOTHING
        return Save.OWN if saved.memory.numel() == self.saved_bytes(p, Save.OWN) else Save.STATES

    def steps(self, p: Problem, x: Inputs, what: str = "") -> TrainingLaunches:
        host = detect(p.device)
        return steps(self, p, host.cc, host.sms, offsets_dtype(x), what or p.direction)

    def forward(self, p: Problem, x: Inputs, save: Save) -> Outputs:
        launches = self.steps(p, x)
        out, inputs = outputs(p, x), laid_out(x)
        parts, memory = parts_in(out.o, launches.plan.saved, NOT_KEPT[save])
        crossing = edges_of(p, out.o, launches)
        results = dict(o=out.o, ht=out.final_state)
        up(p, launches, launches.record, inputs, parts, tables(p, launches, x), crossing, cleared=out.o, **results)
        return out._replace(saved=OpaqueSaved(memory))

    def _backward(
        self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | OpaqueSaved | None = None
    ) -> Grads:
        """Return the gradients.  What another backend saved is not looked at: the forward's operands, states and
        residuals are recomputed; its operands alone, if the states were saved."""
        usable = saved if type(saved) is OpaqueSaved else None
        p, save = with_dht(p, dht is not None), self.saved_in(p, usable)
        launches = self.steps(p, x, BACKWARD_OF.get(save, "backward"))
        like, inputs, sizes, crossing = x.q, laid_out(x), launches.plan.saved, edges_of(p, x.q, launches)
        packed = tables(p, launches, x)
        do, dht = aligned(do, like.dtype), aligned(dht, torch.float32)
        # tokens of no sequence: prepare clears their rows, which does not run again if all was kept
        dv = (like.new_zeros if save is Save.OWN and p.packed else like.new_empty)(p.B, p.T, p.HV, p.V)
        dh0 = None if inputs["h0"] is None else torch.empty_like(inputs["h0"])
        if usable is None:
            parts, _ = parts_in(like, sizes, 2)                                 # tiles and M are needed only briefly
            up(p, launches, launches.again, inputs, parts, packed, crossing, cleared=dv)
        else:
            parts, _ = parts_in(like, sizes, NOT_KEPT[save], usable.memory)
            if save is Save.STATES:
                make_tiles(launches, inputs, parts, packed, cleared=dv)
        dh, added, edge, *shares = fresh_places(like, launches.plan.scratch)
        if launches.carry_back:
            launches.carry_back(tiles=parts.tiles, do=do, dh0=added, segment_table=packed.segment)
            launches.compose_back(M=parts.M, added=added, h0=dht, edge=edge, first_segment=packed.first_segment)
            dht = edge  # type: ignore[assignment]
        if launches.walk:
            launches.walk(tiles=parts.tiles, do=do, dht=dht, dv=dv, dh=dh, dh0=dh0, segment_table=packed.segment)
        parts = parts._replace(tiles=None, M=None)                             # dq and dk may reuse their memory
        dq, dk, dg, dbeta = grads(p, launches, x, inputs, parts, packed, shares, do=do, dv=dv, dh=dh)
        dA_log, ddt_bias = sums(launches, x, shares)
        return Grads(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)

    def segment_map(self, p: Problem, x: Inputs) -> SegmentSummary:
        """For one sequence on several GPUs: compose M and the added states of its segments.  The state that `compose`
        returns for one segment more is the state that leaves the sequence."""
        host, inputs = detect(p.device), laid_out(x)
        launches = map_steps(self, p, host.cc, host.sms)
        like, v, h0 = x.q, inputs.pop("v"), inputs.pop("h0")
        tiles = like.new_empty(launches.plan.tiles, dtype=torch.uint8)
        launches.prepare(**inputs, tiles=tiles, o=v)                           # o is of packed sequences alone
        of_segments = segment_summary(p, like, launches.plan.segments)
        launches.carry(tiles=tiles, v=v, ht=of_segments.added, M=of_segments.M)
        added, M = (like.new_empty(launches.plan.segments + 1, p.HV, p.K, n, dtype=torch.float32) for n in (p.V, p.K))
        launches.compose(M=of_segments.M, added=of_segments.added, h0=h0, edge=added)
        eye = torch.eye(p.K, device=like.device).repeat(1, p.HV, 1, 1)
        launches.compose_M(M=of_segments.M, added=torch.zeros_like(M), h0=eye, edge=M)
        return SegmentSummary(M[-1:], added[-1:])

    def _segment_map_bwd(self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
        """For one sequence on several GPUs: launch the walk back over tiles, without grads."""
        p = dataclasses.replace(p, direction="backward", state_dtype="float32")    # dh0 is requested
        like, inputs = x.q, laid_out(x)
        inputs.pop("h0")
        launches = self.steps(with_dht(p, dht is not None), x, "map of a backward")
        tiles, M = fresh_places(like, launches.plan.saved[:2])
        dh, added, edge = fresh_places(like, launches.plan.scratch[:3])
        do, dht = aligned(do, like.dtype), aligned(dht, torch.float32)
        dv, v = torch.empty_like(inputs["v"]), inputs.pop("v")
        dh0 = like.new_empty(1, p.HV, p.K, p.V, dtype=torch.float32)
        launches.prepare(**inputs, tiles=tiles, o=dv)
        if launches.carry:
            launches.carry(tiles=tiles, v=v, ht=added, M=M)
            launches.carry_back(tiles=tiles, do=do, dh0=added)
            launches.compose_back(M=M, added=added, h0=dht, edge=edge)
            dht = edge  # type: ignore[assignment]
        launches.walk(tiles=tiles, do=do, dht=dht, dv=dv, dh=dh, dh0=dh0)
        return dh0

    def stage(
        self, name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Run the forward in one piece, with what it saves for others; the backward, with all that it recomputes; or
        its second kernel alone."""
        p, save = self.call_of_stage(name, p, offsets is not None)
        if name == "bwd/grads":
            return self.grads_as_stage(p, offsets, tensors)
        if name.startswith("bwd"):
            return backward_as_stage(self.backward, p, offsets, tensors)
        return forward_as_stage(self.plain_forward, save, p, offsets, tensors)

    def grads_as_stage(
        self, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Run bwd/grads alone, on tensors in the layout of chunks."""
        if p.C != TOKENS:
            raise BuildError(f"bwd/grads: chunk_size must be {TOKENS}; found {p.C}. Leave it out.")
        table = chunks_of(p, offsets, tensors)
        x = inputs_of(p, table, offsets, dict(tensors, v=tensors["do"], h0=None))
        launches, inputs = self.steps(p, x), laid_out(x)
        do, dv, r = (rows_of(p, table, tensors[n], p.dtype) for n in ("do", "dv", "r"))
        h, dh = (do.new_zeros(launches.plan.all_states, p.HV, p.K * p.V) for _ in range(2))
        for y, name in ((h, "h"), (dh, "dh")):
            y[: table.NC] = image_of(tensors[name].mT if self.v_first else tensors[name])
        shares = [do.new_zeros(launches.plan.all_states, p.HV, p.K, dtype=torch.float32) for _ in range(2)]
        parts = Parts(None, None, h, r)
        results = grads(p, launches, x, inputs, parts, tables(p, launches, x), shares, do=do, dv=dv, dh=dh)
        dq, dk, dg, dbeta = (y.flatten(0, 1) for y in results)
        given = zip((x.A_log, x.dt_bias), shares)
        of_A_log, of_dt_bias = (None if y is None else share[: table.NC] for y, share in given)
        return {n: table.chunks(y) for n, y in (("dq", dq), ("dk", dk), ("dg", dg), ("dbeta", dbeta.unsqueeze(-1)))} | {
            "dA_log_parts": None if of_A_log is None else of_A_log.sum(-1), "ddt_bias_parts": of_dt_bias,
        }


def tables(p: Problem, launches: Any, x: Inputs) -> PackedTables:
    """Make the tables on the GPU, that of pairs of chunks for training alone."""
    if not p.packed:
        return NO_TABLES
    states = getattr(launches.plan, "states", 0)
    sizes = (ChunkTable.WIDTH * launches.plan.entries, SegmentTable.WIDTH * launches.plan.all_segments,
             ChunkTable.WIDTH * states)
    device = x.q.device
    chunk, segment, state = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    first_segment, cu_seqlens = None, offsets_on(device, x.cu_seqlens)
    if launches.tables:
        first_segment = torch.empty(p.N + 1, dtype=torch.int32, device=device)
        if launches.states:
            launches.states(cu_seqlens=cu_seqlens, chunk_table=state)
        launches.tables(cu_seqlens=cu_seqlens, chunk_table=chunk, segment_table=segment, first_segment=first_segment)
    return PackedTables(chunk, segment, state, first_segment)


def parts_in(like: Tensor, sizes: Sequence[int], first: int, memory: Tensor | None = None) -> tuple[Parts, Tensor]:
    """Parts: the first of them in memory of their own, which ends with them, the others in `memory`, which is returned
    and made if it is not given."""
    early, late = sizes[:first], sizes[first:]
    memory = like.new_empty(sum(late), dtype=torch.uint8) if memory is None else memory
    return Parts(*fresh_places(like, early), *places_in(memory, late)), memory


def fresh_places(like: Tensor, sizes: Sequence[int]) -> list[Place]:
    """Return parts of these sizes in memory that lives as long as one of them."""
    return places_in(like.new_empty(sum(sizes), dtype=torch.uint8), sizes)


def places_in(memory: Tensor, sizes: Sequence[int]) -> list[Place]:
    """Return parts of these sizes, one after the other, without creating tensors."""
    first = memory.data_ptr() if sizes else 0
    return [Place(memory, first + begin, size) for begin, size in zip(itertools.accumulate(sizes, initial=0), sizes)]


class Edges(NamedTuple):
    """The states that clusters hand on if they share all walks, and flags that say that the states are there."""

    edges: Tensor | None
    crossed: Tensor | None


NO_EDGES = Edges(None, None)


def edges_of(p: Problem, like: Tensor, launches: Any) -> Edges:
    """Allocate the Edges for these launches, before the tables: the kernel that needs both overlaps the tables."""
    clusters = launches.plan.clusters.sharing
    if not (launches.fused and clusters):
        return NO_EDGES
    strips = p.V // COLUMNS
    edges = like.new_empty(clusters, strips, COLUMNS, p.K, dtype=torch.float32)
    return Edges(edges, like.new_zeros(clusters, strips, dtype=torch.int32))


def up(
    p: Problem, launches: TrainingLaunches, chain: NamedLaunch | None, inputs: dict, parts: Parts, packed: PackedTables,
    crossing: Edges, cleared: Tensor, **results: Tensor | None,
) -> None:
    """Launch what makes all that a backward reads; rows of `cleared` outside every sequence are set to zero."""
    if launches.fused:
        launches.fused(**inputs, **crossing._asdict(), o=cleared, ht=results.get("ht"), segment_table=packed.segment,
                 tiles=parts.tiles, r=parts.r, h=parts.h)
        return
    v, h0 = inputs["v"], inputs["h0"]
    make_tiles(launches, inputs, parts, packed, cleared)
    if launches.carry:
        added = segment_summary(p, cleared, launches.plan.all_segments).added
        h0 = entering_segments(launches, parts.tiles, v, h0, parts.M, added, packed)
    if chain:
        chain(tiles=parts.tiles, v=v, h0=h0, r=parts.r, h=parts.h, segment_table=packed.segment, **results)


def entering_segments(
    launches: Any, tiles: Any, v: Tensor, h0: Tensor | None, M: Any, added: Tensor, packed: PackedTables
) -> Tensor:
    """Return the states that enter segments, from what each adds to a state and what it multiplies one by, which are
    written to `added` and M."""
    edge = torch.empty_like(added)
    launches.carry(tiles=tiles, v=v, ht=added, M=M, segment_table=packed.segment)
    launches.compose(M=M, added=added, h0=h0, edge=edge, first_segment=packed.first_segment)
    return edge


def make_tiles(launches: TrainingLaunches, inputs: dict, parts: Parts, packed: PackedTables, cleared: Tensor) -> None:
    """Launch what makes the operands of all chunks."""
    if launches.prepare:
        inputs = {name: y for name, y in inputs.items() if name not in ("v", "h0")}
        launches.prepare(**inputs, tiles=parts.tiles, o=cleared, chunk_table=packed.chunk)


def grads(
    p: Problem, launches: TrainingLaunches, x: Inputs, inputs: dict, parts: Parts, packed: PackedTables,
    shares: Sequence[Any], do: Tensor, dv: Tensor, dh: Any,
) -> tuple[Tensor, ...]:
    """Return dq, dk, dg and dbeta, and write the chunks' shares of the gradients of the gate's parameters."""
    like = x.q
    dq, dk = (like.new_empty(p.B, p.T, p.HV, p.K) for _ in range(2))
    dg, dbeta = torch.empty_like(inputs["g"]), torch.empty_like(inputs["beta"])
    if launches.grads:
        of_A_log, of_dt_bias = shares
        inputs = {name: y for name, y in inputs.items() if name not in ("v", "h0")}
        launches.grads(
            **inputs, do=do, dv=dv, r=parts.r, h=parts.h, dh=dh, dq=dq, dk=dk, dg=dg, dbeta=dbeta, of_A_log=of_A_log,
            of_dt_bias=of_dt_bias, chunk_table=packed.state,
        )
    return of_heads(dq, p), of_heads(dk, p), dg, dbeta


def image_of(state: Tensor) -> Tensor:
    """Return (.., rows, columns) rounded and in the order in which kernels keep it, swizzle_128B."""
    rows, columns = state.shape[-2:]
    row, column = (torch.arange(n, device="cpu") for n in (rows, columns))
    place = swizzle_128B(row[:, None], column[None], rows).flatten() // BF16
    image = state.new_empty(*state.shape[:-2], rows * columns, dtype=torch.bfloat16)
    image[..., place.to(state.device)] = state.flatten(-2).to(torch.bfloat16)
    return image


def of_heads(y: Tensor, p: Problem) -> Tensor:
    """The gradient of q or k of each value head, those that share a head summed in order."""
    if p.HV == p.H:
        return y
    return y.view(p.B, p.T, p.H, p.HV // p.H, p.K).sum(3, dtype=torch.float32).to(y.dtype)


def sums(launches: TrainingLaunches, x: Inputs, shares: Sequence[Any]) -> list[Tensor | None]:
    """Return dA_log and ddt_bias."""
    given = x.A_log, x.dt_bias
    summed = [None if y is None else torch.empty(y.shape, dtype=torch.float32, device=y.device) for y in given]
    if launches.shares:
        launches.shares(of_A_log=shares[0], of_dt_bias=shares[1], dA_log=summed[0], ddt_bias=summed[1])
    return [y if y is None or y.dtype == like.dtype else y.to(like.dtype) for y, like in zip(summed, given)]
