"""Tensors in, tensors out: two kernels a forward, seven a backward, one more where sequences are packed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from kda.bundles import Grads, Outputs, Products
from kda.compile.errors import BuildError
from kda.compile.fetching import fetch_here
from kda.compile.kernel import Bound, Kernel
from kda.host import Host, detect
from kda.problem import Inputs, Problem

from ..common.chunks import Chunks
from ..common.tensors import aligned, chunks_of_a_row, laid_out, on_its_device
from .configs import SLICE, Config
from .plan import BACKWARD, FORWARD, WITHIN, Plan, check_memory, plan, recipe, sizes

Tensor = torch.Tensor


@functools.cache
def kernel(config: Config) -> Kernel:
    return fetch_here(recipe(config))


class Steps:
    """What launches the kernels of a call: each called with tensors, by name; nothing where it has nothing to do."""

    def __init__(self, plan: Plan, bound: dict[str, Bound]):
        self.plan, self.bound = plan, bound

    def __call__(self, name: str, *tensors: Tensor | None) -> None:
        if name in self.bound:
            self.bound[name](*tensors)


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, host: Host, offsets: torch.dtype | None, keep: int) -> Steps:
    """For `cu_seqlens` of dtype `offsets`; `keep` as in PrepareConfig."""
    pl = plan(p, host.sms, str(offsets).removeprefix("torch.") if p.packed else None, keep)
    numbers = {
        "tables": "N", "prepare": "T N chunks H HV scale lower_bound", "chain": "T chunks HV scale",
        "chain_bwd": "T chunks HV scale", "wy_bwd": "T N chunks HV scale",
        "intra_bwd": "T tokens N chunks H HV scale lower_bound", "norms_bwd": "tokens N H HV", "sum_chunks": "N all HV",
    }  # fmt: skip
    known = {
        "T": p.T, "N": p.N, "H": p.H, "HV": p.HV, "scale": p.scale, "lower_bound": p.lower_bound or 0.0,
        "chunks": pl.chunks, "tokens": p.B * p.T, "all": p.B * pl.chunks,
    }  # fmt: skip
    for config, _ in pl.steps.values():
        check_memory(config, host)
    with ThreadPoolExecutor() as threads:  # NVRTC builds what is missing side by side
        kernels = dict(zip(pl.steps, threads.map(kernel, [config for config, _ in pl.steps.values()])))
    bound = {}
    for name, (config, grid) in pl.steps.items():
        given = [known[word] for word in numbers[name].split()]
        bound[name] = kernels[name].bound(grid, *given, block=config.threads, dynamic_shared=config.shared)
    return Steps(pl, bound)


def workspace(p: Problem, tiles: int, names: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
    """Operands by name, a tile of each for every chunk and value head, in one piece of memory."""
    of = {name: -(-size * tiles // 64) * 64 for name, size in sizes(p, names).items()}  # at multiples of 256 bytes
    memory = torch.empty(sum(of.values()), dtype=torch.float32, device=device)
    return dict(zip(names, memory.split(list(of.values()))))


def located(at: Steps, p: Problem, cu_seqlens: Tensor | None, device: torch.device) -> list[Tensor | None]:
    """cu_seqlens on the GPU, and the first chunk of each sequence, counted there."""
    if not p.packed:
        return [None, None]
    offsets = cu_seqlens.to(device, non_blocking=True).contiguous()
    first_chunk = torch.empty(p.N + 1, dtype=torch.int64, device=device)
    at("tables", offsets, first_chunk)
    return [offsets, first_chunk]


@on_its_device
def forward(p: Problem, x: Inputs, save: str = "nothing") -> Outputs:
    if save == "all":
        raise BuildError(
            "chunk_kda: backend='sm89' has no kernels that keep all intermediates. Leave out disable_recompute or "
            "backend."
        )
    keep = save == "products"
    at = steps(p, detect(p.device), x.cu_seqlens.dtype if p.packed else None, int(keep))
    *inputs, h0 = laid_out(x)
    q, ht, h = inputs[0], None, None
    o, states = q.new_empty(p.B, p.T, p.HV, p.V), (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    if p.final_state:
        ht = q.new_empty(states)
    if p.intermediate_states:
        h = q.new_empty(p.B, chunks_of_a_row(p, x), *states[1:])
    kept = [q.new_empty(p.B * p.T, p.HV, p.C) if keep else None for _ in Products._fields]
    where = located(at, p, x.cu_seqlens, q.device)
    room = list(workspace(p, at.plan.tiles, FORWARD, q.device).values())
    at("prepare", *inputs, *where, *room, *kept, o, None, None, None, None)
    at("chain", *room, h0, *where, o, None, h, ht)
    return Outputs(o, ht, h, Products(*kept) if keep else None)


@on_its_device
def backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Products | None = None) -> Grads:
    """A_qk and A_inv are taken where they were kept; the rest is made again."""
    kept = [aligned(each) for each in saved] if isinstance(saved, Products) else [None, None]
    at = steps(p, detect(p.device), x.cu_seqlens.dtype if p.packed else None, 2 if kept[0] is None else 3)
    *inputs, h0 = laid_out(x)
    where = located(at, p, x.cu_seqlens, x.q.device)
    do, dht = aligned(do, torch.float32), aligned(dht, torch.float32)
    room, within = _prepared_for_backward(at, p, inputs, where, kept)
    states = (at.plan.tiles * p.K * p.V,)
    h, v_new = do.new_empty(states), torch.empty_like(do)
    at("chain", *(room[n] for n in FORWARD), h0, *where, None, v_new, h, None)
    dh, dv_new, dh0 = do.new_empty(states), torch.empty_like(do), None if h0 is None else torch.empty_like(h0)
    _chain_bwd(at, room, do, dht, where, dv_new, dh, dh0)
    del room                                                                   # makes place for what comes
    grads = _within_chunks(at, p, inputs, where, do, within, h, dh, v_new, dv_new, dh0)
    dA_log, ddt_bias = (
        None if t is None else grad.to(t.dtype) for grad, t in ((grads.dA_log, x.A_log), (grads.ddt_bias, x.dt_bias))
    )
    return grads._replace(dA_log=dA_log, ddt_bias=ddt_bias)


def _prepared_for_backward(
    at: Steps, p: Problem, inputs: list[Tensor | None], where: list, kept: Sequence[Tensor | None] = (None, None)
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the chains read, and what is wanted to the end."""
    room, within = (workspace(p, at.plan.tiles, names, inputs[0].device) for names in (BACKWARD, WITHIN))
    at("prepare", *inputs, *where, *(room[n] for n in FORWARD), *kept, None, room["w_t"], room["kg"],
       *within.values())  # fmt: skip
    return room, within


