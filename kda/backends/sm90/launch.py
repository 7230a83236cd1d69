"""Tensors in, tensors out: tables of packed sequences, tiles of all chunks, chains over them."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import torch

from kda.bundles import Outputs
from kda.compile import cutedsl, store
from kda.compile.errors import BuildError
from kda.compile.kernel import Kernel
from kda.compile.target import parse
from kda.problem import Inputs, Problem

from ..common.tensors import aligned, on_its_device
from .configs import BOUND, COLUMNS, LIMIT, RUN, ChainConfig, PrepareConfig, TablesConfig
from .parts.tile import C, Tile

Tensor = torch.Tensor
TARGET = parse("sm90")
Config = TablesConfig | PrepareConfig | ChainConfig
KERNELS = {TablesConfig: "tables", PrepareConfig: "prepare", ChainConfig: "chain"}


@functools.cache
def kernel(config: Config) -> Kernel:
    name = KERNELS[type(config)]

    def build() -> cutedsl.Compiled:
        return importlib.import_module(f"kda.backends.sm90.fwd.{name}").build(config, TARGET)

    return cutedsl.kernel(build, TARGET, [source(), repr(config)], name)


@functools.cache
def source() -> str:
    return store.sources(Path(__file__).parent)


def run(config: Config, grid: int | tuple[int, ...], *args: object) -> None:
    kernel(config).launch(grid, *args, block=config.threads, dynamic_shared=config.shared)


# Operands of products, and results; decays, norms, the inverse and the state stay float32.
ROUNDED_TO = dict.fromkeys(("A_qk", "A_inv", "qg", "kb", "kg", "h", "v_new", "o"), "bfloat16")


@on_its_device
def forward(p: Problem, x: Inputs, save: str = "nothing") -> Outputs:
    if save != "nothing":
        raise BuildError(
            "chunk_kda: backend='sm90' has no kernels yet that keep what gradients need. Leave backend out, or call it "
            "under torch.no_grad()."
        )
    device = x.q.device
    chunks = p.T // C + p.N if p.packed else p.B * -(-p.T // C)              # the most there can be
    entries = chunks + p.packed                                              # tokens of no sequence may need one more
    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=x.q.dtype, device=device)
    states = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    ht = torch.empty(states, dtype=torch.float32, device=device) if p.final_state else None
    tiles = torch.empty(chunks * p.HV * Tile(p.K).bytes, dtype=torch.uint8, device=device)
    chunk_table, sequences = tables(p, x.cu_seqlens, entries, device) if p.packed else (None, None)
    if entries * p.HV:
        grid = (min(entries, LIMIT), -(-entries // LIMIT)) if p.packed else (-(-p.T // C), p.B)
        run(
            prepare_config(p), (p.HV, *grid), *map(aligned, (x.q, x.k, x.g, x.beta)),
            aligned(x.A_log, torch.float32), aligned(x.dt_bias, torch.float32), tiles, o, chunk_table, p.T, entries,
            p.H, p.HV, p.scale, p.lower_bound or 0.0,
        )  # fmt: skip
    if p.N * p.HV:
        chain = ChainConfig(p.K, p.V, packed=p.packed, h0=p.state_dtype, ht=p.final_state, v_first=p.state_v_first)
        run(chain, (p.V // COLUMNS, p.HV, p.N), tiles, aligned(x.v), aligned(x.initial_state), o, ht, sequences, p.T,
            -(-p.T // C), p.HV)  # fmt: skip
    return Outputs(o, ht, None, None)


def prepare_config(p: Problem) -> PrepareConfig:
    block = p.gate == "bounded" and p.lower_bound >= BOUND and p.qk_l2norm
    return PrepareConfig(
        p.K, p.V, p.gate, block=block, norm=p.qk_l2norm, rate=p.A_log, bias=p.dt_bias, beta=p.beta, packed=p.packed,
        grouped=p.HV != p.H, g_dtype=p.g_dtype, beta_dtype=p.beta_dtype,
    )  # fmt: skip


def tables(p: Problem, cu_seqlens: Tensor, entries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where chunks and sequences lie, on the GPU."""
    sizes = (2 * entries, 3 * p.N)
    chunk_table, sequences = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    cu_seqlens = cu_seqlens.to(device, non_blocking=True).contiguous()
    config = TablesConfig(str(cu_seqlens.dtype).removeprefix("torch."))
    run(config, max(1, -(-p.T // (C * RUN))), cu_seqlens, chunk_table, sequences, p.T, p.N, entries)
    return chunk_table, sequences
