"""Every check of the input, as tables: the requirement, how to detect a violation, what to do about it.

`check` walks rows in order, so a row may rely on those before it:

  CALLER   Python types, and whether gradients are wanted: seen by the public functions
  KIND     shapes, dtypes and options: once per kind of call, also below torch.compile
  VALUES   numbers and memory: on every call; only numbers on the CPU, because a call never waits for the GPU

Those of fused_kda_gate are in kda.checks.gate. docs/data/errors.json lists all rows, and test_errors.py breaks each.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch

from kda.errors import InputError, InputTypeError, in_words
from kda.model import offsets
from kda.model.force import forced
from kda.model.problem import DTYPES, MAX_K, Inputs, Options, Problem, beta_of, gate_of, name_of_dtype

from . import written
from .memo import Memo, Outline, kind_of_call

CHUNK_SIZES = (32, 64)


def _size(name: str, axis: int) -> Any:
    return property(lambda c: c.tensor(name).shape[axis])


SIZES = (*(_size("q", axis) for axis in range(4)), _size("v", 2), _size("v", 3))       # B (or N), T, H, K, HV, V


class _Call(NamedTuple):
    op: str                                  # the public function: chunk_kda, chunk_kda_bwd, fused_recurrent_kda
    inputs: Inputs
    options: Options
    do: Any = None                           # only chunk_kda_bwd has do and dht
    dht: Any = None
    out: Any = None                          # only fused_recurrent_kda has it


class Call(_Call):
    """A call of one of the functions with the arguments of chunk_kda, for all checks."""

    __slots__ = ()
    # The letters of kda.model.problem; rows after "q.shape" and "v.shape" may use them.
    B, T, H, K, HV, V = SIZES
    N = property(lambda c: c.B if c.inputs.cu_seqlens is None else c.inputs.cu_seqlens.shape[0] - 1)
    gate_per_head = property(lambda c: c.inputs.g.dim() == 3)

    @property
    def states(self) -> tuple[int, ...]:
        """The shape of final states."""
        return (self.N, self.HV, *((self.V, self.K) if self.options.state_v_first else (self.K, self.V)))

    @property
    def recurrent(self) -> bool:
        return self.op == "fused_recurrent_kda"

    def tensor(self, name: str) -> Any:
        return getattr(self.inputs, name) if name in Inputs._fields else getattr(self, name)


ARGUMENTS = (*Inputs._fields, "do", "dht", "out")
REQUIRED = Inputs._fields[:5]


class Requirement(NamedTuple):
    id: str
    argument: str
    asked: str | Callable[[Any], str]        # completes "<argument> must be ..."
    found: Callable[[Any], str | None]       # the violation; None if the requirement holds
    fix: str
    error: type[InputError] = InputError


def check(call: Any, rows: Iterable[Requirement]) -> None:
    """Raise an error for the first row whose requirement is violated."""
    for row in rows:
        found = row.found(call)
        if found is not None:
            refuse(call, row, found)


def refuse(call: Any, row: Requirement, found: str) -> NoReturn:
    asked = row.asked if isinstance(row.asked, str) else row.asked(call)
    raise row.error(call.op, row.argument, asked, found, row.fix, row.id)


# what rows are made of


def shape_of(x: Any) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def dtype_name(x: Any) -> str:
    return name_of_dtype(x.dtype)


def is_index(dtype: torch.dtype) -> bool:
    return dtype in (torch.int32, torch.int64)


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def on_cpu(x: Any) -> bool:
    return x is not None and x.device.type == "cpu"


def is_training(inputs: Inputs) -> bool:
    return torch.is_grad_enabled() and True in [getattr(x, "requires_grad", False) for x in inputs[:8]]


def autocasts(x: torch.Tensor) -> bool:
    """Whether torch.autocast is active on the device of `x`."""
    return torch._C._is_any_autocast_enabled() and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def number(x: Any) -> Any:
    """Convert numpy's numbers to Python's. A bool is no number: a flag in the place of a scale is a mistake."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        return x
    return int(x) if isinstance(x, numbers.Integral) else float(x)


def is_number(x: Any, *kinds: type) -> bool:
    return isinstance(x, kinds) and not isinstance(x, bool)


def is_finite(x: float) -> bool:
    """Whether x is finite; x may be an int that is too large for a float."""
    return -math.inf < x < math.inf and abs(x) <= sys.float_info.max


def when(broken: Any, found: str) -> str | None:
    return found if broken else None


def not_dense(x: torch.Tensor) -> str | None:
    """A nested tensor has no shape, whatever its layout."""
    return "a nested tensor" if x.is_nested else when(x.layout != torch.strided, f"a tensor of layout {x.layout}")


