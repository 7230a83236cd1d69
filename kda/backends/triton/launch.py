"""Tensors in, tensors out: the doors that every backend has, on Triton kernels.

A call is four runs of stages. Each finds what it reads in the environment of a `Call` and leaves there what it writes;
`stage` gives the same runs the tensors of `kda verify`. What is not wanted any more is dropped before the next is made:
at B1 T8192 H64 K=V=128 in bfloat16 forward and backward of an autograd step never hold more than 3 GiB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from kda.model.bundles import Grads, Outputs, Products, Save, Saved, SegmentSummary
from kda.model.problem import Inputs, Problem
from kda.model.stages import SHAPES, find

from ..common.chunks import Chunks, has_rows
from ..common.pool.launch import Checkpoints
from ..common.pool.launch import prefill as of_pool
from ..common.tensors import aligned, chunks_of_a_row, on_its_device
from .call import TritonCall, dtype_of
from .decode.launch import decode_step as decode_step
from .decode.launch import recurrent as recurrent
from .plan import call_of_stage
from .plan import dtype_of as dtype_name

Tensor = torch.Tensor


OPERANDS = (
    "A_qk", "A_inv", "w", "u", "qg", "kb", "kg", "h", "v_new", "dh", "dv_new", "P", "D", "kD", "qD", "dA_k", "dA_q",
)
RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta", "dh0")


def rounded_to(p: Problem) -> dict[str, str]:
    """Return the dtypes of operands of products, of what the norms' backward reads, and of results."""
    names = RESULTS if p.dtype == "float32" else (*OPERANDS, "dqn", "dkn", *RESULTS)
    return {name: dtype for name in names if (dtype := dtype_name(p, name)) not in ("float32", "float64")}


# the runs


def sums(c: TritonCall) -> None:
    """Allocate what the backward's kernels find beside the inputs: gc, and the norms of q and k."""
    p = c.p
    # A difference of long float64 sums keeps the small decays that follow a large one.
    c.env["gc"] = c.per_chunk(p.C, p.K, dtype=dtype_of(p, "gc"))
    if p.qk_l2norm:
        c.env["q_norm"], c.env["k_norm"] = c.empty(2, p.B * p.T, p.HV, dtype=torch.float32)


def gate_intra_wy(c: TritonCall, for_backward: bool) -> None:
    """Compute A_qk, w, u, qg, kg, gc_last; for a backward also A_inv."""
    sums(c)
    if "A_inv" in c.env:                                                       # and so is A_qk
        c.make("w u qg kg gc_last")
        c.over_chunks("prepare")
        return
    c.make("A_qk w u qg kg gc_last" + " A_inv" * for_backward)
    c.over_chunks("prepare", A_kk=c.per_chunk(c.p.C, c.p.C, dtype=torch.float32))


def state_output(c: TritonCall) -> None:
    """Compute o, ht, h and v_new, those that there is memory for."""
    h0 = c.env.get("h0")
    if c.plan.cut:
        summary, h0 = summarised(c), c.per_segment(c.p.K, c.p.V)
        c.over_sequences("compose", edge=h0, added=summary.added)
    c.over_segments("state", h0=h0)


def summarised(c: TritonCall) -> SegmentSummary:
    """Return the summary of each segment of the forward; M stays in the environment, for a backward."""
    added = c.per_segment(c.p.K, c.p.V)
    c.over_segments("added", ht=added)
    transitions(c)
    return SegmentSummary(c.env["M"], added)


def transitions(c: TritonCall) -> None:
    """Compute M: each segment multiplies a state by it, and the gradient of a state by its transpose."""
    if "M" not in c.env:
        c.env["M"] = c.per_segment(c.p.K, c.p.K)
        c.over_segments("transition")


