"""FlashInfer: two kernels that it makes of KDA's forward for many short sequences on data-centre Blackwell.

In both, a CTA of 1,024 threads walks over a sequence of a head, with the whole state in tensor memory, and prepares up
to five chunks of 32 tokens ahead. For 8 sequences of 1,024 tokens and 64 heads the package launches `pieces` on a B200
(148 CTAs have at most 112 chunks each: three walks, and a half of one that is cut in two), and `vtile` on a B300 (128
CTAs have four walks each). Its host functions are C++ for the CUDA runtime, so launches are made here, with the
arguments of its bindings.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

import ptxkit
from ptxkit import tensormap

from .cases import case, near

KERNELS = "packages/flashinfer/data/csrc/kda"
HEADS, D, CHUNK, THREADS, BOUND = 64, 128, 32, 1024, -5.0


class PartOfWalk(NamedTuple):
    """Tokens of a walk that a CTA has, and through which places its state comes and goes; -1 for the call's own."""

    walk: int                                # sequence * HEADS + head
    first: int
    tokens: int
    source: int = -1
    destination: int = -1


class ShortSequences:
    """Packed sequences of equal lengths, what a forward makes of them, and the tensor maps that the kernels read."""

    def __init__(self, sequences: int, tokens: int):
        total, self.tokens = sequences * tokens, tokens
        self.q, self.k, self.v, self.g = (torch.randn(total, HEADS, D).bfloat16() for _ in range(4))
        self.beta = torch.randn(total, HEADS).bfloat16()
        self.rate, self.bias = torch.rand(HEADS), torch.randn(HEADS * D) / 8
        self.starts = torch.arange(sequences + 1) * tokens
        self.order = torch.arange(sequences, dtype=torch.int32)
        self.first, self.last = (torch.zeros(sequences, HEADS, D, D).bfloat16() for _ in range(2))
        self.o = torch.zeros(total, HEADS, D).bfloat16()

    def panels(self, x: torch.Tensor) -> torch.Tensor:
        """Return a map of rows in two halves of 64 channels."""
        return stored(address=x.data_ptr(), dims=(64, len(x), HEADS, 2), strides=(2 * HEADS * D, 2 * D, D),
                      box=(64, CHUNK, 1, 2), dtype="bfloat16", swizzle=128)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return stored(address=x.data_ptr(), dims=(D, HEADS, len(x)), strides=(2 * D, 2 * HEADS * D), box=(D, 1, CHUNK),
                      dtype="bfloat16")

    def of_beta(self) -> torch.Tensor:
        return stored(address=self.beta.data_ptr(), dims=(HEADS, len(self.beta)), strides=(2 * HEADS,), box=(8, CHUNK),
                      dtype="bfloat16")

    def inputs(self, v: torch.Tensor) -> list:
        """Return the arguments that both kernels begin with; v: the map of values."""
        return [self.q, self.panels(self.q), self.k, self.panels(self.k), self.v, v, self.g, self.rows(self.g),
                self.beta, self.of_beta(), self.rate, self.bias, self.starts, self.order]

    def states(self) -> list:
        """Return states and output, in the middle of the arguments; without indices, nor states in float32."""
        none = torch.zeros(1)
        return [self.first, self.o, self.panels(self.o), self.last, 0, HEADS * D * D, 0, none, none]

    def correct(self, walks: Sequence[int]) -> bool:
        return near(*(pair for walk in walks for pair in self.pairs(*divmod(walk, HEADS))))

    def pairs(self, sequence: int, head: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (the kernel's, the recurrence's) output and last state of a walk."""
        rows = slice(sequence * self.tokens, (sequence + 1) * self.tokens)
        q, k, v, g, beta = (x[rows, head].double() for x in (self.q, self.k, self.v, self.g, self.beta))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        g = self.rate[head].exp() * (g + self.bias.view(HEADS, D)[head])
        decay, beta = torch.exp(BOUND * torch.sigmoid(g)), torch.sigmoid(beta)
        state, out = torch.zeros(D, D).double(), []
        for t in range(self.tokens):
            state = decay[t][:, None] * state
            state = state + torch.outer(k[t], beta[t] * (v[t] - k[t] @ state))
            out.append(D**-0.5 * q[t] @ state)
        return [(self.o[rows, head], torch.stack(out)), (self.last[sequence, head], state.T)]


def stored(**fields) -> torch.Tensor:
    """Return a tensor map in memory, aligned as a copy demands."""
    place = torch.zeros(2 * tensormap.SIZE, dtype=torch.uint8)
    place = place[-place.data_ptr() % tensormap.SIZE:][:tensormap.SIZE]
    return place.copy_(torch.frombuffer(bytearray(tensormap.encode(**fields)), dtype=torch.uint8))


def pieces(folder: pathlib.Path, call: ShortSequences, ctas: Sequence[Sequence[PartOfWalk]], **how):
    """Run the kernel whose CTAs have a list of pieces each."""
    listed = [piece for cta in ctas for piece in cta]
    bounds = [sum(map(len, ctas[:i])) for i in range(len(ctas) + 1)]
    columns = [torch.tensor(column, dtype=torch.int32) for column in zip(*listed)]
    handed = 1 + max(piece.destination for piece in listed)
    between = torch.zeros(max(handed, 1), D, D).bfloat16(), torch.zeros(max(handed, 1), dtype=torch.int32)
    walks, *others = columns
    args = [*call.inputs(call.rows(call.v)), walks, torch.tensor(bounds, dtype=torch.int32), *others, *between,
            *call.states(), HEADS, 1, 1, D**-0.5, BOUND]
    return ptxkit.run(
        folder / KERNELS / "flashkda_generated_bf16_persistent_m128_47722a5d98.cu",
        "kernel_flashkda_bf16_persistent_m128", arch="sm_100a", grid=len(ctas), block=THREADS, dynamic_shared=221696,
        args=args, **how,
    )


def vtile(folder: pathlib.Path, call: ShortSequences, ctas: int, walks: int, stride: int, arch: str, **how):
    """Run the kernel whose CTAs have so many walks each, `stride` of them apart."""
    args = [*call.inputs(call.panels(call.v)), *call.states(), call.tokens, walks, stride, HEADS, 1, 1, D**-0.5, BOUND]
    return ptxkit.run(
        folder / KERNELS / "flashkda_generated_bf16_fused_m128_vtile_603e2d906d.cu",
        "kernel_flashkda_bf16_fused_m128_vtile", arch=arch, grid=ctas, block=THREADS, dynamic_shared=226304,
        args=args, **how,
    )


@case("flashinfer", "KDA forward, persistent_m128, a walk cut in two", "sm_100a")
def _(folder):
    call = ShortSequences(sequences=1, tokens=96)
    begun, whole, rest = PartOfWalk(1, 0, 64, destination=0), PartOfWalk(0, 0, 96), PartOfWalk(1, 64, 32, source=0)
    run = pieces(folder, call, [[begun], [whole, rest]])
    return call.correct((0, 1)), [run]


@case("flashinfer", "KDA forward, fused_m128_vtile, two walks of a CTA", "sm_103a")
def _(folder):
    call = ShortSequences(sequences=2, tokens=64)
    run = vtile(folder, call, 1, 2, HEADS, "sm_103a")
    return call.correct((0, HEADS)), [run]
