"""Tensors in, tensors out: two kernels a forward, seven a backward, one more where sequences are packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kda.model.bundles import Grads, Outputs, Products, Save, SegmentSummary
from kda.model.host import Host, detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.errors import BuildError
from ptxkit.compile.launch_list import Location

from ..common.chunks import Chunks
from ..common.directions import Direction, run_backward, run_forward
from ..common.launcher import kernels, states_between_chunks
from ..common.routine import Draft, Routine, described_once
from ..common.tensors import INPUTS, ROWS, aligned, inputs_in_memory, on_its_device
from .configs import SLICE
from .plan import BACKWARD, FORWARD, WITHIN, call_of_stage, check_memory, plan, recipe, sizes

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor | None]
Locations = dict[str, Any]                   # Locations by the names that kernels give them; None for a null pointer


def rounded_to(p: Problem) -> dict[str, str]:
    return {}                                                                  # all is float32


kernel = kernels(recipe)


class Description:
    """A routine while it is described: its launches by the names of kernels, and memory for what they pass on."""

    def __init__(self, p: Problem, host: Host, offsets: str | None, save: Save, inputs: Sequence[str]):
        """`save` says what this forward saves, or what this backward's has saved."""
        self.p, self.plan = p, plan(p, host.sms, offsets, save)
        configs = [config for config, _ in self.plan.steps.values()]
        for config in configs:
            check_memory(config, host)
        with ThreadPoolExecutor() as threads:  # NVRTC builds what is missing side by side
            built = dict(zip(configs, threads.map(kernel, configs)))
        self.draft = Draft(built.__getitem__, inputs)
        self.numbers = {
            "T": p.T, "N": p.N, "H": p.H, "HV": p.HV, "scale": p.scale, "lower_bound": p.lower_bound or 0.0,
            "chunks": self.plan.chunks, "tokens": p.B * p.T,
        }
        self.where: Locations = {}             # packed sequences have offsets, and each a first chunk
        if p.packed:
            first = self.draft.tensor((p.N + 1,), "int64")
            self.where = {"cu_seqlens": self.draft["cu_seqlens"], "first_chunk": first}
            self.launch("tables", **self.where)

    def launch(self, name: str, **tensors: Any) -> None:
        """Launch a kernel of the plan, unless it has nothing to do."""
        if name in self.plan.steps:
            config, ctas = self.plan.steps[name]
            numbers = self.numbers | ({"chunks": self.p.B * self.plan.chunks} if name == "sum_chunks" else {})
            given = {number: numbers[number] for number in config.arguments.number_names()}
            self.draft.launch(config, (ctas, 1, 1), **tensors, **given)

    def rows(self, last: int) -> Location:
        return self.draft.tensor((self.p.B, self.p.T, self.p.HV, last), "float32")

    def workspace(self, names: tuple[str, ...]) -> Locations:
        """Return memory for operands by name, a tile of each for every chunk and value head."""
        memory = self.draft.memory()
        return {name: memory.part(4 * size * self.plan.tiles) for name, size in sizes(self.p, names).items()}


def taking(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names}


@described_once
def forward_routine(p: Problem, host: Host, offsets: str | None, save: Save) -> Routine:
    """Return a forward, whose results are o, the final states and Products."""
    d = Description(p, host, offsets, save, (*INPUTS, "h"))
    o, ht = d.rows(p.V), d.draft.tensor((p.N, *p.state_shape), "float32") if p.final_state else None
    products = [d.draft.tensor((p.B * p.T, p.HV, p.C), "float32") if save is Save.PRODUCTS else None
                for _ in Products._fields]
    saved = {"saved_" + name: product for name, product in zip(Products._fields, products) if product}
    room = d.workspace(FORWARD)
    d.launch("prepare", **d.draft.only(*ROWS, "v"), **d.where, **room, **saved, o=o)
    d.launch("chain", **room, **d.where, **d.draft.only("h0", "h"), o=o, ht=ht)
    return d.draft.done(o, ht, *products)


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING) -> Outputs:
    direction, h = forward_direction(p, save, offsets_dtype(x)), states_between_chunks(p, x)
    o, ht, *products = run_forward(direction, x, h)
    return Outputs(o, ht, h, Products(*products) if direction.saved else None)


def forward_direction(p: Problem, save: Save, offsets: str | None) -> Direction:
    if save is Save.ALL:
        raise BuildError(
            "chunk_kda: backend='sm89' has no kernels that keep all intermediates. Leave out disable_recompute or "
            "backend."
        )
    return Direction(forward_routine(p, detect(p.device), offsets, save), (2, 3) if save is Save.PRODUCTS else ())


SAVED = tuple("saved_" + name for name in Products._fields)