# These return the row of one kind for any argument; the error has another `id` and another name if they are given.


def type_row(name: str, needed: bool, id: str | None = None, argument: str | None = None) -> Requirement:
    def found(c: Any) -> str | None:
        x = c.tensor(name)
        if isinstance(x, torch.Tensor):
            return not_dense(x)
        return when(needed or x is not None, in_words(x))

    asked = "a dense torch.Tensor" + ("" if needed else " or None")
    return Requirement(id or f"{name}.type", argument or name, asked, found, "Pass a tensor.", InputTypeError)


def shape_row(
    name: str, letters: str, fix: str, sizes: Callable[[Any], tuple[int, ...]] | None = None, id: str | None = None,
    argument: str | None = None, last_optional: bool = False,
) -> Requirement:
    """Return the check of a shape: `letters` such as "B T HV K", with the sizes of that name or those given;
    `last_optional`: a tensor without the last axis is accepted, too."""

    def expected(c: Any) -> tuple[int, ...]:
        return sizes(c) if sizes else tuple(getattr(c, letter) for letter in letters.split())

    def asked(c: Any) -> str:
        whole = "[" + ", ".join(f"{letter}={n}" for letter, n in zip(letters.split(), expected(c))) + "]"
        return whole + (f" or [{', '.join(letters.split()[:-1])}]" if last_optional else "")

    def found(c: Any) -> str | None:
        x = c.tensor(name)
        if x is None:
            return None
        wanted = expected(c)
        right = wanted[:-1] if last_optional and x.dim() == len(wanted) - 1 else wanted
        return when(tuple(x.shape) != right, f"shape {shape_of(x)}")

    return Requirement(id or f"{name}.shape", argument or name, asked, found, fix)


def numel_row(
    name: str, letters_of: str | Callable[[Any], str], fix: str, id: str | None = None, asked: str = "a tensor of"
) -> Requirement:
    def letters(c: Any) -> str:
        return letters_of if isinstance(letters_of, str) else letters_of(c)

    def wanted(c: Any) -> int:
        return math.prod([getattr(c, letter) for letter in letters(c).split("*")])  # torch.compile traces it

    def found(c: Any) -> str | None:
        x = c.tensor(name)
        return None if x is None or x.numel() == wanted(c) else f"{x.numel()} elements, shape {shape_of(x)}"

    return Requirement(id or f"{name}.numel", name, lambda c: f"{asked} {letters(c)}={wanted(c)} elements", found, fix)


def bias_row(id: str | None = None, asked: str = "a tensor of") -> Requirement:
    fix = "One bias per value head and channel; per value head where g has no channels."
    return numel_row("dt_bias", lambda c: "HV" if c.gate_per_head else "HV*K", fix, id, asked)


_DTYPE_KINDS: dict[str, tuple[Callable[[Any, torch.dtype], bool], str]] = {
    "q's dtype": (lambda c, dtype: dtype == c.tensor("q").dtype, "Use {}.to(q.dtype)."),
    "a float dtype": (lambda c, dtype: is_float(dtype), "Use {}.float()."),
    "float32": (lambda c, dtype: dtype in (torch.float32, torch.float64), "Use {}.float()."),
    "int32 or int64": (lambda c, dtype: is_index(dtype), "Use {}.long()."),
}


def dtype_row(
    name: str, kind: str, id: str | None = None, argument: str | None = None, asked: str = "a tensor of"
) -> Requirement:
    right, fix = _DTYPE_KINDS[kind]

    def found(c: Any) -> str | None:
        x = c.tensor(name)
        if x is None or right(c, x.dtype):
            return None
        return dtype_name(x) + (f", and {dtype_name(c.tensor('q'))} q" if "q's" in kind else "")

    return Requirement(id or f"{name}.dtype", argument or name, f"{asked} {kind}", found, fix.format(argument or name))


def device_row(
    name: str, asked: str = "on the device of q", fix: str = "", id: str | None = None, argument: str | None = None
) -> Requirement:
    def found(c: Any) -> str | None:
        x, home = c.tensor(name), c.tensor("q").device
        right = x is None or ("q" in asked and x.device == home) or ("CPU" in asked and x.device.type == "cpu")
        return when(not right, f"{x.device} beside q on {home}" if x is not None else "")

    return Requirement(id or f"{name}.device", argument or name, asked, found, fix or f"Move {name} there.")


def option_row(name: str, asked: str, fix: str, *kinds: type, id: str | None = None) -> Requirement:
    def found(c: Any) -> str | None:
        x = getattr(c.options, name)
        return when(not is_number(x, *kinds), in_words(x))

    return Requirement(id or f"{name}.type", name, asked, found, fix, InputTypeError)


