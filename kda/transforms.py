"""Operators under torch.func and forward-mode AD.

An operator of torch.library supports neither: torch.func.grad refuses it, and forward-mode AD silently drops
tangents.  Where one of them is active, an autograd.Function calls the operator on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from .errors import KdaError

Tensor = torch.Tensor
Function = torch.autograd.Function

_Kind = torch._C._functorch.TransformType
_KINDS = (_Kind.Grad, _Kind.Jvp, _Kind.Vmap)


class Written(NamedTuple):
    """An argument that an operator changes."""

    number: int
    shared: str                              # what is wrong where all calls of a vmap have the same one


def active() -> bool:
    """Whether a tensor may carry a tangent, or may be that of a transform of torch.func."""
    if forward_ad._current_level >= 0:
        return True
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() in _KINDS


def untransformed() -> bool:
    """Whether an autograd.Function with neither a rule for vmap nor a tangent may run; one that is traced may."""
    return torch.compiler.is_compiling() or not active()


def refuse_tangents(op: str) -> None:
    """For an operator, which sees no tangent: whether one might reach it directly."""
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        raise KdaError(
            f"{op}: forward-mode AD must not be used inside torch.compile or on torch.ops.kda, where tangents would be "
            f"lost; found an active level. Call kda.{op} in eager mode, or use reverse mode."
        )


def pushforward(function: Callable, primals: Sequence, tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The tangents of the results of `function`, which consists of torch operations; a level is active."""
    with forward_ad._set_fwd_grad_enabled(True):
        duals = [x if t is None else forward_ad.make_dual(x.detach(), t) for x, t in zip(primals, tangents)]
        outputs = [forward_ad.unpack_dual(y) for y in function(*duals)]
    return tuple(torch.zeros_like(y.primal) if y.tangent is None else y.tangent for y in outputs)


def function(
    name: str, run: Callable, setup: Callable, backward: Callable, jvp: Callable, written: Written | None = None
) -> type[Function]:  # fmt: skip
    """`run` returns a tuple of tensors; the others are what torch.autograd.Function documents.

    vmap runs its calls one by one; a batch or packed sequences are faster.
    """

    def vmap(info, in_dims, *args):
        if written is not None and in_dims[written.number] is None:
            raise KdaError(written.shared)

        def of(i):
            return [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims)]

        outputs = tuple(torch.stack(each) for each in zip(*(made.apply(*of(i)) for i in range(info.batch_size))))
        return outputs, (0,) * len(outputs)

    members = {"forward": run, "setup_context": setup, "backward": backward, "jvp": jvp, "vmap": vmap}
    made = type(name, (Function,), {word: staticmethod(member) for word, member in members.items()})
    return made
