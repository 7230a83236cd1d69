"""The routines of a forward that keeps what its backward reads, and of that backward.

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

from kda.model.bundles import Grads, OpaqueSaved, Outputs, Products, Save, Saved
from kda.model.host import detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.errors import BuildError
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.launch_list import Location

from .arguments import TILE_ALIGNMENT, KernelConfig
from .cute.configs import ROUNDED_TO, RUN, ChunkTable, ComposeConfig, SegmentTable, TablesConfig
from .cute.tile import BF16, C, swizzle_128B
from .cute.training import TOKENS
from .directions import Direction, as_given, run_backward, run_forward
from .launcher import (
    backward_as_stage,
    chunks_of,
    forward_as_stage,
    gate_numbers,
    inputs_of,
    rows_of,
    walk_numbers,
)
from .routine import Draft, Memory, Routine, described_once
from .tensors import INPUTS, ROWS, aligned, inputs_in_memory, on_its_device
from .training_plan import COLUMNS, NOT_KEPT, Clusters, Reverse, TrainingPlan, states_table

Tensor = torch.Tensor

# What a backward rounds, by the names that the stages have for what is as large: kE, qg, b kg, A_qk b, T', states, r,
# z and dv; G, Qu, Ku and Kd; results.
ROUNDED_IN_BACKWARD = dict.fromkeys(
    ("A_qk", "A_inv", "w", "u", "qg", "kb", "kg", "h", "v_new", "dh", "dv_new", "P", "kD", "qD", "dA_k", "dA_q",
     "r", "G", "Qu", "Ku", "Kd", "dq", "dk", "dv", "dg", "dbeta"), "bfloat16",
)


BEGUN = ("again", "dq", "dv")                # what the rest of a backward reads beside what was kept


class Begun(NamedTuple):
    """What a backward has after its first half.  The second half writes over it."""

    kept: OpaqueSaved | None                 # what the forward kept
    again: Tensor                            # what was made again; then gradients of states
    dq: Tensor                               # r, then dq
    dv: Tensor

    @property
    def tensors(self) -> list[Any]:
        return [self.kept.memory if self.kept else None, *self[1:]]


class PackedTables(NamedTuple):
    """Tables of chunks, segments and pairs of chunks, on the GPU; None unless sequences are packed."""

    chunk: Location | None = None
    segment: Location | None = None
    state: Location | None = None
    first_segment: Location | None = None


class Parts(NamedTuple):
    """What a backward reads beside the inputs, in the order of `SavedBytes`."""

    tiles: Location | None
    M: Location | None
    h: Location | None
    r: Location | None


class Description:
    """What the launches of a routine share while it is described."""

    def __init__(
        self, p: Problem, plan: Any, kernel: Callable[[KernelConfig], Kernel], inputs: Sequence[str],
        offsets: str | None,
    ) -> None:
        self.p, self.plan, self.offsets = p, plan, offsets                     # Sizes; the dtype of cu_seqlens
        self.draft = Draft(kernel, inputs)
        self.scratch = self.draft.memory()
        self.rows = self.draft.only(*ROWS)
        self.gate, self.walk = gate_numbers(p), walk_numbers(p, plan)
        self.walks = plan.all_segments if p.N else 0
        self.tables = PackedTables()

    @property
    def forward(self) -> dict[str, Any]:
        """Return what kernels that both make tiles and walk over them read."""
        return dict(**self.draft.only(*ROWS, "v", "h0"), **self.gate, chunks=self.plan.chunks, N=self.p.N)

    def launch_walk(self, config: Any, **tensors: Location | None) -> None:
        """Launch a kernel, if there is one, that walks over tiles, a strip of the columns of each state at a time."""
        if config:
            self.draft.launch(config, (config.strips, self.p.HV, self.walks), **self.walk, **tensors)

    def launch_compose(self, config: ComposeConfig | None, **tensors: Location | None) -> None:
        if config:
            grid = (config.strips, self.p.HV, self.p.N)
            self.draft.launch(config, grid, segments=self.plan.segments, HV=self.p.HV,
                              first_segment=self.tables.first_segment, **tensors)

    def states(self, number: int, columns: int) -> Location:
        """Return memory for so many states, or matrices of another width, of each head in float32."""
        return self.scratch.part(4 * number * self.p.HV * self.p.K * columns)

    def result(self, last: int, dtype: str) -> Location:
        """Return a tensor with a row for each token and value head."""
        return self.draft.tensor((self.p.B, self.p.T, self.p.HV, last), dtype)

    def make_tables(self, make: Callable[[int], Location] | None = None) -> None:
        """Launch what makes the tables of packed sequences, but for that of the states that are kept."""
        p, plan, make = self.p, self.plan, make or self.scratch.part
        if not p.packed:
            return
        chunk, segment, state = (make(8 * width * entries) for width, entries in (
            (ChunkTable.WIDTH, plan.entries), (SegmentTable.WIDTH, plan.all_segments),
            (ChunkTable.WIDTH, getattr(plan, "states", 0))))
        self.tables = PackedTables(chunk, segment, state, make(4 * (p.N + 1)))
        every = (TOKENS if isinstance(plan, TrainingPlan) else p.C) // C
        self.draft.launch(
            TablesConfig(self.offsets), (runs(C, p), 1, 1), cu_seqlens=self.draft["cu_seqlens"], T=p.T, N=p.N,  # type: ignore[arg-type]
            segment=plan.segment, every=every, chunk_entries=plan.entries, segment_entries=plan.all_segments,
            chunk_table=chunk, segment_table=segment, first_segment=self.tables.first_segment,
        )

    def make_table_of_states(self) -> None:
        """Launch what makes the table of the chunks that grads has, of packed sequences."""
        p = self.p
        if p.packed:
            self.draft.launch(
                states_table(self.offsets), (runs(TOKENS, p), 1, 1), cu_seqlens=self.draft["cu_seqlens"], T=p.T, N=p.N,  # type: ignore[arg-type]
                segment=1, every=1, chunk_entries=self.plan.states, segment_entries=0, chunk_table=self.tables.state,
            )

    def edges(self, chosen: Clusters) -> dict[str, Location]:
        """Return the states that clusters hand on if they share all walks, and flags that say that they are there."""
        clusters, strips = chosen.sharing, self.p.V // COLUMNS
        if not clusters:
            return {}
        flags = self.draft.tensor((clusters, strips), "int32", zeroed=True)
        return dict(edges=self.scratch.part(4 * clusters * strips * COLUMNS * self.p.K), crossed=flags)

    def make_tiles(
        self, prepare: KernelConfig, tiles: Location | None, cleared: Location, **products: Location | None
    ) -> None:
        """Launch what makes the operands of all chunks; rows of `cleared` outside every sequence are set to zero."""
        self.draft.launch(
            prepare, (self.p.HV, *self.plan.entries_grid), **self.rows, **self.gate, chunks=self.plan.entries,
            tiles=tiles, o=cleared, chunk_table=self.tables.chunk, **products,
        )

    def entering_segments(
        self, carry: KernelConfig | None, compose: ComposeConfig | None, tiles: Location | None, M: Location | None
    ) -> Location:
        """Launch what finds the states that enter segments, and return them; with whole sequences, those of the call.
        What each segment multiplies a state by is written to M."""
        h0 = self.draft["h0"]
        if not carry:
            return h0
        added, edge = (self.states(self.plan.all_segments, self.p.V) for _ in range(2))
        self.launch_walk(carry, tiles=tiles, v=self.draft["v"], ht=added, M=M, segment_table=self.tables.segment)
        self.launch_compose(compose, M=M, added=added, h0=h0, edge=edge)
        return edge


def runs(rows: int, p: Problem) -> int:
    """Return the number of CTAs that write tables."""
    return max(1, -(-p.T // (rows * RUN))) if p.N else 0


@functools.lru_cache(maxsize=1024)
def with_dht(p: Problem, dht: bool) -> Problem:
    return dataclasses.replace(p, final_state=dht)


@described_once
def forward_routine(
    backend: TrainingBackend, p: Problem, cc: tuple[int, int], sms: int, offsets: str | None, save: Save
) -> Routine:
    """Return the forward, whose results are o, the final states, and memory with what it keeps."""
    d = backend.description(p, cc, sms, offsets, INPUTS)
    o = d.result(p.V, p.dtype)
    ht = d.draft.tensor((p.N, *p.state_shape), "float32") if p.final_state else None
    sizes = d.plan.saved
    made_again, kept = sizes[: NOT_KEPT[save]], sizes[NOT_KEPT[save]:]
    saved = d.draft.tensor((sum(kept),), "uint8")
    parts = Parts(*map(d.scratch.part, made_again), *parts_of(saved, kept))
    d.plan.making.launches(d, parts, True, cleared=o, o=o, ht=ht)
    return d.draft.done(o, ht, saved)


@described_once
def backward_routine(
    backend: TrainingBackend, p: Problem, cc: tuple[int, int], sms: int, offsets: str | None, save: Save,
    begun: bool = False,
) -> Routine:
    """Return the backward for which `save` was kept; `p.final_state` says whether final states have gradients.  Its
    results are Grads, of each value head.  If it was begun, it goes on where `begin_routine` ends."""
    d = backend.description(p, cc, sms, offsets, (*INPUTS, "do", "dht", "saved", *BEGUN[: len(BEGUN) * begun]))
    dv = d.draft["dv"] if begun else d.result(p.V, p.dtype)
    dh0 = d.draft.tensor((p.N, *p.state_shape), p.state_dtype) if p.state_dtype else None
    one, again = d.plan.reverse.get(save), None
    if save is not Save.OWN:
        again = Memory(d.draft["again"].slot) if begun else d.draft.memory()
    results = results_of_grads(d, d.draft["dq"] if begun else None) if one else []
    parts = parts_to_read(d, save, again, again if begun else d.scratch, results)
    if begun:
        d.make_tables()
    else:
        make_again(d, save, parts, cleared=dv)
    if one:
        scratch = scratch_of(d, dh=not again, shares_over=parts.h if save is Save.NOTHING else None)
        reverse(d, one, parts, scratch, dv, dh0, results)
    else:
        scratch = scratch_of(d)
        walk_back(d, parts, scratch, dv, dh0)
        if again:
            d.draft.free_here()                                                # dq and dk may lie in its memory
        results = grads(d, parts, scratch, do=d.draft["do"], dv=dv)
    return d.draft.done(*results[:2], dv, *results[2:], *sums(d, scratch, save), dh0)


@described_once
def begin_routine(
    backend: TrainingBackend, p: Problem, cc: tuple[int, int], sms: int, offsets: str | None, save: Save
) -> Routine:
    """Return what a backward can do before it has all gradients of final states: it makes what was not kept, and walks
    back for those that `p` has.  Its results are the gradients of the states that enter, and what the rest reads."""
    d = backend.description(p, cc, sms, offsets, (*INPUTS, "do", "dht", "saved"))
    dv, dh0 = d.result(p.V, p.dtype), d.draft.tensor((p.N, *p.state_shape), p.state_dtype)  # type: ignore[arg-type]
    again, dq = (None, None) if save is Save.OWN else (d.draft.memory(), d.result(p.K, p.dtype))
    parts = parts_to_read(d, save, again, again, [dq])
    make_again(d, save, parts, cleared=dv)
    walk_back(d, parts, scratch_of(d), dv, dh0)
    return d.draft.done(dh0, Location(again.slot) if again else None, dq, dv)


def parts_to_read(
    d: Description, save: Save, again: Memory | None, others: Memory | None, results: Sequence[Location | None]
) -> Parts:
    """Return where all lies that a backward reads: what was kept, and memory for what is made again."""
    sizes, one = d.plan.saved, d.plan.reverse.get(save)
    tiles = [again.part(sizes.tiles + (one.spare if one else 0))] if again else []
    if save is not Save.NOTHING:
        parts = *tiles, *parts_of(d.draft["saved"], sizes[NOT_KEPT[save]:])
        return Parts._make(parts)
    assert again and others
    r = results[0] if one else others.part(sizes.r)                            # dq of an item comes when r was read
    return Parts(tiles[0], again.part(sizes.M), others.part(sizes.h), r)


def make_again(d: Description, save: Save, parts: Parts, cleared: Location) -> None:
    """Launch what makes all that was not kept."""
    if save is Save.NOTHING:
        d.plan.making.launches(d, parts, False, cleared=cleared)
        return
    d.make_tables()
    if save is Save.STATES:
        d.make_tiles(d.plan.prepare, parts.tiles, cleared=cleared)


class Scratch(NamedTuple):
    """What the kernels of a backward tell each other, in the order of `TrainingPlan.scratch`."""

    dh: Location | None                      # gradients of the states that chunks leave
    added: Location | None                   # what each segment adds to them
    edge: Location | None                    # those that leave segments
    of_A_log: Location                       # each chunk's share of the gradients of the gate's parameters
    of_dt_bias: Location


def scratch_of(d: Description, dh: bool = True, shares_over: Location | None = None) -> Scratch:
    """Return memory for all, but for dh, and for shares, which may lie over h: each item's over its own."""
    first, added, edge, *shares = d.plan.scratch
    return Scratch(
        d.scratch.part(first) if dh else None, d.scratch.part(added), d.scratch.part(edge),
        *(shares_over._replace(offset=shares_over.offset + n, size=shares_over.size - n) for n in (0, 4 * d.p.K))  # type: ignore[operator]
        if shares_over else map(d.scratch.part, shares),
    )