def logits_only_row(name: str, id: str | None = None, fix: str = "") -> Requirement:
    return Requirement(
        id or f"{name}.unused", name, "left out unless use_gate_in_kernel=True",
        lambda c: when(c.tensor(name) is not None and not c.options.use_gate_in_kernel, "use_gate_in_kernel=False"),
        fix or f"Set use_gate_in_kernel=True if g holds logits; leave {name} out if g holds log decays.",
    )


def _own_memory_row(name: str, id: str, is_written: Callable[[Call], bool]) -> Requirement:
    def found(c: Call) -> str | None:
        x = c.tensor(name)
        if x is None or not is_written(c) or x.is_contiguous():
            return None
        return when(written.may_overlap(x), f"strides {tuple(x.stride())} of shape {shape_of(x)}")

    return Requirement(id, name, "a tensor without overlap, because it is written", found, f"Use {name}.contiguous().")


# CALLER


def _training_state(c: Call) -> str | None:
    x = c.inputs.initial_state
    return when(c.options.inplace_final_state and x is not None and x.requires_grad and torch.is_grad_enabled(),
                 "requires_grad=True")


def _training_out(c: Call) -> str | None:
    if c.out is None or not torch.is_grad_enabled():
        return None
    return "gradients recorded" if is_training(c.inputs) else when(c.out.requires_grad, "requires_grad=True")


# These check whether gradients are wanted.
INTERMEDIATE_STATES = Requirement(
    "return_intermediate_states.grad", "return_intermediate_states", "used under torch.no_grad()",
    lambda c: when(c.options.return_intermediate_states and is_training(c.inputs), "gradients recorded"),
    "No gradient flows through the intermediate states.",
)
WRITTEN_STATE = Requirement(
    "inplace_final_state.grad", "initial_state", "a tensor without gradients to be written in place", _training_state,
    "Use torch.no_grad(), or inplace_final_state=False.",
)

TRAINING_POOL = Requirement(
    "ssm_state_indices.grad", "ssm_state_indices", "used under torch.no_grad()",
    lambda c: when(not c.recurrent and c.inputs.ssm_state_indices is not None and is_training(c.inputs),
                    "gradients recorded"),
    "No gradient flows through a pool; pass initial_state=pool[slots] to train.",
)

TRAINING_OUT = Requirement(
    "out.grad", "out", "used under torch.no_grad()",
    lambda c: _training_out(c), "No gradient flows through out; leave it out to record gradients.",
)

TRAINING = (INTERMEDIATE_STATES, WRITTEN_STATE, TRAINING_POOL, TRAINING_OUT)

NUMBERS = (
    option_row("scale", "a number or None", "Pass a float, such as 0.125, or None for K ** -0.5.", int, float),
    option_row(
        "lower_bound", "a number or None", "Pass a float, such as -5.0, or None for no bound.", int, float, type(None)
    ),
    option_row("chunk_size", "an int", "Pass 32 or 64, or leave it out.", int),
)

CALLER: tuple[Requirement, ...] = (
    *(type_row(name, needed=name in REQUIRED) for name in ARGUMENTS),
    *NUMBERS,
    option_row("backend", "a str or None", "Pass the name of a backend, or leave it out.", str, type(None)),
    *TRAINING,
)


# KIND


def bad_v(c: Any) -> str | None:
    v, q = c.tensor("v"), c.tensor("q")
    right = v.dim() == 4 and v.shape[0] == q.shape[0] and v.shape[1] == c.T and c.HV > 0 and c.V > 0
    return None if right else f"shape {shape_of(v)}"


def _bad_beta(c: Call) -> str | None:
    x = c.inputs.beta
    shapes = [(c.B, c.T, c.HV), (c.B, c.T, c.HV, c.V)][: 2 if c.recurrent else 1]
    return None if tuple(x.shape) in shapes else f"shape {shape_of(x)}"


def bad_bound(bound: Any) -> str | None:
    right = bound is None or (is_number(bound, int, float) and is_finite(bound) and bound < 0)
    return None if right else f"{bound!r:.60}"


def _bad_promise(c: Call) -> str | None:
    o = c.options
    if o.safe_gate and o.use_gate_in_kernel and o.lower_bound is None:
        return "safe_gate=True for a gate without a lower_bound"
    return when(o.safe_gate and o.lower_bound is not None and o.lower_bound < -5, f"lower_bound={o.lower_bound}")


def _bad_offsets_shape(c: Call) -> str | None:
    x = c.inputs.cu_seqlens
    return None if x is None or (x.dim() == 1 and x.shape[0] > 0) else f"shape {shape_of(x)}"


