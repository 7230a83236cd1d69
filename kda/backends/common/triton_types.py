"""Triton's names of dtypes and targets, which the plans of all Triton kernels share.  No torch, no Triton."""

from __future__ import annotations

from kda.model.host import Host
from ptxkit.compile.target import Target, code_for

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "int32": "i32", "int64": "i64"}


def target_of(host: Host) -> Target:
    target = code_for(host.cc) if host.cc else None
    assert target is not None
    return target


def width(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
