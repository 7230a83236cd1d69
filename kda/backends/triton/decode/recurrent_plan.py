"""What the recurrent kernel (kernel.py) is built and launched for: plain Python, no torch, no Triton."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from kda.model.host import Host
from kda.model.problem import Problem
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from ...common import triton_recipes
from ...common.arguments import Arguments, number, tensor
from ...common.triton_types import target_of, width
from ..limits import TritonConfig
from .plan import Layouts, aligned, strides_of, with_strides

FUNCTION = "triton.decode.kernel:recurrent"
ROWS = ("q", "k", "v", "g", "beta")
TENSORS = (*ROWS, "A_log", "dt_bias", "cu_seqlens", "slots", "accepted", "state")
AXES = dict.fromkeys(ROWS, "bthd") | {"state": "nhkv", "slots": "ns"}
WARPS_PER_SM = 4                             # one for each scheduler
FEW, MANY = 1024, 2048                       # elements of a state that one warp holds: 32 or 64 registers a thread


@with_strides(AXES)
class RecurrentArguments(Arguments):
    q = k = v = tensor(None, "p.dtype", divisible="rows_by_16")
    g = tensor(None, "p.g_dtype", divisible="gates_by_16")
    beta = tensor(None, "p.beta_dtype", divisible=False)
    dt_bias = tensor(None, divisible="rows_by_16")
    A_log = cu_seqlens = slots = accepted = tensor(None, divisible=False)
    state = tensor(None, "p.state_dtype", divisible="state_by_16")
    ht = tensor("float32", needs="final")
    o = tensor(None, "p.dtype")
    T = pool = S_slots = number("int64")
    N = HV = group = number("int32")
    scale = lower_bound = number("float32")


class RecurrentLayout(NamedTuple):
    """What a kernel is built for that a Problem does not say: dtypes by name, and how tensors lie in memory."""

    A_log: str | None = None
    dt_bias: str | None = None
    cu_seqlens: str | None = None
    slots: str | None = None
    accepted: str | None = None
    dense: bool = True                       # channels of q, k, v, g and beta lie next to each other
    aligned: bool = True                     # their rows begin at multiples of 16 bytes and elements
    order: str | None = None                 # how a state lies: "kv" and "vk" without gaps, "any" with any strides
    state_aligned: bool = True               # states begin at such multiples


@dataclass(frozen=True)
class RecurrentConfig(TritonConfig):
    BV: int                                  # columns of the state that a program holds
    num_warps: int = 1                       # with one, for K up to 256, sums over K need no barrier
    tiles: ClassVar = ("BV",)


def configs(p: Problem) -> tuple[RecurrentConfig, RecurrentConfig]:
    """Return the configuration for calls that leave the chip idle, and the one for those that fill it."""
    warps = max(1, width(p.K) // 256)
    few, many = (max(8, warps * elements // width(p.K)) for elements in (FEW, MANY))
    return RecurrentConfig(min(few, width(p.V)), warps), RecurrentConfig(min(many, width(p.V)), warps)


def config(p: Problem, sms: int) -> RecurrentConfig:
    """Take wide tiles once they give every scheduler a warp.  With batch_invariant, other sequences do not count."""
    if prescribed := p.force.config("recurrent"):
        return prescribed
    few, many = configs(p)
    sequences = 1 if p.batch_invariant else p.N
    return many if programs(p, many, sequences) >= WARPS_PER_SM * sms else few


def programs(p: Problem, c: RecurrentConfig, sequences: int) -> int:
    return -(-p.V // c.BV) * p.HV * sequences


def grid(p: Problem, c: RecurrentConfig) -> int:
    return programs(p, c, p.N)


def numbers(p: Problem, x: Layouts) -> dict[str, float]:
    axes = AXES | {"state": "nhvk"} if p.state_v_first else AXES
    strides = {f"{row}_d": 1 for row in ROWS} | strides_of(axes, x) | _of_gate(p)
    return dict.fromkeys(RecurrentArguments.number_names(), 0) | strides | {
        "scale": p.scale, "lower_bound": p.lower_bound or 0.0, "T": p.T, "N": p.N, "HV": p.HV, "group": p.HV // p.H,
        "pool": p.slots, "S_slots": x["slots"].shape[1] if p.slots_per_token else 1,
    }


def _of_gate(p: Problem) -> dict[str, int]:
    """Return the stride of g's channels where a head has one."""
    return {"g_d": 0} if p.gate_per_head else {}


def _wide_rows(p: Problem) -> tuple[str, ...]:
    """Return the tensors of tokens that have channels."""
    return ("q", "k", "v") if p.gate_per_head else ("q", "k", "v", "g")


def layout(p: Problem, x: Layouts, strides: Mapping[str, float]) -> RecurrentLayout:
    order = None
    if "state" in x:
        between: Any = strides["state_k"] if p.K > 1 else p.V, strides["state_v"] if p.V > 1 else 1
        order = {(p.V, 1): "kv", (1, p.K): "vk"}.get(between, "any")
    return RecurrentLayout(
        **{name: x[name].dtype if name in x else None for name in RecurrentLayout._fields[:5]},
        dense=all(strides[f"{row}_d"] == 1 for row in ROWS if row != "g" or not p.gate_per_head),
        aligned=all(aligned(x, strides, row, "bth") for row in _wide_rows(p))
        and ("dt_bias" not in x or aligned(x, strides, "dt_bias")),
        order=order, state_aligned="state" in x and aligned(x, strides, "state", "nh"),
    )


def recipe(p: Problem, x: RecurrentLayout, c: RecurrentConfig, target: Target) -> Recipe:
    c.require_valid()
    rows = x.dense and x.aligned and p.K % 16 == p.V % 16 == 0
    config = SimpleNamespace(
        **x._asdict(), p=p, rows_by_16=rows, gates_by_16=rows and not p.gate_per_head,
        state_by_16=x.state_aligned and p.K * p.V % 16 == 0, final=p.final_state and not p.inplace,
    )
    constants: dict[str, Any] = {
        "K": p.K, "V": p.V, "BK": width(p.K), "BV": c.BV, "NORM": p.qk_l2norm, "GATE": p.gate, "BETA": p.beta,
        "PER_VALUE": p.beta_per_value, "ORDER": x.order, "FINAL_ORDER": "vk" if p.state_v_first else "kv",
        "INPLACE": p.inplace, "PER_TOKEN": p.slots_per_token, "GATES": p.gate_width,
    }
    fixed: dict[str, Any] = {f"{row}_d": 1 for row in ROWS} | _of_gate(p) if x.dense else {}
    fixed |= {"state_k": None, "state_v": None} if x.order != "any" else {}
    return triton_recipes.recipe(
        FUNCTION, RecurrentArguments, config, constants, target, fixed=fixed, num_warps=c.num_warps,
        enable_fp_fusion=False,
    )


def recipes(p: Problem, host: Host) -> list[Recipe]:
    """Return all that calls like this one need, of any size, if their tensors are contiguous."""
    needed = []
    for offsets, slots, c in itertools.product(("int32", "int64"), ("int32", "int64"), configs(p)):
        x = RecurrentLayout(
            A_log="float32" if p.A_log else None,
            dt_bias="float32" if p.dt_bias else None,
            cu_seqlens=offsets if p.packed else None,
            slots=slots if p.slots else None,
            accepted=slots if p.accepted_tokens else None,
            order=None if p.state_dtype is None else "vk" if p.state_v_first else "kv",
        )
        needed.append(recipe(p, x, c, target_of(host)))
    return list(dict.fromkeys(needed))