def walk_back(d: Description, parts: Parts, scratch: Scratch, dv: Location, dh0: Location | None) -> None:
    """Launch the walk back over the chunks."""
    given = walked_back(d, parts)
    d.launch_walk(d.plan.walk, **given, dht=leaving_segments(d, parts, scratch), dv=dv, dh=scratch.dh, dh0=dh0)


def walked_back(d: Description, parts: Parts) -> dict[str, Location | None]:
    """Return what a walk back reads."""
    return dict(tiles=parts.tiles, do=d.draft["do"], segment_table=d.tables.segment)


def leaving_segments(d: Description, parts: Parts, scratch: Scratch) -> Location | None:
    """Launch what finds the gradients of the states that leave segments, and return them; with whole sequences, those
    of the call."""
    dht = d.draft["dht"]
    if not d.plan.carry_back:
        return dht
    d.launch_walk(d.plan.carry_back, **walked_back(d, parts), dh0=scratch.added)
    d.launch_compose(d.plan.compose_back, M=parts.M, added=scratch.added, h0=dht, edge=scratch.edge)
    return scratch.edge


def grads(d: Description, parts: Parts, scratch: Scratch, do: Location, dv: Location) -> list[Location]:
    """Return the results; each chunk's share of the gate's parameters is written."""
    results = results_of_grads(d)
    arguments = arguments_of_grads(d, parts, scratch, do, dv, results)
    d.draft.launch(d.plan.grads, (d.plan.grads_grid, 1, 1), **arguments)
    return results


