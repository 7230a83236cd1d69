"""What the kernel of decode_step (step.py) is built and launched for: plain Python, no torch, no Triton."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from kda.model.host import Host
from kda.model.problem import Problem, StepInputs, StepProblem
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from ...common import triton_recipes
from ...common.arguments import Arguments, number, tensor
from ...common.triton_types import target_of, width
from ..limits import TritonConfig
from .plan import Layouts, aligned, strides_of, with_strides

FUNCTION = "triton.decode.step:decode_step"
AXES = {"q": "nth", "k": "nth", "v": "nth", "g": "nth", "beta": "nth", "norm_gate": "nth", "states": "nhvk",
        "conv_states": "nlc", "slots": "n"}
TENSORS = StepInputs._fields
ROWS = ("q", "k", "v", "g", "norm_gate")     # tensors whose channels lie next to each other, if they have any
ELEMENTS = 4096                              # elements of a state that one warp holds: 128 registers a thread
PIECE = 256                                  # bytes of a state's row in a piece: 64 channels of float32
HELD = 2048                                  # elements of a state of 16 bits that one warp computes with at once
TURNED = 2**14                               # elements of a state (K, V) that shared memory turns: 64 KiB
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@with_strides(AXES)
class StepArguments(Arguments):
    q = k = v = norm_gate = out = tensor(None, divisible="rows_by_16")
    dt_bias = conv_weight = conv_bias = norm_weight = records = tensor(None, divisible="rows_by_16")
    g = tensor(None, divisible="gates_by_16")
    states = tensor(None, divisible="states_by_16")
    conv_states = tensor(None, divisible="tails_by_16")
    beta = A_log = slots = accepted = path = parents = tensor(None, divisible=False)
    pool = first_slot = number("int64")
    T = L = H = group = number("int32")
    scale = lower_bound = norm_eps = number("float32")


@dataclass(frozen=True)
class StepConfig(TritonConfig):
    num_warps: int
    piece: int
    rows: int | None = None                  # rows of V in a block that is computed with at once; None: all
    ahead: int = 1                           # blocks that are loaded before the first, of one token
    tiles: ClassVar = ("piece", "rows")


class StepLayout(NamedTuple):
    """What a kernel is built for that a StepProblem does not say: dtypes by name, and how tensors lie in memory."""

    dtypes: tuple[tuple[str, str | None], ...]
    aligned: bool = True                     # rows begin at multiples of 16 bytes and elements
    order: str = "vk"                        # how a state lies: "vk" and "kv" without gaps, "any" with any strides
    states_aligned: bool = True              # states begin at such multiples
    channels: int | None = 1                 # the stride of channels in tails, if it is 1


def config(s: StepProblem, sms: int) -> StepConfig:
    """Return what is fastest on an H200 (docs/results/decode.md), of 2 to 16 warps and pieces of 32 to 128 channels.

    A state of K = V = 128 is held by four warps: two CTAs share an SM, one loads while one computes.  A row of 128
    channels is then one element per thread, and nothing of it is computed twice.  A state of 16 bits waits for its one
    token as it was loaded, in 64 registers a thread, and is computed with in two blocks of rows, or in one where every
    CTA has an SM.  No bit depends on that, on how many other sequences there are, or on how many drafts came with a
    token.  So pieces are those of one token, though 32 channels of float32 save 5% with drafts.
    """
    if prescribed := s.core.force.config("decode_step"):
        return prescribed
    BK, BV, size = width(s.core.K), width(s.core.V), ITEMSIZE.get(s.core.state_dtype or "float32", 4)
    warps, piece = max(1, BK * BV // ELEMENTS), min(BK, PIECE // size)
    if s.core.T > 1 or size != 2 or grid(s) <= sms:
        return StepConfig(warps, piece)
    rows = min(BV, HELD * warps // BK)
    return StepConfig(warps, piece, rows, BV // rows)


def grid(s: StepProblem, c: StepConfig | None = None) -> int:
    return s.core.N * s.core.H


def numbers(s: StepProblem, x: Layouts) -> dict[str, float]:
    p = s.core
    return dict.fromkeys(StepArguments.number_names(), 0) | strides_of(AXES, x) | {
        "scale": p.scale, "lower_bound": p.lower_bound or 0.0, "norm_eps": s.norm_eps or 0.0, "pool": p.slots,
        "first_slot": s.first_slot, "T": p.T, "L": max(s.tail, 1), "H": p.H, "group": p.HV // p.H,
    }


def orders(p: Problem) -> dict[tuple[int, int], str]:
    """Return strides of V and K in a state -> what a kernel calls the order."""
    return {(p.K, 1): "vk", (1, p.V): "kv" if width(p.K) * width(p.V) <= TURNED else "any"}


def rows(p: Problem) -> tuple[str, ...]:
    """Return those of ROWS that have channels."""
    return tuple(name for name in ROWS if name != "g" or not p.gate_per_head)


def layout(s: StepProblem, x: Layouts, strides: Mapping[str, float]) -> StepLayout:
    p = s.core
    flat = [name for name in ("dt_bias", "conv_weight", "conv_bias", "norm_weight", "records", "out") if name in x]
    rows_aligned = all(aligned(x, strides, name, "nth") for name in rows(p) if name in x)
    between: Any = strides["states_v"] if p.V > 1 else p.K, strides["states_k"] if p.K > 1 else 1
    return StepLayout(
        tuple((name, x[name].dtype if name in x else None) for name in StepInputs._fields),
        aligned=rows_aligned and not any(x[name].address for name in flat),
        order=orders(p).get(between, "any"), states_aligned=aligned(x, strides, "states", "nh"),
        channels=1 if "conv_states" in x and strides["conv_states_c"] == 1
        and aligned(x, strides, "conv_states", "nl") else None,
    )


def recipe(s: StepProblem, x: StepLayout, c: StepConfig, target: Target) -> Recipe:
    c.require_valid()
    p, whole = s.core, s.core.K % 16 == s.core.V % 16 == 0
    dense, dense_tails = x.order != "any", x.channels == 1 and s.width > 0
    config = SimpleNamespace(
        **dict.fromkeys(TENSORS) | dict(x.dtypes), rows_by_16=x.aligned and whole,
        gates_by_16=x.aligned and whole and not p.gate_per_head, states_by_16=dense and x.states_aligned and whole,
        tails_by_16=dense_tails and whole,
    )
    constants: dict[str, Any] = {
        "K": p.K, "V": p.V, "BK": width(p.K), "BV": width(p.V), "PIECE": c.piece,
        "ROWS": c.rows or width(p.V), "AHEAD": c.ahead, "W": s.width, "NORM": p.qk_l2norm,
        "GATE": p.gate, "BETA": p.beta, "ORDER": x.order, "ONE": p.T == 1, "SINGLE": p.HV == p.H, "WARPS": c.num_warps,
        "GATES": p.gate_width,
    }
    fixed: dict[str, Any] = {"states_v": None, "states_k": None} if dense else {}
    fixed |= {"conv_states_c": 1} if dense_tails else {}
    return triton_recipes.recipe(
        FUNCTION, StepArguments, config, constants, target, fixed=fixed, num_warps=c.num_warps, enable_fp_fusion=False
    )


def usual_step(p: Problem) -> StepProblem:
    """Return the StepProblem that a layer makes of a problem: with a convolution over four tokens, the gated norm and,
    where tokens are accepted, with drafts."""
    core = dataclasses.replace(p, state_dtype=p.state_dtype or "float32", inplace=True, state_v_first=True)
    return StepProblem(core, width=4, norm_eps=1e-5, drafts=p.accepted_tokens)


def recipes(s: StepProblem, host: Host) -> list[Recipe]:
    """Return all recipes that calls like this one need, of any size, if their tensors are contiguous."""
    p, needed = s.core, []
    conv, norm = bool(s.width), s.norm_eps is not None
    given: dict[str, str | None] = {
        "A_log": "float32" if p.A_log else None, "dt_bias": "float32" if p.dt_bias else None,
        **dict.fromkeys(("conv_states", "conv_weight"), p.dtype if conv else None),
        **dict.fromkeys(("norm_gate", "norm_weight"), p.dtype if norm else None),
        "records": "float32" if s.drafts else None, "states": p.state_dtype, "g": p.g_dtype, "beta": p.beta_dtype,
        **dict.fromkeys(("q", "k", "v", "out"), p.dtype),
    }
    for index, channels, order in itertools.product(("int32", "int64"), (1, None), orders(p).values()):
        indices = {"slots": index, "accepted": index if s.drafts else None, "parents": index if s.tree else None}
        indices["path"] = indices["parents"]
        dtypes = tuple((name, (given | indices).get(name)) for name in StepInputs._fields)
        layout = StepLayout(dtypes, channels=channels, order=order)
        needed += [recipe(s, layout, config(s, sms), target_of(host)) for sms in (0, s.core.N * p.H)]
    return list(dict.fromkeys(needed))
