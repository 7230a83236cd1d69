"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import torch

from kda.bundles import Outputs
from kda.compile import cutedsl, store
from kda.compile.kernel import Kernel
from kda.compile.target import parse
from kda.problem import Inputs, Problem

from .configs import BOUND, COLUMNS, LIMIT, RUN, ChainConfig, PrepareConfig, TablesConfig
from .parts.tile import C, Tile

Tensor = torch.Tensor
TARGET = parse("sm90")
KERNELS = {TablesConfig: "tables", PrepareConfig: "prepare", ChainConfig: "chain"}


@functools.cache
def kernel(config: TablesConfig | PrepareConfig | ChainConfig) -> Kernel:
    name = KERNELS[type(config)]

    def build() -> cutedsl.Compiled:
        return importlib.import_module(f"kda.backends.sm90.fwd.{name}").build(config, TARGET)

    return cutedsl.kernel(build, TARGET, [source(), repr(config)], name)


@functools.cache
def source() -> str:
    return store.sources(*(path for path in Path(__file__).parent.rglob("*.py")))


def run(config: TablesConfig | PrepareConfig | ChainConfig, grid: int | tuple[int, ...], *args: object) -> None:
    kernel(config).launch(grid, *args, block=config.threads, dynamic_shared=config.shared)


def forward(p: Problem, x: Inputs) -> Outputs:
    device = x.q.device
    chunks = p.T // C + p.N if p.packed else p.B * -(-p.T // C)              # the most there can be
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=x.q.dtype, device=device)
    states = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    ht = torch.empty(states, dtype=torch.float32, device=device) if p.final_state else None
    tiles = torch.empty(chunks * p.HV * Tile(p.K).bytes, dtype=torch.uint8, device=device)
    chunk_table = sequences = None
    programs = chunks + p.packed                                             # tokens of no sequence may need one more
    if p.packed:
        table = torch.empty(2 * programs + 3 * p.N, dtype=torch.int64, device=device)
        chunk_table, sequences = table.split((2 * programs, 3 * p.N))
        cu_seqlens = x.cu_seqlens.to(device, non_blocking=True).contiguous()
        config = TablesConfig(str(cu_seqlens.dtype).removeprefix("torch."))
        run(config, -(-max(p.T, 1) // (C * RUN)), cu_seqlens, chunk_table, sequences, p.T, p.N, programs)
    q, k, v, g, beta = (t.contiguous() for t in (x.q, x.k, x.v, x.g, x.beta))
    A_log, dt_bias = (t if t is None else t.to(torch.float32).contiguous() for t in (x.A_log, x.dt_bias))
    per_row = -(-p.T // C)
    prepare = PrepareConfig(
        p.K, p.V, p.gate, block=p.gate == "bounded" and p.lower_bound >= BOUND and p.qk_l2norm, norm=p.qk_l2norm,
        rate=p.A_log, bias=p.dt_bias, beta=p.beta, packed=p.packed, grouped=p.HV != p.H, g_dtype=p.g_dtype,
        beta_dtype=p.beta_dtype,
    )  # fmt: skip
    grid = (min(programs, LIMIT), -(-programs // LIMIT)) if p.packed else (per_row, p.B)
    if programs * p.HV:
        run(prepare, (p.HV, *grid), q, k, g, beta, A_log, dt_bias, tiles, o, chunk_table, p.T, programs, p.H, p.HV,
            p.scale, p.lower_bound or 0.0)  # fmt: skip
    chain = ChainConfig(p.K, p.V, h0=p.state_dtype, ht=p.final_state, v_first=p.state_v_first, packed=p.packed)
    h0 = None if x.initial_state is None else x.initial_state.contiguous()
    if p.N:
        run(chain, (p.V // COLUMNS, p.HV, p.N), tiles, v, h0, o, ht, sequences, p.T, per_row, p.HV)
    return Outputs(o, ht, None, None)