def _states_asked(c: Call) -> str:
    first = "N" if c.inputs.ssm_state_indices is None else "slots"
    last = "V, K" if c.options.state_v_first else "K, V"
    sizes = [str(c.N) if first == "N" else "slots", *map(str, c.states[1:])]
    return f"[{first}, HV, {last}] = [{', '.join(sizes)}]"


def _bad_state(c: Call) -> str | None:
    x, expected = c.inputs.initial_state, c.states
    if x is None:
        return None
    if c.inputs.ssm_state_indices is not None:
        expected = (*x.shape[:1], *expected[1:])
    return when(tuple(x.shape) != expected, f"shape {shape_of(x)}")


def _bad_state_dtype(c: Call) -> str | None:
    x, any_float = c.inputs.initial_state, c.recurrent or c.inputs.ssm_state_indices is not None
    good = x is None or (is_float(x.dtype) if any_float else x.dtype in (torch.float32, c.inputs.q.dtype))
    return None if good else dtype_name(x)


def _bad_slots(c: Call) -> str | None:
    x, dims = c.inputs.ssm_state_indices, (1, 2) if c.recurrent else (1,)
    right = x is None or (x.dim() in dims and x.shape[0] == c.N and (x.dim() == 1 or x.shape[1] > 0))
    return None if right else f"shape {shape_of(x)}"


def _bad_checkpoints(c: Call) -> str | None:
    x = c.inputs.checkpoint_offsets
    right = x is None or (x.dim() == 2 and x.shape[0] == c.N and x.shape[1] > 0)
    return None if right else f"shape {shape_of(x)}"


def _other_checkpoints(c: Call) -> str | None:
    offsets, slots = c.inputs.checkpoint_offsets, c.inputs.checkpoint_indices
    if offsets is None or slots is None:
        return when(offsets is not slots, "one without the other")
    return when(offsets.shape != slots.shape, f"shape {shape_of(slots)} beside {shape_of(offsets)}")


def _without_pool(name: str) -> Callable[[Call], str | None]:
    return lambda c: when(c.tensor(name) is not None and c.inputs.ssm_state_indices is None, "ssm_state_indices=None")


def _heads_first(c: Call) -> str | None:
    shape = c.inputs.g.shape                 # the right one first: an export with a dynamic T must permit T == HV
    return when(shape != (c.B, c.T, c.HV, c.K) and shape == (c.B, c.HV, c.T, c.K), f"shape {shape_of(c.inputs.g)}")


def _no_slots_per_token(c: Call) -> str | None:
    x = c.inputs.ssm_state_indices
    return when(c.inputs.num_accepted_tokens is not None and (x is None or x.dim() != 2), "no slots per token")


GATE_FIX = "The gate has the heads of v and the channels of k, or one number per head."
DEVICES = {"cu_seqlens": "on the device of q or the CPU", "cu_seqlens_cpu": "on the CPU"}

LOWER_BOUND = Requirement(
    "lower_bound.value", "lower_bound", "a finite negative number", lambda c: bad_bound(c.options.lower_bound),
    "-5.0 is the common choice; None means no bound.",
)
SIGMOID = Requirement(
    "allow_neg_eigval.sigmoid", "allow_neg_eigval", "used with use_beta_sigmoid_in_kernel=True",
    lambda c: when(c.options.allow_neg_eigval and not c.options.use_beta_sigmoid_in_kernel, "no sigmoid"),
    "Set use_beta_sigmoid_in_kernel=True, or double beta yourself.",
)
SCALE = Requirement(
    "scale.value", "scale", "a finite number",
    lambda c: when(not is_finite(c.options.scale), f"{c.options.scale!r:.60}"), "None means K ** -0.5.",
)

