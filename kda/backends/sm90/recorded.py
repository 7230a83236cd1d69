"""The launches of a forward that keeps what its backward reads, and of that backward.

  forward   prepare, with b on keys;  carry and compose where sequences are cut;  a chain: o, h of every two chunks, r
  backward  the same without results, unless they were kept;  the way back over the chunks;  grads
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from kda.bundles import Grads, Outputs, Own
from kda.host import detect
from kda.problem import Inputs, Problem

from ..common.arguments import Launch
from ..common.cute.tile import C
from ..common.launcher import launch_of, offsets_dtype, outputs, segment_summary
from ..common.tensors import aligned, laid_out, offsets_on
from .configs import RUN, TOKENS, ChunkTable, SegmentTable, TablesConfig
from .kernels import kernel
from .plan import RecordedPlan, recorded_plan, states_table

Tensor = torch.Tensor


class Tables(NamedTuple):
    """Where chunks, segments and pairs of chunks lie, on the GPU; None unless sequences are packed."""

    chunk: Tensor | None = None
    segment: Tensor | None = None
    state: Tensor | None = None
    first_segment: Tensor | None = None


class Parts(NamedTuple):
    """What a backward reads beside the inputs."""

    tiles: Tensor
    h: Tensor
    M: Tensor
    r: Tensor


class Steps(NamedTuple):
    """A plan, and what launches its kernels: called with tensors; None where there is nothing to do."""

    plan: RecordedPlan
    tables: Launch | None                    # of chunks, and of segments
    states: Launch | None                    # of pairs of chunks
    prepare: Launch | None
    carry: Launch | None
    compose: Launch | None
    record: Launch | None
    again: Launch | None
    carry_back: Launch | None
    compose_back: Launch | None
    walk: Launch | None
    grads: Launch | None


@functools.lru_cache(maxsize=1024)
def steps(p: Problem, sms: int, offsets: str | None) -> Steps:
    """For `cu_seqlens` of dtype `offsets`; of a backward `p.final_state` says whether final states have gradients."""
    pl = recorded_plan(p, sms)
    step = functools.partial(launch_of, kernel)
    gate = dict(T=p.T, H=p.H, HV=p.HV, scale=p.scale, lower_bound=p.lower_bound or 0.0)
    walk = dict(T=p.T, chunks=pl.chunks, segments=pl.segments, segment=pl.segment, HV=p.HV)
    compose = dict(segments=pl.segments, HV=p.HV)
    walks = pl.all_segments if p.N else 0

    def walker(config):
        return config and step(config, (config.strips, p.HV, walks), **walk)

    def composer(config):
        return config and step(config, (config.strips, p.HV, p.N), **compose)

    return Steps(
        pl,
        step(TablesConfig(offsets) if offsets else None, (runs(C, p), 1, 1), T=p.T, N=p.N, segment=pl.segment,
             every=pl.again.every, chunk_entries=pl.entries, segment_entries=pl.all_segments),
        step(states_table(offsets) if offsets else None, (runs(TOKENS, p), 1, 1), T=p.T, N=p.N, segment=1, every=1,
             chunk_entries=pl.states, segment_entries=0),
        step(pl.prepare, (p.HV, *pl.entries_grid), chunks=pl.entries, **gate),
        walker(pl.carry), composer(pl.compose), walker(pl.record), walker(pl.again),
        walker(pl.carry_back), composer(pl.compose_back), walker(pl.walk),
        step(pl.grads, (pl.grads_grid, 1, 1), chunks=pl.states, items=pl.all_states * p.HV, zero=0.0, one=1.0, **gate),
    )  # fmt: skip


def runs(rows: int, p: Problem) -> int:
    """CTAs that write tables."""
    return max(1, -(-p.T // (rows * RUN))) if p.N else 0


def kept_bytes(p: Problem) -> int:
    return sum(recorded_plan(p, detect(p.device).sms).kept.places)


def forward(p: Problem, x: Inputs) -> Outputs:
    at = steps(p, detect(p.device).sms, offsets_dtype(x))
    out, inputs = outputs(p, x), laid_out(x)
    memory = out.o.new_empty(sum(at.plan.kept.places), dtype=torch.uint8)
    found = tables(p, at, x)
    up(p, at, at.record, inputs, parts_of(memory, at), found, cleared=out.o, o=out.o, ht=out.final_state)
    return out._replace(saved=Own(memory))


def backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, own: Own | None) -> Grads:
    """Without `own`, operands, states and residuals of the forward are made again."""
    p = dataclasses.replace(p, final_state=dht is not None)
    at = steps(p, detect(p.device).sms, offsets_dtype(x))
    like, inputs, found = x.q, laid_out(x), tables(p, at, x)
    do, dht = aligned(do, like.dtype), aligned(dht, torch.float32)
    # tokens of no sequence: prepare clears their rows, which does not run again if all was kept
    dv = (like.new_zeros if own and p.packed else like.new_empty)(p.B, p.T, p.HV, p.V)
    dh0 = None if inputs["h0"] is None else torch.empty_like(inputs["h0"])
    dh = like.new_empty(at.plan.all_states, p.HV, p.V, p.K)
    if own is None:
        parts = Parts(*(like.new_empty(size, dtype=torch.uint8) for size in at.plan.kept))
        up(p, at, at.again, inputs, parts, found, cleared=dv)
    else:
        parts = parts_of(own.memory, at)
    back(p, at, parts, found, do=do, dht=dht, dv=dv, dh=dh, dh0=dh0)
    parts = parts._replace(tiles=None, M=None)                                 # dq and dk may lie where they lay
    return grads(p, at, x, inputs, parts, found, do=do, dv=dv, dh=dh)._replace(dh0=dh0)


def tables(p: Problem, at: Steps, x: Inputs) -> Tables:
    if not p.packed:
        return Tables()
    sizes = (ChunkTable.WIDTH * at.plan.entries, SegmentTable.WIDTH * at.plan.all_segments,
             ChunkTable.WIDTH * at.plan.states)  # fmt: skip
    device = x.q.device
    chunk, segment, state = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    first_segment, cu_seqlens = None, offsets_on(device, x.cu_seqlens)
    if at.tables:
        first_segment = torch.empty(p.N + 1, dtype=torch.int32, device=device)
        at.tables(cu_seqlens=cu_seqlens, chunk_table=chunk, segment_table=segment, first_segment=first_segment)
        at.states(cu_seqlens=cu_seqlens, chunk_table=state)
    return Tables(chunk, segment, state, first_segment)


def parts_of(memory: Tensor, at: Steps) -> Parts:
    """The parts of memory that a forward keeps."""
    return Parts(*memory.split(at.plan.kept.places))


def up(p: Problem, at: Steps, chain: Launch | None, inputs: dict, parts: Parts, found: Tables, cleared: Tensor,
       **results: Tensor | None) -> None:  # fmt: skip
    """All that a backward reads; `cleared` where tokens are no sequence's."""
    inputs = dict(inputs)
    v, h0 = inputs.pop("v"), inputs.pop("h0")
    if at.prepare:
        at.prepare(**inputs, tiles=parts.tiles, o=cleared, chunk_table=found.chunk)
    if at.carry:
        summary = segment_summary(p, cleared, at.plan.all_segments)
        edge = torch.empty_like(summary.added)
        at.carry(tiles=parts.tiles, v=v, ht=summary.added, M=parts.M, segment_table=found.segment)
        at.compose(M=parts.M, added=summary.added, h0=h0, edge=edge, first_segment=found.first_segment)
        h0 = edge
    if chain:
        chain(tiles=parts.tiles, v=v, h0=h0, r=parts.r, h=parts.h, segment_table=found.segment, **results)


