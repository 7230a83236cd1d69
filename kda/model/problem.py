"""Problem: one call without its tensors.  Frozen, hashable, one line when printed; imports neither torch nor a DSL.

B batch, T tokens of a row, N sequences, H query/key heads, HV value heads, K and V head dims, C rows of a chunk.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kda.model.force import Force, forced

DTYPES = ("bfloat16", "float16", "float32", "float64")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}     # words of people
AT_LEAST = {"B": 0, "T": 0, "N": 0, "slots": 0, "H": 1, "HV": 1, "K": 1, "V": 1}  # least numbers that people may write
ONE_OF: dict[str, tuple[Any, ...]] = {
    "op": ("chunk", "recurrent", "decode"), "direction": ("forward", "backward"), "C": (32, 64), "dtype": DTYPES,
    "gate": ("given", "softplus", "bounded"), "beta": ("given", "sigmoid", "2*sigmoid"),
    "g_dtype": DTYPES, "beta_dtype": DTYPES, "state_dtype": DTYPES, "checkpoints": DTYPES,
}
DEFAULTS = {                                 # a public function: the fields that it has if no word says otherwise
    "decode_step": {"gate": "softplus", "A_log": True, "beta": "sigmoid", "qk_l2norm": True, "state_dtype": "float32",
                    "state_v_first": True, "inplace": True},
}
OPTIONS = {                                  # a field of a Problem: the `op` whose calls may have it
    "disable_recompute": ("chunk",), "intermediate_states": ("chunk",), "start_slots": ("chunk",),
    "checkpoints": ("chunk",), "slots_per_token": ("recurrent",),
    "accepted_tokens": ("recurrent", "decode"), "packed": ("chunk", "recurrent"), "final_state": ("chunk", "recurrent"),
    "batch_invariant": ("chunk", "recurrent"),
}
DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "npu", "mtia", "xla", "meta")                     # with or without ":0"
_SIZE = re.compile(r"(B|T|N|H|HV|K|V|C)(\d+)")                # T8192 is T=8192
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}
MAX_K = 256                                  # limit of chunk_kda; fused_recurrent_kda has none of its own


class Inputs(NamedTuple):
    """The tensors of a call, in the order of the public signatures."""

    q: Any                                   # (B, T, H, K)
    k: Any                                   # (B, T, H, K)
    v: Any                                   # (B, T, HV, V)
    g: Any                                   # (B, T, HV, K), or (B, T, HV): natural-log decay, or logits of the gate
    beta: Any                                # (B, T, HV), or (B, T, HV, V) in fused_recurrent_kda
    A_log: Any = None                        # HV elements
    dt_bias: Any = None                      # HV*K elements, or HV with one gate per head
    initial_state: Any = None                # (N, HV, K, V); a pool (slots, HV, K, V) with ssm_state_indices
    cu_seqlens: Any = None                   # (N+1,)
    cu_seqlens_cpu: Any = None               # (N+1,) on the CPU
    ssm_state_indices: Any = None            # (N,) or (N, S): slots of the pool, -1 is padding
    num_accepted_tokens: Any = None          # (N,)
    initial_state_indices: Any = None        # (N,): of chunk_kda, slots to start from instead; -1 is a state of zero
    checkpoint_offsets: Any = None           # (N, E): tokens of each sequence after which its state is stored
    checkpoint_indices: Any = None           # (N, E): the slots where; -1 is none


class Options(NamedTuple):
    """The options of a call, under the names of the public keywords; flags last."""

    scale: float
    lower_bound: float | None = None
    chunk_size: int = 64
    backend: str | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    disable_recompute: bool | str = False    # True, or "states"
    return_intermediate_states: bool = False
    state_v_first: bool = False
    inplace_final_state: bool = False
    batch_invariant: bool = False


class StepInputs(NamedTuple):
    """The tensors of a call of decode_step: N sequences of T tokens each; L rows of the convolution's tails."""

    q: Any                                   # (N, T, H, K)
    k: Any                                   # (N, T, H, K)
    v: Any                                   # (N, T, HV, V)
    g: Any                                   # (N, T, HV, K), or (N, T, HV)
    beta: Any                                # (N, T, HV)
    states: Any                              # (slots, HV, V, K), updated in place
    A_log: Any = None                        # HV elements
    dt_bias: Any = None                      # HV*K elements, or HV with one gate per head
    slots: Any = None                        # (N,): of each sequence in states, conv_states and records
    conv_states: Any = None                  # (slots, L, C), updated in place; C = 2*H*K + HV*V channels: q, k, v
    conv_weight: Any = None                  # (C, W)
    conv_bias: Any = None                    # (C,)
    norm_gate: Any = None                    # (N, T, HV, V)
    norm_weight: Any = None                  # (V,)
    records: Any = None                      # (slots, T - 1, HV, 2*K + V) float32, updated in place
    accepted: Any = None                     # (N,): how many tokens of the last step were accepted
    path: Any = None                         # (N, T): their numbers in that step, in order
    parents: Any = None                      # (N, T): the number of the token that each one follows
    out: Any = None                          # (N, T, HV, V), in the dtype of q


