"""Problem and host to a plan: kernels, their configurations, and how sequences are cut.  No torch, no Triton.

Only the rule that cuts sequences depends on B, T, N or H, and it chooses among kernels that are built anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kda.model.bundles import Save, chunk_bound
from kda.model.host import Host
from kda.model.problem import Problem
from kda.model.stages import LOG2_E
from ptxkit.compile.recipes import Constant
from ptxkit.compile.triton import Recipe

from ..common import cutting, triton_recipes
from ..common.arguments import Arguments, number, tensor
from ..common.pool.plan import inner
from ..common.pool.plan import recipes as pool_recipes
from ..common.triton_types import target_of
from .configs import TileConfig, choose, power_of_2
from .decode.recurrent_plan import recipes as decode_recipes
from .decode.step_plan import recipes as step_recipes
from .decode.step_plan import usual_step

SHORTEST = 16                                # chunks of a segment


@dataclass(frozen=True)
class Plan(cutting.Cut):
    problem: Problem
    kernels: dict[str, Recipe]
    cut: bool                                # into segments, each of which one program of `state` walks

    __hash__ = None                          # type: ignore[assignment]

    def tiles(self, kernel: str, dim: str) -> int:
        """Return into how many slices of K or V a kernel's programs cut; a transition has K columns for V."""
        built_for: Mapping[str, Any] = self.kernels[kernel].constants
        return -(-built_for.get(dim, self.problem.K) // built_for["B" + dim])

    @property
    def chunk_bound(self) -> int:
        p = self.problem
        return chunk_bound(p.B, p.T, p.N, p.C, p.packed)


@functools.lru_cache(maxsize=1024)
def plan(p: Problem, host: Host, saved: Save = Save.NOTHING, cut: bool = False) -> Plan:
    """Return the plan of a call.  `saved` is what this forward saves, or what the forward of this backward has saved.
    With `cut` there are at least two segments, unless there are fewer chunks."""
    make = _Recipes(p, host)
    segment = split(p, host.sms, make.state.BV)
    if cut and not segment:
        segment = -(-p.T // p.C) // 2
    kernels = (make.forward if p.direction == "forward" else make.backward)(segment, saved)
    return Plan(*cutting.cut_into(p, p.C, segment), p, kernels, segment > 0)


def call_of_stage(name: str, p: Problem, packed: bool) -> tuple[Problem, Save]:
    direction = "forward" if name.startswith("fwd") else "backward"
    state_dtype = p.state_dtype or "float32"
    return replace(p, direction=direction, final_state=True, state_dtype=state_dtype, packed=packed), Save.ALL


def recipes_of_call(p: Problem, host: Host, offsets: str | None, save: Save) -> list[Recipe]:
    return [*plan(p, host, save).kernels.values()]


def split(p: Problem, sms: int, BV: int) -> int:
    """Return the chunks of a segment, 0 for whole sequences: two programs on an SM walk BV columns of a state each."""
    return cutting.segment_length(p, p.C, -(-p.V // BV), 2 * (p.force.sms or sms), SHORTEST)


# Rows of a diagonal block, whether of normalised q and k alone, and the most bits that half of its rows may decay by:
# a normalised k is at most 1 and of no weight below 2^-19, others need room on both sides.
SPANS = ((32, True, 116.0), (16, False, 64.0))


def span(p: Problem) -> int:
    """Return the rows of a diagonal block half of whose decay bfloat16 holds, and its inverse; 1: no bound says so."""
    if p.gate != "bounded" or p.dtype != "bfloat16":
        return 1
    bits = -p.lower_bound * LOG2_E  # type: ignore[operator]
    fits = (rows for rows, normalised, most in SPANS
            if bits * rows / 2 <= most and rows < p.C and p.qk_l2norm >= normalised)
    return next(fits, 1)


class ChunkArguments(Arguments):
    """The arguments of a call by their one name, in its kernels and in the memory for them.  Rows are (tokens, heads,
    channels), matrices and states of chunks (chunks, HV, ..): kda/model/stages.py says what they are."""

    q = k = v = do = o = dq = dk = dv = dqn = dkn = tensor(None, "dtype")
    A_qk = A_inv = w = u = qg = kg = v_new = h = dv_new = dh = P = L1 = L2 = tensor(None, "dtype")
    U1 = U2 = tensor(None, "dtype", needs=lambda p: span(p) > 1)
    units = tensor("float32", needs=lambda p: span(p) > 1, divisible=False)    # (chunks, HV)
    g = dg = tensor(None, "g_dtype")
    beta = dbeta = tensor(None, "beta_dtype", divisible=False)
    h0 = dh0 = tensor(None, "state_dtype")                                     # (N, HV, K, V), or (N, HV, V, K)
    ht = dht = gc_last = A_kk = tensor("float32")
    M = added = edge = tensor("float32")                                       # (segments, HV, K, K or V)
    # A difference of long float64 sums keeps the small decays that follow a large one.
    gc = tensor(None, lambda p: "float64" if p.dtype == "float32" else "float32")
    A_log = dA_log = tensor("float32", needs="A_log", divisible=False)
    dt_bias = ddt_bias = tensor("float32", needs="dt_bias", divisible=False)
    of_A_log = tensor("float32", needs="A_log")                                # (chunks, HV, K): shares in gradients
    of_dt_bias = tensor("float32", needs="dt_bias")
    q_norm = k_norm = tensor("float32", needs="qk_l2norm", divisible=False)    # (tokens, HV)
    diagonal = db = tensor("float32", divisible=False)
    dg_shares = tensor("float32", needs="gate_per_head")                       # (slices of K, tokens, HV)
    pool = tensor(None, "checkpoints", divisible=False)
    place = tensor("int64")                                                    # (chunks)
    cu_seqlens = tensor("int64", divisible=False)
    chunk_table = segment_table = taken = tensor("int64", needs="packed", divisible=False)     # parts/sequences.py
    first_segment = tensor("int32", needs="packed", divisible=False)
    T = tokens = N = H = HV = C = one = number("int32")
    chunks = chunk_bound = chunk_entries = segment = pieces = segment_entries = number("int32")
    scale = lower_bound = number("float32")


def dtype_of(p: Problem, name: str) -> str | None:
    """Return the dtype of a tensor, None if there is none.  Operands that lie in no memory have that of q."""
    declared = ChunkArguments.declared.get(name)
    return declared.dtype_in(p) if declared else p.dtype


class _Recipes:
    """The kernels of one class of problems on one target."""

    def __init__(self, p: Problem, host: Host):
        self.p, self.target, self.K = p, target_of(host), power_of_2(p.K)
        self.prepare, self.state = choose("prepare", p, host), choose("state", p, host)
        self.wy, self.intra = choose("wy", p, host), choose("intra", p, host)
        self.state_back, self.composing = choose("state_bwd", p, host), choose("compose", p, host, bits=32)
        self.constants: dict[str, Any] = {
            "K": p.K, "V": p.V, "C": p.C, "SPAN": span(p), "GATE": p.gate, "RATE": p.A_log, "BIAS": p.dt_bias,
            "PER_HEAD": p.gate_per_head,
            "BETA": p.beta, "NORM": p.qk_l2norm, "V_FIRST": p.state_v_first, "SUMMED": p.dtype == "float32",
            "PRECISION": "tf32x3" if p.dtype == "float32" else "tf32",         # for products of float32 operands
        }

    def recipe(
        self, function: str, c: TileConfig, dtypes: Mapping[str, str | None] = triton_recipes.NONE,
        **constants: Constant,
    ) -> Recipe:
        """Return the recipe of a kernel.  `dtypes` are those of tensors that are not as declared, `constants`
        those that neither the call nor the configuration says."""
        c.require_valid()
        known = self.constants | {"BK": c.BK, "BV": c.BV, "STAGES": c.stages} | constants
        options: dict[str, Any] = {"maxnreg": c.maxnreg} if c.maxnreg else {}
        return triton_recipes.recipe(
            f"triton.{function}", ChunkArguments, self.p, known, self.target, dtypes=dtypes, num_warps=c.num_warps,
            num_stages=c.stages, **options,
        )

    def forward(self, segment: int, saved: Save) -> dict[str, Recipe]:
        p, all_ = self.p, saved is Save.ALL
        store_h = "kv" if all_ else "none" if not p.intermediate_states else "vk" if p.state_v_first else "kv"
        prepare = self.preparation("forward" if saved is Save.NOTHING else "backward", output=True)
        kernels = {**self.sequences(), "prepare": prepare, **self.states(segment, True, store_h, store_v=all_)}
        if p.packed and all_:
            kernels["clear_kept"] = self.recipe("parts.sequences:clear_kept", TileConfig(), BLOCK=64)
        return kernels

    def sequences(self) -> dict[str, Recipe]:
        return {
            f"tables {dtype}": self.recipe(
                "parts.sequences:tables", TileConfig(), {"cu_seqlens": dtype}, BLOCK=256, RUN=16
            )
            for dtype in ("int32", "int64") if self.p.packed
        }

    def preparation(self, mode: str, output: bool) -> Recipe:
        """Return the modes of fwd/prepare; `output`: for a call that gives o."""
        norms, rows, pairs, BG = mode != "forward", mode != "sums", mode in ("forward", "backward"), min(self.K, 128)
        left_out = absent(
            q_norm=norms, k_norm=norms, A_qk=pairs, A_kk=pairs, A_inv=mode in ("backward", "saved"),
            o=self.p.packed and output, **dict.fromkeys(("v", "beta", "w", "u", "qg", "kg", "gc_last"), rows),
        )
        run = self.run(BG, self.prepare)                                       # BG: slices of K, a channel a thread
        return self.recipe("fwd.prepare:prepare", self.prepare, left_out, MODE=mode, BG=BG, RUN=run)

    def run(self, channels: int, c: TileConfig) -> int:
        """Return how many rows of a channel one thread has."""
        return min(self.p.C, max(1, self.p.C * channels // (32 * c.num_warps)))

    def states(self, segment: int, output: bool, store_h: str, store_v: bool) -> dict[str, Recipe]:
        p = self.p
        given = "zero" if p.state_dtype is None else "sequence"
        final = "sequence" if p.final_state and output else "none"
        kernels = {"state": self.state_kernel("segment" if segment else given, final, output, store_h, store_v)}
        if segment:
            kernels["added"] = self.state_kernel("zero", "segment", False, "none", False)
            kernels["transition"] = self.transition()
            kernels["compose"] = self.compose(given, p.state_dtype, reverse=False)
        return kernels

    def state_kernel(self, start: str, finish: str, output: bool, store_h: str, store_v: bool) -> Recipe:
        checkpoints = output and self.p.checkpoints is not None
        left_out = absent(A_qk=output, qg=output, o=output, v_new=store_v, h=store_h != "none", ht=finish != "none",
                          pool=checkpoints, place=checkpoints)
        return self.recipe(
            "fwd.state:state", self.state, left_out | {"h0": self.edge(start)}, START=start, FINISH=finish,
            OUTPUT=output, STORE_H=store_h, STORE_V=store_v,
        )

    def edge(self, end: str) -> str | None:
        """Return the dtype of states that walks begin or end with: those of sequences, of segments, or none."""
        return {"sequence": self.p.state_dtype, "segment": "float32"}.get(end)

    def transition(self) -> Recipe:
        return self.recipe("fwd.state:transition", self.state)

    def compose(self, start: str, dtype: str | None, reverse: bool) -> Recipe:
        return self.recipe(
            "fwd.state:compose", self.composing, {"h0": None if start == "zero" else dtype}, ROWS=self.K,
            REVERSE=reverse, PRECISION="tf32x3",
        )

    def backward(self, segment: int, saved: Save) -> dict[str, Recipe]:
        p = self.p
        kernels = self.sequences()
        if saved is Save.ALL:
            kernels["sums"] = self.preparation("sums", output=False)
            if segment:
                kernels["transition"] = self.transition()
        else:
            kernels["prepare"] = self.preparation("backward" if saved is Save.NOTHING else "saved", output=False)
            kernels |= self.states(segment, output=False, store_h="kv", store_v=True)
        final = "none" if p.state_dtype is None else "sequence"
        if segment:
            kernels["added_bwd"] = self.state_bwd("zero", "segment", store=False)
            kernels["compose_bwd"] = self.compose("sequence", "float32", reverse=True)
            kernels["compose_bwd from zero"] = self.compose("zero", None, reverse=True)
            kernels["state_bwd"] = self.state_bwd("segment", final, store=True)
        else:
            kernels["state_bwd"] = self.state_bwd("sequence", final, store=True)
            kernels["state_bwd from zero"] = self.state_bwd("zero", final, store=True)
        c = self.intra
        kernels["wy_bwd"] = self.recipe("bwd.wy:wy_bwd", self.wy)
        shares = {"dg": "float32"} if p.gate_per_head else {}
        kernels["intra_bwd"] = self.recipe("bwd.intra:intra_bwd", c, shares, RUN=self.run(c.BK, c))
        kernels["norms_bwd"] = self.recipe(
            "bwd.norms:norms_bwd", TileConfig(BK=self.K),
            absent(q=p.qk_l2norm, k=p.qk_l2norm, beta=p.beta != "given",
                   **dict.fromkeys(("dg", "dg_shares"), p.gate_per_head)), ROWS=max(1, 4096 // self.K),
            SHARES=1 + -(-p.K // c.BK),
        )
        if p.A_log or p.dt_bias:
            terms = -(-p.K // c.BK) if p.gate_per_head else p.K               # that a chunk and head have
            kernels["sum_chunks"] = self.recipe(
                "bwd.gate:sum_chunks", TileConfig(BK=power_of_2(terms)), K=terms, ROWS=32
            )
        return kernels

    def state_bwd(self, start: str, finish: str, store: bool) -> Recipe:
        left_out = absent(dht=start != "zero", dv_new=store, dh=store)
        return self.recipe(
            "bwd.state:state_bwd", self.state_back, left_out | {"dh0": self.edge(finish)}, START=start, FINISH=finish,
            STORE=store, STAGES=min(self.state_back.stages, 2),
        )


def absent(**needed: bool) -> dict[str, str | None]:
    """Return the dtypes, None, of the tensors that a kernel does not need."""
    return {name: None for name, value in needed.items() if not value}


def recipes(p: Problem, host: Host, training: bool = True) -> list[Recipe]:
    """Return all kernels that a call of this class can need, whatever the lengths of its sequences; `training`: also
    if its gradients are wanted."""
    if p.op == "recurrent":
        return decode_recipes(p, host)
    if p.op == "decode":
        return step_recipes(usual_step(p), host)
    if p.slots:
        return [*pool_recipes(p, p.C, target_of(host)), *recipes(inner(p), host, training)]
    make = _Recipes(p, host)
    make_kernels = make.forward if p.direction == "forward" else make.backward
    saves = (Save.NOTHING, Save.PRODUCTS)[: 1 + training]
    plans = [make_kernels(segment, saved) for segment in ((0,) if p.batch_invariant else (0, 64))
             for saved in ((Save.ALL,) if p.disable_recompute else saves)]
    return list(dict.fromkeys(recipe for kernels in plans for recipe in kernels.values()))
