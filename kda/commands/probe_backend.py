"""A small live call of one backend: `python -m kda.commands.probe_backend NAME` prints {"ok", "seconds", "says"}.

Forward and backward on packed sequences, one of them empty, compared with the reference in float64 on the same inputs.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import kda
from kda.errors import NoBackendError

LENGTHS = (65, 0, 5)
H, HV = 2, 4
CASES = ((64, "float32", 1e-4), (128, "bfloat16", 2e-2))         # K = V, dtype, largest relative error
OPTIONS = {
    "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0, "output_final_state": True,
}  # fmt: skip


def make_inputs(K: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    T, N = sum(LENGTHS), len(LENGTHS)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    return {
        "q": normal(1, T, H, K), "k": normal(1, T, H, K), "v": normal(1, T, HV, K), "g": normal(1, T, HV, K),
        "beta": normal(1, T, HV), "do": normal(1, T, HV, K), "dht": normal(N, HV, K, K, dtype=torch.float32),
        "initial_state": normal(N, HV, K, K, dtype=torch.float32), "A_log": normal(HV, dtype=torch.float32),
        "dt_bias": normal(HV * K, dtype=torch.float32), "cu_seqlens": ends.to(device),
    }  # fmt: skip


def call(x: dict[str, torch.Tensor], backend: str) -> tuple[dict[str, torch.Tensor], bool]:
    """Outputs and gradients by name, and whether the backend has a backward."""
    gradients = {"do": x["do"], "dht": x["dht"]}
    keywords = {name: t for name, t in x.items() if name not in gradients} | OPTIONS | {"backend": backend}
    o, state = kda.chunk_kda(**keywords)
    try:
        grads = kda.chunk_kda_bwd(**keywords, **gradients)
    except NoBackendError:
        return {"o": o, "final_state": state}, False
    return {"o": o, "final_state": state, **grads._asdict()}, True


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = (found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float(error) if error.isfinite() else float("inf")


def try_case(backend: str, K: int, dtype: str, budget: float, device: str) -> dict:
    x = make_inputs(K, getattr(torch, dtype), device)
    exact = {name: t.double() if t.is_floating_point() else t for name, t in x.items()}
    wanted, _ = call(exact, "reference")                 # first, so that the time is not that of imports
    began = time.monotonic()
    found, has_backward = call(x, backend)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    errors = {name: relative_error(t, wanted[name]) for name, t in found.items() if t is not None}
    worst = max(errors, key=errors.get)
    what = f"K=V={K} {dtype} forward" + (" and backward" if has_backward else "")
    says = f"{what}, largest relative error {errors[worst]:.1e} in {worst}, at most {budget:g} is right"
    return {"ok": errors[worst] <= budget, "seconds": seconds, "says": says}


def probe(backend: str) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    refused = ""
    for case in CASES:
        try:
            return try_case(backend, *case, device)
        except NoBackendError as error:
            refused = next((r for name, reasons in error.choice.tried if name == backend for r in reasons), str(error))
    return {"ok": False, "seconds": 0.0, "says": f"takes none of the small calls: {refused}"}


if __name__ == "__main__":
    print("\n" + json.dumps(probe(sys.argv[1])))
