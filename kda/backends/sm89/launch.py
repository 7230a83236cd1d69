"""Tensors in, tensors out: two kernels a forward, seven a backward, one more where sequences are packed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from kda.model.bundles import Grads, Outputs, Products, Save, SegmentSummary
from kda.model.host import Host, detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from ptxkit.compile.errors import BuildError

from ..common.arguments import NamedLaunch
from ..common.chunks import Chunks
from ..common.launcher import kernels, outputs
from ..common.tensors import aligned, laid_out, offsets_on, on_its_device
from .configs import SLICE
from .plan import BACKWARD, FORWARD, WITHIN, Plan, call_of_stage, check_memory, plan, recipe, sizes

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor | None]


def rounded_to(p: Problem) -> dict[str, str]:
    return {}                                                                  # all is float32


kernel = kernels(recipe)


class Steps:
    """Launches a plan's kernels when it is called with the name of one and its tensors.  Nothing happens where that
    kernel has nothing to do."""

    def __init__(self, plan: Plan, launches: dict[str, NamedLaunch]):
        self.plan, self.launches = plan, launches

    def __call__(self, name: str, **tensors: Tensor | None) -> None:
        if name in self.launches:
            self.launches[name](**tensors)


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, host: Host, offsets: str | None, save: Save) -> Steps:
    """Return the Steps of a call.  `offsets` is the dtype of `cu_seqlens`; `save` says what this forward saves, or what
    this backward's has saved."""
    pl = plan(p, host.sms, offsets, save)
    numbers = {
        "T": p.T, "N": p.N, "H": p.H, "HV": p.HV, "scale": p.scale, "lower_bound": p.lower_bound or 0.0,
        "chunks": pl.chunks, "tokens": p.B * p.T,
    }
    for config, _ in pl.steps.values():
        check_memory(config, host)
    with ThreadPoolExecutor() as threads:  # NVRTC builds what is missing side by side
        kernels = dict(zip(pl.steps, threads.map(kernel, [config for config, _ in pl.steps.values()])))
    launches = {}
    for name, (config, ctas) in pl.steps.items():
        values = numbers | ({"chunks": p.B * pl.chunks} if name == "sum_chunks" else {})
        given = {number: values[number] for number in config.arguments.numbers()}
        launches[name] = config.bound(kernels[name], (ctas, 1, 1), **given)
    return Steps(pl, launches)


