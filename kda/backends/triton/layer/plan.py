"""What the kernels of a layer's other parts are built and launched for: plain Python, no torch, no Triton."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from kda.model.host import Host
from kda.model.problem import Problem
from kda.routing.capability import Rule
from ptxkit.compile.target import Target
from ptxkit.compile.triton import Recipe

from ...common.triton_types import TYPES, target_of

WIDTH = 4                                    # tokens that the convolution sees: that of every model
CHANNELS = 512                               # channels of a program of the convolution: four a thread
NORM_ELEMENTS = 2048                         # elements of a tile of the norm


class LayerPart(NamedTuple):
    """A convolution or a norm, without its tensors."""

    dtype: str
    size: int                                # width of a convolution, channels of a norm


CONVOLUTION = (
    Rule("layer.gpu", lambda p, h: h.cc is not None and h.cc >= (8, 0),
         "needs an NVIDIA GPU of compute capability 8.0 or more, found {h}"),
    Rule("layer.installed", lambda p, h: h.has("triton"), "needs the package triton", "pip install triton"),
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


def recipe(function: str, tensors: Mapping[str, str | None], numbers: Mapping[str, str], constants: Mapping[str, Any],
           target: Target, warps: int = 4) -> Recipe:
    """Return the recipe of a kernel.  `tensors` are names -> dtypes, None for an absent one; all but offsets and tables
    begin at multiples of 16 bytes."""
    types = {name: TYPES[dtype] for name, dtype in tensors.items() if dtype is not None}
    aligned = [name for name in types if name not in ("starts", "numbers", "cu_seqlens")]
    absent = {name: None for name, dtype in tensors.items() if dtype is None}
    return Recipe(
        f"kda.backends.triton.layer.{function}", types | dict(numbers), absent | dict(constants), target=target,
        divisible=aligned, options={"num_warps": warps, "num_stages": 1},
    )


@functools.lru_cache(maxsize=1024)
def convolution(kernel: str, dtypes: tuple[tuple[str, str | None], ...], channels: int, host: Host) -> Recipe:
    """Return the recipe of a convolution.  `dtypes` has x, weight, bias, state, and those of starts, numbers and
    cu_seqlens that the kernel reads."""
    given = dict(dtypes)
    x, state = given["x"], given["state"]
    tables = {
        "convolve": ("starts", "numbers"),
        "convolve_bwd": ("starts", "numbers"),
        "convolve_state_bwd": ("cu_seqlens",),
    }[kernel]
    tensors = {name: given[name] for name in ("x", "weight", "bias", "state", *tables)}
    if kernel == "convolve":
        tensors["y"] = x
    else:
        tensors["dy"] = x
    if kernel == "convolve_bwd":
        tensors |= {"dx": x, "shares": "float32"}
    if kernel == "convolve_state_bwd":
        tensors["dstate"] = state
    counts = ("tokens", "T", "C") if kernel == "convolve_state_bwd" else ("tokens", "T", "C", "rows")
    built = recipe(f"convolution:{kernel}", tensors, dict.fromkeys(counts, "i32"), {"BC": CHANNELS}, target_of(host))
    if channels % 16:
        return built
    return Recipe(built.function, built.signature, built.constants, target=built.target,
                  divisible=(*built.divisible, "C"), options=built.options)


@functools.lru_cache(maxsize=1024)
def norm(kernel: str, dtypes: tuple[tuple[str, str], ...], V: int, host: Host) -> Recipe:
    """Return the recipe of a norm.  `dtypes` has x, gate and weight."""
    given = dict(dtypes)
    BV = max(16, 1 << (V - 1).bit_length())
    tensors = {name: given[name] for name in ("x", "gate", "weight")}
    numbers = {"rows": "i32", "eps": "fp32"}
    if kernel == "norm_gate":
        tensors["y"] = given["x"]
    else:
        tensors |= {"dy": given["x"], "dx": given["x"], "dgate": given["gate"], "shares": "float32"}
        numbers["tiles"] = "i32"
    constants = {"V": V, "BV": BV, "ROWS": max(1, NORM_ELEMENTS // BV)}
    return recipe(f"norm:{kernel}", tensors, numbers, constants, target_of(host))


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
