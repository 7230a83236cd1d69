"""Every check of the input, as a table: what is asked, how to see that it does not hold, what to do about it.

`check` walks the rows in order, so a row may rely on those above it.  Rows that look at shapes, dtypes and devices run
once per kind of call; rows of VALUES look at numbers and run on every call, for tensors on the CPU only: a call never
waits for the GPU.  docs/errors.md lists the rows, and tests/nothing/test_errors.py breaks each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .errors import InputError, InputTypeError
from .problem import DTYPES, Inputs, Options, Problem

MAX_K = 256
CHUNK_SIZES = (32, 64)


class Call(NamedTuple):
    op: str                                  # the public function: chunk_kda, chunk_kda_bwd, fused_recurrent_kda
    inputs: Inputs
    options: Options
    do: Any = None                           # of chunk_kda_bwd
    dht: Any = None
    out: Any = None                          # of fused_recurrent_kda

    # The letters of kda.problem; rows below "q.dims" and "v.dims" may use them.
    B = property(lambda c: c.inputs.q.shape[0])
    T = property(lambda c: c.inputs.q.shape[1])
    H = property(lambda c: c.inputs.q.shape[2])
    K = property(lambda c: c.inputs.q.shape[3])
    HV = property(lambda c: c.inputs.v.shape[2])
    V = property(lambda c: c.inputs.v.shape[3])
    N = property(lambda c: c.B if c.inputs.cu_seqlens is None else c.inputs.cu_seqlens.shape[0] - 1)

    @property
    def states(self) -> tuple[int, ...]:
        """The shape of final states."""
        return (self.N, self.HV, *((self.V, self.K) if self.options.state_v_first else (self.K, self.V)))

    @property
    def recurrent(self) -> bool:
        return self.op == "fused_recurrent_kda"


Text = str | Callable[[Call], str]


class Check(NamedTuple):
    id: str
    argument: str
    asked: Text                              # completes "<argument> must be ..."
    found: Callable[[Call], str | None]      # what breaks it; None when it holds
    fix: str
    error: type[InputError] = InputError


def shape(x: Any) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _wrong_shape(x: Any, *expected: tuple[int, ...]) -> str | None:
    return None if x is None or any(tuple(x.shape) == e for e in expected) else f"shape {shape(x)}"


def _wrong_dtype(x: Any, ok: Callable[[torch.dtype], bool]) -> str | None:
    return None if x is None or ok(x.dtype) else dtype_name(x)


def _wrong_numel(x: Any, n: int) -> str | None:
    return None if x is None or x.numel() == n else f"{x.numel()} elements, shape {shape(x)}"


def _is_index(dtype: torch.dtype) -> bool:
    return dtype in (torch.int32, torch.int64)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _given(x: Any, why: str) -> str | None:
    return None if x is None else why


def _overlaps(x: Any) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))


def _bad_bound(c: Call) -> str | None:
    bound = c.options.lower_bound
    return None if bound is None or (math.isfinite(bound) and bound < 0) else repr(bound)


def _bad_promise(c: Call) -> str | None:
    o = c.options
    if not o.safe_gate:
        return None
    if o.use_gate_in_kernel and o.lower_bound is None:
        return "safe_gate=True for a gate without a lower_bound"
    if o.lower_bound is not None and o.lower_bound < -5:
        return f"safe_gate=True with lower_bound={o.lower_bound:g}"
    return None


def _not_tensor(x: Any) -> str | None:
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__} {x!r:.60}"
    return None if x.layout == torch.strided else f"a {x.layout} tensor"


_ARGUMENTS = (*Inputs._fields, "do", "dht", "out")
_DEVICES = {"cu_seqlens": "on the device of q or the CPU", "cu_seqlens_cpu": "on the CPU"}


def _argument(c: Call, name: str) -> Any:
    return getattr(c.inputs, name) if name in Inputs._fields else getattr(c, name)


def _type_row(name: str) -> Check:
    needed = name in Inputs._fields[:5]
    return Check(f"{name}.type", name, "a dense torch.Tensor" + ("" if needed else " or None"),
                 lambda c: None if not needed and _argument(c, name) is None else _not_tensor(_argument(c, name)),
                 "Pass a tensor." if needed else "Pass a tensor, or leave it out.", InputTypeError)  # fmt: skip


def _device_row(name: str) -> Check:
    def found(c: Call) -> str | None:
        x = _argument(c, name)
        allowed = {"cu_seqlens": (c.inputs.q.device.type, "cpu"), "cu_seqlens_cpu": ("cpu",)}.get(name)
        right = x is None or (x.device.type in allowed if allowed else x.device == c.inputs.q.device)
        return None if right else f"{x.device} beside q on {c.inputs.q.device}"

    return Check(f"{name}.device", name, _DEVICES.get(name, "on the device of q"), found, f"Move {name} there.")


def _option_row(name: str, asked: str, kinds: tuple[type, ...]) -> Check:
    def found(c: Call) -> str | None:
        x = getattr(c.options, name)
        return None if isinstance(x, kinds) else f"{type(x).__name__} {x!r:.60}"

    return Check(f"{name}.type", name, asked, found, "See help(kda.chunk_kda).", InputTypeError)


_NUMBER = (int, float)

# What only the caller's side can see: Python types, and whether autograd records.
CALLER: tuple[Check, ...] = (
    *map(_type_row, _ARGUMENTS),
    _option_row("scale", "a number or None", _NUMBER),
    _option_row("lower_bound", "a number or None", (*_NUMBER, type(None))),
    _option_row("chunk_size", "an int", (int,)),
    _option_row("backend", "a str or None", (str, type(None))),
    Check("return_intermediate_states.grad", "return_intermediate_states", "used under torch.no_grad() or torch.inference_mode()",
          lambda c: "a call that records gradients" if c.options.return_intermediate_states and records_gradients(c.inputs) else None,
          "No gradient flows through the intermediate states."),
    Check("inplace_final_state.grad", "initial_state", "without gradients to be written in place",
          lambda c: "requires_grad=True" if c.options.inplace_final_state and torch.is_grad_enabled() and c.inputs.initial_state is not None and c.inputs.initial_state.requires_grad else None,
          "Use torch.no_grad(), or inplace_final_state=False."),
)  # fmt: skip

ROWS: tuple[Check, ...] = (
    *map(_device_row, _ARGUMENTS[1:]),
    # q, k, v, g, beta
    Check("q.dims", "q", "[B, T, H, K] with H >= 1", lambda c: None if c.inputs.q.dim() == 4 and c.H > 0 else f"shape {shape(c.inputs.q)}",
          "Reshape q; there is no head-first layout."),
    Check("q.dtype", "q", " or ".join(DTYPES), lambda c: None if dtype_name(c.inputs.q) in DTYPES else dtype_name(c.inputs.q),
          "Cast q, k and v."),
    Check("q.head_dim", "q", f"of 1 <= K <= {MAX_K}", lambda c: None if 1 <= c.K <= MAX_K else f"K={c.K}", "Split the heads."),
    Check("k.shape", "k", lambda c: f"of q's shape {shape(c.inputs.q)}", lambda c: _wrong_shape(c.inputs.k, tuple(c.inputs.q.shape)),
          "q and k share heads and head dim; only v, g and beta may have more heads."),
    Check("k.dtype", "k", lambda c: f"of q's dtype {dtype_name(c.inputs.q)}", lambda c: _wrong_dtype(c.inputs.k, lambda d: d == c.inputs.q.dtype),
          "Use k.to(q.dtype)."),
    Check("v.dims", "v", lambda c: f"[B={c.B}, T={c.T}, HV, V] with HV, V >= 1",
          lambda c: None if c.inputs.v.dim() == 4 and c.inputs.v.shape[:2] == c.inputs.q.shape[:2] and c.HV > 0 and c.V > 0 else f"shape {shape(c.inputs.v)}",
          "Give v the batch and the tokens of q."),
    Check("v.dtype", "v", lambda c: f"of q's dtype {dtype_name(c.inputs.q)}", lambda c: _wrong_dtype(c.inputs.v, lambda d: d == c.inputs.q.dtype),
          "Use v.to(q.dtype)."),
    Check("v.heads", "v", lambda c: f"of a multiple of H={c.H} heads", lambda c: None if c.HV % c.H == 0 else f"HV={c.HV}",
          "Each q/k head serves HV / H value heads."),
    Check("g.shape", "g", lambda c: f"[B={c.B}, T={c.T}, HV={c.HV}, K={c.K}]", lambda c: _wrong_shape(c.inputs.g, (c.B, c.T, c.HV, c.K)),
          "The gate has the heads of v and the channels of k."),
    Check("g.dtype", "g", "of a float dtype", lambda c: _wrong_dtype(c.inputs.g, _is_float), "Cast g."),
    Check("beta.shape", "beta", lambda c: f"[B={c.B}, T={c.T}, HV={c.HV}]" + (f" or [.., V={c.V}]" if c.recurrent else ""),
          lambda c: _wrong_shape(c.inputs.beta, (c.B, c.T, c.HV), *([(c.B, c.T, c.HV, c.V)] if c.recurrent else [])),
          "One beta a token and value head; fused_recurrent_kda also takes one a value channel."),
    Check("beta.dtype", "beta", "of a float dtype", lambda c: _wrong_dtype(c.inputs.beta, _is_float), "Cast beta."),
    # the gate and beta
    Check("A_log.numel", "A_log", lambda c: f"of HV={c.HV} elements", lambda c: _wrong_numel(c.inputs.A_log, c.HV), "One rate a value head."),
    Check("A_log.dtype", "A_log", "of a float dtype", lambda c: _wrong_dtype(c.inputs.A_log, _is_float), "Cast A_log."),
    Check("A_log.unused", "A_log", "left out unless use_gate_in_kernel=True",
          lambda c: None if c.options.use_gate_in_kernel else _given(c.inputs.A_log, "A_log with use_gate_in_kernel=False"),
          "Set use_gate_in_kernel=True if g holds logits; leave A_log out if g holds log decays."),
    Check("A_log.missing", "A_log", "given for a gate without a lower_bound",
          lambda c: "neither A_log nor lower_bound" if c.options.use_gate_in_kernel and c.inputs.A_log is None and c.options.lower_bound is None else None,
          "Pass A_log for -exp(A_log) softplus(g + dt_bias), or lower_bound for lower_bound sigmoid(exp(A_log) (g + dt_bias))."),
    Check("dt_bias.numel", "dt_bias", lambda c: f"of HV*K={c.HV * c.K} elements", lambda c: _wrong_numel(c.inputs.dt_bias, c.HV * c.K),
          "One bias a value head and channel."),
    Check("dt_bias.dtype", "dt_bias", "of a float dtype", lambda c: _wrong_dtype(c.inputs.dt_bias, _is_float), "Cast dt_bias."),
    Check("dt_bias.unused", "dt_bias", "left out unless use_gate_in_kernel=True",
          lambda c: None if c.options.use_gate_in_kernel else _given(c.inputs.dt_bias, "dt_bias with use_gate_in_kernel=False"),
          "Set use_gate_in_kernel=True if g holds logits; leave dt_bias out if g holds log decays."),
    Check("lower_bound.value", "lower_bound", "a finite negative number", _bad_bound, "-5.0 is the common choice; None means no bound."),
    Check("safe_gate.promise", "safe_gate", "set only for a gate within [-5, 0]", _bad_promise,
          "Leave safe_gate out: kda takes every gate at full speed and needs no promise."),
    Check("allow_neg_eigval.sigmoid", "allow_neg_eigval", "used with use_beta_sigmoid_in_kernel=True",
          lambda c: "use_beta_sigmoid_in_kernel=False" if c.options.allow_neg_eigval and not c.options.use_beta_sigmoid_in_kernel else None,
          "Set use_beta_sigmoid_in_kernel=True, or double beta yourself."),
    Check("scale.value", "scale", "a finite number", lambda c: None if math.isfinite(c.options.scale) else repr(c.options.scale),
          "None means K ** -0.5."),
    Check("chunk_size.value", "chunk_size", " or ".join(map(str, CHUNK_SIZES)),
          lambda c: None if c.options.chunk_size in CHUNK_SIZES else repr(c.options.chunk_size), "64 is the default."),
    # sequences
    Check("cu_seqlens.dims", "cu_seqlens", "[N + 1]", lambda c: None if (x := c.inputs.cu_seqlens) is None or (x.dim() == 1 and x.shape[0] > 0) else f"shape {shape(x)}",
          "Pass the N + 1 offsets of N packed sequences."),
    Check("cu_seqlens.dtype", "cu_seqlens", "int32 or int64", lambda c: _wrong_dtype(c.inputs.cu_seqlens, _is_index), "Cast cu_seqlens."),
    Check("cu_seqlens.batch", "q", "of B=1 with cu_seqlens", lambda c: None if c.inputs.cu_seqlens is None or c.B == 1 else f"B={c.B}",
          "Pack the sequences of a batch along T: x.flatten(0, 1).unsqueeze(0)."),
    Check("cu_seqlens_cpu.alone", "cu_seqlens_cpu", "a copy of cu_seqlens", lambda c: None if c.inputs.cu_seqlens is not None else _given(c.inputs.cu_seqlens_cpu, "cu_seqlens_cpu without cu_seqlens"),
          "Pass cu_seqlens as well."),
    Check("cu_seqlens_cpu.shape", "cu_seqlens_cpu", lambda c: f"of the shape of cu_seqlens, {shape(c.inputs.cu_seqlens)}",
          lambda c: c.inputs.cu_seqlens_cpu is not None and _wrong_shape(c.inputs.cu_seqlens_cpu, tuple(c.inputs.cu_seqlens.shape)) or None, "Pass cu_seqlens.cpu()."),
    Check("cu_seqlens_cpu.dtype", "cu_seqlens_cpu", "int32 or int64", lambda c: _wrong_dtype(c.inputs.cu_seqlens_cpu, _is_index), "Pass cu_seqlens.cpu()."),
    # states
    Check("initial_state.shape", "initial_state", lambda c: f"{list(c.states)}" if c.inputs.ssm_state_indices is None else f"a pool [slots, {', '.join(map(str, c.states[1:]))}]",
          lambda c: _wrong_shape(c.inputs.initial_state, c.states) if c.inputs.ssm_state_indices is None or c.inputs.initial_state is None
          else _wrong_shape(c.inputs.initial_state, (*c.inputs.initial_state.shape[:1], *c.states[1:])),
          "One (K, V) state a sequence and value head; (V, K) with state_v_first=True."),
    Check("initial_state.dtype", "initial_state", lambda c: f"float32 or q's dtype {dtype_name(c.inputs.q)}",
          lambda c: _wrong_dtype(c.inputs.initial_state, lambda d: d in (torch.float32, c.inputs.q.dtype)), "Use initial_state.float()."),
    # chunk_kda_bwd
    Check("do.shape", "do", lambda c: f"of v's shape {shape(c.inputs.v)}", lambda c: _wrong_shape(c.do, tuple(c.inputs.v.shape)), "do is the gradient of o."),
    Check("do.dtype", "do", "of a float dtype", lambda c: _wrong_dtype(c.do, _is_float), "Cast do."),
    Check("dht.shape", "dht", lambda c: f"{list(c.states)}", lambda c: _wrong_shape(c.dht, c.states), "dht is the gradient of the final states, in their layout."),
    Check("dht.dtype", "dht", "of a float dtype", lambda c: _wrong_dtype(c.dht, _is_float), "Cast dht."),
    # fused_recurrent_kda
    Check("ssm_state_indices.shape", "ssm_state_indices", lambda c: f"[N={c.N}] or [N={c.N}, S >= 1]",
          lambda c: None if (x := c.inputs.ssm_state_indices) is None or (x.dim() in (1, 2) and x.shape[0] == c.N and x.shape[-1:].numel() > 0) or (x.dim() == 1 and c.N == 0)
          else f"shape {shape(x)}", "One slot a sequence, or one a token of it."),
    Check("ssm_state_indices.dtype", "ssm_state_indices", "int32 or int64", lambda c: _wrong_dtype(c.inputs.ssm_state_indices, _is_index), "Cast ssm_state_indices."),
    Check("ssm_state_indices.pool", "initial_state", "the pool of states that ssm_state_indices points into",
          lambda c: "None" if c.inputs.ssm_state_indices is not None and c.inputs.initial_state is None else None, "Pass initial_state=pool."),
    Check("num_accepted_tokens.shape", "num_accepted_tokens", lambda c: f"[N={c.N}]", lambda c: _wrong_shape(c.inputs.num_accepted_tokens, (c.N,)), "One count a sequence."),
    Check("num_accepted_tokens.dtype", "num_accepted_tokens", "int32 or int64", lambda c: _wrong_dtype(c.inputs.num_accepted_tokens, _is_index), "Cast num_accepted_tokens."),
    Check("num_accepted_tokens.slots", "num_accepted_tokens", "used with ssm_state_indices of shape [N, S]",
          lambda c: None if (x := c.inputs.ssm_state_indices) is not None and x.dim() == 2 else _given(c.inputs.num_accepted_tokens, "no slots per token"),
          "It says from which of a sequence's slots to go on."),
    Check("inplace_final_state.state", "inplace_final_state", "used with an initial_state", lambda c: "initial_state=None" if c.options.inplace_final_state and c.inputs.initial_state is None else None,
          "The final states are written into initial_state."),
    Check("out.shape", "out", lambda c: f"of v's shape {shape(c.inputs.v)}", lambda c: _wrong_shape(c.out, tuple(c.inputs.v.shape)), "out takes o."),
    Check("out.dtype", "out", lambda c: f"of q's dtype {dtype_name(c.inputs.q)}", lambda c: _wrong_dtype(c.out, lambda d: d == c.inputs.q.dtype), "out takes o."),
)  # fmt: skip


def _offsets(x: Any, T: int) -> str | None:
    ends = x.tolist()
    if ends[0] != 0:
        return f"a first offset of {ends[0]}"
    for n, (start, end) in enumerate(zip(ends, ends[1:])):
        if end < start:
            return f"sequence {n} from {start} to {end}"
    return f"a last offset of {ends[-1]}" if ends[-1] > T else None


def on_cpu(x: Any) -> bool:
    return x is not None and x.device.type == "cpu"


def _differing(c: Call) -> str | None:
    a, b = c.inputs.cu_seqlens, c.inputs.cu_seqlens_cpu
    if on_cpu(a) and b is not None and a.tolist() != b.tolist():
        return f"{b.tolist()[:8]} beside {a.tolist()[:8]}"
    return None


def _bad_slots(c: Call) -> str | None:
    x = c.inputs.ssm_state_indices
    if not on_cpu(x):
        return None
    slots = c.inputs.initial_state.shape[0]
    return f"slot {int(x.max())} of a pool of {slots}" if x.numel() and int(x.max()) >= slots else None


def _shared_slots(c: Call) -> str | None:
    x = c.inputs.ssm_state_indices
    if not on_cpu(x) or not c.options.inplace_final_state:
        return None
    owner: dict[int, int] = {}
    for n, slots in enumerate(x.reshape(x.shape[0], -1).tolist()):
        for slot in slots:
            if slot >= 0 and owner.setdefault(slot, n) != n:
                return f"slot {slot} for sequences {owner[slot]} and {n}"
    return None


def _lengths(c: Call) -> list[int] | None:
    """Lengths of the sequences, as far as they can be known without waiting for a GPU."""
    ends = host_offsets(c.inputs)
    if c.inputs.cu_seqlens is None:
        return [c.T] * c.B
    return None if ends is None else [b - a for a, b in zip(ends, ends[1:])]


def _too_few_slots(c: Call) -> str | None:
    x = c.inputs.ssm_state_indices
    longest = max(_lengths(c) or [0])
    if x is None or x.dim() != 2 or not c.options.inplace_final_state or longest <= x.shape[1]:
        return None
    return f"{x.shape[1]} slots for a sequence of {longest} tokens"


def _bad_counts(c: Call) -> str | None:
    x = c.inputs.num_accepted_tokens
    if not on_cpu(x):
        return None
    S = c.inputs.ssm_state_indices.shape[1]
    return next((f"{n} for sequence {i} with S={S}" for i, n in enumerate(x.tolist()) if not 1 <= n <= S), None)


VALUES: tuple[Check, ...] = (
    Check("inplace_final_state.overlap", "initial_state", "memory of its own to be written in place",
          lambda c: f"strides {c.inputs.initial_state.stride()}" if c.options.inplace_final_state and _overlaps(c.inputs.initial_state) else None,
          "Use initial_state.contiguous(), or inplace_final_state=False."),
    Check("out.overlap", "out", "memory of its own", lambda c: f"strides {c.out.stride()}" if c.out is not None and _overlaps(c.out) else None, "Use torch.empty_like(v)."),
    Check("cu_seqlens.values", "cu_seqlens", lambda c: f"offsets from 0, never falling, to at most T={c.T}",
          lambda c: _offsets(c.inputs.cu_seqlens, c.T) if on_cpu(c.inputs.cu_seqlens) else None, "Offsets are cumulative sums of the lengths."),
    Check("cu_seqlens_cpu.values", "cu_seqlens_cpu", lambda c: f"offsets from 0, never falling, to at most T={c.T}",
          lambda c: _offsets(c.inputs.cu_seqlens_cpu, c.T) if c.inputs.cu_seqlens_cpu is not None else None, "Pass cu_seqlens.cpu()."),
    Check("cu_seqlens_cpu.differs", "cu_seqlens_cpu", "equal to cu_seqlens", _differing, "Pass cu_seqlens.cpu()."),
    Check("ssm_state_indices.range", "ssm_state_indices", "slots of the pool, or -1 for padding", _bad_slots, "Check the slot allocator, or grow the pool."),
    Check("ssm_state_indices.shared", "ssm_state_indices", "different for each sequence when states are written in place", _shared_slots,
          "Two sequences would write one state; give each its own slots."),
    Check("ssm_state_indices.per_token", "ssm_state_indices", "[N, S] with S at least the longest sequence", _too_few_slots,
          "The state after every token is stored; pass a slot for each."),
    Check("num_accepted_tokens.range", "num_accepted_tokens", "from 1 to S", _bad_counts, "At least one token of the last step was accepted."),
)  # fmt: skip

class GateCall(NamedTuple):
    """A call of fused_kda_gate."""

    op: str
    g: Any
    A_log: Any
    dt_bias: Any
    lower_bound: Any
    output_dtype: Any


def _gate_type(name: str) -> Check:
    return Check(f"gate.{name}.type", name, "a dense torch.Tensor" + ("" if name == "g" else " or None"),
                 lambda c: None if name != "g" and getattr(c, name) is None else _not_tensor(getattr(c, name)),
                 "Pass a tensor.", InputTypeError)  # fmt: skip


GATE: tuple[Check, ...] = (
    *map(_gate_type, ("g", "A_log", "dt_bias")),
    Check("gate.g.shape", "g", "[.., HV, K]", lambda c: None if c.g.dim() >= 2 else f"shape {shape(c.g)}", "The last two axes are heads and channels."),
    Check("gate.g.dtype", "g", "of a float dtype", lambda c: _wrong_dtype(c.g, _is_float), "Cast g."),
    Check("gate.A_log.numel", "A_log", lambda c: f"of HV={c.g.shape[-2]} elements", lambda c: _wrong_numel(c.A_log, c.g.shape[-2]), "One rate a value head."),
    Check("gate.A_log.dtype", "A_log", "of a float dtype", lambda c: _wrong_dtype(c.A_log, _is_float), "Cast A_log."),
    Check("gate.A_log.missing", "A_log", "given for a gate without a lower_bound", lambda c: "neither A_log nor lower_bound" if c.A_log is None and c.lower_bound is None else None,
          "Pass A_log, or lower_bound for the bounded gate."),
    Check("gate.dt_bias.numel", "dt_bias", lambda c: f"of HV*K={c.g.shape[-2] * c.g.shape[-1]} elements", lambda c: _wrong_numel(c.dt_bias, c.g.shape[-2] * c.g.shape[-1]),
          "One bias a value head and channel."),
    Check("gate.dt_bias.dtype", "dt_bias", "of a float dtype", lambda c: _wrong_dtype(c.dt_bias, _is_float), "Cast dt_bias."),
    Check("gate.lower_bound.value", "lower_bound", "a finite negative number or None",
          lambda c: None if c.lower_bound is None or (isinstance(c.lower_bound, (int, float)) and math.isfinite(c.lower_bound) and c.lower_bound < 0) else repr(c.lower_bound),
          "-5.0 is the common choice."),
    Check("gate.output_dtype.value", "output_dtype", "a float dtype of torch",
          lambda c: None if isinstance(c.output_dtype, torch.dtype) and _is_float(c.output_dtype) else repr(c.output_dtype), "torch.float32 is the default."),
    Check("gate.device", "g", "on one device with A_log and dt_bias",
          lambda c: next((f"{x.device} beside g on {c.g.device}" for x in (c.A_log, c.dt_bias) if x is not None and x.device != c.g.device), None),
          "Move them to one device."),
)  # fmt: skip

# Rows whose check lives where the argument is first seen: id -> argument.
ELSEWHERE = {
    "keyword.unknown": "any unknown keyword", "state_layout.both": "transpose_state_layout", "cp_context.none": "cp_context",
    "flag.type": "any flag", "saved.type": "saved", "backend.name": "backend",
}  # fmt: skip


def fail(c: Any, row: Check, found: str) -> None:
    asked = row.asked if isinstance(row.asked, str) else row.asked(c)
    raise row.error(c.op, row.argument, asked, found, row.fix, row.id)


def check(c: Any, rows: tuple[Check, ...] = ROWS) -> None:
    for row in rows:
        found = row.found(c)
        if found is not None:
            fail(c, row, found)


def records_gradients(inputs: Inputs) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:8])


def host_offsets(x: Inputs) -> list[int] | None:
    """cu_seqlens as a list if a CPU holds it."""
    source = x.cu_seqlens_cpu if x.cu_seqlens_cpu is not None else x.cu_seqlens
    return source.tolist() if on_cpu(source) else None


def host_lengths(x: Inputs) -> list[int] | None:
    """cu_seqlens as a list, waiting for the GPU if it must, and checked; None without cu_seqlens."""
    if x.cu_seqlens is None:
        return None
    ends = host_offsets(x)
    if ends is not None:
        return ends
    host = x.cu_seqlens.cpu()
    found = _offsets(host, x.q.shape[1])
    if found is not None:
        raise InputError("kda", "cu_seqlens", f"offsets from 0, never falling, to at most T={x.q.shape[1]}", found,
                         "Offsets are cumulative sums of the lengths.", "cu_seqlens.values")  # fmt: skip
    return host.tolist()


_known: dict[tuple, Problem] = {}


def problem_of(c: Call, direction: str = "forward") -> Problem:
    """The checked Problem of a call; a kind of call that was seen before costs one look-up and the VALUES."""
    key = (c.op, direction, c.options, *(x if x is None else (x.shape, x.dtype, x.device) for x in c.inputs))
    if c.op != "chunk_kda":
        key += tuple(x if x is None else (x.shape, x.dtype, x.device) for x in (c.do, c.dht, c.out))
    problem = _known.get(key)
    if problem is None:
        check(c)
        if len(_known) >= 4096:
            _known.clear()
        problem = _known[key] = describe(c, direction)
    if c.inputs.cu_seqlens is not None or c.recurrent:
        check(c, VALUES)
    return problem


def describe(c: Call, direction: str) -> Problem:
    x, o = c.inputs, c.options
    gate = "given" if not o.use_gate_in_kernel else "softplus" if o.lower_bound is None else "bounded"
    beta = "given" if not o.use_beta_sigmoid_in_kernel else "2*sigmoid" if o.allow_neg_eigval else "sigmoid"
    return Problem(
        op="recurrent" if c.recurrent else "chunk", direction=direction, device=str(x.q.device),
        B=c.B, T=c.T, N=c.N, H=c.H, HV=c.HV, K=c.K, V=c.V, C=o.chunk_size,
        dtype=dtype_name(x.q), g_dtype=dtype_name(x.g), beta_dtype=dtype_name(x.beta),
        state_dtype=None if x.initial_state is None else dtype_name(x.initial_state), packed=x.cu_seqlens is not None,
        gate=gate, lower_bound=o.lower_bound, A_log=x.A_log is not None, dt_bias=x.dt_bias is not None,
        beta=beta, beta_per_value=x.beta.dim() == 4, qk_l2norm=o.use_qk_l2norm_in_kernel, scale=o.scale,
        final_state=o.output_final_state, intermediate_states=o.return_intermediate_states, state_v_first=o.state_v_first,
        disable_recompute=o.disable_recompute, batch_invariant=o.batch_invariant,
        slots=0 if x.ssm_state_indices is None else x.initial_state.shape[0],
        slots_per_token=x.ssm_state_indices is not None and x.ssm_state_indices.dim() == 2,
        accepted_tokens=x.num_accepted_tokens is not None, inplace=o.inplace_final_state,
    )  # fmt: skip
