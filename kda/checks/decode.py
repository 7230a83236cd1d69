"""Every check of a call of decode_step, as a table of `checks.calls.Requirement`; rows are in docs/data/errors.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from kda.model.problem import DTYPES, StepInputs

from . import written
from .calls import (
    GATE_FIX,
    LOWER_BOUND,
    SCALE,
    SIGMOID,
    SIZES,
    Requirement,
    bad_v,
    bias_row,
    device_row,
    dtype_name,
    dtype_row,
    is_finite,
    logits_only_row,
    numel_row,
    on_cpu,
    option_row,
    owned_twice,
    shape_of,
    shape_row,
    type_row,
    when,
)

WIDTHS = (2, 8)                              # widths that a convolution may have
MOST_IN_A_TREE = 64                          # tokens


class StepOptions(NamedTuple):
    """What a call asks for, under the names of its keywords."""

    scale: Any
    lower_bound: Any = None
    use_qk_l2norm_in_kernel: bool = True
    use_gate_in_kernel: bool = True
    use_beta_sigmoid_in_kernel: bool = True
    allow_neg_eigval: bool = False
    norm_eps: Any = 1e-5
    first_slot: int = 0
    state_v_first: bool = True
    backend: Any = None


FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
         "state_v_first")


class _StepCall(NamedTuple):
    x: StepInputs
    options: StepOptions
    op: str = "decode_step"


class StepCall(_StepCall):
    """A call of decode_step; states are (V, K) and tails (L, C) here, however they came."""

    __slots__ = ()
    # The letters of kda.model.problem.
    N, T, H, K, HV, V = SIZES
    C = property(lambda c: 2 * c.H * c.K + c.HV * c.V)
    W = property(lambda c: 0 if c.x.conv_weight is None else c.x.conv_weight.shape[1])
    L = property(lambda c: c.W - 1 + (0 if c.x.records is None else c.T - 1))
    slots = property(lambda c: c.x.states.shape[0])
    gate_per_head = property(lambda c: c.x.g.dim() == 3)

    def tensor(self, name: str) -> Any:
        return getattr(self.x, name)


NAMES = {"slots": "ssm_state_indices", "accepted": "num_accepted_tokens", "path": "accepted_path"}
_NAMES = [NAMES.get(name, name) for name in StepInputs._fields]
REQUIRED = StepInputs._fields[:6]
DTYPE_KINDS = dict.fromkeys(("slots", "accepted", "path", "parents"), "int32 or int64") | dict.fromkeys(
    ("k", "v", "out"), "q's dtype") | {"records": "float32"}
WRITTEN = ("states", "conv_states", "records", "out")


def _id(name: str, what: str) -> str:
    return f"decode.{NAMES.get(name, name)}.{what}"


def _shape_row(name: str, letters: str, fix: str, sizes: Callable[[Any], tuple[int, ...]] | None = None) -> Requirement:
    return shape_row(name, letters, fix, sizes, _id(name, "shape"), NAMES.get(name, name))


def _number_row(name: str, asked: str, *kinds: type) -> Requirement:
    return option_row(name, asked, "See help(kda.decode_step).", *kinds, id=_id(name, "type"))


def _dtype_row(name: str) -> Requirement:
    kind = DTYPE_KINDS.get(name, "a float dtype")
    asked = "of dtype" if kind in ("int32 or int64", "float32") else "of"
    return dtype_row(name, kind, _id(name, "dtype"), NAMES.get(name, name), asked)


def _together_row(id: str, name: str, others: tuple[str, ...], asked: str, fix: str) -> Requirement:
    """Return the check that `name` is given only where all others are."""

    def found(c: StepCall) -> str | None:
        missing = [NAMES.get(each, each) for each in others if getattr(c.x, each) is None]
        return when(getattr(c.x, name) is not None and missing, f"no {' and no '.join(missing)}")

    return Requirement(f"decode.{id}", NAMES.get(name, name), asked, found, fix)


def _own_memory_row(name: str) -> Requirement:
    def found(c: StepCall) -> str | None:
        x = getattr(c.x, name)
        if x is None or x.is_contiguous() or (name in ("states", "conv_states") and not written.may_overlap(x)):
            return None
        return f"strides {tuple(x.stride())} of shape {shape_of(x)}"

    asked = "contiguous" if name in ("records", "out") else "memory of its own to be written"
    return Requirement(_id(name, "memory"), name, asked, found, f"Use {name}.contiguous() once, for all calls.")


def _negated_row(name: str) -> Requirement:
    return Requirement(_id(name, "negated"), name, written.NEGATED, lambda c: written.negated(getattr(c.x, name)),
                       written.NEGATED_FIX)


def _bad_weight(c: StepCall) -> str | None:
    x = c.x.conv_weight
    good = x is None or (x.dim() == 2 and x.shape[0] == c.C and WIDTHS[0] <= x.shape[1] <= WIDTHS[1])
    return None if good else f"shape {shape_of(x)}"


def _recording(c: StepCall) -> str | None:
    wanting = [n for n in StepInputs._fields if getattr(getattr(c.x, n), "requires_grad", False)]
    return f"{NAMES.get(wanting[0], wanting[0])}.requires_grad=True" if wanting and torch.is_grad_enabled() else None


def _bad_slot(c: StepCall) -> str | None:
    x = c.x.slots
    if not on_cpu(x) or not x.numel():
        return None
    low, high = int(x.min()), int(x.max())
    return when(low < -1 or high >= c.slots,
                 f"slot {low if high < c.slots else high} of a pool of {c.slots}")


def _shared_slot(c: StepCall) -> str | None:
    if not on_cpu(c.x.slots):
        return None
    return owned_twice(([slot] for slot in c.x.slots.tolist()), c.options.first_slot)


def _rows(c: StepCall, *names: str) -> Iterator[tuple]:
    """The number of each sequence and its rows of these tensors; none if one is not on the CPU, nor of padding."""
    tensors = [getattr(c.x, name) for name in names]
    if not all(map(on_cpu, tensors)):
        return
    slots = None if c.x.slots is None else c.x.slots.tolist()                  # on the device of the others
    for i, rows in enumerate(zip(*(x.tolist() for x in tensors))):
        if slots is None or slots[i] >= c.options.first_slot:
            yield i, *rows


def _bad_count(c: StepCall) -> str | None:
    return next((f"{n} for sequence {i}" for i, n in _rows(c, "accepted") if not 1 <= n <= c.T), None)


def _bad_path(c: StepCall) -> str | None:
    for i, count, row in _rows(c, "accepted", "path"):
        real = row[:count]
        if real[0] != 0 or any(not a < b < c.T for a, b in zip(real, real[1:])):
            return f"{real} for sequence {i}"
    return None


def _bad_parent(c: StepCall) -> str | None:
    for i, row in _rows(c, "parents"):
        for t, parent in enumerate(row):
            if t and not 0 <= parent < t:
                return f"{parent} for token {t} of sequence {i}"
    return None


OF_TYPES: tuple[Requirement, ...] = (
    *(type_row(n, n in REQUIRED, _id(n, "type"), NAMES.get(n, n)) for n in StepInputs._fields),
    _number_row("scale", "a number or None", int, float),
    _number_row("lower_bound", "a number or None", int, float, type(None)),
    _number_row("norm_eps", "a number", int, float),
    _number_row("first_slot", "an int", int),
    _number_row("backend", "a str or None", str, type(None)),
)
RECORDING = Requirement(
    "decode.grad", "the call", "made without gradients", _recording,
    "There is no backward: use torch.no_grad().",
)

KIND: tuple[Requirement, ...] = (
    Requirement("decode.q.shape", "q", "[N, T, H, K] with T, H, K >= 1",
                lambda c: when(c.x.q.dim() != 4 or 0 in c.x.q.shape[1:], f"shape {shape_of(c.x.q)}"),
                "A token of each of N sequences is (N, 1, H, K)."),
    Requirement("decode.q.dtype", "q", "of dtype " + ", ".join(DTYPES),
                lambda c: when(dtype_name(c.x.q) not in DTYPES, dtype_name(c.x.q)), "Cast q, k and v."),
    *(device_row(n, fix="Move it there.", id=_id(n, "device"), argument=NAMES.get(n, n))
      for n in StepInputs._fields[1:]),
    _shape_row("k", "N T H K", "q and k share heads and head dim."),
    Requirement("decode.v.shape", "v", lambda c: f"[N={c.N}, T={c.T}, HV, V] with HV, V >= 1", bad_v,
                "Give v the sequences and the tokens of q."),
    Requirement("decode.v.heads", "v", lambda c: f"of a multiple of H={c.H} heads",
                lambda c: when(c.HV % c.H, f"HV={c.HV}"), "Each q/k head serves HV / H value heads."),
    shape_row("g", "N T HV K", GATE_FIX, id="decode.g.shape", last_optional=True),
    _shape_row("beta", "N T HV", "One beta per token and value head."),
    Requirement("decode.states.shape", "states",
                lambda c: f"[slots, HV={c.HV}, "
                + (f"V={c.V}, K={c.K}]" if c.options.state_v_first else f"K={c.K}, V={c.V}]")
                + ("" if c.x.slots is not None else f" with slots = N = {c.N}"),
                lambda c: when(c.x.states.dim() != 4 or [*c.x.states.shape[1:]] != [c.HV, c.V, c.K]
                                or (c.x.slots is None and c.slots != c.N), f"shape {shape_of(c.x.states)}"
                                + ("" if c.options.state_v_first else ", seen as (V, K)")),
                "Without ssm_state_indices state n is that of sequence n; state_v_first=False is for states (K, V)."),
    numel_row("A_log", "HV", "One rate per value head.", "decode.A_log.numel", "of"),
    bias_row("decode.dt_bias.numel", "of"),
    *(logits_only_row(name, f"decode.{name}.unused", f"Leave {name} out if g holds log decays.")
      for name in ("A_log", "dt_bias")),
    Requirement("decode.A_log.missing", "A_log", "given for a gate without a lower_bound",
                lambda c: when(c.options.use_gate_in_kernel and c.x.A_log is c.options.lower_bound is None, "neither"),
                "Pass A_log, or lower_bound for the bounded gate."),
    *(row._replace(id=f"decode.{row.id}") for row in (LOWER_BOUND, SIGMOID, SCALE)),
    Requirement("decode.norm_eps.value", "norm_eps", "a finite number >= 0",
                lambda c: when(not (is_finite(c.options.norm_eps) and c.options.norm_eps >= 0),
                               f"{c.options.norm_eps!r:.60}"), "1e-5 is the default."),
    Requirement("decode.first_slot.value", "first_slot", "0 or more",
                lambda c: when(c.options.first_slot < 0, repr(c.options.first_slot)),
                "0: a slot of -1 is padding; 1: slot 0 is, too."),
    _shape_row("slots", "N", "One slot per sequence."),
    _together_row("conv_states.alone", "conv_states", ("conv_weight",), "used with conv_weight",
                  "Pass the weight (C, W), or neither."),
    _together_row("conv_weight.alone", "conv_weight", ("conv_states",), "used with conv_states",
                  "Pass the pool of tails, or neither: q, k and v are then used as they are."),
    _together_row("conv_bias.alone", "conv_bias", ("conv_weight", "conv_states"), "used with a convolution",
                  "Leave it out where q, k and v were convolved before."),
    Requirement("decode.conv_weight.shape", "conv_weight",
                lambda c: f"[C={c.C}, W] with C = 2*H*K + HV*V and {WIDTHS[0]} <= W <= {WIDTHS[1]}", _bad_weight,
                "Concatenate the weights of q, k and v: torch.cat([wq, wk, wv]).flatten(1)."),
    _shape_row("records", "slots T-1 HV 2K+V", "One record per slot, draft token and value head.",
               lambda c: (c.slots, c.T - 1, c.HV, 2 * c.K + c.V)),
    Requirement("decode.records.tokens", "records", "left out where T = 1",
                lambda c: when(c.x.records is not None and c.T == 1, "T=1"), "One token alone is never rolled back."),
    _shape_row("conv_states", "slots L C",
               "L = W - 1, with records W - 2 + T; conv_channels_first=True is for tails (C, L)."),
    _shape_row("conv_bias", "C", "One bias per channel."),
    _together_row("norm_gate.alone", "norm_gate", ("norm_weight",), "used with norm_weight", "Pass both, or neither."),
    _together_row("norm_weight.alone", "norm_weight", ("norm_gate",), "used with norm_gate", "Pass both, or neither."),
    _shape_row("norm_gate", "N T HV V", "The gate has the shape of v."),
    _shape_row("norm_weight", "V", "One weight per channel of v, shared by all heads."),
    _together_row("num_accepted_tokens.records", "accepted", ("records",), "used with records",
                  "Only drafts can be rolled back: pass their records."),
    Requirement("decode.records.accepted", "records", "used with num_accepted_tokens",
                lambda c: when(c.x.records is not None and c.x.accepted is None, "none"),
                "It says how many tokens of the last step were accepted; 1 after a prefill."),
    _shape_row("accepted", "N", "One count per sequence."),
    _together_row("accepted_path.records", "path", ("records",), "used with records", "Leave it out without drafts."),
    _shape_row("path", "N T", "The numbers of the accepted tokens of the last step, filled up with anything."),
    _together_row("parents.records", "parents", ("records",), "used with records",
                  "Tokens that are never rolled back lie in a line."),
    _shape_row("parents", "N T", "The number of the token before each one; the first has none."),
    Requirement("decode.parents.tokens", "parents", f"of at most {MOST_IN_A_TREE} tokens",
                lambda c: when(c.x.parents is not None and c.T > MOST_IN_A_TREE, f"T={c.T}"), "Draft fewer tokens."),
    _shape_row("out", "N T HV V", "o is written to out."),
    *(_dtype_row(name) for name in StepInputs._fields[1:]),
)

# Numbers, only where a CPU holds them, and memory: on every call.
VALUES: tuple[Requirement, ...] = (
    Requirement("decode.ssm_state_indices.range", "ssm_state_indices", "slots of the pool, or -1 for padding",
                _bad_slot, "Grow the pool, or check the slot allocator."),
    Requirement("decode.ssm_state_indices.shared", "ssm_state_indices", "different for each sequence", _shared_slot,
                "Two sequences would write one state; give each a slot of its own."),
    Requirement("decode.num_accepted_tokens.range", "num_accepted_tokens", lambda c: f"from 1 to T={c.T}", _bad_count,
                "The first token of a step is always accepted."),
    Requirement("decode.accepted_path.values", "accepted_path", "0 and then ascending numbers of tokens", _bad_path,
                "It begins with the root, 0, and each token comes after the one before it."),
    Requirement("decode.parents.values", "parents", "the number of an earlier token", _bad_parent,
                "Put each token after its parent."),
    *map(_own_memory_row, WRITTEN),
    *map(_negated_row, WRITTEN),
    Requirement("decode.memory.shared", "what is written", written.SHARED,
                lambda c: written.shared(c.x, _NAMES, WRITTEN), written.SHARED_FIX),
)

ALL = (*OF_TYPES, RECORDING, *KIND, *VALUES)