def output_state_bwd(c: TritonCall) -> None:
    """Compute dh, dv_new and, where there is memory for it, dh0."""
    c.make("dh dv_new")
    dht = c.env["dht"]
    start = " from zero" if dht is None else ""
    if not c.plan.cut:
        c.over_segments("state_bwd" + start)
        return
    transitions(c)
    added, edge = c.per_segment(c.p.K, c.p.V), c.per_segment(c.p.K, c.p.V)
    c.over_segments("added_bwd", dh0=added)
    c.over_sequences("compose_bwd" + start, edge=edge, added=added, h0=dht)
    c.over_segments("state_bwd", dht=edge)


def wy_intra_gate_bwd(c: TritonCall) -> None:
    """Compute the gradients of the inputs."""
    p, env = c.p, c.env
    tokens = (p.B * p.T, p.HV)
    slices = c.plan.tiles("intra_bwd", "K")
    c.make("dv")
    env |= {name: c.per_chunk(p.C, p.C, dtype=dtype_of(p, "A_qk")) for name in ("L1", "L2", "U1", "U2")}
    env["units"] = c.per_chunk(dtype=torch.float32)
    env |= {"P": torch.empty_like(env["dv"]), "diagonal": c.empty(*tokens, dtype=torch.float32),
            "db": c.empty(1 + slices, *tokens, dtype=torch.float32)}
    c.over_chunks("wy_bwd")
    c.drop("A_inv dv_new")
    c.make("dqn dkn dg")
    for name in ("A_log", "dt_bias"):
        given = env[name]
        of_chunks = None if given is None else c.empty(c.chunks, p.HV, p.K, dtype=torch.float32)
        env |= {"of_" + name: of_chunks, "d" + name: None if given is None else torch.empty_like(given)}
    c.over_chunks("intra_bwd", slices)
    c.drop("h dh v_new do P L1 L2 U1 U2 units diagonal gc")
    c.make("dq dk dbeta")
    rows: Any = c.plan.kernels["norms_bwd"].constants["ROWS"]
    c.run("norms_bwd", -(-p.B * p.T // rows) * p.H)
    if p.A_log or p.dt_bias:
        c.run("sum_chunks", p.HV, chunks=c.chunks)


# calls


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING, checkpoints: Checkpoints | None = None) -> Outputs:
    c = TritonCall.of(p, save, x, **(checkpoints._asdict() if checkpoints else {}))
    env, kind = c.env, save.kind
    c.make("o" + " h v_new" * (kind is Saved))
    chunks = chunks_of_a_row(p, x) if p.intermediate_states else 0
    if p.intermediate_states and kind is not Saved:
        env["h"] = c.empty(p.B, chunks, *p.state_shape, dtype=x.q.dtype)
    if p.final_state:
        env["ht"] = c.empty(p.N, *p.state_shape, dtype=torch.float32)
    gate_intra_wy(c, for_backward=kind is not None)
    c.drop("gc q_norm k_norm")
    state_output(c)
    if "clear_kept" in c.kernels:
        c.over_chunks("clear_kept")
    h = None
    if p.intermediate_states:
        h = env["h"]
        if kind is Saved:                                                      # (K, V), of as many as there can be
            h = h[: p.B * chunks].unflatten(0, (p.B, chunks))
            h = (h.mT if p.state_v_first else h).clone(memory_format=torch.contiguous_format)
    saved = kind(*(env[name] for name in kind._fields)) if kind else None
    return Outputs(env["o"], env.get("ht"), h, saved)


prefill = of_pool(forward, lambda p: p.C)


@on_its_device
def backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | None = None) -> Grads:
    save = Save.of(saved)
    given: dict[str, Any] = {} if saved is None else {name: aligned(t) for name, t in saved._asdict().items()}
    c = TritonCall.of(p, save, x, do=aligned(do, x.q.dtype), dht=aligned(dht, torch.float32), **given)
    env = c.env
    if save is Save.ALL:
        sums(c)
        c.over_chunks("sums")
    else:
        gate_intra_wy(c, for_backward=True)
        c.make("h v_new")
        state_output(c)
        c.drop("u")
    env["dh0"] = None if x.initial_state is None else torch.empty_like(env["h0"])
    output_state_bwd(c)
    c.drop("A_qk w qg kg gc_last M")
    wy_intra_gate_bwd(c)
    names = zip(Grads._fields, (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state))
    return Grads(*(None if t is None else env[name].to(t.dtype) for name, t in names))


