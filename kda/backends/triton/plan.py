"""Problem and host to a plan: kernels, their configurations, and how sequences are cut.  No torch, no Triton.

Only the rule that cuts sequences depends on B, T, N or H, and it chooses among kernels that are built anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kda.model.bundles import Save, chunk_bound
from kda.model.host import Host
from kda.model.problem import Problem
from kda.model.stages import LOG2_E
from ptxkit.compile.recipes import Constant
from ptxkit.compile.triton import Recipe

from ..common import cutting, triton_recipes
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
    bits = -p.lower_bound * LOG2_E
    fits = (rows for rows, normalised, most in SPANS
            if bits * rows / 2 <= most and rows < p.C and p.qk_l2norm >= normalised)
    return next(fits, 1)


# Tensors, numbers and constants of each kernel.
ARGUMENTS = {
    "parts.sequences:tables": (
        "cu_seqlens chunk_table segment_table first_segment taken", "T N C segment chunk_entries segment_entries",
        "BLOCK RUN",
    ),
    "parts.sequences:clear_kept": (
        "A_qk A_inv w qg kg v_new h gc_last chunk_table", "chunk_bound HV", "K V C BLOCK",
    ),
    "fwd.prepare:prepare": (
        "q k v g beta A_log dt_bias gc q_norm k_norm A_qk A_kk A_inv w u qg kg gc_last o chunk_table",
        "T chunks H HV one scale lower_bound", "K V C BK BV BG RUN SPAN GATE RATE BIAS BETA NORM MODE PRECISION "
        "PER_HEAD",
    ),
    "fwd.state:state": (
        "A_qk w u qg kg gc_last h0 o v_new h ht pool place segment_table", "T chunks pieces segment HV scale",
        "K V C BK BV START FINISH V_FIRST OUTPUT STORE_H STORE_V PRECISION STAGES",
    ),
    "fwd.state:transition": (
        "w kg gc_last M segment_table", "T chunks pieces segment HV", "K C BK BV PRECISION STAGES",
    ),
    "fwd.state:compose": (
        "M added h0 edge first_segment", "pieces HV", "K V ROWS BK BV V_FIRST REVERSE PRECISION",
    ),
    "bwd.state:state_bwd": (
        "A_qk w qg kg gc_last do dht dv_new dh dh0 segment_table", "T chunks pieces segment HV scale",
        "K V C BK BV START FINISH V_FIRST STORE PRECISION STAGES",
    ),
    "bwd.wy:wy_bwd": (
        "v beta A_inv v_new dv_new do P L1 L2 U1 U2 units dv db diagonal chunk_table", "T chunks HV scale",
        "V C BV SPAN BETA PRECISION STAGES",
    ),
    "bwd.intra:intra_bwd": (
        "q k g beta A_log dt_bias gc q_norm k_norm h dh v_new do P L1 L2 U1 U2 units diagonal dqn dkn dg db of_A_log "
        "of_dt_bias chunk_table",
        "T tokens chunks H HV one scale lower_bound",
        "K V C BK BV SPAN RUN GATE RATE BIAS BETA NORM SUMMED PRECISION STAGES PER_HEAD",
    ),
    "bwd.norms:norms_bwd": (
        "q k beta q_norm k_norm dqn dkn db dg_shares dq dk dbeta dg taken", "tokens H HV", "K BK ROWS SHARES BETA NORM",
    ),
    "bwd.gate:sum_chunks": ("of_A_log of_dt_bias dA_log ddt_bias", "chunks HV", "K BK ROWS RATE BIAS PER_HEAD"),
}
TABLES = ("chunk_table", "segment_table", "first_segment", "taken")           # parts/sequences.py
UNALIGNED = {"beta", "A_log", "dt_bias", "cu_seqlens", *TABLES, "dbeta", "db", "units", "diagonal", "q_norm", "k_norm",
             "dA_log", "ddt_bias", "pool"}
FLOATS = ("scale", "lower_bound")            # numbers; the others are int32
DTYPES = {                                   # dtypes of tensors that have not that of q, whatever the call
    **dict.fromkeys(("A_log", "dt_bias", "dA_log", "ddt_bias", "of_A_log", "of_dt_bias", "gc_last", "ht", "dht", "A_kk",
                     "M", "added", "edge", "q_norm", "k_norm", "units", "diagonal", "db", "dg_shares"),
                    "float32"),
    **dict.fromkeys(("chunk_table", "segment_table", "taken", "place"), "int64"), "first_segment": "int32",
}


@functools.lru_cache(maxsize=4096)
def dtype_of(p: Problem, name: str) -> str:
    """Return the dtype in which kernels have a tensor."""
    wide = "float64" if p.dtype == "float32" else "float32"                    # for sums of log2 decays
    of_call = {"g": p.g_dtype, "beta": p.beta_dtype, "h0": p.state_dtype or "float32", "gc": wide,
               "pool": p.checkpoints or "float32"}
    return of_call.get(name) or of_call.get(name.removeprefix("d")) or DTYPES.get(name, p.dtype)


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
        given = {
            **dict.fromkeys(TABLES, p.packed), **dict.fromkeys(("q_norm", "k_norm"), p.qk_l2norm),
            **dict.fromkeys(("A_log", "of_A_log", "dA_log"), p.A_log),
            **dict.fromkeys(("dt_bias", "of_dt_bias", "ddt_bias"), p.dt_bias),
            **dict.fromkeys(("U1", "U2", "units"), self.constants["SPAN"] > 1),
        }
        self.absent = absent(**given)

    def recipe(
        self, function: str, c: TileConfig, left_out: Iterable[str] = (),
        dtypes: Mapping[str, str | None] | None = None, **constants: Constant,
    ) -> Recipe:
        """Return the recipe of a kernel.  The tensors in `left_out` are None; `dtypes` are those of tensors that have
        others than `dtype_of` says; `constants` are those that the call and the configuration do not say."""
        c.require_valid()
        tensors, numbers, needed = (names.split() for names in ARGUMENTS[function])
        none = {*self.absent, *left_out}
        given = {name: None if name in none else dtype_of(self.p, name) for name in tensors}
        given |= dtypes or {}
        known = self.constants | {"BK": c.BK, "BV": c.BV, "STAGES": c.stages} | constants
        options = {"maxnreg": c.maxnreg} if c.maxnreg else {}
        return triton_recipes.recipe(
            f"triton.{function}", given, {name: "fp32" if name in FLOATS else "i32" for name in numbers},
            {name: known[name] for name in needed}, {*tensors} - UNALIGNED, self.target, c.num_warps, c.stages,
            **options,
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
                "parts.sequences:tables", TileConfig(), dtypes={"cu_seqlens": dtype}, BLOCK=256, RUN=16
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
            "fwd.state:state", self.state, left_out, {"h0": self.edge(start)}, START=start, FINISH=finish,
            OUTPUT=output, STORE_H=store_h, STORE_V=store_v,
        )

    def edge(self, end: str) -> str | None:
        """Return the dtype of states that walks begin or end with: those of sequences, of segments, or none."""
        return {"sequence": self.p.state_dtype, "segment": "float32"}.get(end)

    def transition(self) -> Recipe:
        return self.recipe("fwd.state:transition", self.state)

    def compose(self, start: str, dtype: str | None, reverse: bool) -> Recipe:
        return self.recipe(
            "fwd.state:compose", self.composing, (), {"h0": None if start == "zero" else dtype}, ROWS=self.K,
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
        kernels["intra_bwd"] = self.recipe("bwd.intra:intra_bwd", c, dtypes=shares, RUN=self.run(c.BK, c))
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
            "bwd.state:state_bwd", self.state_back, left_out, {"dh0": self.edge(finish)}, START=start, FINISH=finish,
            STORE=store, STAGES=min(self.state_back.stages, 2),
        )


def absent(**needed: bool) -> list[str]:
    return [name for name, value in needed.items() if not value]


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
