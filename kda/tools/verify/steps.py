"""Calls of `kda.decode_step` for tests and benchmarks, and what is right for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import kda

from .budget import Budget, shaken, shakes

Tensor = torch.Tensor
UPDATED = ("states", "conv_states", "records")     # tensors that are updated in place


def make_step(
    N: int = 3, T: int = 1, H: int = 2, HV: int | None = None, K: int = 32, V: int = 16, *, W: int = 4,
    dtype: str = "float32", states: str = "float32", gate: str = "softplus", beta: str = "sigmoid",
    l2norm: bool = True, conv: bool = True, bias: bool = False, norm: bool = True, drafts: bool = False,
    tree: bool = False, per_head: bool = False, slots: list[int] | None = None, pool: int | None = None, seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the arguments of a call: N sequences in slots somewhere in a pool, the numbers of a running model."""
    HV, pool = HV or H, pool or N + 2
    random = torch.Generator(device).manual_seed(seed)
    kind, C = getattr(torch, dtype), 2 * H * K + HV * V

    def normal(*shape: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random, device=device)

    if slots is None:
        slots = torch.randperm(pool, generator=random, device=device)[:N].tolist()
    gates = (N, T, HV) if per_head else (N, T, HV, K)
    x: dict[str, Any] = {
        "q": normal(N, T, H, K), "k": normal(N, T, H, K), "v": normal(N, T, HV, V), "g": normal(*gates),
        "beta": normal(N, T, HV), "states": normal(pool, HV, V, K, dtype=getattr(torch, states)),
        "ssm_state_indices": torch.tensor(slots, dtype=torch.int32, device=device),
    }
    x |= {"use_qk_l2norm_in_kernel": l2norm, "use_beta_sigmoid_in_kernel": beta != "given",
          "allow_neg_eigval": beta == "2*sigmoid", "use_gate_in_kernel": gate != "given"}
    if gate == "given":
        x["g"] = -uniform(*gates).to(kind)
    else:
        x |= {"A_log": uniform(HV), "dt_bias": normal(HV if per_head else HV * K, dtype=torch.float32)}
        x["lower_bound"] = -5.0 if gate == "bounded" else None
    if beta == "given":
        x["beta"] = uniform(N, T, HV).to(kind)
    if not l2norm and not conv:
        x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(kind)
    if conv:
        rows = W - 1 + (T - 1 if drafts else 0)
        x |= {"conv_states": normal(pool, rows, C), "conv_weight": normal(C, W)}
        x["conv_bias"] = normal(C) if bias else None
    if norm:
        x |= {"norm_gate": normal(N, T, HV, V), "norm_weight": 1 + uniform(V).to(kind)}
    if drafts:
        x |= {"records": normal(pool, T - 1, HV, 2 * K + V, dtype=torch.float32),
              "num_accepted_tokens": torch.ones(N, dtype=torch.int32, device=device)}
    if tree:
        earlier = [[max(0, t - 1 - int(n)) for t, n in enumerate(torch.randint(0, 3, (T,)).tolist())] for _ in range(N)]
        x["parents"] = torch.tensor(earlier, dtype=torch.int32, device=device)
    return x


def copied(x: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the same call on tensors of its own, numbers with a fraction in `dtype`."""
    def copy(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(dtype or t.dtype, copy=True) if t.is_floating_point() else t.clone()

    return {name: copy(t) for name, t in x.items()}


def run_step(x: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Return o, and what the call leaves in the tensors that it updates, by name; those of x."""
    with torch.no_grad():
        o = kda.decode_step(**x, **options)
    return {"o": o} | {name: x[name] for name in UPDATED if x.get(name) is not None}


def bytes_moved(x: Mapping[str, Any]) -> int:
    """Return bytes that a call cannot do without: rows, weights once, and of each sequence its state, tail and records,
    both ways."""
    def size(name: str) -> int:
        return x[name].numel() * x[name].element_size() if x.get(name) is not None else 0

    pools = sum(size(name) // len(x[name]) for name in UPDATED if x.get(name) is not None)
    rows = [*tokens_of(x), "v", "conv_weight", "conv_bias", "norm_weight", "A_log", "dt_bias"]    # v: and o, as large
    return 2 * len(x["q"]) * pools + sum(map(size, rows))


def budgets(x: dict[str, Any], run: Callable[..., dict[str, Tensor]] = run_step) -> dict[str, Budget]:
    """Return the budget of o and of each updated tensor, from the reference in float64 and in float32.  `run` makes a
    call that has no chunks; by default it is one of decode_step."""
    reference = {"backend": "reference"}
    exact = run(copied(x, torch.float64), **reference)
    rounded = [run(_rounded(x, shake), **reference) for shake in (None, *shakes(x["g"].numel()))]
    stored = {name: result.dtype for name, result in run(copied(x), **reference).items()}
    K, W = x["q"].shape[-1], 4
    return {
        name: Budget.of(exact[name].double(), *(r[name].to(stored[name]) for r in rounded), compute=torch.float32,
                        stored=stored[name], summed=K + W)
        for name in exact
    }


def _rounded(x: dict[str, Any], shake: int | None) -> dict[str, Any]:
    """Cast to float32 and shake inputs in the last bit; the pool of states is as it was: it rounds after each token."""
    rounded = copied(x, torch.float32) | {name: x[name].clone() for name in ("states",) if name in x}
    if shake is not None:
        for name in (name for name in ("q", "k", "v", "g", "states", "initial_state") if name in rounded):
            if rounded[name].dtype == torch.float32:
                rounded[name] = shaken(rounded[name], shake)
    return rounded


def tokens_of(x: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a call has for each token."""
    return {n: x[n] for n in ("q", "k", "v", "g", "beta", "norm_gate") if x.get(n) is not None}
