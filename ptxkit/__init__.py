"""Runs the PTX of GPU kernels on a CPU and reports what is wrong with them.

    run = ptxkit.launch(ptx, grid=1, block=128, args=[x, y])
    print(run.report())

    with ptxkit.capture(arch="sm_100a") as session:   # launches of compiled kernels, on CPU tensors
        my_compiled_kernel(x, y)
    assert not session.findings
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "launch": "launches",
    "run": "cuda",
    "LaunchError": "launches",
    "Run": "report",
    "Finding": "findings",
    "SimulationError": "findings",
    "TensorMap": "tensormap",
    "capture": "capturing",
    "CaptureError": "capturing",
    "library": "capturing.host",
    "mutants": "mutation",
    "MutantsError": "mutation",
    "EngineError": "engine.build",
    "PtxError": "ptx",
}
__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])
