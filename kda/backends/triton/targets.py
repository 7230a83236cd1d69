"""What all plans of this backend say in Triton's words.  No torch, no Triton."""

from __future__ import annotations

from kda.compile.target import TARGETS, Target
from kda.host import Host

TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "float64": "*fp64", "int32": "*i32",
         "int64": "*i64"}  # fmt: skip


def target_of(host: Host) -> Target:
    """The newest arch whose code this GPU runs."""
    assert host.cc is not None
    fits = [t for t in TARGETS.values() if t.cc == host.cc or (t.spelling[-1] != "a" and t.cc <= host.cc)]
    return max(fits, key=lambda t: t.cc)