# maps of a sequence on several GPUs, by the kernels of calls


@on_its_device
def segment_map(p: Problem, x: Inputs, transition: bool) -> SegmentSummary:
    c = TritonCall.of(p, Save.NOTHING, x, cut=transition)
    c.make("o")
    added = c.env["ht"] = c.empty(1, p.HV, p.K, p.V, dtype=torch.float32)
    gate_intra_wy(c, for_backward=False)
    c.drop("gc q_norm k_norm")
    state_output(c)
    return SegmentSummary(whole_transition(c, transition), added)


@on_its_device
def segment_map_bwd(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
    p = dataclasses.replace(p, direction="backward", state_dtype="float32")    # dh0 is requested
    c = TritonCall.of(p, Save.NOTHING, x, do=aligned(do, x.q.dtype), dht=aligned(dht, torch.float32))
    dh0 = c.env["dh0"] = c.empty(1, p.HV, p.K, p.V, dtype=torch.float32)
    gate_intra_wy(c, for_backward=True)
    c.drop("gc q_norm k_norm A_inv u")
    output_state_bwd(c)
    return dh0


def whole_transition(c: TritonCall, wanted: bool) -> Tensor:
    """Return M of the one sequence from those of its segments: in float64, which torch's flags do not affect."""
    p = c.p
    if not wanted:
        return torch.zeros(1, p.HV, p.K, p.K, device=c.device)
    if not c.plan.cut:                                                     # there is one chunk
        w, kg = (c.env[name].transpose(0, 1).double() for name in ("w", "kg"))
        return (c.env["gc_last"].double().exp2().view(p.HV, p.K).diag_embed() - kg.mT @ w).float().unsqueeze(0)
    *others, last = c.env["M"].double().unbind()
    for M in reversed(others):
        last = last @ M
    return last.float().unsqueeze(0)


# stages alone


def stage(
    name: str, p: Problem, offsets: list[int] | None, tensors: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Do one of the four runs, on tensors as they lie in chunks: rows (NC, heads, C, D), states (NC or N, HV, K, V)."""
    run = find(name)
    p, save = call_of_stage(name, p, offsets is not None)
    device = next(x.device for x in tensors.values() if x is not None)
    table, given = Chunks(p, offsets, device), {}
    for n in run.reads:
        x = tensors[n]
        given[n] = x if x is None else aligned(table.rows(x) if has_rows(n) else x, dtype_of(p, n))
    for n, shape in (("A_log", (p.HV,)), ("dt_bias", (p.HV, p.K))):
        if given.get(n) is not None:
            given[n] = given[n].view(shape)
    if offsets is not None:
        given["cu_seqlens"] = torch.tensor(offsets, device=device)
    c = TritonCall(p, save, device, given)
    if name == "fwd/gate+intra+wy":
        c.make("o")                                                            # cleared past the sequences
        gate_intra_wy(c, for_backward=True)
    elif name == "fwd/state+output":
        c.make("o h v_new")
        c.env["ht"] = torch.empty_like(tensors["h0"], dtype=torch.float32)
        state_output(c)
    elif name == "bwd/output+state":
        c.env["dh0"] = torch.empty_like(tensors["dht"], dtype=dtype_of(p, "dh0"))
        output_state_bwd(c)
    else:
        sums(c)
        c.over_chunks("sums")
        wy_intra_gate_bwd(c)
    return {n: _written(c.env[n], n, table) for n in run.writes}


def _written(x: Tensor | None, name: str, table: Chunks) -> Tensor | None:
    if x is None:
        return None
    if has_rows(name):
        channels = SHAPES[name].count(",")
        rows = x.flatten(0, -2 - channels)
        return table.chunks(rows if channels else rows.unsqueeze(-1))
    if name in ("h", "dh"):
        return x[: table.NC]
    return x[: table.NC].unsqueeze(-2) if name == "gc_last" else x
