"""FlashInfer: three kernels of its KDA forward on data-centre Blackwell, for calls whose times are published.

A CTA of 1,024 threads walks over a sequence of a head, with its state in tensor memory, and prepares up to five chunks
of 32 tokens ahead. With 64 heads the package launches

    m64      for a sequence of 8,192 tokens: two CTAs walk, each with half of the columns
    pieces   for 8 sequences of 1,024 tokens on a B200: 148 CTAs have at most 112 chunks each, three walks and a half of
             one that is cut in two
    vtile    for these on a B300: 128 CTAs have four walks each

Its host functions are C++ for the CUDA runtime, so launches are made here, with the arguments of its bindings.
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


class PublishedCall:
    """Sequences of equal lengths, what a forward makes of them, and the tensor maps that the kernels read."""

    def __init__(self, sequences: int, tokens: int):
        total, self.tokens = sequences * tokens, tokens
        self.q, self.k, self.v, self.g = (torch.randn(total, HEADS, D).bfloat16() for _ in range(4))
        self.beta = torch.randn(total, HEADS).bfloat16()
        self.rate, self.bias = torch.rand(HEADS), torch.randn(HEADS * D) / 8
        self.starts = torch.arange(sequences + 1) * tokens
        self.order = torch.arange(sequences, dtype=torch.int32)
        self.first, self.last = (torch.zeros(sequences, HEADS, D, D).bfloat16() for _ in range(2))
        self.o = torch.zeros(total, HEADS, D).bfloat16()

    def panels(self, x: torch.Tensor, box: int = 2) -> torch.Tensor:
        """Return a map of rows in two halves of 64 channels, of which a copy moves so many."""
        return stored(address=x.data_ptr(), dims=(64, len(x), HEADS, 2), strides=(2 * HEADS * D, 2 * D, D),
                      box=(64, CHUNK, 1, box), dtype="bfloat16", swizzle=128)

    def rows(self, x: torch.Tensor, box: int = D) -> torch.Tensor:
        return stored(address=x.data_ptr(), dims=(D, HEADS, len(x)), strides=(2 * D, 2 * HEADS * D),
                      box=(box, 1, CHUNK), dtype="bfloat16", swizzle=0 if box == D else 128)

    def of_beta(self) -> torch.Tensor:
        return stored(address=self.beta.data_ptr(), dims=(HEADS, len(self.beta)), strides=(2 * HEADS,), box=(8, CHUNK),
                      dtype="bfloat16")

    def inputs(self, v: torch.Tensor) -> list:
        """Return the arguments that both kernels begin with; v: the map of values."""
        return [self.q, self.panels(self.q), self.k, self.panels(self.k), self.v, v, self.g, self.rows(self.g),
                self.beta, self.of_beta(), self.rate, self.bias, self.starts, self.order]

    def states(self, panels: int = 2) -> list:
        """Return states and output, in the middle of the arguments; without indices, nor states in float32."""
        none = torch.zeros(1)
        return [self.first, self.o, self.panels(self.o, panels), self.last, 0, HEADS * D * D, 0, none, none]

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


def pieces(folder: pathlib.Path, call: PublishedCall, ctas: Sequence[Sequence[PartOfWalk]], **how):
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


def vtile(folder: pathlib.Path, call: PublishedCall, ctas: int, walks: int, stride: int, arch: str, **how):
    """Run the kernel whose CTAs have so many walks each, `stride` of them apart."""
    args = [*call.inputs(call.panels(call.v)), *call.states(), call.tokens, walks, stride, HEADS, 1, 1, D**-0.5, BOUND]
    return ptxkit.run(
        folder / KERNELS / "flashkda_generated_bf16_fused_m128_vtile_603e2d906d.cu",
        "kernel_flashkda_bf16_fused_m128_vtile", arch=arch, grid=ctas, block=THREADS, dynamic_shared=226304,
        args=args, **how,
    )


def m64(folder: pathlib.Path, call: PublishedCall, walks: int, **how):
    """Run the kernel of which two CTAs have a walk; each has 64 columns of the state."""
    args = [*call.inputs(call.rows(call.v, 64)), *call.states(1), HEADS, 1, 1, D**-0.5, BOUND]
    return ptxkit.run(
        folder / KERNELS / "flashkda_generated_bf16_fused_m64_2eb7864cd4.cu", "kernel_flashkda_bf16_fused_m64",
        arch="sm_100a", grid=2 * walks, block=THREADS, dynamic_shared=227328, args=args, **how,
    )


@case("flashinfer", "KDA forward, fused_m64, two CTAs of a walk", "sm_100a")
def _(folder):
    call = PublishedCall(sequences=1, tokens=96)
    run = m64(folder, call, 1)
    return call.correct([0]), [run]


@case("flashinfer", "KDA forward, persistent_m128, a walk cut in two", "sm_100a")
def _(folder):
    call = PublishedCall(sequences=1, tokens=96)
    begun, whole, rest = PartOfWalk(1, 0, 64, destination=0), PartOfWalk(0, 0, 96), PartOfWalk(1, 64, 32, source=0)
    run = pieces(folder, call, [[begun], [whole, rest]])
    return call.correct((0, 1)), [run]


@case("flashinfer", "KDA forward, fused_m128_vtile, two walks of a CTA", "sm_103a")
def _(folder):
    call = PublishedCall(sequences=2, tokens=64)
    run = vtile(folder, call, 1, 2, HEADS, "sm_103a")
    return call.correct((0, HEADS)), [run]
