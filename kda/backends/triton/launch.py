"""Tensors in, tensors out: the doors that every backend has, on Triton kernels.

A call is four runs of stages. Each finds what it reads in the environment of a `TritonCall` and leaves there what it
writes; `stage` gives the same runs the tensors of `kda verify`. What is not wanted any more is dropped before the next
is made: at B1 T8192 H64 K=V=128 in bfloat16 forward and backward of an autograd step never hold more than 3 GiB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from kda.model.bundles import Grads, Outputs, Products, Save, Saved, SegmentSummary
from kda.model.host import Host, detect
from kda.model.offsets import offsets_dtype
from kda.model.problem import Inputs, Problem
from kda.model.stages import SHAPES, find

from ..common.chunks import Chunks, has_rows
from ..common.directions import Direction, run_backward, run_forward
from ..common.launcher import states_between_chunks
from ..common.pool.launch import STATES, Checkpoints
from ..common.pool.launch import prefill as of_pool
from ..common.routine import Routine, described_once
from ..common.tensors import INPUTS, aligned, inputs_in_memory, on_its_device
from .call import TritonCall
from .decode.launch import decode_launch as decode_launch
from .decode.launch import decode_step as decode_step
from .decode.launch import recurrent as recurrent
from .plan import call_of_stage, dtype_of

Tensor = torch.Tensor


OPERANDS = (
    "A_qk", "A_inv", "w", "u", "qg", "kb", "kg", "h", "v_new", "dh", "dv_new", "P", "D", "kD", "qD", "dA_k", "dA_q",
)
RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta", "dh0")


def rounded_to(p: Problem) -> dict[str, str]:
    """Return the dtypes of operands of products, of what the norms' backward reads, and of results."""
    names = RESULTS if p.dtype == "float32" else (*OPERANDS, "dqn", "dkn", *RESULTS)
    return {name: dtype for name in names if (dtype := dtype_of(p, name)) not in ("float32", "float64", None)}


# the runs


def sums(c: TritonCall, for_backward: bool = True) -> None:
    """Allocate gc and, which only a backward reads, the norms of q and k."""
    c.per_chunk("gc", c.p.C, c.p.K)
    if for_backward:
        c.allocate("q_norm k_norm", c.p.B * c.p.T, c.p.HV)


def gate_intra_wy(c: TritonCall, for_backward: bool) -> None:
    """Compute A_qk, w, u, qg, kg, gc_last; for a backward also A_inv."""
    sums(c, for_backward)
    if "A_inv" in c.env:                                                       # and so is A_qk
        c.make("w u qg kg gc_last")
        c.over_chunks("prepare")
        return
    c.make("A_qk w u qg kg gc_last" + " A_inv" * for_backward)
    c.per_chunk("A_kk", c.p.C, c.p.C)
    c.over_chunks("prepare")
    c.drop("A_kk")


def state_output(c: TritonCall) -> None:
    """Compute o, ht, h and v_new, those that there is memory for."""
    if not c.plan.cut:
        c.over_segments("state", h0=c.env.get("h0"))
        return
    c.per_segment("added edge", c.p.K, c.p.V)
    c.over_segments("added", ht=c.env["added"])
    transitions(c)
    c.over_sequences("compose")
    c.over_segments("state", h0=c.env["edge"])
    c.drop("added edge")


def transitions(c: TritonCall) -> None:
    """Compute M: each segment multiplies a state by it, and the gradient of a state by its transpose."""
    if "M" not in c.env:
        c.per_segment("M", c.p.K, c.p.K)
        c.over_segments("transition")


def output_state_bwd(c: TritonCall, dht: bool) -> None:
    """Compute dh, dv_new and, where there is memory for it, dh0; `dht`: final states have gradients."""
    c.make("dh dv_new")
    start = "" if dht else " from zero"
    if not c.plan.cut:
        c.over_segments("state_bwd" + start)
        return
    transitions(c)
    c.per_segment("added edge", c.p.K, c.p.V)
    c.over_segments("added_bwd", dh0=c.env["added"])
    c.over_sequences("compose_bwd" + start, h0=c.env["dht"])
    c.over_segments("state_bwd", dht=c.env["edge"])
    c.drop("added edge")


