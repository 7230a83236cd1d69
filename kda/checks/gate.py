"""Every check of a call of fused_kda_gate, a table of `checks.calls.Requirement`; rows are in docs/data/errors.json."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .calls import Requirement, bad_bound, dtype_row, is_float, numel_row, shape_of, type_row, when


class GateCall(NamedTuple):
    """A call of fused_kda_gate."""

    op: str
    g: Any
    A_log: Any
    dt_bias: Any
    lower_bound: Any
    output_dtype: Any

    @property
    def HV(self) -> int:
        return self.g.shape[-2]

    @property
    def K(self) -> int:
        return self.g.shape[-1]

    def tensor(self, name: str) -> Any:
        return getattr(self, name)


def _gate_device(c: GateCall) -> str | None:
    others = [x.device for x in (c.A_log, c.dt_bias) if x is not None and x.device != c.g.device]
    return f"{others[0]} beside g on {c.g.device}" if others else None


GATE: tuple[Requirement, ...] = (
    *(type_row(name, needed=name == "g", id=f"gate.{name}.type") for name in ("g", "A_log", "dt_bias")),
    Requirement("gate.device", "g", "on one device with A_log and dt_bias", _gate_device, "Move them to one device."),
    Requirement(
        "gate.g.shape", "g", "[.., HV, K]", lambda c: f"shape {shape_of(c.g)}" if c.g.dim() < 2 else None,
        "The last two axes are heads and channels.",
    ),
    *(dtype_row(name, "a float dtype", id=f"gate.{name}.dtype") for name in ("g", "A_log", "dt_bias")),
    numel_row("A_log", "HV", "One rate per value head.", id="gate.A_log.numel"),
    numel_row("dt_bias", "HV*K", "One bias per value head and channel.", id="gate.dt_bias.numel"),
    Requirement(
        "gate.A_log.missing", "A_log", "given for a gate without a lower_bound",
        lambda c: when(c.A_log is None and c.lower_bound is None, "neither"),
        "Pass A_log, or lower_bound for the bounded gate.",
    ),
    Requirement(
        "gate.lower_bound.value", "lower_bound", "a finite negative number or None",
        lambda c: bad_bound(c.lower_bound), "-5.0 is the common choice.",
    ),
    Requirement(
        "gate.output_dtype.value", "output_dtype", "a float dtype of torch",
        lambda c: when(not (isinstance(x := c.output_dtype, torch.dtype) and is_float(x)), repr(c.output_dtype)),
        "torch.float32 is the default.",
    ),
)