def name_of_dtype(dtype: Any) -> str:
    """Return the name of torch's dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class Hashed:
    """A frozen dataclass whose hash is computed once, because a call looks it up several times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._values()))

    def __hash__(self) -> int:
        return self._hash                    # type: ignore[attr-defined]

    def __reduce__(self):
        """Leave out the hash: hashes of strings differ between processes."""
        return type(self), self._values()

    def _values(self) -> tuple:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Problem(Hashed):
    """A call without its tensors: sizes, dtypes and options.  `Problem.parse("K=64 V=64 float32 packed")` makes one."""

    op: str = "chunk"                        # "chunk", "recurrent" or "decode"
    direction: str = "forward"               # "forward" or "backward"
    device: str = "cuda:0"
    B: int = 1
    T: int = 4096
    N: int = 1
    H: int = 8
    HV: int = 8
    K: int = 128
    V: int = 128
    C: int = 64
    dtype: str = "bfloat16"                  # dtype of q, k, v and o
    g_dtype: str = "bfloat16"
    beta_dtype: str = "bfloat16"
    state_dtype: str | None = None           # dtype of initial_state; None without one
    packed: bool = False                     # cu_seqlens given
    gate: str = "given"                      # "given" natural-log decays, "softplus" or "bounded" logits
    lower_bound: float | None = None         # the bounded gate's, or what the caller promises for a given one
    A_log: bool = False
    dt_bias: bool = False
    beta: str = "given"                      # "given", "sigmoid" or "2*sigmoid"
    beta_per_value: bool = False             # beta is (B, T, HV, V)
    gate_per_head: bool = False              # g is (B, T, HV): all channels of a head have one decay
    qk_l2norm: bool = False
    scale: float = 128**-0.5
    final_state: bool = False
    intermediate_states: bool = False
    state_v_first: bool = False
    disable_recompute: bool = False
    batch_invariant: bool = False
    slots: int = 0                           # rows of the state pool; 0 without ssm_state_indices
    slots_per_token: bool = False            # ssm_state_indices is (N, S)
    accepted_tokens: bool = False
    inplace: bool = False                    # final states go into initial_state
    start_slots: bool = False                # initial_state_indices given
    checkpoints: str | None = None           # dtype of states stored at checkpoint_offsets; None without them
    force: Force = dataclasses.field(default_factory=forced, repr=False)       # what tests and tools prescribe
    __hash__ = Hashed.__hash__

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def gate_width(self) -> int:
        """Return the numbers that g has for a token and head, and dt_bias for a head."""
        return 1 if self.gate_per_head else self.K

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of a sequence's state as the caller has it."""
        return (self.HV, self.V, self.K) if self.state_v_first else (self.HV, self.K, self.V)

    @property
    def states_in_words(self) -> str:
        return "no initial states" if self.state_dtype is None else f"states {self.state_dtype}"

    def __str__(self) -> str:
        heads = f"H={self.H}" if self.H == self.HV else f"H={self.H} HV={self.HV}"
        words = [
            f"{self.op} {self.direction} B={self.B} T={self.T} N={self.N} {heads} "
            f"K={self.K} V={self.V} C={self.C} {self.dtype}",
            self.device,
            f"{self.gate} gate" + ("" if self.lower_bound is None else f" >= {self.lower_bound:g}"),
        ]
        flags = {
            "packed": self.packed,
            "l2norm": self.qk_l2norm,
            f"beta {self.beta}": self.beta != "given",
            f"g {self.g_dtype}": self.g_dtype != self.dtype,
            f"beta {self.beta_dtype}": self.beta_dtype != self.dtype,
            "beta per value": self.beta_per_value,
            "gate per head": self.gate_per_head,
            f"initial state {self.state_dtype}": self.state_dtype is not None and not self.slots,
            f"{self.slots} state slots" + (" per token" if self.slots_per_token else ""): self.slots > 0,
            "accepted tokens": self.accepted_tokens,
            "in place": self.inplace,
            "other slots to start from": self.start_slots,
            f"checkpoints {self.checkpoints}": self.checkpoints is not None,
            "final state": self.final_state,
            "intermediate states": self.intermediate_states,
            "states (V, K)": self.state_v_first,
            "no recompute": self.disable_recompute,
            "batch invariant": self.batch_invariant,
            f"scale {self.scale:.4g}": not math.isclose(self.scale, self.K**-0.5),
        }
        return ", ".join(words + [word for word, on in flags.items() if on])

    @classmethod
    def parse(cls, text: str, also: Iterable[str] = (), **defaults: Any) -> Problem:
        """Return a problem from words such as "K=64 V=128 float32 packed backward": field=value, a size as in T8192, a
        dtype, or a name below; the name of a field that is true or false makes it true.  `also` are words that the
        caller puts into others: they are suggested for one that is written nearly so."""
        return cls.of_fields(defaults | cls.defaults_in(text) | cls.fields_in(text, also))

    @staticmethod
    def defaults_in(text: str) -> dict[str, Any]:
        """Return the defaults of the functions that words name."""
        named = [DEFAULTS.get(word, {}) for word in text.replace(",", " ").split()]
        return {name: value for fields in named for name, value in fields.items()}

    @classmethod
    def fields_in(cls, text: str, also: Iterable[str] = (), once: bool = False) -> dict[str, Any]:
        """Return the fields that words give, as `parse` reads them.  Of two words for a field the last one counts, or
        (`once`) the second one is refused."""
        by_name = {f.name: f for f in dataclasses.fields(cls) if f.name != "force"}
        words: dict[str, dict[str, Any]] = {
            **{name: {"dtype": d, "g_dtype": d, "beta_dtype": d}
               for name, d in (*zip(DTYPES, DTYPES), *SHORT_DTYPES.items())},
            "forward": {"direction": "forward"}, "backward": {"direction": "backward"},
            "chunk": {"op": "chunk"}, "recurrent": {"op": "recurrent"}, "decode": {"op": "decode", "T": 1},
            "chunk_kda": {"op": "chunk"}, "fused_recurrent_kda": {"op": "recurrent"},
            "decode_step": {"op": "decode", "T": 1},
            "given": {"gate": "given"}, "softplus": {"gate": "softplus", "A_log": True, "lower_bound": None},
            "bounded": {"gate": "bounded", "A_log": True, "lower_bound": -5.0}, "l2norm": {"qk_l2norm": True},
            "initial_state": {"state_dtype": "float32"}, "cpu": {"device": "cpu"}, "cuda": {"device": "cuda:0"},
            **{name: {name: True} for name, field in by_name.items() if field.type == "bool"},
        }
        named: dict[str, tuple[str, Any]] = {}         # a field: the word that gives it, and its value
        assigned: dict[str, tuple[str, Any]] = {}      # those given as name=value: no word overrides them
        unknown = []
        for word in text.replace(",", " ").split():
            size = _SIZE.fullmatch(word)
            *names, value = size.groups() if size else word.split("=")         # K=V=64 gives both
            if word in words:
                _put(named, word, words[word], once)
            elif names and {*names} <= {*by_name}:
                _put(assigned, word, {name: _parsed(by_name[name], value, word) for name in names}, once)
            else:
                unknown.append(word)
        if unknown:
            meant = "".join(_meant(word, (*words, *also), by_name) for word in unknown)
            known = ", ".join([*words, *(f"{name}=..." for name in by_name if name not in words)])
            are = "is not a known word" if len(unknown) == 1 else "are not known words"
            raise ValueError(f"{' and '.join(map(repr, unknown))} {are}.{meant} Known: {known}; sizes also as in T8192")
        return {name: value for name, (_, value) in (named | assigned).items()}

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Problem:
        """Return the problem of some fields; those that are left out follow from them."""
        fields = dict(fields)
        fields.setdefault("HV", fields.get("H", cls.HV))
        if fields["HV"] % fields.get("H", cls.H):
            raise ValueError(f"HV={fields['HV']} must be a multiple of H={fields.get('H', cls.H)}")
        fields.setdefault("N", fields.get("B", cls.N))
        if fields.get("op", cls.op) == "chunk" and not fields.get("packed") and fields["N"] != fields.get("B", cls.B):
            B, N = fields.get("B", cls.B), fields["N"]
            raise ValueError(f"{N=} sequences need `packed`; without it there are {B=} of T tokens")
        fields.setdefault("scale", fields.get("K", cls.K) ** -0.5)
        problem = cls(**fields)
        _check_callable(problem)
        return problem