KIND: tuple[Requirement, ...] = (
    Requirement(
        "q.shape", "q", "[B, T, H, K] with H >= 1",
        lambda c: when(c.inputs.q.dim() != 4 or c.H == 0, f"shape {shape_of(c.inputs.q)}"),
        "Reshape q; there is no head-first layout.",
    ),
    Requirement(
        "q.dtype", "q", "a tensor of " + ", ".join(DTYPES[:-1]) + f" or {DTYPES[-1]}",
        lambda c: when(dtype_name(c.inputs.q) not in DTYPES, dtype_name(c.inputs.q)), "Cast q, k and v.",
    ),
    Requirement(
        "q.head_dim", "q", lambda c: "a tensor with K >= 1" if c.recurrent else f"a tensor with 1 <= K <= {MAX_K}",
        lambda c: when(c.K < 1 or not (c.recurrent or c.K <= MAX_K), f"K={c.K}"),
        "Build the model with more heads of fewer channels; fused_recurrent_kda accepts K up to 1,024 on a GPU, any K "
        "on a CPU.",
    ),
    *(device_row(name, DEVICES.get(name, "on the device of q")) for name in ARGUMENTS[1:]),
    shape_row("k", "B T H K", "q and k share heads and head dim; only v, g and beta may have more heads."),
    dtype_row("k", "q's dtype"),
    Requirement(
        "v.shape", "v", lambda c: f"[B={c.B}, T={c.T}, HV, V] with HV, V >= 1", bad_v,
        "Give v the batch and the tokens of q; heads come behind the tokens.",
    ),
    dtype_row("v", "q's dtype"),
    Requirement(
        "v.heads", "v", lambda c: f"a tensor with a multiple of H={c.H} heads",
        lambda c: when(c.HV % c.H, f"HV={c.HV}"), "Each q/k head serves HV / H value heads.",
    ),
    Requirement(
        "g.heads_first", "g", lambda c: f"[B={c.B}, T={c.T}, HV={c.HV}, K={c.K}], by the shapes of q, k and v",
        _heads_first, "Either g or q, k and v have heads before tokens; use x.transpose(1, 2) on those.",
    ),
    shape_row("g", "B T HV K", GATE_FIX, last_optional=True),
    dtype_row("g", "a float dtype"),
    Requirement(
        "beta.shape", "beta",
        lambda c: f"[B={c.B}, T={c.T}, HV={c.HV}]" + (f" or [.., V={c.V}]" if c.recurrent else ""), _bad_beta,
        "One beta per token and value head; heads come after tokens, in all inputs. Only fused_recurrent_kda accepts "
        "one per value channel.",
    ),
    dtype_row("beta", "a float dtype"),
    numel_row("A_log", "HV", "One rate per value head."),
    dtype_row("A_log", "a float dtype"),
    logits_only_row("A_log"),
    Requirement(
        "A_log.missing", "A_log", "given for a gate without a lower_bound",
        lambda c: when(c.options.use_gate_in_kernel and c.inputs.A_log is c.options.lower_bound is None, "neither"),
        "Pass A_log for -exp(A_log) softplus(g + dt_bias), or lower_bound for the bounded gate.",
    ),
    bias_row(),
    dtype_row("dt_bias", "a float dtype"),
    logits_only_row("dt_bias"),
    LOWER_BOUND,
    Requirement("safe_gate.promise", "safe_gate", "set only for a gate within [-5, 0]", _bad_promise,
                "Leave safe_gate out: kda runs every gate at full speed and needs no promise."),
    SIGMOID,
    SCALE,
    Requirement("chunk_size.value", "chunk_size", f"either {' or '.join(map(str, CHUNK_SIZES))}", lambda c: when(
        c.options.chunk_size not in CHUNK_SIZES, repr(c.options.chunk_size)), "64 is the default."),
    Requirement(
        "cu_seqlens.shape", "cu_seqlens", "[N + 1]",
        _bad_offsets_shape,
        "Pass the N + 1 offsets of N packed sequences.",
    ),
    dtype_row("cu_seqlens", "int32 or int64"),
    Requirement(
        "cu_seqlens.batch", "q", "a tensor with B=1 beside cu_seqlens",
        lambda c: when(c.inputs.cu_seqlens is not None and c.B != 1, f"B={c.B}"),
        "Pack the sequences of a batch along T: x.flatten(0, 1).unsqueeze(0).",
    ),
    Requirement(
        "cu_seqlens_cpu.alone", "cu_seqlens_cpu", "a copy of cu_seqlens",
        lambda c: when(c.inputs.cu_seqlens is None and c.inputs.cu_seqlens_cpu is not None, "cu_seqlens=None"),
        "Pass cu_seqlens as well.",
    ),
    dtype_row("cu_seqlens_cpu", "int32 or int64"),
    Requirement(
        "initial_state_indices.pool", "initial_state_indices", "used with ssm_state_indices",
        _without_pool("initial_state_indices"), "ssm_state_indices says where the final states go; -1 drops one.",
    ),
    Requirement(
        "checkpoint_offsets.pool", "checkpoint_offsets", "used with ssm_state_indices",
        _without_pool("checkpoint_offsets"), "The states are stored in the pool that it points into.",
    ),
    Requirement(
        "initial_state.shape", "initial_state",
        _states_asked,
        _bad_state,
        "One state per sequence and value head, all in one layout; of a pool, name slots in ssm_state_indices.",
    ),
    Requirement(
        "initial_state.dtype", "initial_state",
        lambda c: "a tensor of a float dtype" if c.recurrent else
        "a tensor of float32 or of q's dtype, or a pool of any float dtype",
        _bad_state_dtype, "Use initial_state.float().",
    ),
    shape_row("do", "B T HV V", "do is the gradient of o."),
    dtype_row("do", "a float dtype"),
    shape_row("dht", "N HV K V", "dht is the gradient of the final states, in their layout.",
              lambda c: c.states),
    dtype_row("dht", "a float dtype"),
    Requirement(
        "ssm_state_indices.shape", "ssm_state_indices",
        lambda c: f"[N={c.N}]" + (f" or [N={c.N}, S >= 1]" if c.recurrent else ""), _bad_slots,
        "One slot per sequence; fused_recurrent_kda also accepts one per token of each.",
    ),
    dtype_row("ssm_state_indices", "int32 or int64"),
    Requirement(
        "ssm_state_indices.pool", "initial_state", "the pool that ssm_state_indices points into",
        lambda c: when(c.inputs.ssm_state_indices is not None and c.inputs.initial_state is None, "None"),
        "Pass initial_state=pool.",
    ),
    Requirement(
        "ssm_state_indices.intermediate", "return_intermediate_states", "left out beside ssm_state_indices",
        lambda c: when(c.inputs.ssm_state_indices is not None and c.options.return_intermediate_states, "True"),
        "Pass checkpoint_offsets and checkpoint_indices: those states are stored in the pool.",
    ),
    Requirement(
        "ssm_state_indices.backward", "ssm_state_indices", "left out of a backward",
        lambda c: when(c.op == "chunk_kda_bwd" and c.inputs.ssm_state_indices is not None, "a pool"),
        "A pool is for inference; pass initial_state=pool[slots] to train.",
    ),
    shape_row("initial_state_indices", "N", "One slot per sequence, -1 to start from zero."),
    dtype_row("initial_state_indices", "int32 or int64"),
    Requirement(
        "checkpoint_offsets.shape", "checkpoint_offsets", lambda c: f"[N={c.N}, E >= 1]", _bad_checkpoints,
        "One row per sequence; a slot of -1 in checkpoint_indices leaves an entry out.",
    ),
    dtype_row("checkpoint_offsets", "int32 or int64"),
    Requirement(
        "checkpoint_indices.shape", "checkpoint_indices", "of the shape of checkpoint_offsets", _other_checkpoints,
        "Pass both: the slot of each state that is stored.",
    ),
    dtype_row("checkpoint_indices", "int32 or int64"),
    shape_row("num_accepted_tokens", "N", "One count per sequence."),
    dtype_row("num_accepted_tokens", "int32 or int64"),
    Requirement(
        "num_accepted_tokens.slots", "num_accepted_tokens", "used with ssm_state_indices [N, S]",
        _no_slots_per_token, "It says from which slot each sequence continues.",
    ),
    Requirement(
        "inplace_final_state.state", "inplace_final_state", "used with an initial_state",
        lambda c: when(c.options.inplace_final_state and c.inputs.initial_state is None, "initial_state=None"),
        "The final states are written into initial_state: pass one, or inplace_final_state=False.",
    ),
    shape_row("out", "B T HV V", "o is written to out."),
    dtype_row("out", "q's dtype"),
)