def reverse(
    d: Description, one: Reverse, parts: Parts, scratch: Scratch, dv: Location, dh0: Location | None,
    results: Sequence[Location],
) -> None:
    """Do in one launch what the walk back, behind the gradients that leave segments, and grads do."""
    dht, plan = leaving_segments(d, parts, scratch), d.plan
    arguments = arguments_of_grads(d, parts, scratch, d.draft["do"], dv, results)
    queue = d.draft.tensor((one.config.queue + arguments["items"],), "int32", zeroed=True)
    over_tiles = {}
    if scratch.dh is None:
        places = d.scratch.part(4 * arguments["items"] * one.config.grads.panels)
        over_tiles = dict(places_of_dh=places, spare=plan.saved.tiles // TILE_ALIGNMENT)
    d.draft.launch(
        one.config, (one.grid, 1, 1), **arguments, **over_tiles, tiles=parts.tiles, dht=dht, dh0=dh0, queue=queue,
        segment_table=d.tables.segment, first_segment=d.tables.first_segment, segments=plan.segments, N=d.p.N,
        segment=plan.segment, walks=one.walks, walkers=one.walkers,
    )


def results_of_grads(d: Description, dq: Location | None = None) -> list[Location]:
    """Return dq and dk of each value head, dg and dbeta."""
    p = d.p
    gates = (p.B, p.T, p.HV) if p.gate_per_head else (p.B, p.T, p.HV, p.K)
    return [
        dq or d.result(p.K, p.dtype), d.result(p.K, p.dtype), d.draft.tensor(gates, p.g_dtype),
        d.draft.tensor((p.B, p.T, p.HV), p.beta_dtype),
    ]


def arguments_of_grads(
    d: Description, parts: Parts, scratch: Scratch, do: Location, dv: Location, results: Sequence[Location]
) -> dict[str, Any]:
    """Return what grads is launched with."""
    p, plan = d.p, d.plan
    d.make_table_of_states()
    dq, dk, dg, dbeta = results
    return dict(
        **d.rows, **d.gate, chunks=plan.states, items=plan.all_states * p.HV, one=1.0,
        do=do, dv=dv, r=parts.r, h=parts.h, dh=scratch.dh, dq=dq, dk=dk, dg=dg, dbeta=dbeta,
        of_A_log=scratch.of_A_log, of_dt_bias=scratch.of_dt_bias, chunk_table=d.tables.state,
    )


def sums(d: Description, scratch: Scratch, save: Save) -> list[Location | None]:
    """Return dA_log and ddt_bias."""
    p = d.p
    dA_log = d.draft.tensor((p.HV,), "float32") if p.A_log else None
    ddt_bias = d.draft.tensor((p.HV * p.gate_width,), "float32") if p.dt_bias else None
    d.draft.launch(d.plan.shares_of(save), (p.HV, 1, 1), chunks=d.plan.all_states * (p.T > 0), HV=p.HV,
                   of_A_log=scratch.of_A_log, of_dt_bias=scratch.of_dt_bias, dA_log=dA_log, ddt_bias=ddt_bias)
    return [dA_log, ddt_bias]


@described_once
def map_bwd_routine(backend: TrainingBackend, p: Problem, cc: tuple[int, int], sms: int) -> Routine:
    """Return the walk back over tiles of one sequence, without grads; its result is the gradient of the state that
    enters."""
    d = backend.description(p, cc, sms, None, (*INPUTS, "do", "dht"))
    tiles, M = map(d.scratch.part, d.plan.saved[:2])
    dv, dh0 = d.result(p.V, p.dtype), d.draft.tensor((1, p.HV, p.K, p.V), "float32")
    d.make_tiles(d.plan.prepare, tiles, cleared=dv)
    if carry := d.plan.making.carry:
        d.launch_walk(carry, tiles=tiles, v=d.draft["v"], ht=d.states(d.plan.all_segments, p.V), M=M)
    walk_back(d, Parts(tiles, M, None, None), scratch_of(d), dv, dh0)
    return d.draft.done(dh0)


@described_once
def bytes_saved(backend: TrainingBackend, p: Problem, sms: int, save: Save) -> int:
    return sum(backend.plan(p, sms).saved[NOT_KEPT[save]:])


class TrainingBackend:
    """The functions of an arch's `launch` that have to do with gradients, or with a forward alone as a stage."""

    def __init__(
        self, plan: Callable[[Problem, int], TrainingPlan], kernel: Callable[[KernelConfig, tuple[int, int]], Kernel],
        plain_forward: Callable[..., Outputs], call_of_stage: Callable[[str, Problem, bool], tuple[Problem, Save]], *,
        v_first: bool,
    ) -> None:
        self.plan, self.kernel = plan, kernel      # for this number of SMs; for a compute capability
        self.plain_forward, self.call_of_stage = plain_forward, call_of_stage
        self.v_first = v_first                     # rows of saved states are those of v
        self.backward, self.segment_map_bwd = on_its_device(self._backward), on_its_device(self._segment_map_bwd)
        self.begin_backward = on_its_device(self._begin_backward)
        self.finish_backward = on_its_device(self._finish_backward)

    def description(
        self, p: Problem, cc: tuple[int, int], sms: int, offsets: str | None, inputs: Sequence[str]
    ) -> Description:
        """Return what a routine begins with."""
        return Description(p, self.plan(p, sms), lambda config: self.kernel(config, cc), inputs, offsets)

    def rounded_to(self, p: Problem) -> dict[str, str]:
        return ROUNDED_IN_BACKWARD if p.direction == "backward" else ROUNDED_TO

    def saved_bytes(self, p: Problem, save: Save) -> int:
        return bytes_saved(self, p, detect(p.device).sms, save)

    def saved_in(self, p: Problem, saved: OpaqueSaved | None) -> Save:
        """Return what a forward has kept, which the size of its memory tells."""
        if saved is None:
            return Save.NOTHING
        return Save.OWN if saved.memory.numel() == self.saved_bytes(p, Save.OWN) else Save.STATES

    def forward(self, p: Problem, x: Inputs, save: Save) -> Outputs:
        o, final_state, memory = run_forward(self.forward_direction(p, save, offsets_dtype(x)), x)
        return Outputs(o, final_state, None, OpaqueSaved(memory))

    def forward_direction(self, p: Problem, save: Save, offsets: str | None) -> Direction:
        host = detect(p.device)
        return Direction(forward_routine(self, p, host.cc, host.sms, offsets, save), (2,))  # type: ignore[arg-type]

    def backward_direction(self, p: Problem, save: Save, offsets: str | None, dht: bool) -> Direction:
        host, usable = detect(p.device), save in NOT_KEPT
        run = backward_routine(
            self, with_dht(p, dht), host.cc, host.sms, offsets, save if usable else Save.NOTHING)  # type: ignore[arg-type]
        return Direction(run, (0,) if usable else ())

    def _backward(
        self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | OpaqueSaved | None = None
    ) -> Grads:
        """Return the gradients.  What another backend saved is not looked at: the forward's operands, states and
        residuals are recomputed; its operands alone, if the states were saved."""
        usable = saved if type(saved) is OpaqueSaved else None
        direction = self.backward_direction(p, self.saved_in(p, usable), offsets_dtype(x), dht is not None)
        return run_backward(direction, x, do, dht, usable)

    def _begin_backward(
        self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | OpaqueSaved | None
    ) -> tuple[Tensor, OpaqueSaved | Begun] | None:
        """Return the gradients of the states that enter, and what the second half reads; None if beginning earlier
        would take more memory."""
        kept, host = saved if type(saved) is OpaqueSaved else None, detect(p.device)
        save = self.saved_in(p, kept)
        if save is not Save.OWN and save not in self.plan(p, host.sms).reverse:
            return None
        run = begin_routine(self, with_dht(p, dht is not None), host.cc, host.sms, offsets_dtype(x), save)  # type: ignore[arg-type]
        given = [*inputs_in_memory(x), aligned(do, x.q.dtype), aligned(dht, torch.float32)]
        dh0, *others = run(x.q, [*given, aligned(kept.memory)] if kept else given)
        return dh0, kept if kept and save is Save.OWN else Begun(kept, *others)

    def _finish_backward(
        self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, begun: OpaqueSaved | Begun
    ) -> Grads:
        if isinstance(begun, OpaqueSaved):
            return self._backward(p, x, do, dht, begun)
        host, save = detect(p.device), self.saved_in(p, begun.kept)
        run = backward_routine(self, with_dht(p, dht is not None), host.cc, host.sms, offsets_dtype(x), save, True)  # type: ignore[arg-type]
        return run_backward(Direction(run, (0, 1, 2, 3)), x, do, dht, begun.tensors)

    def _segment_map_bwd(self, p: Problem, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
        """For one sequence on several GPUs: launch the walk back over tiles, without grads."""
        p = dataclasses.replace(p, direction="backward", state_dtype="float32")    # dh0 is requested
        p, host = with_dht(p, dht is not None), detect(p.device)
        do, dht = aligned(do, x.q.dtype), aligned(dht, torch.float32)  # type: ignore[assignment]
        (dh0,) = map_bwd_routine(self, p, host.cc, host.sms)(x.q, [*inputs_in_memory(x), do, dht])  # type: ignore[arg-type]
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
        table, host = chunks_of(p, offsets, tensors), detect(p.device)
        x = inputs_of(p, table, offsets, dict(tensors, v=tensors["do"], h0=None))
        names = ("do", "dv", "r", "h", "dh", "of_A_log", "of_dt_bias")
        d = self.description(p, host.cc, host.sms, offsets_dtype(x), (*INPUTS, *names))  # type: ignore[arg-type]
        do, dv, r, h, dh, *shares = (d.draft[name] for name in names)
        d.make_tables()
        run = d.draft.done(*grads(d, Parts(None, None, h, r), Scratch(dh, None, None, *shares), do, dv))

        rows = [rows_of(p, table, tensors[n], p.dtype) for n in ("do", "dv", "r")]  # type: ignore[arg-type]
        states = [rows[0].new_zeros(d.plan.all_states, p.HV, p.K * p.V) for _ in range(2)]
        for y, name in zip(states, ("h", "dh")):
            y[: table.NC] = image_of(tensors[name].mT if self.v_first else tensors[name])  # type: ignore[arg-type, union-attr]
        of_parameters = [rows[0].new_zeros(d.plan.all_states, p.HV, p.K, dtype=torch.float32) for _ in range(2)]
        results = run(x.q, [*inputs_in_memory(x), *rows, *states, *of_parameters])
        dq, dk, dg, dbeta = (as_given(y, given).flatten(0, 1) for y, given in zip(results, (x.q, x.k, x.g, x.beta)))  # type: ignore[union-attr]
        dg = dg.view(p.B * p.T, p.HV, p.gate_width)
        given = zip((x.A_log, x.dt_bias), of_parameters)
        of_A_log, of_dt_bias = (None if y is None else share[: table.NC] for y, share in given)
        return {n: table.chunks(y) for n, y in (("dq", dq), ("dk", dk), ("dg", dg), ("dbeta", dbeta.unsqueeze(-1)))} | {
            "dA_log_parts": None if of_A_log is None else of_A_log.sum(-1),
            "ddt_bias_parts": of_dt_bias if of_dt_bias is None or not p.gate_per_head else of_dt_bias.sum(-1, True),
        }

    def tables_alone(self, p: Problem, x: Inputs) -> dict[str, Tensor]:
        """Make the tables of a step alone, and return them as bytes, by name."""
        host = detect(p.device)
        d = self.description(p, host.cc, host.sms, offsets_dtype(x), INPUTS)  # type: ignore[arg-type]
        d.make_tables(lambda size: d.draft.tensor((size,), "uint8"))
        d.make_table_of_states()
        return dict(zip(PackedTables._fields, d.draft.done(*d.tables)(x.q, inputs_in_memory(x))))


def parts_of(memory: Location, sizes: Sequence[int]) -> list[Location]:
    """Return parts of these sizes of an input or result, one after the other."""
    return [Location(memory.slot, begin, size) for begin, size in zip(itertools.accumulate(sizes, initial=0), sizes)]


def image_of(state: Tensor) -> Tensor:
    """Return (.., rows, columns) rounded and in the order in which kernels keep it, swizzle_128B."""
    rows, columns = state.shape[-2:]
    row, column = (torch.arange(n, device="cpu") for n in (rows, columns))
    place = swizzle_128B(row[:, None], column[None], rows).flatten() // BF16
    image = state.new_empty(*state.shape[:-2], rows * columns, dtype=torch.bfloat16)
    image[..., place.to(state.device)] = state.flatten(-2).to(torch.bfloat16)
    return image
