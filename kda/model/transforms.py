"""Operators of torch.ops.kda, and what happens to them under torch.func and forward-mode AD.

An operator of torch.library supports neither: torch.func.grad refuses it, and forward-mode AD silently drops
tangents.  So every operator is registered here, and refuses tangents.  Where a transform is active, an
autograd.Function calls the operator on plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from kda.errors import KdaError

Tensor = torch.Tensor
Function = torch.autograd.Function

NOT_TRACED = (
    "kda: torch.func was requested inside of torch.compile, which cannot trace it through kernels. Leave out "
    "fullgraph=True, so that this call runs in eager mode, or compile without torch.func."
)

_Kind = torch._C._functorch.TransformType
_KINDS = (_Kind.Grad, _Kind.Jvp, _Kind.Vmap)


class Written(NamedTuple):
    """An argument that an operator changes."""

    number: int
    shared: str                              # what is wrong where all calls of a vmap have the same one


class Links(NamedTuple):
    """The functions that torch.autograd.Function documents under these names."""

    setup: Callable
    backward: Callable
    jvp: Callable | None

    @classmethod
    def none(cls, message: str) -> Links:
        """Return the links of an operator without a derivative: autograd would silently omit the gradient otherwise."""

        def refuse(ctx, *grads):
            raise KdaError(message)

        return cls(lambda ctx, inputs, output: None, refuse, refuse)


def register(
    schema: str, op: str, real: Callable, fake: Callable, links: Links | None = None, autograd: Callable | None = None
) -> None:
    """Define torch.ops.kda.<schema>, an operator of the public function kda.<op>.

    What writes into an argument cannot have links; `autograd` takes their place.
    """
    name = "kda::" + schema.partition("(")[0]
    torch.library.define(name, schema[schema.index("("):], tags=[torch.Tag.pt2_compliant_tag])
    torch.library.impl(name, "CompositeExplicitAutograd")(_refusing_tangents(op, real))
    torch.library.register_fake(name)(_refusing_tangents(op, fake))
    if autograd is not None:
        torch.library.impl(name, "Autograd")(autograd)
    elif links is not None:
        torch.library.register_autograd(name, links.backward, setup_context=links.setup)


def _refusing_tangents(op: str, implementation: Callable) -> Callable:
    @functools.wraps(implementation)
    def run(*args: Any) -> Any:
        refuse_tangents(op)
        return implementation(*args)

    return run


def active() -> bool:
    """Whether a tensor may carry a tangent, or may be that of a transform of torch.func."""
    if forward_ad._current_level >= 0:
        return True
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() in _KINDS


def untransformed() -> bool:
    """Whether an autograd.Function with neither a rule for vmap nor a tangent may run; one that is traced may."""
    return torch.compiler.is_compiling() or not active()


def transforming() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


vars(transforming)["_dynamo_marked_constant"] = True                            # torch.compile calls it untraced


def tangents() -> bool:
    """Whether a tensor may carry a tangent, of a dual level or of torch.func.jvp."""
    top = torch._C._functorch.peek_interpreter_stack()
    return forward_ad._current_level >= 0 or (top is not None and top.key() == _Kind.Jvp)


def differentiated() -> bool:
    """Whether torch.func.grad, or what is made of it, is active, also around another transform."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return False
    return _Kind.Grad in [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


def refuse_tangents(op: str) -> None:
    """Raise an error in an operator, which sees no tangent, where one might reach it directly."""
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
) -> type[Function]:
    """`run` returns a tuple of tensors; the others are what torch.autograd.Function documents.

    vmap runs its calls one by one; a batch or packed sequences are faster.
    """

    def vmap(info, in_dims, *args):
        if torch.compiler.is_compiling():  # torch.compile then runs it in eager mode
            raise KdaError(NOT_TRACED)
        if written is not None and in_dims[written.number] is None:
            raise KdaError(written.shared)

        def part(i):
            return [x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims)]

        if not info.batch_size:                                                # a call of zeros tells the shapes
            args = [x if dim is None else x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
                    for x, dim in zip(args, in_dims)]
        calls = [looped.apply(*part(i)) for i in range(max(1, info.batch_size))]
        outputs = tuple(torch.stack(each)[: info.batch_size] for each in zip(*calls))
        return outputs, (0,) * len(outputs)

    members = {"forward": run, "setup_context": setup, "backward": backward, "jvp": jvp, "vmap": vmap}
    looped = type(name, (Function,), {word: staticmethod(member) for word, member in members.items()})
    return looped


def batched(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch.autograd.grad(is_grads_batched=True) asks for several gradients at once."""
    if torch.compiler.is_compiling():
        return False
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors)


def one_by_one(function: Callable[..., Sequence[Tensor | None]], tensors: Sequence[Any]) -> list:
    """Call `function` for each gradient of a batch; its results are a batch again."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows: Any = [torch._remove_batch_dim(x, level, 1, 0) if batched([x]) else None for x in tensors]
    size = next(len(x) for x in rows if x is not None)
    calls = [function(*(x if many is None else many[i] for x, many in zip(tensors, rows))) for i in range(size)]
    return [None if each[0] is None else torch._add_batch_dim(torch.stack(each), 0, level)
            for each in zip(*calls)]