def _chain_bwd(at: Steps, room: Mapping[str, Tensor], do: Tensor, dht: Tensor | None, where: list, *out: Tensor | None):
    at("chain_bwd", *(room[n] for n in ("A_qk", "qg", "kg", "w_t", "gc_last")), do, dht, *where, *out)


def _within_chunks(
    at: Steps, p: Problem, inputs: list[Tensor | None], where: list, do: Tensor,
    within: Mapping[str, Tensor], h: Tensor, dh: Tensor, v_new: Tensor, dv_new: Tensor, dh0: Tensor | None,
) -> Grads:  # fmt: skip
    q, k, v, g, beta, A_log, dt_bias = inputs
    tokens, tiles = p.B * p.T, at.plan.tiles
    P, dv, db = torch.empty_like(v), torch.empty_like(v), v.new_empty(1 + p.K // SLICE, tokens, p.HV)
    dA_qk, dA_kk = (v.new_empty(tiles, p.C, p.C) for _ in range(2))
    rows = within["of_rows"]
    at("wy_bwd", v, within["A_inv"], rows, v_new, dv_new, do, *where, P, dv, dA_qk, dA_kk, db)
    dqn, dkn, dg = (torch.empty_like(g) for _ in range(3))
    of_A_log, of_dt_bias = (v.new_empty(tiles, p.K) if there else None for there in (p.A_log, p.dt_bias))
    at("intra_bwd", q, k, g, A_log, dt_bias, rows, h, dh, v_new, do, P, dA_qk, dA_kk, *where, dqn, dkn, dg, db,
       of_A_log, of_dt_bias)  # fmt: skip
    dq, dk, dbeta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(beta)
    at("norms_bwd", q, k, beta, dqn, dkn, db, where[0], dq, dk, dbeta)
    dA_log, ddt_bias = (None if given is None else torch.empty_like(given) for given in (A_log, dt_bias))
    at("sum_chunks", of_A_log, of_dt_bias, where[1], dA_log, ddt_bias)
    return Grads(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)


# stages alone


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """A run of stages on tensors as they lie in chunks: rows (NC, HV, C, D), states (NC or N, HV, K, V)."""
    p = dataclasses.replace(
        p, packed=offsets is not None, final_state=True, state_v_first=False, state_dtype="float32",
        direction="forward" if name.startswith("fwd") else "backward",
    )  # fmt: skip
    device = next(x.device for x in tensors.values() if x is not None)
    run = {"fwd/gate+intra+wy": _prepare, "fwd/state+output": _chain, "bwd/output+state": _state_bwd,
           "bwd/wy+intra+gate": _wy_bwd}[name]  # fmt: skip
    at = steps(p, detect(p.device), torch.int64 if p.packed else None, 1 if name.startswith("fwd") else 2)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
    return run(at, p, Chunks(p, offsets, device), located(at, p, cu_seqlens, device), tensors)


def _inputs(table: Chunks, tensors: Mapping[str, Tensor | None]) -> list[Tensor | None]:
    rows = [table.rows(tensors[n]) for n in ("q", "k", "v", "g", "beta")]
    return rows + [None if tensors[n] is None else aligned(tensors[n].flatten()) for n in ("A_log", "dt_bias")]


def _tiles(x: Tensor, table: Chunks, p: Problem, *shape: int) -> Tensor:
    return x[: table.NC * p.HV * shape[0] * shape[1]].view(table.NC, p.HV, *shape)


def _prepare(at: Steps, p: Problem, table: Chunks, where: list, tensors: Mapping[str, Tensor | None]) -> dict:
    inputs = _inputs(table, tensors)
    room = workspace(p, at.plan.tiles, FORWARD, table.at.device)
    kept = [inputs[0].new_zeros(p.B * p.T, p.HV, p.C) for _ in range(2)]
    at("prepare", *inputs, *where, *room.values(), *kept, None, None, None, None, None)
    shapes = {"w": (p.C, p.K), "qg": (p.C, p.K), "u": (p.C, p.V), "gc_last": (1, p.K), "kg_t": (p.K, p.C)}
    found = {name: _tiles(room[name], table, p, *shape) for name, shape in shapes.items()}
    return found | {"kg": found["kg_t"].mT, "A_qk": table.chunks(kept[0]), "A_inv": table.chunks(kept[1])}


def _chain(at: Steps, p: Problem, table: Chunks, where: list, tensors: Mapping[str, Tensor | None]) -> dict:
    given = [aligned(tensors[n].mT if n == "kg" else tensors[n]) for n in ("w", "qg", "kg", "u", "A_qk", "gc_last")]
    h0 = aligned(tensors["h0"])
    o, v_new = (h0.new_zeros(p.B * p.T, p.HV, p.V) for _ in range(2))
    h, ht = h0.new_empty(table.NC, p.HV, p.K, p.V), torch.empty_like(h0)
    at("chain", *given, h0, *where, o, v_new, h, ht)
    return {"h": h, "v_new": table.chunks(v_new), "ht": ht, "o": table.chunks(o)}


def _state_bwd(at: Steps, p: Problem, table: Chunks, where: list, tensors: Mapping[str, Tensor | None]) -> dict:
    given = {n: aligned(tensors[n].mT) for n in ("A_qk", "qg")}
    given |= {"w_t": aligned(tensors["w"].mT), "kg": aligned(tensors["kg"]), "gc_last": aligned(tensors["gc_last"])}
    do, dht = table.rows(tensors["do"]), aligned(tensors["dht"])
    dv_new, dh, dh0 = torch.zeros_like(do), do.new_empty(table.NC, p.HV, p.K, p.V), torch.empty_like(dht)
    _chain_bwd(at, given, do, dht, where, dv_new, dh, dh0)
    return {"dh": dh, "dv_new": table.chunks(dv_new), "dh0": dh0}


def _wy_bwd(at: Steps, p: Problem, table: Chunks, where: list, tensors: Mapping[str, Tensor | None]) -> dict:
    inputs = _inputs(table, tensors)
    _, within = _prepared_for_backward(at, p, inputs, where)
    within["A_inv"], *states = (aligned(tensors[n]) for n in ("A_inv", "h", "dh"))
    do, v_new, dv_new = (table.rows(tensors[n]) for n in ("do", "v_new", "dv_new"))
    grads = _within_chunks(at, p, inputs, where, do, within, *states, v_new, dv_new, None)._asdict()
    found = {n: table.chunks(grads[n].view(p.B * p.T, *x.shape[1:])) for n, x in zip(
        ("dq", "dk", "dv", "dg"), inputs)}  # fmt: skip
    found["dbeta"] = table.chunks(grads["dbeta"].view(p.B * p.T, p.HV, 1))
    bias = grads["ddt_bias"]
    return found | {"dA_log": grads["dA_log"], "ddt_bias": None if bias is None else bias.view(p.HV, p.K)}