@described_once
def backward_routine(p: Problem, host: Host, offsets: str | None, save: Save) -> Routine:
    """Return the backward for which `save` was saved.  A_qk and A_inv are read if they were; the rest is recomputed.
    Its results are Grads."""
    d = Description(p, host, offsets, save, (*INPUTS, "do", "dht", *SAVED))
    do, tiles = d.draft["do"], d.plan.tiles
    room, within = _prepared_for_backward(d, d.draft.only(*SAVED) if save is Save.PRODUCTS else {})
    h, v_new = (d.draft.tensor((tiles * p.K * p.V,), "float32"), d.rows(p.V))
    d.launch("chain", **taking(room, *FORWARD), **d.where, h0=d.draft["h0"], v_new=v_new, h=h)
    dh, dv_new = (d.draft.tensor((tiles * p.K * p.V,), "float32"), d.rows(p.V))
    dh0 = d.draft.tensor((p.N, *p.state_shape), "float32") if p.state_dtype else None
    _chain_bwd(d, room, d_o=do, dht=d.draft["dht"], dv_new=dv_new, dh=dh, dh0=dh0)
    d.draft.free_here()                                                        # makes place for what comes
    return d.draft.done(*_within_chunks(d, within, do=do, h=h, dh=dh, v_new=v_new, dv_new=dv_new), dh0)


@on_its_device
def backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Products | None = None) -> Grads:
    direction = backward_direction(p, Save.of(saved), offsets_dtype(x), dht is not None)
    return run_backward(direction, x, do, dht, saved)


def backward_direction(p: Problem, save: Save, offsets: str | None, dht: bool) -> Direction:
    usable = save is Save.PRODUCTS
    run = backward_routine(p, detect(p.device), offsets, save if usable else Save.NOTHING)
    return Direction(run, (0, 1) if usable else ())


def _prepared_for_backward(d: Description, saved: Locations) -> tuple[Locations, Locations]:
    """Launch prepare and return its results: those that only the chains read, and those that are wanted to the end."""
    room, within = (d.workspace(names) for names in (BACKWARD, WITHIN))
    d.launch("prepare", **d.draft.only(*ROWS, "v"), **d.where, **room, **saved, **within)
    return room, within


def _chain_bwd(d: Description, room: Locations, **others: Location | None) -> None:
    """Launch chain_bwd; `prepare` wrote A_qk and qg transposed, for a backward."""
    d.launch("chain_bwd", A_qk_t=room["A_qk"], qg_t=room["qg"], **taking(room, "kg", "w_t", "gc_last"), **d.where,
             **others)