def workspace(p: Problem, tiles: int, names: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
    """Return operands by name, a tile of each for every chunk and value head, in one piece of memory, at multiples
    of 256 bytes."""
    elements = {name: -(-size * tiles // 64) * 64 for name, size in sizes(p, names).items()}
    memory = torch.empty(sum(elements.values()), dtype=torch.float32, device=device)
    return dict(zip(names, memory.split(list(elements.values()))))


def located(launch: Steps, p: Problem, cu_seqlens: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """Return cu_seqlens on the GPU, and the first chunk of each sequence, counted there; nothing unless packed."""
    if not p.packed:
        return {}
    where = {
        "cu_seqlens": offsets_on(device, cu_seqlens),
        "first_chunk": torch.empty(p.N + 1, dtype=torch.int64, device=device),
    }
    launch("tables", **where)
    return where


def taking(given: Tensors, *names: str) -> dict[str, Tensor | None]:
    return {name: given[name] for name in names}


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING) -> Outputs:
    if save is Save.ALL:
        raise BuildError(
            "chunk_kda: backend='sm89' has no kernels that keep all intermediates. Leave out disable_recompute or "
            "backend."
        )
    launch = steps(p, detect(p.device), offsets_dtype(x), save)
    inputs = laid_out(x)
    h0, q, saved, products = inputs.pop("h0"), inputs["q"], None, {}
    o, ht, h, _ = outputs(p, x)
    if save is Save.PRODUCTS:
        saved = Products(*(q.new_empty(p.B * p.T, p.HV, p.C) for _ in Products._fields))
        products = {"saved_" + name: tensor for name, tensor in saved._asdict().items()}
    where = located(launch, p, x.cu_seqlens, q.device)
    room = workspace(p, launch.plan.tiles, FORWARD, q.device)
    launch("prepare", **inputs, **where, **room, **products, o=o)
    launch("chain", **room, **where, h0=h0, o=o, h=h, ht=ht)
    return Outputs(o, ht, h, saved)


@on_its_device
def backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Products | None = None) -> Grads:
    """Return the gradients.  A_qk and A_inv are read if they were saved; the rest is recomputed."""
    saved = saved if isinstance(saved, Products) else None
    launch = steps(p, detect(p.device), offsets_dtype(x), Save.of(saved))
    inputs = laid_out(x)
    h0 = inputs.pop("h0")
    where = located(launch, p, x.cu_seqlens, x.q.device)
    do, dht = aligned(do, torch.float32), aligned(dht, torch.float32)
    room, within = _prepared_for_backward(launch, p, inputs, where, saved)
    states = (launch.plan.tiles * p.K * p.V,)
    h, v_new = do.new_empty(states), torch.empty_like(do)
    launch("chain", **taking(room, *FORWARD), **where, h0=h0, v_new=v_new, h=h)
    dh, dv_new, dh0 = do.new_empty(states), torch.empty_like(do), None if h0 is None else torch.empty_like(h0)
    _chain_bwd(launch, room, where, d_o=do, dht=dht, dv_new=dv_new, dh=dh, dh0=dh0)
    del room                                                                   # makes place for what comes
    grads = _within_chunks(launch, p, inputs, where, within, do=do, h=h, dh=dh, v_new=v_new, dv_new=dv_new, dh0=dh0)
    dA_log, ddt_bias = (
        None if t is None else grad.to(t.dtype) for grad, t in ((grads.dA_log, x.A_log), (grads.ddt_bias, x.dt_bias))
    )
    return grads._replace(dA_log=dA_log, ddt_bias=ddt_bias)


def _prepared_for_backward(
    launch: Steps, p: Problem, inputs: Tensors, where: Tensors, saved: Products | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Launch prepare and return its results: those that only the chains read, and those that are wanted to the end."""
    room, within = (workspace(p, launch.plan.tiles, names, inputs["q"].device) for names in (BACKWARD, WITHIN))
    products = {} if saved is None else {"saved_" + name: aligned(tensor) for name, tensor in saved._asdict().items()}
    launch("prepare", **inputs, **where, **room, **products, **within)
    return room, within


def _chain_bwd(launch: Steps, room: Tensors, where: Tensors, **others: Tensor | None) -> None:
    """Launch chain_bwd; `prepare` wrote A_qk and qg transposed, for a backward."""
    launch("chain_bwd", A_qk_t=room["A_qk"], qg_t=room["qg"], **taking(room, "kg", "w_t", "gc_last"), **where, **others)


def _within_chunks(
    launch: Steps, p: Problem, inputs: Tensors, where: Tensors, within: Tensors, *, do: Tensor, h: Tensor, dh: Tensor,
    v_new: Tensor, dv_new: Tensor, dh0: Tensor | None,
) -> Grads:
    q, k, v, g, beta = taking(inputs, "q", "k", "v", "g", "beta").values()
    tokens, tiles = p.B * p.T, launch.plan.tiles
    P, dv, db = torch.empty_like(v), torch.empty_like(v), v.new_empty(1 + p.K // SLICE, tokens, p.HV)
    dA_qk, dA_kk = (v.new_empty(tiles, p.C, p.C) for _ in range(2))
    shared = dict(P=P, dA_qk=dA_qk, dA_kk=dA_kk, db=db)
    launch("wy_bwd", v=v, **within, v_new=v_new, dv_new=dv_new, d_o=do, **where, **shared, dv=dv)
    dqn, dkn, dg = (torch.empty_like(g) for _ in range(3))
    of_A_log, of_dt_bias = (v.new_empty(tiles, p.K) if needed else None for needed in (p.A_log, p.dt_bias))
    launch(
        "intra_bwd", **taking(inputs, "q", "k", "g", "A_log", "dt_bias"), of_rows=within["of_rows"], h=h, dh=dh,
        v_new=v_new, d_o=do, **where, **shared, dqn=dqn, dkn=dkn, dg=dg, of_A_log=of_A_log, of_dt_bias=of_dt_bias,
    )
    dq, dk, dbeta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(beta)
    launch(
        "norms_bwd", q=q, k=k, beta=beta, dqn=dqn, dkn=dkn, db=db, cu_seqlens=where.get("cu_seqlens"), dq=dq, dk=dk,
        dbeta=dbeta,
    )
    of_parameters = (inputs["A_log"], inputs["dt_bias"])
    dA_log, ddt_bias = (None if given is None else torch.empty_like(given) for given in of_parameters)
    launch(
        "sum_chunks", of_A_log=of_A_log, of_dt_bias=of_dt_bias, first_chunk=where.get("first_chunk"), dA_log=dA_log,
        ddt_bias=ddt_bias,
    )
    return Grads(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)


# maps of a sequence on several GPUs, by the kernels of calls


@on_its_device
def segment_map(p: Problem, x: Inputs, transition: bool) -> SegmentSummary:
    p = dataclasses.replace(p, state_dtype="float32")
    launch, inputs, out = steps(p, detect(p.device), None, Save.NOTHING), laid_out(x), outputs(p, x)
    room, h0 = workspace(p, launch.plan.tiles, FORWARD, x.q.device), inputs.pop("h0")
    zero = torch.zeros_like(out.final_state)
    launch("prepare", **inputs, **room, o=out.o)
    launch("chain", **room, h0=zero if h0 is None else h0, o=out.o, ht=out.final_state)
    if transition:
        room["u"].zero_()
        eye = torch.eye(p.K, device=zero.device).repeat(1, p.HV, 1, 1)         # K and V are equal
        launch("chain", **room, h0=eye, o=out.o, ht=zero)
    return SegmentSummary(zero, out.final_state)


@on_its_device
def segment_map_bwd(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
    p = dataclasses.replace(p, direction="backward", state_dtype="float32")
    launch, inputs = steps(p, detect(p.device), None, Save.NOTHING), laid_out(x)
    inputs.pop("h0")
    room, _ = _prepared_for_backward(launch, p, inputs, {})
    do, dht = aligned(do, torch.float32), aligned(dht, torch.float32)
    dh0, dh = do.new_empty(1, p.HV, p.K, p.V), do.new_empty(launch.plan.tiles * p.K * p.V)
    _chain_bwd(launch, room, {}, d_o=do, dht=dht, dv_new=torch.empty_like(do), dh=dh, dh0=dh0)
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
    launch = steps(p, detect(p.device), "int64" if p.packed else None, save)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
    return run(launch, p, Chunks(p, offsets, device), located(launch, p, cu_seqlens, device), tensors)


def _inputs(table: Chunks, tensors: Tensors) -> dict[str, Tensor | None]:
    rows = {n: table.rows(tensors[n]) for n in ("q", "k", "v", "g", "beta")}
    return rows | {n: None if tensors[n] is None else aligned(tensors[n].flatten()) for n in ("A_log", "dt_bias")}


def _tiles(x: Tensor, table: Chunks, p: Problem, *shape: int) -> Tensor:
    return x[: table.NC * p.HV * shape[0] * shape[1]].view(table.NC, p.HV, *shape)


def _prepare(launch: Steps, p: Problem, table: Chunks, where: Tensors, tensors: Tensors) -> dict[str, Tensor]:
    inputs = _inputs(table, tensors)
    room = workspace(p, launch.plan.tiles, FORWARD, table.positions.device)
    saved = Products(*(inputs["q"].new_zeros(p.B * p.T, p.HV, p.C) for _ in Products._fields))
    launch("prepare", **inputs, **where, **room, saved_A_qk=saved.A_qk, saved_A_inv=saved.A_inv)
    shapes = {"w": (p.C, p.K), "qg": (p.C, p.K), "u": (p.C, p.V), "gc_last": (1, p.K), "kg_t": (p.K, p.C)}
    results = {name: _tiles(room[name], table, p, *shape) for name, shape in shapes.items()}
    return results | {"kg": results["kg_t"].mT, **{name: table.chunks(x) for name, x in saved._asdict().items()}}


def _chain(launch: Steps, p: Problem, table: Chunks, where: Tensors, tensors: Tensors) -> dict[str, Tensor]:
    given = {n: aligned(tensors[n]) for n in ("w", "qg", "u", "A_qk", "gc_last", "h0")}
    o, v_new = (given["h0"].new_zeros(p.B * p.T, p.HV, p.V) for _ in range(2))
    h, ht = o.new_empty(table.NC, p.HV, p.K, p.V), torch.empty_like(given["h0"])
    launch("chain", **given, kg_t=aligned(tensors["kg"].mT), **where, o=o, v_new=v_new, h=h, ht=ht)
    return {"h": h, "v_new": table.chunks(v_new), "ht": ht, "o": table.chunks(o)}


def _state_bwd(launch: Steps, p: Problem, table: Chunks, where: Tensors, tensors: Tensors) -> dict[str, Tensor]:
    given = {n: aligned(tensors[n].mT) for n in ("A_qk", "qg")}
    given |= {"w_t": aligned(tensors["w"].mT), "kg": aligned(tensors["kg"]), "gc_last": aligned(tensors["gc_last"])}
    do, dht = table.rows(tensors["do"]), aligned(tensors["dht"])
    dv_new, dh, dh0 = torch.zeros_like(do), do.new_empty(table.NC, p.HV, p.K, p.V), torch.empty_like(dht)
    _chain_bwd(launch, given, where, d_o=do, dht=dht, dv_new=dv_new, dh=dh, dh0=dh0)
    return {"dh": dh, "dv_new": table.chunks(dv_new), "dh0": dh0}


def _wy_bwd(launch: Steps, p: Problem, table: Chunks, where: Tensors, tensors: Tensors) -> dict[str, Tensor | None]:
    inputs = _inputs(table, tensors)
    _, within = _prepared_for_backward(launch, p, inputs, where)
    within |= {"A_inv": aligned(tensors["A_inv"])}
    states = {n: aligned(tensors[n]) for n in ("h", "dh")}
    rows = {n: table.rows(tensors[n]) for n in ("do", "v_new", "dv_new")}
    grads = _within_chunks(launch, p, inputs, where, within, **states, **rows, dh0=None)._asdict()
    results = {n: table.chunks(grads[n].view(p.B * p.T, *x.shape[1:])) for n, x in zip(
        ("dq", "dk", "dv", "dg"), inputs.values())}
    results["dbeta"] = table.chunks(grads["dbeta"].view(p.B * p.T, p.HV, 1))
    bias = grads["ddt_bias"]
    return results | {"dA_log": grads["dA_log"], "ddt_bias": None if bias is None else bias.view(p.HV, p.K)}