def gate_of(use_gate: bool, lower_bound: float | None) -> str:
    """Return `Problem.gate` of the public options."""
    return "given" if not use_gate else "softplus" if lower_bound is None else "bounded"


def beta_of(use_sigmoid: bool, allow_neg_eigval: bool) -> str:
    """Return `Problem.beta` of the public options."""
    return "given" if not use_sigmoid else "2*sigmoid" if allow_neg_eigval else "sigmoid"


def _check_callable(p: Problem) -> None:
    """What the checks of a call refuse before any backend is asked, no backend accepts either."""
    if p.op == "chunk" and p.K > MAX_K:
        raise ValueError(f"K={p.K} is over {MAX_K}, the most that chunk_kda permits; `recurrent` permits "
                         "1,024 on a GPU, any K on a CPU")
    if p.op == "chunk" and p.packed and p.B != 1:
        raise ValueError(f"B={p.B} is not 1, and `packed` sequences lie in one row: leave one out")
    if p.gate == "softplus" and p.lower_bound is not None:
        raise ValueError(f"`softplus` has no lower_bound, found {p.lower_bound:g}: say `bounded`, or leave it out")
    for name, ops in OPTIONS.items():
        if getattr(p, name) and p.op not in ops:
            raise ValueError(f"`{p.op}` has no `{name}`: leave one out")
    for name in ("slots_per_token", "accepted_tokens", "start_slots", "checkpoints"):
        if getattr(p, name) and not p.slots and p.op != "decode":
            raise ValueError(f"`{name}` needs slots of a pool: give slots=, or leave it out")
    if p.op != "chunk" and p.direction == "backward":
        raise ValueError(f"`{p.op}` has no `backward`: leave one out")