def wy_intra_gate_bwd(c: TritonCall) -> None:
    """Compute the gradients of the inputs."""
    p = c.p
    tokens = (p.B * p.T, p.HV)
    slices = c.plan.tiles("intra_bwd", "K")
    c.make("dv")
    c.per_chunk("L1 L2 U1 U2", p.C, p.C)
    c.per_chunk("units")
    c.allocate("diagonal", *tokens)
    c.allocate("db", 1 + slices, *tokens)
    c.allocate("P", *tokens, p.V)
    c.over_chunks("wy_bwd")
    c.drop("A_inv dv_new")
    c.make("dqn dkn dg")
    for name, channels in (("A_log", 1), ("dt_bias", p.gate_width)):
        c.allocate("of_" + name, c.chunks, p.HV, slices if p.gate_per_head else p.K)
        c.allocate("d" + name, p.HV * channels)
    c.allocate("dg_shares", slices, *tokens)
    c.over_chunks("intra_bwd", slices, **{"dg": c.env["dg_shares"]} if p.gate_per_head else {})
    c.drop("h dh v_new do P L1 L2 U1 U2 units diagonal gc")
    c.make("dq dk dbeta")
    rows: Any = c.plan.kernels["norms_bwd"].constants["ROWS"]
    c.run("norms_bwd", -(-p.B * p.T // rows) * p.H)
    if p.A_log or p.dt_bias:
        c.run("sum_chunks", p.HV, chunks=c.chunks)


# calls


@described_once
def forward_routine(p: Problem, host: Host, save: Save, offsets: str | None) -> Routine:
    """Return a forward, whose results are o, the final states, the states that enter chunks and what is saved."""
    kind = save.kind
    c = TritonCall(p, host, save, offsets, (*INPUTS, *STATES))
    c.make("o" + " h v_new" * (kind is Saved))
    if p.final_state:
        c.allocate("ht", p.N, *p.state_shape)
    gate_intra_wy(c, for_backward=kind is not None)
    c.drop("gc q_norm k_norm")
    state_output(c)
    if "clear_kept" in c.kernels:
        c.over_chunks("clear_kept")
    return c.done(("o", "ht", "h", *(kind._fields if kind else ())))


@on_its_device
def forward(p: Problem, x: Inputs, save: Save = Save.NOTHING, checkpoints: Checkpoints | None = None) -> Outputs:
    direction, h = forward_direction(p, save, offsets_dtype(x)), states_between_chunks(p, x)
    o, ht, all_states, *saved = run_forward(direction, x, h, *(checkpoints or (None, None)))
    if h is not None and save is Save.ALL:                                     # (K, V), of as many as there can be
        states = all_states[: p.B * h.shape[1]].unflatten(0, h.shape[:2])
        h.copy_(states.mT if p.state_v_first else states)
    return Outputs(o, ht, h, save.kind(*saved) if save.kind else None)


def forward_direction(p: Problem, save: Save, offsets: str | None) -> Direction:
    saved = range(3, 3 + len(save.kind._fields if save.kind else ()))
    return Direction(forward_routine(p, detect(p.device), save, offsets), tuple(saved))


prefill = of_pool(forward, lambda p: p.C)


@described_once
def backward_routine(p: Problem, host: Host, save: Save, offsets: str | None, dht: bool) -> Routine:
    """Return the backward for which `save` was saved; `dht`: final states have gradients.  Its results are Grads."""
    saved = save.kind._fields if save.kind else ()
    c = TritonCall(p, host, save, offsets, (*INPUTS, "do", "dht", *saved))
    if save is Save.ALL:
        sums(c)
        c.over_chunks("sums")
    else:
        gate_intra_wy(c, for_backward=True)
        c.make("h v_new")
        state_output(c)
        c.drop("u")
    c.allocate("dh0", p.N, *p.state_shape)
    output_state_bwd(c, dht)
    c.drop("A_qk w qg kg gc_last M")
    wy_intra_gate_bwd(c)
    return c.done(Grads._fields)


@on_its_device
def backward(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None, saved: Saved | Products | None = None) -> Grads:
    return run_backward(backward_direction(p, Save.of(saved), offsets_dtype(x), dht is not None), x, do, dht, saved)


def backward_direction(p: Problem, save: Save, offsets: str | None, dht: bool) -> Direction:
    saved = range(len(save.kind._fields if save.kind else ()))
    return Direction(backward_routine(p, detect(p.device), save, offsets, dht), tuple(saved))


# maps of a sequence on several GPUs, by the kernels of calls


@described_once
def map_routine(p: Problem, host: Host, transition: bool) -> Routine:
    """Return the map of a sequence; its results are the final state, M of its segments, w, kg and gc_last."""
    c = TritonCall(p, host, Save.NOTHING, None, INPUTS, cut=transition)
    c.make("o")
    c.allocate("ht", 1, p.HV, p.K, p.V)
    gate_intra_wy(c, for_backward=False)
    c.drop("gc q_norm k_norm")
    state_output(c)
    return c.done(("ht", "M", "w", "kg", "gc_last"))


@on_its_device
def segment_map(p: Problem, x: Inputs, transition: bool) -> SegmentSummary:
    added, *others = map_routine(p, detect(p.device), transition)(x.q, inputs_in_memory(x))
    return SegmentSummary(whole_transition(p, *others) if transition else torch.zeros_like(added), added)


@described_once
def map_bwd_routine(p: Problem, host: Host, dht: bool) -> Routine:
    c = TritonCall(p, host, Save.NOTHING, None, (*INPUTS, "do", "dht"))
    c.allocate("dh0", 1, p.HV, p.K, p.V)
    gate_intra_wy(c, for_backward=True)
    c.drop("gc q_norm k_norm A_inv u")
    output_state_bwd(c, dht)
    return c.done(["dh0"])


@on_its_device
def segment_map_bwd(p: Problem, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
    p = dataclasses.replace(p, direction="backward", state_dtype="float32")    # dh0 is requested
    run = map_bwd_routine(p, detect(p.device), dht is not None)
    (dh0,) = run(x.q, [*inputs_in_memory(x), aligned(do, x.q.dtype), aligned(dht, torch.float32)])
    return dh0


def whole_transition(p: Problem, M: Tensor | None, w: Tensor, kg: Tensor, gc_last: Tensor) -> Tensor:
    """Return M of the one sequence from those of its segments: in float64, which torch's flags do not affect."""
    if M is None:                                                              # there is one chunk
        w, kg = (x.transpose(0, 1).double() for x in (w, kg))
        return (gc_last.double().exp2().view(p.HV, p.K).diag_embed() - kg.mT @ w).float().unsqueeze(0)
    *others, last = M.double().unbind()
    for each in reversed(others):
        last = last @ each
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
        given[n] = x if x is None else aligned(table.rows(x) if has_rows(n) else x, getattr(torch, dtype_of(p, n)))  # type: ignore[arg-type]
    if offsets is not None:
        given["cu_seqlens"] = torch.tensor(offsets, device=device)
    c = TritonCall(p, detect(p.device), save, "int64" if p.packed else None, tuple(given))
    if name == "fwd/gate+intra+wy":
        c.make("o")                                                            # cleared past the sequences
        gate_intra_wy(c, for_backward=True)
    elif name == "fwd/state+output":
        c.make("o h v_new")
        c.allocate("ht", *tensors["h0"].shape)  # type: ignore[union-attr]
        state_output(c)
    elif name == "bwd/output+state":
        c.allocate("dh0", *tensors["dht"].shape)  # type: ignore[union-attr]
        output_state_bwd(c, dht=True)
    else:
        sums(c)
        c.over_chunks("sums")
        wy_intra_gate_bwd(c)
    shapes = {"dA_log": (p.HV,), "ddt_bias": (p.HV, p.gate_width), "dg": (p.B * p.T, p.HV, p.gate_width)}
    results = zip(run.writes, c.done(run.writes)(table.positions, list(given.values())))
    return {n: _written(x if x is None else x.view(shapes.get(n, x.shape)), n, table) for n, x in results}


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
