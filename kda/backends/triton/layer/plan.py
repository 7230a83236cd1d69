"""What the kernels of a layer's other parts are built and launched for: plain Python, no torch, no Triton."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import NamedTuple

from kda.model.host import Host
from kda.model.problem import Problem
from kda.routing.capability import Rule
from ptxkit.compile.triton import Recipe

from ...common import triton_recipes
from ...common.arguments import Arguments, number, tensor
from ...common.rules import TRITON, rules_of, runs_from
from ...common.triton_types import target_of, width

WIDTH = 4                                    # tokens that the convolution sees: that of every model
CHANNELS = 512                               # channels of a program of the convolution: four a thread
NORM_ELEMENTS = 2048                         # elements of a tile of the norm


class LayerArguments(Arguments):
    """Results and gradients have the dtypes of their inputs.  All tensors but offsets and tables begin at multiples of
    16 bytes."""

    x = y = dy = dx = tensor(None, "x")      # (tokens, C), or of a norm (rows, V)
    weight = bias = tensor(None)             # (C, 4), or (V), and (C)
    state = dstate = tensor(None, "state")   # (N, 3, C)
    gate = dgate = tensor(None, "gate")      # (rows, V)
    shares = tensor("float32")               # what each program adds to gradients of weights
    starts = numbers = cu_seqlens = tensor(None, divisible=False)
    tokens = T = rows = tiles = number("int32")
    C = number("int32", divisible="C_by_16")
    eps = number("float32")


class LayerPart(NamedTuple):
    """A convolution or a norm, without its tensors."""

    dtype: str
    size: int                                # width of a convolution, channels of a norm


CONVOLUTION = (
    *rules_of("layer", runs_from(8, 0), TRITON),
    Rule("layer.dtype", lambda p, h: p.dtype in ("bfloat16", "float16", "float32"),
         "needs bfloat16, float16 or float32, got {p.dtype}"),
    Rule("layer.width", lambda p, h: p.size == WIDTH, "needs a convolution over 4 tokens, got {p.size}"),
)
NORM = (
    *CONVOLUTION[:3],
    Rule("layer.channels", lambda p, h: p.size <= 1024, "needs at most 1024 channels, got {p.size}"),
)


@functools.lru_cache(maxsize=1024)
def broken(rules: tuple[Rule, ...], part: LayerPart, host: Host) -> tuple[str, ...]:
    """Return why torch has to do it; empty if a kernel can."""
    return tuple(f"{r.id}: {r.why.format(p=part, h=host)}" for r in rules if not r.holds(part, host))


@functools.lru_cache(maxsize=1024)
def convolution(kernel: str, dtypes: tuple[tuple[str, str | None], ...], channels: int, host: Host) -> Recipe:
    """Return the recipe of a convolution.  `dtypes` has x, weight, bias, state, and those of starts, numbers and
    cu_seqlens that the kernel reads."""
    config = SimpleNamespace(**dict(dtypes), C_by_16=channels % 16 == 0)
    return triton_recipes.recipe(
        f"triton.layer.convolution:{kernel}", LayerArguments, config, {"BC": CHANNELS}, target_of(host)
    )


@functools.lru_cache(maxsize=1024)
def norm(kernel: str, dtypes: tuple[tuple[str, str], ...], V: int, host: Host) -> Recipe:
    """Return the recipe of a norm.  `dtypes` has x, gate and weight."""
    BV = max(16, width(V))
    constants = {"V": V, "BV": BV, "ROWS": max(1, NORM_ELEMENTS // BV)}
    config = SimpleNamespace(**dict(dtypes))
    return triton_recipes.recipe(f"triton.layer.norm:{kernel}", LayerArguments, config, constants, target_of(host))


def recipes(p: Problem, host: Host) -> list[Recipe]:
    """Return all kernels of a layer whose heads have V channels: for rows or packed sequences, with a state or
    without."""
    needed = []
    for starts, state in itertools.product((None, "int32"), (None, p.dtype)):
        numbers = starts if state else None
        given = {"x": p.dtype, "weight": p.dtype, "bias": None, "state": state, "starts": starts, "numbers": numbers}
        for kernel in ("convolve", "convolve_bwd", *["convolve_state_bwd"] * bool(state)):
            offsets = "int64" if starts and kernel == "convolve_state_bwd" else None
            needed.append(convolution(kernel, (*given.items(), ("cu_seqlens", offsets)), p.HV * p.V, host))
    dtypes = tuple(dict.fromkeys(("x", "gate", "weight"), p.dtype).items())
    return needed + [norm(kernel, dtypes, p.V, host) for kernel in ("norm_gate", "norm_gate_bwd")]


def run_of(tokens: int, blocks: int, sms: int) -> int:
    """Return how many tokens a program convolves: as many as leave work for four programs on each SM; 4 to 64."""
    rows = 64
    while rows > 4 and blocks * -(-tokens // rows) < 4 * sms:
        rows //= 2
    return rows


def norm_programs(tiles: int, sms: int) -> int:
    """Return how many programs the norm's backward has, which process the tiles in turns."""
    return min(tiles, 4 * sms)
