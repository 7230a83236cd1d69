"""DTensors: a call on a mesh is the same call on each rank's local tensors, if their placements allow it.

Along a dimension of the mesh, the tensors of a call are placed in one of four ways, decided by v: sharded by batch, by
heads (value heads with their q/k heads), along the sequence with a cp_context of that dimension's group, or replicated.
Everything else is refused; nothing is gathered.  Replicated parameters of sharded tokens get the sum of all
ranks' gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from kda.errors import InputError
from kda.model.problem import Inputs

from .context import CPContext

Tensor = torch.Tensor

PARAMETERS = ("A_log", "dt_bias")
OFFSETS = ("cu_seqlens", "cu_seqlens_cpu", "num_accepted_tokens", "ssm_state_indices")
ROWS = ("q", "k", "v", "g", "beta")
OUTPUTS = ("o", "final_state", "h")


class Sharding(NamedTuple):
    """Placements along a dimension of the mesh: the sharded axis of each tensor; other tensors are replicated."""

    name: str
    axes: dict[str, int]                     # "rows" are the five tensors of tokens, o and out
    shared: str = ""                         # the size that ranks share evenly: "B" or "H"
    summed: bool = False                     # ranks have different tokens of the heads of a parameter

    def placement(self, name: str, x: Any = None) -> Placement:
        axis = self.axes.get(name, self.axes.get("rows") if name in (*ROWS, "o", "out") else None)
        if axis is not None and name in PARAMETERS and isinstance(x, Tensor):
            axis = next((i for i, n in enumerate(x.shape) if n == x.numel()), 0)
        return Replicate() if axis is None else Shard(axis)

    def of_gradient(self, name: str, x: Tensor) -> Placement:
        return Partial() if name in PARAMETERS and self.summed else self.placement(name, x)


WAYS = {
    Shard(0): Sharding("by batch", {"rows": 0, "initial_state": 0, "final_state": 0, "h": 0}, "B", summed=True),
    Shard(1): Sharding("along the sequence", {"rows": 1}, summed=True),
    Shard(2): Sharding(
        "by heads", {"rows": 2, "initial_state": 1, "final_state": 1, "h": 2, "A_log": 0, "dt_bias": 0}, "H"
    ),
    Replicate(): Sharding("replicated", {}),
}
_FIX = "Redistribute the tensors; along the sequence pass cp_context."


def run(op: str, inputs: Inputs, function: Callable[..., tuple], context: CPContext | None = None,
        out: Any = None) -> tuple:
    """function(local inputs) -> o, final states, h, as DTensors again; `out` is placed as o and passed on."""
    if not isinstance(inputs.v, DTensor):
        given = next(name for name, x in zip((*Inputs._fields, "out"), (*inputs, out)) if isinstance(x, DTensor))
        _refuse(op, "v", f"a DTensor beside {given}, which is one", type(inputs.v).__name__,
                "Distribute all tensors of a call, or pass x.to_local() of each.", "mesh.plain")
    mesh = inputs.v.device_mesh
    ways = [_way(op, inputs, i, context) for i in range(mesh.ndim)]
    local = [_local(op, name, x, mesh, ways) for name, x in zip(Inputs._fields, inputs)]
    if out is not None:
        function = functools.partial(function, out=_local(op, "out", out, mesh, ways))
    results = function(Inputs(*local))
    return tuple(
        x if x is None else DTensor.from_local(x, mesh, [way.placement(name) for way in ways], run_check=False)
        for name, x in zip(OUTPUTS, results)
    )


def _way(op: str, inputs: Inputs, dim: int, context: CPContext | None) -> Sharding:
    mesh, placement = inputs.v.device_mesh, inputs.v.placements[dim]
    named = f"mesh dimension {_named(mesh, dim)}"
    way = WAYS.get(placement)
    if way is None:
        _refuse(op, "v", f"sharded by batch or heads, along the sequence, or replicated on {named}",
                str(placement), _FIX, "mesh.way")
    if way.name == "along the sequence":  # type: ignore[union-attr]
        _check_sequence(op, inputs, mesh, dim, named, context)
    size = {"B": inputs.v.shape[0], "H": inputs.q.shape[2] if inputs.q.dim() == 4 else 0}.get(way.shared, 0)  # type: ignore[union-attr]
    if size % mesh.size(dim):
        what = "q/k heads, with their value heads," if way.shared == "H" else "batch"  # type: ignore[union-attr]
        _refuse(op, "q", f"a tensor whose {what} the {mesh.size(dim)} ranks of {named} can share",
                f"{way.shared}={size}", "Use fewer ranks, or replicate along this dimension.", "mesh.even")  # type: ignore[union-attr]
    if way.shared == "B" and inputs.ssm_state_indices is not None:  # type: ignore[union-attr]
        _refuse(op, "initial_state", f"given without ssm_state_indices if {named} shards by batch", "ssm_state_indices",
                "Shard by heads.", "mesh.pool")
    return way  # type: ignore[return-value]


def _check_sequence(op: str, inputs: Inputs, mesh: Any, dim: int, named: str, context: CPContext | None) -> None:
    if context is None:
        _refuse(op, "v", f"sharded by batch or heads, or replicated, on {named}", "Shard(dim=1) without a cp_context",
                f"Pass cp_context=kda.parallel.build_cp_context(cu_seqlens, mesh.get_group({dim})).",
                "mesh.sequence")
    group = mesh.get_group(dim)
    if context.group.group_name != group.group_name or len(set(context.lengths)) > 1:  # type: ignore[union-attr]
        _refuse(op, "cp_context", f"a context of the group of {named}, with equal parts", repr(context),
                f"Build it with mesh.get_group({dim}) and without lengths.", "mesh.group")
    if inputs.initial_state is not None:
        _refuse(op, "initial_state", f"left out if {named} shards along the sequence", "a tensor",
                "Call chunk_kda on x.to_local() of each tensor: states belong to a rank's own sequences.",
                "mesh.states")


def _local(op: str, name: str, x: Any, mesh: Any, ways: list[Sharding], beside: str = "v") -> Any:
    if x is None or (name in OFFSETS and not isinstance(x, DTensor)):
        return x
    if not isinstance(x, DTensor):
        _refuse(op, name, f"a DTensor beside {beside}, which is one", type(x).__name__,
                "Distribute all tensors of a call, or pass x.to_local() of each.", "mesh.plain")
    if x.device_mesh != mesh:
        _refuse(op, name, f"on {beside}'s mesh, of {tuple(mesh.shape)} ranks", f"one of {tuple(x.device_mesh.shape)}",
                "Use one mesh.", "mesh.same")
    for dim, (way, placement) in enumerate(zip(ways, x.placements)):
        wanted = way.placement(name, x)
        if placement != wanted:
            asked = f"{wanted} on mesh dimension {_named(mesh, dim)}, along which the call is {way.name}"
            _refuse(op, name, asked, str(placement), _FIX, "mesh.placement")
    if name in OFFSETS:
        return x.to_local()
    gradients = [way.of_gradient(name, x) for way in ways]
    if gradients != list(x.placements):
        x = x.redistribute(mesh, x.placements)                                 # its backward sums
    return x.to_local(grad_placements=gradients)


def gate(op: str, g: Any, A_log: Any, dt_bias: Any, function: Callable[..., Tensor]) -> Tensor:
    """function(g, A_log, dt_bias) on local tensors; g (.., HV, K)."""
    if not isinstance(g, DTensor):
        _refuse(op, "g", "a DTensor beside A_log and dt_bias", type(g).__name__, "Distribute all of them.",
                "mesh.plain")
    heads, ways = g.dim() - 2, []
    for dim, placement in enumerate(g.placements):
        if placement == Replicate():
            ways.append(Sharding("replicated", {}))
        elif isinstance(placement, Shard) and placement.dim < heads:
            ways.append(Sharding("by rows", {"g": placement.dim}, summed=True))
        elif placement == Shard(heads):
            ways.append(Sharding("by heads", {"g": heads, "A_log": 0, "dt_bias": 0}))
        else:
            _refuse(op, "g", f"sharded by rows or heads, or replicated, on {_named(g.device_mesh, dim)}",
                    str(placement), "Redistribute it: channels of a head stay together.", "mesh.way")
    ways = [way._replace(axes={n: a for n, a in way.axes.items()}) for way in ways]
    local = [
        _local(op, name, x, g.device_mesh, ways, beside="g")
        for name, x in (("g", g), ("A_log", A_log), ("dt_bias", dt_bias))
    ]
    return DTensor.from_local(function(*local), g.device_mesh, g.placements, run_check=False)


def _named(mesh: Any, dim: int) -> str:
    names = mesh.mesh_dim_names
    return f"{names[dim]!r}" if names else str(dim)


def _refuse(op: str, argument: str, asked: str, found: str, fix: str, check: str) -> None:
    raise InputError(op, argument, asked, found, fix, check)