# VALUES


def _bad_offsets(c: Call, name: str) -> str | None:
    x = c.tensor(name)
    return offsets.bad_offsets(x.tolist(), c.T) if on_cpu(x) else None


def _differing(c: Call) -> str | None:
    a, b = c.inputs.cu_seqlens, c.inputs.cu_seqlens_cpu
    if b is None or (tuple(a.shape) == tuple(b.shape) and not (on_cpu(a) and a.tolist() != b.tolist())):
        return None
    return f"{b.tolist()[:8]} beside {a.tolist()[:8]}" if on_cpu(a) else f"shape {shape_of(b)} beside {shape_of(a)}"


def _range_row(name: str, fix: str) -> Requirement:
    def found(c: Call) -> str | None:
        x = c.tensor(name)
        if not on_cpu(x) or not x.numel():
            return None
        low, high, slots = int(x.min()), int(x.max()), c.inputs.initial_state.shape[0]
        return when(low < -1 or high >= slots, f"slot {low if low < -1 else high} of a pool of {slots}")

    asked = "slots of the pool, or -1 for " + ("padding" if name == "ssm_state_indices" else "none")
    return Requirement(f"{name}.range", name, asked, found, fix)


def owned_twice(slots: Iterable[Iterable[int]], first: int = 0) -> str | None:
    """Return the first slot, of those from `first` on, that two sequences name."""
    owner: dict[int, int] = {}
    for n, named in enumerate(slots):
        for slot in named:
            if slot >= first and owner.setdefault(slot, n) != n:
                return f"slot {slot} for sequences {owner[slot]} and {n}"
    return None


