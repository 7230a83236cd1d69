"""Tensors in, tensors out: two kernels a forward, three of a packed one, and one workspace between them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kda.bundles import Outputs
from kda.compile.errors import BuildError
from kda.compile.fetching import fetch_here
from kda.compile.kernel import Bound, Kernel
from kda.host import Host, detect
from kda.problem import Inputs, Problem

from ..common.chunks import Chunks
from ..common.tensors import aligned, chunks_of_a_row, laid_out, on_its_device
from .configs import Config
from .plan import Plan, check_memory, plan, recipe, sizes

Tensor = torch.Tensor


@functools.cache
def kernel(config: Config) -> Kernel:
    return fetch_here(recipe(config))


class Steps(NamedTuple):
    """What launches the kernels: called with tensors; None where there is nothing to do."""

    plan: Plan
    tables: Bound | None
    prepare: Bound | None
    chain: Bound | None


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, host: Host, offsets: torch.dtype | None, keep: bool) -> Steps:
    """For `cu_seqlens` of dtype `offsets`."""
    pl = plan(p, host.sms, str(offsets).removeprefix("torch.") if p.packed else None, keep)

    def bound(config: Config | None, grid: int, *numbers: float) -> Bound | None:
        if config is None or not grid:
            return None
        check_memory(config, host)
        return kernel(config).bound(grid, *numbers, block=config.threads, dynamic_shared=config.shared)

    return Steps(
        pl,
        bound(pl.tables, 1, p.N),
        bound(pl.prepare, pl.prepare_grid, p.T, p.N, pl.chunks, p.H, p.HV, p.scale, p.lower_bound or 0.0),
        bound(pl.chain, pl.chain_grid, p.T, pl.chunks, p.HV, p.scale),
    )


class Workspace:
    """Operands of `chain`, a tile for each chunk and value head, in one piece of memory."""

    def __init__(self, p: Problem, tiles: int, device: torch.device):
        of = {name: -(-size * tiles // 64) * 64 for name, size in sizes(p).items()}    # at multiples of 256 bytes
        memory = torch.empty(sum(of.values()), dtype=torch.float32, device=device)
        self.w, self.qg, self.kg_t, self.u, self.A_qk, self.gc_last = memory.split(list(of.values()))


def located(at: Steps, p: Problem, cu_seqlens: Tensor | None, device: torch.device) -> list[Tensor | None]:
    """cu_seqlens on the GPU, and the first chunk of each sequence, counted there."""
    if not p.packed:
        return [None, None]
    offsets = cu_seqlens.to(device, non_blocking=True).contiguous()
    first_chunk = torch.empty(p.N + 1, dtype=torch.int64, device=device)
    at.tables(offsets, first_chunk)
    return [offsets, first_chunk]


@on_its_device
def forward(p: Problem, x: Inputs, save: str = "nothing") -> Outputs:
    if save != "nothing":
        raise BuildError(
            "chunk_kda: backend='sm89' has no kernels that keep intermediates. Leave out disable_recompute or backend."
        )
    at = steps(p, detect(p.device), x.cu_seqlens.dtype if p.packed else None, False)
    q, k, v, g, beta, A_log, dt_bias, h0 = laid_out(x)
    o, ht, h = q.new_empty(p.B, p.T, p.HV, p.V), None, None
    states = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    if p.final_state:
        ht = q.new_empty(states)
    if p.intermediate_states:
        h = q.new_empty(p.B, chunks_of_a_row(p, x), *states[1:])
    where = located(at, p, x.cu_seqlens, q.device)
    room = Workspace(p, at.plan.tiles, q.device)
    if at.prepare:
        at.prepare(q, k, v, g, beta, A_log, dt_bias, *where, room.w, room.qg, room.kg_t, room.u, room.A_qk,
                   room.gc_last, None, None, o)  # fmt: skip
    if at.chain:
        at.chain(room.w, room.qg, room.kg_t, room.u, room.A_qk, room.gc_last, h0, *where, o, None, h, ht)
    return Outputs(o, ht, h, None)


# stages alone


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """A run of stages on tensors as they lie in chunks: rows (NC, HV, C, D), states (NC or N, HV, K, V)."""
    import dataclasses

    p = dataclasses.replace(p, packed=offsets is not None, final_state=True, state_v_first=False)
    device = next(x.device for x in tensors.values() if x is not None)
    table = Chunks(p, offsets, device)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
    at = steps(p, detect(p.device), torch.int64 if p.packed else None, True)
    where = located(at, p, cu_seqlens, device)
    return (_prepare if name == "fwd/gate+intra+wy" else _chain)(at, p, table, where, tensors)


def _prepare(at: Steps, p: Problem, table: Chunks, where: list, tensors: Mapping[str, Tensor | None]) -> dict:
    room = Workspace(p, at.plan.tiles, table.at.device)
    rows = [aligned(table.rows(tensors[n])) for n in ("q", "k", "v", "g", "beta")]
    flat = [None if tensors[n] is None else aligned(tensors[n].flatten()) for n in ("A_log", "dt_bias")]
    kept = [rows[0].new_zeros(p.B * p.T, p.HV, p.C) for _ in range(2)]
    if at.prepare:
        at.prepare(*rows, *flat, *where, room.w, room.qg, room.kg_t, room.u, room.A_qk, room.gc_last, *kept, None)
    tiles = table.NC * p.HV

    def out(x: Tensor, *shape: int) -> Tensor:
        n = tiles * shape[0] * shape[1]
        return x[:n].view(table.NC, p.HV, *shape)

    return {
        "w": out(room.w, p.C, p.K), "qg": out(room.qg, p.C, p.K), "kg": out(room.kg_t, p.K, p.C).mT,
        "u": out(room.u, p.C, p.V), "gc_last": out(room.gc_last, 1, p.K), "A_qk": table.chunks(kept[0]),
        "A_inv": table.chunks(kept[1]),
    }  # fmt: skip


def _chain(at: Steps, p: Problem, table: Chunks, where: list, tensors: Mapping[str, Tensor | None]) -> dict:
    given = [aligned(tensors[n].mT if n == "kg" else tensors[n]) for n in ("w", "qg", "kg", "u", "A_qk", "gc_last")]
    h0 = aligned(tensors["h0"])
    o, v_new = (h0.new_zeros(p.B * p.T, p.HV, p.V) for _ in range(2))
    h, ht = h0.new_empty(table.NC, p.HV, p.K, p.V), torch.empty_like(h0)
    if at.chain:
        at.chain(*given, h0, *where, o, v_new, h, ht)
    return {"h": h, "v_new": table.chunks(v_new), "ht": ht, "o": table.chunks(o)}