def _put(given: dict[str, tuple[str, Any]], word: str, fields: Mapping[str, Any], once: bool) -> None:
    for name, value in fields.items():
        before, other = given.get(name, (word, value))
        if once and other != value:
            raise ValueError(f"{before!r} and {word!r} give {name} two values: leave one out")
        given[name] = word, value


def _meant(word: str, words: Iterable[str], fields: Iterable[str]) -> str:
    """Return the known word that is written alike, capitals aside, as a question; nothing if there is none."""
    name, equals, value = word.partition("=")
    of_lower = {each.lower(): each for each in (fields if equals else words)}
    near = difflib.get_close_matches(name.lower(), of_lower, n=1)
    return f" Did you mean {of_lower[near[0]] + equals + value!r}?" if near else ""


def _parsed(field: dataclasses.Field, text: str, word: str) -> Any:
    kind = str(field.type).split(" ")[0]
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        value = {"int": int, "float": float, "str": str}[kind](text)
    except (KeyError, ValueError):
        raise ValueError(f"{word!r} needs {KINDS[kind]} for {field.name}, found {text!r}") from None
    name = field.name
    if ONE_OF.get(name) is DTYPES:
        value = SHORT_DTYPES.get(value, value)
    if name in AT_LEAST and value < AT_LEAST[name]:
        raise ValueError(f"{word!r} needs {name} of at least {AT_LEAST[name]}")
    if name in ONE_OF and value not in ONE_OF[name]:
        raise ValueError(f"{word!r} needs {name} to be one of {', '.join(map(str, ONE_OF[name]))}")
    if name == "device" and value.partition(":")[0] not in DEVICES:
        raise ValueError(f"{word!r} needs a device of torch, such as cpu or cuda:0")
    if name == "lower_bound" and not -math.inf < value < 0:
        raise ValueError(f"{word!r} needs a finite negative number")
    if name == "scale" and not math.isfinite(value):
        raise ValueError(f"{word!r} needs a finite number")
    return value


@dataclass(frozen=True)
class StepProblem(Hashed):
    """One call of decode_step without its tensors: the recurrence, and what stands around it."""

    core: Problem                            # op="decode", N sequences of T tokens
    width: int = 0                           # W, tokens that the convolution sees; 0 without one
    norm_eps: float | None = None            # None without the gated norm
    first_slot: int = 0                      # slots below it are padding
    drafts: bool = False                     # tokens behind the first may be rolled back: there are records
    tree: bool = False                       # each of them may follow any token before it
    __hash__ = Hashed.__hash__

    @property
    def tail(self) -> int:
        """L, inputs of the convolution that are kept for each sequence."""
        return 0 if not self.width else self.width - 1 + (self.core.T - 1 if self.drafts else 0)