def _shared_slot(c: Call) -> str | None:
    x = c.inputs.ssm_state_indices
    if not on_cpu(x) or not c.options.inplace_final_state:
        return None
    return owned_twice(x.reshape(x.shape[0], -1).tolist())


def _shared_checkpoint(c: Call) -> str | None:
    x = c.inputs.checkpoint_indices
    if not on_cpu(x):
        return None
    taken = set(c.inputs.ssm_state_indices.tolist()) if on_cpu(c.inputs.ssm_state_indices) else set()
    for slot in x.flatten().tolist():
        if slot >= 0 and slot in taken:
            return f"slot {slot} for two states"
        taken.add(slot)
    return None


def _bad_checkpoint(c: Call) -> str | None:
    x, slots, ends = c.inputs.checkpoint_offsets, c.inputs.checkpoint_indices, offsets.host_offsets(c.inputs)
    if not (on_cpu(x) and on_cpu(slots)):
        return None
    if ends is None and c.inputs.cu_seqlens is not None:
        return None
    lengths = [c.T] * c.N if ends is None else [end - start for start, end in zip(ends, ends[1:], strict=False)]
    for n, row in enumerate(zip(x.tolist(), slots.tolist(), strict=True)):
        for offset, slot in zip(*row, strict=True):
            if slot >= 0 and (offset % c.options.chunk_size or not 0 <= offset <= lengths[n]):
                return f"{offset} in sequence {n} of {lengths[n]} tokens, chunk_size={c.options.chunk_size}"
    return None


def _checkpoint_twice(c: Call) -> str | None:
    x, slots = c.inputs.checkpoint_offsets, c.inputs.checkpoint_indices
    for n, row in enumerate(zip(x.tolist(), slots.tolist())) if on_cpu(x) and on_cpu(slots) else ():
        stored = [offset for offset, slot in zip(*row) if slot >= 0]
        if twice := [offset for offset in stored if stored.count(offset) > 1]:
            return f"{twice[0]} twice in sequence {n}"
    return None


def _gaps_in_states(c: Call) -> str | None:
    x = c.inputs.initial_state
    if c.recurrent or x is None or c.inputs.ssm_state_indices is None or x.shape[0] == 0 or x[0].is_contiguous():
        return None
    return f"strides {tuple(x.stride())} of shape {shape_of(x)}"


def _too_few_slots(c: Call) -> str | None:
    x, ends = c.inputs.ssm_state_indices, offsets.host_offsets(c.inputs)
    if x is None or x.dim() != 2 or not c.options.inplace_final_state:
        return None
    if c.inputs.cu_seqlens is not None and ends is None:
        return None
    longest = c.T if ends is None else max((end - start for start, end in zip(ends, ends[1:], strict=False)), default=0)
    return when(longest > x.shape[1], f"{x.shape[1]} slots for a sequence of {longest} tokens")


def _bad_count(c: Call) -> str | None:
    x = c.inputs.num_accepted_tokens
    if not on_cpu(x):
        return None
    S = c.inputs.ssm_state_indices.shape[1]
    return next((f"{n} for sequence {i} with S={S}" for i, n in enumerate(x.tolist()) if not 1 <= n <= S), None)


def _negated_state(c: Call) -> str | None:
    return written.negated(c.inputs.initial_state) if c.options.inplace_final_state else None


def _shared_state(c: Call) -> str | None:
    if not c.options.inplace_final_state:
        return None
    return written.shared((*c.inputs, c.out), (*Inputs._fields, "out"), ["initial_state"])