def _within_chunks(
    d: Description, within: Locations, *, do: Location, h: Location, dh: Location, v_new: Location, dv_new: Location
) -> list[Location | None]:
    """Launch what follows the chains, and return all Grads but dh0."""
    p, tiles, draft = d.p, d.plan.tiles, d.draft
    P, dv, db = d.rows(p.V), d.rows(p.V), draft.tensor((1 + p.K // SLICE, p.B * p.T, p.HV), "float32")
    dA_qk, dA_kk = (draft.tensor((tiles, p.C, p.C), "float32") for _ in range(2))
    shared = dict(P=P, dA_qk=dA_qk, dA_kk=dA_kk, db=db)
    d.launch("wy_bwd", v=draft["v"], **within, v_new=v_new, dv_new=dv_new, d_o=do, **d.where, **shared, dv=dv)
    dqn, dkn = (d.rows(p.K) for _ in range(2))
    dg = {"dg": draft.tensor((p.B, p.T, p.HV, *([] if p.gate_per_head else [p.K])), "float32")}
    of_slices = dg
    if p.gate_per_head:
        of_slices = {"dg_shares": draft.tensor((p.K // SLICE, p.B * p.T, p.HV), "float32")}
    of_A_log, of_dt_bias = (draft.tensor((tiles, p.K), "float32") if needed else None
                            for needed in (p.A_log, p.dt_bias))
    d.launch(
        "intra_bwd", **draft.only("q", "k", "g", "A_log", "dt_bias"), of_rows=within["of_rows"], h=h, dh=dh,
        v_new=v_new, d_o=do, **d.where, **shared, dqn=dqn, dkn=dkn, **of_slices, of_A_log=of_A_log,
        of_dt_bias=of_dt_bias,
    )
    dq, dk = (draft.tensor((p.B, p.T, p.H, p.K), "float32") for _ in range(2))
    dbeta = draft.tensor((p.B, p.T, p.HV), "float32")
    d.launch("norms_bwd", **draft.only("q", "k", "beta"), dqn=dqn, dkn=dkn, db=db, cu_seqlens=d.where.get("cu_seqlens"),
             dq=dq, dk=dk, dbeta=dbeta, **of_slices | dg if p.gate_per_head else {})
    dA_log, ddt_bias = (draft.tensor((p.HV * channels,), "float32") if needed else None
                        for needed, channels in ((p.A_log, 1), (p.dt_bias, p.gate_width)))
    d.launch("sum_chunks", of_A_log=of_A_log, of_dt_bias=of_dt_bias, first_chunk=d.where.get("first_chunk"),
             dA_log=dA_log, ddt_bias=ddt_bias)
    return [dq, dk, dv, dg["dg"], dbeta, dA_log, ddt_bias]


# maps of a sequence on several GPUs, by the kernels of calls


@described_once
def map_routine(p: Problem, host: Host, transition: bool) -> Routine:
    """Return the map of a sequence; its results are M, if there is a `transition`, and the final state."""
    d = Description(p, host, None, Save.NOTHING, (*INPUTS, "zero", "eye"))
    o, ht, M = d.rows(p.V), *(d.draft.tensor((p.N, *p.state_shape), "float32") for _ in range(2))
    room, nothing = d.workspace(FORWARD), d.draft.tensor((d.plan.tiles * p.C * p.V,), "float32", zeroed=True)
    d.launch("prepare", **d.draft.only(*ROWS, "v"), **room, o=o)
    d.launch("chain", **room, h0=d.draft["zero"], o=o, ht=ht)
    if transition:
        d.launch("chain", **room | {"u": nothing}, h0=d.draft["eye"], o=o, ht=M)
    return d.draft.done(M if transition else None, ht)


@on_its_device
def segment_map(p: Problem, x: Inputs, transition: bool) -> SegmentSummary:
    p = dataclasses.replace(p, state_dtype="float32")
    *inputs, h0, offsets = inputs_in_memory(x)
    zero = x.q.new_zeros(1, *p.state_shape) if h0 is None or not transition else None
    eye = torch.eye(p.K, device=x.q.device).repeat(1, p.HV, 1, 1) if transition else None    # K and V are equal
    start = zero if h0 is None else h0
    M, added = map_routine(p, detect(p.device), transition)(x.q, [*inputs, h0, offsets, start, eye])
    return SegmentSummary(M if transition else zero, added)  # type: ignore[arg-type]


@described_once
def map_bwd_routine(p: Problem, host: Host) -> Routine:
    """Return the walk back over one sequence; its result is the gradient of the state that enters."""
    d = Description(p, host, None, Save.NOTHING, (*INPUTS, "do", "dht"))
    room, _ = _prepared_for_backward(d, {})
    dh0, dh = d.draft.tensor((1, p.HV, p.K, p.V), "float32"), d.draft.tensor((d.plan.tiles * p.K * p.V,), "float32")
    _chain_bwd(d, room, d_o=d.draft["do"], dht=d.draft["dht"], dv_new=d.rows(p.V), dh=dh, dh0=dh0)
    return d.draft.done(dh0)


@on_its_device
def segment_map_bwd(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
    p = dataclasses.replace(p, direction="backward", state_dtype="float32")
    do, dht = aligned(do, torch.float32), aligned(dht, torch.float32)  # type: ignore[assignment]
    (dh0,) = map_bwd_routine(p, detect(p.device))(x.q, [*inputs_in_memory(x), do, dht])
    return dh0


# stages alone


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: Tensors
) -> dict[str, Tensor | None]:
    """Run stages on tensors as they lie in chunks: rows (NC, HV, C, D), states (NC or N, HV, K, V)."""
    p, save = call_of_stage(name, p, offsets is not None)
    device = next(x.device for x in tensors.values() if x is not None)
    run = {"fwd/gate+intra+wy": _prepare, "fwd/state+output": _chain, "bwd/output+state": _state_bwd,
           "bwd/wy+intra+gate": _wy_bwd}[name]
    return run(StageCall(p, save, offsets, Chunks(p, offsets, device), tensors))  # type: ignore[return-value]


class StageCall:
    """The tensors of a stage that runs alone."""

    def __init__(self, p: Problem, save: Save, offsets: list[int] | None, table: Chunks, tensors: Tensors):
        self.p, self.save, self.table, self.tensors = p, save, table, tensors
        device = table.positions.device
        self.cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
        self.like = torch.empty(0, device=device)

    def rows(self, *names: str) -> dict[str, Tensor]:
        return {name: self.table.rows(self.tensors[name]) for name in names}  # type: ignore[arg-type]

    def inputs(self) -> dict[str, Tensor | None]:
        flat = {n: None if x is None else aligned(x.flatten()) for n in ("A_log", "dt_bias")
                for x in (self.tensors[n],)}
        return {**self.rows("q", "k", "v", "g", "beta"), **flat}

    def describe(self, given: Tensors) -> Description:
        offsets = "int64" if self.p.packed else None
        return Description(self.p, detect(self.p.device), offsets, self.save, (*given, "cu_seqlens"))

    def run(self, routine: Routine, given: Tensors) -> list[Any]:
        return routine(self.like, [*given.values(), self.cu_seqlens])

    def tiles(self, x: Tensor, *shape: int) -> Tensor:
        return x.view(torch.float32)[: self.table.NC * self.p.HV * shape[0] * shape[1]].view(
            self.table.NC, self.p.HV, *shape)


def _prepare(c: StageCall) -> dict[str, Tensor]:
    p, given = c.p, c.inputs()
    d = c.describe(given)
    elements = sizes(p, FORWARD)
    room = {name: d.draft.tensor((size * d.plan.tiles,), "float32") for name, size in elements.items()}
    saved = {name: d.draft.tensor((p.B * p.T, p.HV, p.C), "float32", zeroed=True) for name in SAVED}
    d.launch("prepare", **d.draft.only(*given), **d.where, **room, **saved)
    *written, A_qk, A_inv = c.run(d.draft.done(*room.values(), *saved.values()), given)
    shapes = {"w": (p.C, p.K), "qg": (p.C, p.K), "u": (p.C, p.V), "gc_last": (1, p.K), "kg_t": (p.K, p.C)}
    results = {name: c.tiles(x, *shapes[name]) for name, x in zip(room, written) if name in shapes}
    return results | {"kg": results["kg_t"].mT, "A_qk": c.table.chunks(A_qk), "A_inv": c.table.chunks(A_inv)}


def _chain(c: StageCall) -> dict[str, Tensor]:
    p = c.p
    given = {n: aligned(c.tensors[n]) for n in ("w", "qg", "u", "A_qk", "gc_last", "h0")}
    given["kg_t"] = aligned(c.tensors["kg"].mT)  # type: ignore[union-attr]
    d = c.describe(given)
    o, v_new = (d.draft.tensor((p.B * p.T, p.HV, p.V), "float32", zeroed=True) for _ in range(2))
    h, ht = (d.draft.tensor((n, p.HV, p.K, p.V), "float32") for n in (c.table.NC, p.N))
    d.launch("chain", **d.draft.only(*given), **d.where, o=o, v_new=v_new, h=h, ht=ht)
    o, v_new, h, ht = c.run(d.draft.done(o, v_new, h, ht), given)
    return {"h": h, "v_new": c.table.chunks(v_new), "ht": ht, "o": c.table.chunks(o)}


def _state_bwd(c: StageCall) -> dict[str, Tensor]:
    p, read = c.p, c.tensors
    given = {n: aligned(read[n].mT) for n in ("A_qk", "qg")} | {"w_t": aligned(read["w"].mT)}  # type: ignore[union-attr]
    given |= {n: aligned(read[n]) for n in ("kg", "gc_last", "dht")} | c.rows("do")
    d = c.describe(given)
    dv_new = d.draft.tensor(given["do"].shape, "float32", zeroed=True)  # type: ignore[union-attr]
    dh, dh0 = (d.draft.tensor((n, p.HV, p.K, p.V), "float32") for n in (c.table.NC, p.N))
    _chain_bwd(d, d.draft.only(*given), d_o=d.draft["do"], dht=d.draft["dht"], dv_new=dv_new, dh=dh, dh0=dh0)
    dv_new, dh, dh0 = c.run(d.draft.done(dv_new, dh, dh0), given)
    return {"dh": dh, "dv_new": c.table.chunks(dv_new), "dh0": dh0}


def _wy_bwd(c: StageCall) -> dict[str, Tensor | None]:
    p, inputs = c.p, c.inputs()
    given = inputs | {n: aligned(c.tensors[n]) for n in ("A_inv", "h", "dh")} | c.rows("do", "v_new", "dv_new")
    d = c.describe(given)
    _, within = _prepared_for_backward(d, {})
    within["A_inv"] = d.draft["A_inv"]
    described = _within_chunks(d, within, **d.draft.only("do", "h", "dh", "v_new", "dv_new"))
    grads = dict(zip(Grads._fields, c.run(d.draft.done(*described), given)))
    results = {n: c.table.chunks(grads[n].view(p.B * p.T, *x.shape[1:])) for n, x in zip(  # type: ignore[union-attr]
        ("dq", "dk", "dv", "dg"), inputs.values())}
    results["dbeta"] = c.table.chunks(grads["dbeta"].view(p.B * p.T, p.HV, 1))
    bias = grads["ddt_bias"]
    return results | {"dA_log": grads["dA_log"], "ddt_bias": None if bias is None else bias.view(p.HV, p.gate_width)}