def back(p: Problem, at: Steps, parts: Parts, found: Tables, do: Tensor, dht: Tensor | None, dv: Tensor, dh: Tensor,
         dh0: Tensor | None) -> None:  # fmt: skip
    """dv, gradients of the states that leave pairs of chunks, and of those that enter sequences."""
    if at.carry_back:
        added = dv.new_empty(at.plan.all_segments, p.HV, p.K, p.V, dtype=torch.float32)
        edge = torch.empty_like(added)
        at.carry_back(tiles=parts.tiles, do=do, dh0=added, segment_table=found.segment)
        at.compose_back(M=parts.M, added=added, h0=dht, edge=edge, first_segment=found.first_segment)
        dht = edge
    if at.walk:
        at.walk(tiles=parts.tiles, do=do, dht=dht, dv=dv, dh=dh, dh0=dh0, segment_table=found.segment)


def grads(p: Problem, at: Steps, x: Inputs, inputs: dict, parts: Parts, found: Tables, do: Tensor, dv: Tensor,
          dh: Tensor) -> Grads:  # fmt: skip
    """What is local to pairs of chunks."""
    like = x.q
    dq, dk = (like.new_empty(p.B, p.T, p.HV, p.K) for _ in range(2))
    dg, dbeta = torch.empty_like(inputs["g"]), torch.empty_like(inputs["beta"])
    shares = [like.new_empty(at.plan.all_states, p.HV, p.K, dtype=torch.float32) for _ in range(2)]
    if at.grads:
        of_A_log, of_dt_bias = shares
        inputs = {name: y for name, y in inputs.items() if name not in ("v", "h0")}
        at.grads(
            **inputs, do=do, dv=dv, r=parts.r, h=parts.h, dh=dh, dq=dq, dk=dk, dg=dg, dbeta=dbeta, of_A_log=of_A_log,
            of_dt_bias=of_dt_bias, chunk_table=found.state,
        )  # fmt: skip
    else:
        of_A_log, of_dt_bias = [share[:0] for share in shares]
    dA_log, ddt_bias = summed(of_A_log, (0, 2), x.A_log), summed(of_dt_bias, (0,), x.dt_bias)
    return Grads(of_heads(dq, p), of_heads(dk, p), dv, dg, dbeta, dA_log, ddt_bias, None)


def of_heads(y: Tensor, p: Problem) -> Tensor:
    """The gradient of q or k of each value head, those that share a head summed in order."""
    if p.HV == p.H:
        return y
    return y.view(p.B, p.T, p.H, p.HV // p.H, p.K).sum(3, dtype=torch.float32).to(y.dtype)


def summed(shares: Tensor, dims: tuple[int, ...], like: Tensor | None) -> Tensor | None:
    """The gradient of a gate's parameter, of what chunks give to it."""
    if like is None:
        return None
    found = torch.empty(like.shape, dtype=shares.dtype, device=shares.device)
    left = [n for d, n in enumerate(shares.shape) if d not in dims]
    torch.sum(shares, dims, out=found.view(left))
    return found.to(like.dtype)
