"""The named shapes of `kda bench`, the models of `kda compile`, and how much work a shape is.

Imports the standard library alone.

FLOPs count the products of the chunked algorithm with C = 64, 2mnk each and triangular ones in full, whatever a backend
really does, so that numbers of two backends compare.  Per token and value head:

    forward    6 C K + 4 C V +  6 K V      A_qk, A_kk, w: C K; u, A_qk v_new: C V; w h, kg^T v_new, qg h: K V
    backward  12 C K + 8 C V + 12 K V      twice as many products; recomputing the forward is not counted

Bytes are those that any kernel moves, each tensor once, in the dtype of q; beta and states, below 1%, are left out:

    forward    reads q, k, v, g and writes o
    backward   reads q, k, v, g, do and writes dq, dk, dv, dg
    step       both

The floor of a time is bytes over the bandwidth of a large copy on the same device, measured in the same run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

C = 64
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
DIRECTIONS = ("forward", "backward")
GATES = ("bounded", "softplus", "given")     # a label that names none has the first
CUSTOM = "custom"                            # the name of a shape that was given by its sizes
EXACT_TOKENS, EXACT_STEPS = 2048, 1 << 28    # tokens, and tokens * HV * K * V, that float64 walks one by one
CPU_FLOPS = 2e9                              # about what the reference does per second and thread
CPU_TOKEN = 0.005                            # about the seconds that the definition takes for a token
PATIENCE = 180.0                             # predicted seconds above which a shape needs --force
HOST_BYTES, DEVICE_BYTES = 200, 160          # needed for each token, value head and channel, about


class BenchShape(NamedTuple):
    origin: str = "given"
    B: int = 1
    T: int = 0                               # tokens of a row
    H: int = 1
    HV: int | None = None                    # None: H
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()            # packed sequences, instead of B and T
    on: str = "gpu"                          # the kind of device on which it is a default
    gate: str = GATES[0]

    @property
    def tokens(self) -> int:
        return sum(self.lengths) if self.lengths else self.B * self.T

    @property
    def heads(self) -> int:
        """HV."""
        return self.H if self.HV is None else self.HV

    @property
    def label(self) -> str:
        heads = f"H={self.H}" if self.heads == self.H else f"H={self.H} HV={self.heads}"
        dims = f"K=V={self.K}" if self.K == self.V else f"K={self.K} V={self.V}"
        gate = "" if self.gate == GATES[0] else f", {self.gate} gate"
        return f"{self._rows} {heads} {dims} {SHORT[self.dtype]}{gate}"

    @property
    def _rows(self) -> str:
        if not self.lengths:
            return f"B={self.B} T={self.T}"
        if len(set(self.lengths)) == 1:
            return f"{len(self.lengths)} x {self.lengths[0]}"
        return "[" + ",".join(map(str, self.lengths)) + "]"


class Model(NamedTuple):
    """The KDA layers of a model: K = V = 128, bfloat16, a value head per query/key head."""

    title: str
    heads: int
    layers: int                              # layers with KDA
    gate: str                                # a word of `Problem.parse`


MODELS = {
    "kimi-linear": Model("Kimi-Linear-48B-A3B", 32, 20, "softplus"),
    "kimi-k3": Model("Kimi-K3", 96, 69, "bounded"),
    "glm-5.3-flash": Model("GLM-5.3-Flash", 64, 34, "bounded"),
    "ling-3": Model("Ling 3", 32, 35, "bounded"),
}


def of_model(name: str, tokens: int) -> BenchShape:
    """Return a prefill with the heads and the gate of a model."""
    model = MODELS[name]
    return BenchShape(f"prefill of {model.title}: its heads and its gate", T=tokens, H=model.heads, on="named",
                      gate=model.gate)


def gate_in(label: str) -> str:
    """Return the gate of a shape by its label."""
    return next((gate for gate in GATES if label.endswith(f", {gate} gate")), GATES[0])


def with_gate(label: str) -> str:
    """Return a label that names its gate, whichever it is."""
    return label.removesuffix(f", {gate_in(label)} gate") + f", {gate_in(label)} gate"


SHAPES = {
    "tiny": BenchShape("seconds on any CPU", T=256, H=2, K=64, V=64, dtype="float32", on="cpu"),
    "tiny-grouped": BenchShape(
        "two value heads share a q/k head", T=256, H=1, HV=2, K=64, V=64, dtype="float32", on="cpu"
    ),
    "tiny-packed": BenchShape("a tail, an empty sequence, a single token", H=2, K=64, V=64, dtype="float32",
                              lengths=(129, 0, 1, 126), on="cpu"),
    "small": BenchShape("large enough that a CPU computes rather than calls", T=2048, H=4, K=64, V=64, dtype="float32",
                        on="named"),
    "kimi-8k": of_model("kimi-linear", 8192),
    "h32-8k": BenchShape("as many heads as Kimi-Linear and Ling 3 have", T=8192, H=32, on="named"),
    "h64-8k": BenchShape("the prefill that the peers report", T=8192, H=64),
    "h96-8k": BenchShape("more heads than fill one wave of a large GPU", T=8192, H=96),
    "h64-8k-b2": BenchShape("a batch of two", B=2, T=8192, H=64),
    "h16-8k": BenchShape("64 heads over four GPUs", T=8192, H=16),
    "h8-32k": BenchShape("few heads, a long sequence: the state is walked serially", T=32768, H=8),
    "h4-64k": BenchShape("four heads of a document", T=65536, H=4, on="named"),
    "h4-2k": BenchShape("four heads of a prompt: most SMs are idle", T=2048, H=4, on="named"),
    "h64-8k-64": BenchShape("heads of 64 channels", T=8192, H=64, K=64, V=64, on="named"),
    "h64-1k": BenchShape("short: the time to launch shows", T=1024, H=64),
    "h12-8k": BenchShape("96 heads over eight GPUs, a longer sequence", T=8192, H=12, on="named"),
    "h12-512": BenchShape("96 heads over eight GPUs, a short prompt", T=512, H=12, on="named"),
    "h8-64k": BenchShape("64 heads over eight GPUs, a long document", T=65536, H=8, on="named"),
    "h12-4k": BenchShape("96 heads over eight GPUs", T=4096, H=12),
    "h64-mixed": BenchShape("packed prompts of mixed lengths", H=64, lengths=(1300, 547, 2048, 963, 271, 3063)),
    "h64-8x1k": BenchShape("packed prompts of one length", H=64, lengths=(1024,) * 8),
}


def flops(shape: BenchShape, direction: str) -> int:
    K, V = shape.K, shape.V
    forward = 6 * C * K + 4 * C * V + 6 * K * V
    return shape.tokens * shape.heads * forward * {"forward": 1, "backward": 2, "step": 3}[direction]


def bytes_moved(shape: BenchShape, direction: str) -> int:
    if direction == "step":
        return sum(bytes_moved(shape, way) for way in DIRECTIONS)
    qk, g, v = 2 * shape.H * shape.K, shape.heads * shape.K, shape.heads * shape.V
    read, written = qk + g + v, v
    if direction == "backward":
        read, written = read + v, read
    return shape.tokens * (read + written) * BYTES[shape.dtype]


# ---------------------------------------------------------------------------------------------- what is too large


def walks_exactly(tokens: int, heads: int, K: int, V: int) -> bool:
    return tokens <= EXACT_TOKENS and tokens * heads * K * V <= EXACT_STEPS


def seconds_on_a_cpu(shape: BenchShape, directions: Sequence[str], threads: int) -> float:
    """Estimate the time of the parity check, a warm-up and the fewest launches."""
    once = sum(flops(shape, way) for way in directions) / (CPU_FLOPS * threads)
    exact = walks_exactly(shape.tokens, shape.heads, shape.K, shape.V)
    return 6 * once + (CPU_TOKEN * shape.tokens if exact else 2 * once)


def host_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def too_large(shape: BenchShape, directions: Sequence[str], threads: int | None, device_memory: int = 0) -> str | None:
    """Return why this machine skips the shape, with an estimate; `threads` are those of a CPU, None for a GPU."""
    size = shape.tokens * shape.heads * max(shape.K, shape.V)
    needs = (("host has", HOST_BYTES * size, host_memory()), ("GPU has", DEVICE_BYTES * size, device_memory))
    for what, need, available in needs:
        if available and need > 0.7 * available:
            return f"would need about {need / 2**30:.0f} GiB, and the {what} {available / 2**30:.0f} GiB"
    if threads and (seconds := seconds_on_a_cpu(shape, directions, threads)) > PATIENCE:
        work, rate = sum(flops(shape, way) for way in directions) / 1e9, CPU_FLOPS * threads / 1e9
        return f"would take about {_long(seconds)} on this CPU: {work:.0f} GFLOP, at about {rate:.0f} GFLOP/s"
    return None


def _long(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.0f} hours"
