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
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from ..common.pool.plan import inner
from ..common.pool.plan import recipes as pool_recipes
from ..common.triton_types import TYPES, target_of
from .configs import TileConfig, choose, power_of_2
from .decode.recurrent_plan import recipes as decode_recipes
from .decode.step_plan import recipes as step_recipes
from .decode.step_plan import usual_step


@dataclass(frozen=True)
class Plan:
    problem: Problem
    target: Target
    sms: int
    kernels: dict[str, Recipe]
    segment: int                             # chunks that one program of `state` walks; 0: whole sequences

    __hash__ = None                          # type: ignore[assignment]

    def tiles(self, kernel: str, dim: str) -> int:
        """Return into how many slices of K or V a kernel's programs cut; a transition has K columns for V."""
        built_for: Mapping[str, Any] = self.kernels[kernel].constants
        return -(-built_for.get(dim, self.problem.K) // built_for["B" + dim])

    @property
    def chunks(self) -> int:
        """Return the chunks of a row of T tokens."""
        return -(-self.problem.T // self.problem.C)

    @property
    def chunk_bound(self) -> int:
        p = self.problem
        return chunk_bound(p.B, p.T, p.N, p.C, p.packed)

    @property
    def segment_chunks(self) -> int:
        return self.segment or max(self.chunks, 1)

    @property
    def pieces(self) -> int:
        """Return the segments of a row of T tokens."""
        return max(1, -(-self.chunks // self.segment_chunks))

    @property
    def segment_bound(self) -> int:
        """Return the most segments there can be; every sequence has one."""
        p = self.problem
        if not p.packed:
            return p.B * self.pieces
        return p.T // (self.segment_chunks * p.C) + p.N if self.segment else p.N


@functools.lru_cache(maxsize=1024)
def plan(p: Problem, host: Host, saved: Save = Save.NOTHING, cut: bool = False) -> Plan:
    """Return the plan of a call.  `saved` is what this forward saves, or what the forward of this backward has saved.
    With `cut` there are at least two segments, unless there are fewer chunks."""
    make = _Recipes(p, host)
    segment = split(p, host.sms, make.state.BV)
    if cut and not segment:
        segment = -(-p.T // p.C) // 2
    kernels = (make.forward if p.direction == "forward" else make.backward)(segment, saved)
    return Plan(p, make.target, host.sms, kernels, segment)


def call_of_stage(name: str, p: Problem, packed: bool) -> tuple[Problem, Save]:
    direction = "forward" if name.startswith("fwd") else "backward"
    state_dtype = p.state_dtype or "float32"
    return replace(p, direction=direction, final_state=True, state_dtype=state_dtype, packed=packed), Save.ALL


def recipes_of_call(p: Problem, host: Host, offsets: str | None, save: Save) -> list[Recipe]:
    return [*plan(p, host, save).kernels.values()]


def split(p: Problem, sms: int, BV: int) -> int:
    """Return the chunks of a segment, 0 for whole sequences: cut if heads and sequences leave the chip idle.

    Never with batch_invariant: roundings would depend on neighbours, and on where a call ends.
    """
    sequences = max(p.N, 1)
    wanted = 2 * sms // (-(-p.V // BV) * p.HV * sequences)
    if wanted < 3 or p.batch_invariant:
        return 0
    chunks = -(-p.T // p.C) // (sequences if p.packed else 1)
    length = max(16, -(-chunks // wanted))
    return length if chunks > 2 * length else 0


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


class _Recipes:
    """The kernels of one class of problems on one target."""

    def __init__(self, p: Problem, host: Host):
        self.p, self.target = p, target_of(host)
        wide = 2 if p.dtype == "float32" else 1
        self.K = power_of_2(p.K)
        self.sums = "float64" if p.dtype == "float32" else "float32"             # dtype of sums of log2 decays
        self.prepare = choose("prepare", p, host)
        self.state, self.state_back = choose("state", p, host), choose("state_bwd", p, host)
        self.wy, self.intra = choose("wy", p, host), choose("intra", p, host)
        self.composing = choose("compose", p, host, bits=32)
        self.span = span(p)
        self.precision = "tf32" if wide == 1 else "tf32x3"                     # for products of float32 operands

    def recipe(self, function: str, tensors: str, numbers: str, constants: dict[str, Any], config: TileConfig,
               absent: Iterable[str] = ()) -> Recipe:
        """Return the recipe of a kernel.  `tensors` are "name:type ..."; those in `absent` are None, and so are
        tables where nothing is packed."""
        config.require_valid()
        signature = {}
        for word in tensors.split():
            name, _, kind = word.partition(":")
            signature[name] = TYPES[{"q": self.p.dtype, "g": self.p.g_dtype, "b": self.p.beta_dtype}.get(kind, kind)]
        left_out = [*absent, *(name for name in TABLES if name in signature and not self.p.packed)]
        for word in numbers.split():
            name, _, kind = word.partition(":")
            signature[name] = kind or "i32"
        constants = dict(constants) | dict.fromkeys(left_out)
        signature = {name: kind for name, kind in signature.items() if name not in left_out}
        aligned = [n for n, kind in signature.items() if kind.startswith("*") and n not in UNALIGNED]
        options = {"num_warps": config.num_warps, "num_stages": config.stages}
        if config.maxnreg:
            options["maxnreg"] = config.maxnreg
        return Recipe(f"kda.backends.triton.{function}", signature, constants, target=self.target, divisible=aligned,
                      options=options)

    def tables(self, dtype: str) -> Recipe:
        return self.recipe(
            "parts.sequences:tables",
            f"cu_seqlens:{dtype} chunk_table:int64 segment_table:int64 first_segment:int32 taken:int64",
            "T N C segment chunk_entries segment_entries", {"BLOCK": 256, "RUN": 16}, TileConfig(),
        )

    def forward(self, segment: int, saved: Save) -> dict[str, Recipe]:
        p, all_ = self.p, saved is Save.ALL
        store_h = "kv" if all_ else "none" if not p.intermediate_states else "vk" if p.state_v_first else "kv"
        prepare = self.preparation("forward" if saved is Save.NOTHING else "backward", output=True)
        kernels = {**self.sequences(), "prepare": prepare, **self.states(segment, True, store_h, store_v=all_)}
        if p.packed and all_:
            kernels["clear_kept"] = self.recipe(
                "parts.sequences:clear_kept",
                "A_qk:q A_inv:q w:q qg:q kg:q v_new:q h:q gc_last:float32 chunk_table:int64", "chunk_bound HV",
                {"K": p.K, "V": p.V, "C": p.C, "BLOCK": 64}, TileConfig(),
            )
        return kernels

    def sequences(self) -> dict[str, Recipe]:
        return {f"tables {d}": self.tables(d) for d in ("int32", "int64")} if self.p.packed else {}

    @staticmethod
    def absent(**needed: bool) -> list[str]:
        return [name for name, value in needed.items() if not value]

    def preparation(self, mode: str, output: bool) -> Recipe:
        """Return the modes of fwd/prepare; `output`: for a call that gives o."""
        p, c = self.p, self.prepare
        constants = {
            "K": p.K, "V": p.V, "C": p.C, "BK": c.BK, "BV": c.BV, **self.channels(c.num_warps), "SPAN": self.span,
            "GATE": p.gate, "RATE": p.A_log, "BIAS": p.dt_bias, "BETA": p.beta, "NORM": p.qk_l2norm,
            "MODE": mode, "PRECISION": self.precision,
        }
        norms, rows = p.qk_l2norm and mode != "forward", mode != "sums"
        absent = self.absent(
            A_log=p.A_log, dt_bias=p.dt_bias, q_norm=norms, k_norm=norms, A_qk=mode in ("forward", "backward"),
            A_kk=mode in ("forward", "backward"), A_inv=mode in ("backward", "saved"), o=p.packed and output,
            **dict.fromkeys(("v", "beta", "w", "u", "qg", "kg", "gc_last"), rows),
        )
        return self.recipe(
            "fwd.prepare:prepare",
            f"q:q k:q v:q g:g beta:b A_log:float32 dt_bias:float32 gc:{self.sums} q_norm:float32 k_norm:float32 A_qk:q "
            "A_kk:float32 A_inv:q w:q u:q qg:q kg:q gc_last:float32 o:q chunk_table:int64",
            "T chunks H HV one scale:fp32 lower_bound:fp32", constants, c, absent,
        )

    def channels(self, warps: int) -> dict[str, int]:
        """Return the slices of K where a thread owns a channel, and the rows that it sums."""
        BG = min(self.K, 128)
        return {"BG": BG, "RUN": self.run(BG, warps)}

    def run(self, channels: int, warps: int) -> int:
        """Return how many rows of a channel one thread has."""
        return min(self.p.C, max(1, self.p.C * channels // (32 * warps)))

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

    def walk_constants(self, c: TileConfig, start: str, finish: str) -> dict[str, Constant]:
        """Return the constants of kernels that walk the chunks of a segment, with a state from `start` to `finish`."""
        p = self.p
        return {
            "K": p.K, "V": p.V, "C": p.C, "BK": c.BK, "BV": c.BV, "START": start, "FINISH": finish,
            "V_FIRST": p.state_v_first, "PRECISION": self.precision,
        }

    def state_kernel(self, start: str, finish: str, output: bool, store_h: str, store_v: bool) -> Recipe:
        p, c = self.p, self.state
        outputs = {"OUTPUT": output, "STORE_H": store_h, "STORE_V": store_v, "STAGES": c.stages}
        constants = self.walk_constants(c, start, finish) | outputs
        checkpoints = output and p.checkpoints is not None
        absent = self.absent(A_qk=output, qg=output, o=output, v_new=store_v, h=store_h != "none", h0=start != "zero",
                             ht=finish != "none", pool=checkpoints, place=checkpoints)
        h0 = p.state_dtype if start == "sequence" else "float32"
        return self.recipe(
            "fwd.state:state",
            f"A_qk:q w:q u:q qg:q kg:q gc_last:float32 h0:{h0} o:q v_new:q h:q ht:float32 "
            f"pool:{p.checkpoints or 'float32'} place:int64 segment_table:int64",
            "T chunks pieces segment HV scale:fp32", constants, c, absent,
        )

    def transition(self) -> Recipe:
        p, c = self.p, self.state
        constants = {"K": p.K, "C": p.C, "BK": c.BK, "BV": c.BV, "PRECISION": self.precision, "STAGES": c.stages}
        return self.recipe(
            "fwd.state:transition",
            "w:q kg:q gc_last:float32 M:float32 segment_table:int64",
            "T chunks pieces segment HV", constants, c,
        )

    def compose(self, start: str, dtype: str | None, reverse: bool) -> Recipe:
        p, c = self.p, self.composing
        constants = {"K": p.K, "V": p.V, "ROWS": self.K, "BK": c.BK, "BV": c.BV, "V_FIRST": p.state_v_first,
                     "REVERSE": reverse, "PRECISION": "tf32x3"}
        return self.recipe(
            "fwd.state:compose", f"M:float32 added:float32 h0:{dtype or 'float32'} edge:float32 first_segment:int32",
            "pieces HV", constants, c, self.absent(h0=start != "zero"),
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
        kernels |= {"wy_bwd": self.wy_bwd(), "intra_bwd": self.intra_bwd()}
        kernels["norms_bwd"] = self.norms_bwd()
        if p.A_log or p.dt_bias:
            kernels["sum_chunks"] = self.recipe(
                "bwd.gate:sum_chunks", "of_A_log:float32 of_dt_bias:float32 dA_log:float32 ddt_bias:float32",
                "chunks HV", {"K": p.K, "BK": self.K, "ROWS": 32, "RATE": p.A_log, "BIAS": p.dt_bias}, TileConfig(),
                self.absent(of_A_log=p.A_log, of_dt_bias=p.dt_bias, dA_log=p.A_log, ddt_bias=p.dt_bias),
            )
        return kernels

    def wy_bwd(self) -> Recipe:
        p, c = self.p, self.wy
        constants = {"V": p.V, "C": p.C, "BV": c.BV, "SPAN": self.span, "BETA": p.beta,
                     "PRECISION": self.precision, "STAGES": c.stages}
        return self.recipe(
            "bwd.wy:wy_bwd",
            "v:q beta:b A_inv:q v_new:q dv_new:q do:q P:q L1:q L2:q U1:q U2:q units:float32 dv:q db:float32 "
            "diagonal:float32 chunk_table:int64",
            "T chunks HV scale:fp32", constants, c, self.blocks,
        )

    @property
    def blocks(self) -> list[str]:
        return self.absent(**dict.fromkeys(("U1", "U2", "units"), self.span > 1))

    def intra_bwd(self) -> Recipe:
        p, c = self.p, self.intra
        constants = {
            "K": p.K, "V": p.V, "C": p.C, "BK": c.BK, "BV": c.BV, "SPAN": self.span,
            "RUN": self.run(c.BK, c.num_warps), "GATE": p.gate, "RATE": p.A_log, "BIAS": p.dt_bias,
            "BETA": p.beta, "NORM": p.qk_l2norm,
            "SUMMED": p.dtype == "float32", "PRECISION": self.precision, "STAGES": c.stages,
        }
        absent = self.absent(A_log=p.A_log, dt_bias=p.dt_bias, q_norm=p.qk_l2norm, k_norm=p.qk_l2norm,
                             of_A_log=p.A_log, of_dt_bias=p.dt_bias)
        return self.recipe(
            "bwd.intra:intra_bwd",
            f"q:q k:q g:g beta:b A_log:float32 dt_bias:float32 gc:{self.sums} q_norm:float32 k_norm:float32 h:q dh:q "
            "v_new:q do:q P:q L1:q L2:q U1:q U2:q units:float32 diagonal:float32 dqn:q dkn:q dg:g db:float32 "
            "of_A_log:float32 of_dt_bias:float32 chunk_table:int64",
            "T tokens chunks H HV one scale:fp32 lower_bound:fp32", constants, c,
            [*absent, *self.blocks],
        )

    def norms_bwd(self) -> Recipe:
        p = self.p
        constants = {"K": p.K, "BK": self.K, "ROWS": max(1, 4096 // self.K), "SHARES": 1 + -(-p.K // self.intra.BK),
                     "BETA": p.beta, "NORM": p.qk_l2norm}
        absent = self.absent(q=p.qk_l2norm, k=p.qk_l2norm, q_norm=p.qk_l2norm, k_norm=p.qk_l2norm,
                             beta=p.beta != "given")
        return self.recipe(
            "bwd.norms:norms_bwd",
            "q:q k:q beta:b q_norm:float32 k_norm:float32 dqn:q dkn:q db:float32 dq:q dk:q dbeta:b taken:int64",
            "tokens H HV", constants, TileConfig(), absent,
        )

    def state_bwd(self, start: str, finish: str, store: bool) -> Recipe:
        p, c = self.p, self.state_back
        constants = self.walk_constants(c, start, finish) | {"STORE": store, "STAGES": min(c.stages, 2)}
        absent = self.absent(dht=start != "zero", dv_new=store, dh=store, dh0=finish != "none")
        dh0 = p.state_dtype if finish == "sequence" else "float32"
        return self.recipe(
            "bwd.state:state_bwd",
            f"A_qk:q w:q qg:q kg:q gc_last:float32 do:q dht:float32 dv_new:q dh:q dh0:{dh0} segment_table:int64",
            "T chunks pieces segment HV scale:fp32", constants, c, absent,
        )


TABLES = ("chunk_table", "segment_table", "first_segment", "taken")           # parts/sequences.py
UNALIGNED = ("beta", "A_log", "dt_bias", "cu_seqlens", *TABLES, "dbeta", "db", "units", "diagonal", "q_norm", "k_norm",
             "dA_log", "ddt_bias", "pool")


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