VALUES: tuple[Requirement, ...] = (
    Requirement(
        offsets.CHECK, "cu_seqlens", offsets.ASKED, lambda c: _bad_offsets(c, "cu_seqlens"), offsets.FIX,
    ),
    Requirement(
        "cu_seqlens_cpu.values", "cu_seqlens_cpu", offsets.ASKED, lambda c: _bad_offsets(c, "cu_seqlens_cpu"),
        "Pass cu_seqlens.cpu().",
    ),
    Requirement("cu_seqlens_cpu.differs", "cu_seqlens_cpu", "equal to cu_seqlens", _differing,
                "Pass cu_seqlens.cpu()."),
    _range_row("ssm_state_indices", "Grow the pool, or check the slot allocator."),
    _range_row("initial_state_indices", "Start from a slot that holds a state, or from zero with -1."),
    _range_row("checkpoint_indices", "Grow the pool, or check the slot allocator."),
    Requirement(
        "checkpoint_indices.shared", "checkpoint_indices", "slots that no other state of the call is written to",
        _shared_checkpoint, "Give each stored state a slot of its own.",
    ),
    Requirement(
        "checkpoint_offsets.values", "checkpoint_offsets", "multiples of chunk_size from 0 to the sequence's length",
        _bad_checkpoint, "States exist between chunks; use -1 in checkpoint_indices for entries that are not wanted.",
    ),
    Requirement(
        "checkpoint_offsets.twice", "checkpoint_offsets", "different for every state that is stored of a sequence",
        _checkpoint_twice, "A state is stored in one slot: copy it from there, or use -1 in checkpoint_indices.",
    ),
    Requirement(
        "ssm_state_indices.layout", "initial_state", "a pool whose slots are each contiguous", _gaps_in_states,
        "Only the distance between slots may be larger than a slot; use initial_state.contiguous().",
    ),
    Requirement(
        "ssm_state_indices.shared", "ssm_state_indices", "different for every sequence whose state is written in place",
        _shared_slot, "Two sequences would write the same state; give each its own slots.",
    ),
    Requirement(
        "ssm_state_indices.per_token", "ssm_state_indices", "[N, S] with S at least the longest sequence",
        _too_few_slots, "The state after every token is stored; give each token a slot.",
    ),
    Requirement(
        "num_accepted_tokens.range", "num_accepted_tokens", "from 1 to S", _bad_count,
        "At least one token of the last step was accepted.",
    ),
    _own_memory_row("initial_state", "inplace_final_state.overlap", lambda c: c.options.inplace_final_state),
    _own_memory_row("out", "out.overlap", lambda c: True),
    Requirement("inplace_final_state.negated", "initial_state", written.NEGATED, _negated_state, written.NEGATED_FIX),
    Requirement("inplace_final_state.shared", "initial_state", written.SHARED, _shared_state, written.SHARED_FIX),
)

OUT = tuple(row for row in (*CALLER, *KIND, *VALUES) if row.argument == "out")


# from a call to its Problem


_PROBLEMS: Memo[Problem] = Memo()


def problem_of(c: Call, direction: str = "forward") -> Problem:
    """Return the checked Problem of a call; a remembered kind of call costs one look-up and the VALUES."""
    tensors = c.inputs if c.do is c.dht is c.out is None else (*c.inputs, c.do, c.dht, c.out)
    key = kind_of_call(tensors, c.op, direction, c.options, forced())
    problem = _PROBLEMS.get(key)
    if problem is None:
        check(c, (*CALLER, *KIND))                                             # an operator's arguments satisfy CALLER
        problem = _PROBLEMS.remember(key, _describe(c, direction))
    if c.inputs.cu_seqlens is not None or c.recurrent or c.inputs.ssm_state_indices is not None:
        check(c, VALUES)
    return problem


def problem_of_outlines(inputs: Iterable[Outline | None], options: Options) -> Problem:
    """The Problem of a call that is being traced and not yet checked."""
    return _describe(Call("chunk_kda", Inputs(*inputs), options), "forward")


def _describe(c: Call, direction: str) -> Problem:
    x, o = c.inputs, c.options
    return Problem(
        op="recurrent" if c.recurrent else "chunk", direction=direction, device=str(x.q.device),
        B=c.B, T=c.T, N=c.N, H=c.H, HV=c.HV, K=c.K, V=c.V, C=o.chunk_size,
        dtype=dtype_name(x.q), g_dtype=dtype_name(x.g), beta_dtype=dtype_name(x.beta),
        state_dtype=None if x.initial_state is None else dtype_name(x.initial_state), packed=x.cu_seqlens is not None,
        gate=gate_of(o.use_gate_in_kernel, o.lower_bound), lower_bound=o.lower_bound,
        A_log=x.A_log is not None, dt_bias=x.dt_bias is not None,
        beta=beta_of(o.use_beta_sigmoid_in_kernel, o.allow_neg_eigval), beta_per_value=x.beta.dim() == 4,
        gate_per_head=c.gate_per_head,
        qk_l2norm=o.use_qk_l2norm_in_kernel, scale=o.scale,
        final_state=o.output_final_state, intermediate_states=o.return_intermediate_states,
        state_v_first=o.state_v_first, disable_recompute=o.disable_recompute is True, batch_invariant=o.batch_invariant,
        slots=0 if x.ssm_state_indices is None else x.initial_state.shape[0],
        slots_per_token=x.ssm_state_indices is not None and x.ssm_state_indices.dim() == 2,
        accepted_tokens=x.num_accepted_tokens is not None, inplace=o.inplace_final_state,
        start_slots=x.initial_state_indices is not None,
        checkpoints=None if x.checkpoint_offsets is None else dtype_name(x.initial_state),
    )
