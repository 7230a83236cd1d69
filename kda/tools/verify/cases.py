"""Random inputs of a problem, the same on every machine: a `Spec` says what, `make` draws it, a `Case` holds it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kda.model.gates import wide_dtype
from kda.model.problem import Inputs, Problem, name_of_dtype

from .layout import ChunkLayout
from .literal import l2norm, log_decay

Tensor = torch.Tensor

REGIMES = ("fast", "slow")                   # the state forgets within 16 tokens; it remembers for hundreds
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Spec:
    """What to draw; printed by `arguments` as the options of `kda verify`."""

    lengths: tuple[int, ...] | None = None   # packed sequences; None: B rows of T tokens
    B: int = 1
    T: int = 128
    H: int = 2
    HV: int | None = None                    # None: H
    K: int = 128
    V: int = 128
    C: int = 64
    dtype: str = "bfloat16"
    gate: str = "bounded"                    # "given", "softplus" or "bounded"
    regime: str = "slow"
    beta: str = "sigmoid"                    # "given", "sigmoid" or "2*sigmoid"
    l2norm: bool = True                      # False: q and k come normalised
    initial_state: bool = True
    gate_per_head: bool = False              # g (B, T, HV): one gate for all channels of a head
    padding: int = 0                         # tokens past the last sequence, all nan
    seed: int = 0

    @property
    def heads(self) -> int:
        """HV."""
        return self.H if self.HV is None else self.HV

    @property
    def offsets(self) -> list[int] | None:
        return None if self.lengths is None else [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    @property
    def shape(self) -> tuple[int, int]:
        return (self.B, self.T) if self.lengths is None else (1, sum(self.lengths) + self.padding)

    def arguments(self) -> list[str]:
        if self.lengths is not None:
            words = ["--lengths", ",".join(map(str, self.lengths))]
        else:
            words = [*(["--batch", str(self.B)] if self.B > 1 else []), "--tokens", str(self.T)]
        words += ["--heads", str(self.H)]
        if self.heads != self.H:
            words += ["--value-heads", str(self.HV)]
        options = {"K": "-K", "V": "-V", "C": "--chunk-size"} | {n: f"--{n}" for n in ("dtype", "gate", "regime")}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in options and value != field.default:
                words += [options[field.name], str(value)]
        words += ["--gate-per-head"] if self.gate_per_head else []
        return [*words, "--seed", str(self.seed)]


@dataclass(frozen=True)
class Case:
    """One call: the keywords of `kda.chunk_kda`, the gradients that come back to it, and the Spec it was drawn from."""

    spec: Spec
    keywords: dict[str, Any]
    do: Tensor
    dht: Tensor

    @property
    def inputs(self) -> Inputs:
        return Inputs(**{name: x for name, x in self.keywords.items() if name in Inputs._fields})

    def problem(self, direction: str = "forward", device: str | None = None) -> Problem:
        """Return the problem that it is on its own device, or on another."""
        spec, x = self.spec, self.inputs
        dtype = {name: name_of_dtype(t.dtype) for name, t in x._asdict().items() if t is not None}
        return Problem(
            direction=direction, device=device or str(x.q.device), B=spec.shape[0], T=spec.shape[1],
            N=spec.shape[0] if spec.lengths is None else len(spec.lengths), H=spec.H, HV=spec.heads, K=spec.K, V=spec.V,
            C=spec.C, dtype=dtype["q"], g_dtype=dtype["g"], beta_dtype=dtype["beta"],
            state_dtype=dtype.get("initial_state"),
            packed=x.cu_seqlens is not None, gate=spec.gate, lower_bound=self.keywords.get("lower_bound"),
            gate_per_head=spec.gate_per_head, A_log=x.A_log is not None, dt_bias=x.dt_bias is not None,
            beta=spec.beta, qk_l2norm=spec.l2norm,
            scale=self.keywords.get("scale") or spec.K**-0.5, final_state=True,
        )

    @functools.cached_property
    def layout(self) -> ChunkLayout:
        return ChunkLayout.from_problem(self.problem(), self.spec.offsets)

    def map(self, function: Callable[[Tensor], Tensor]) -> Case:
        """Return the same case with every tensor replaced."""
        keywords = {name: function(x) if isinstance(x, Tensor) else x for name, x in self.keywords.items()}
        return Case(self.spec, keywords, function(self.do), function(self.dht))

    def part(self, n: int, tokens: slice, H: int, HV: int) -> Case:
        """Return some tokens of sequence n, with its first heads, as a row of its own."""
        heads = {"q": H, "k": H, "v": HV, "g": HV, "beta": HV}

        def rows(x: Tensor, heads: int) -> Tensor:
            return x.flatten(0, 1)[tokens, :heads].unsqueeze(0).contiguous()

        keywords = {name: x for name, x in self.keywords.items() if name != "cu_seqlens"}
        keywords |= {name: rows(keywords[name], count) for name, count in heads.items()}
        for name, count in (("A_log", HV), ("dt_bias", HV * self.problem().gate_width)):
            if name in keywords:
                keywords[name] = keywords[name][:count]
        if "initial_state" in keywords:
            keywords["initial_state"] = keywords["initial_state"][n : n + 1, :HV]
        spec = dataclasses.replace(self.spec, lengths=None, B=1, T=keywords["q"].shape[1], H=H, HV=HV, padding=0)
        return Case(spec, keywords, rows(self.do, HV), self.dht[n : n + 1, :HV])

    def stage_tensors(self, dtype: torch.dtype) -> dict[str, Tensor | None]:
        """Return what the stages read that no stage writes, in chunks, on the CPU."""
        x, p, chunk = self.map(lambda x: x.cpu()).inputs, self.problem(), self.layout.chunk
        g = x.g.unsqueeze(-1) if p.gate_per_head else x.g
        rows = {"q": x.q, "k": x.k, "v": x.v, "g": g, "beta": x.beta.unsqueeze(-1), "do": self.do.cpu()}
        h0 = x.initial_state
        return {
            **{name: chunk(t.flatten(0, 1).to(dtype)) for name, t in rows.items()},
            "A_log": None if x.A_log is None else x.A_log.to(dtype).view(p.HV, 1, 1),
            "dt_bias": None if x.dt_bias is None else x.dt_bias.to(dtype).view(p.HV, 1, p.gate_width),
            "h0": torch.zeros(p.N, p.HV, p.K, p.V, dtype=dtype) if h0 is None else h0.to(dtype),
            "dht": self.dht.cpu().to(dtype),
        }


def make(spec: Spec, device: str = "cpu", drawn_on: str = "cpu") -> Case:
    """Draw the inputs of a case.  A GPU draws them much faster, and other numbers than a CPU from the same seed."""
    random = torch.Generator(drawn_on).manual_seed(spec.seed)
    (B, T), HV, dtype = spec.shape, spec.heads, getattr(torch, spec.dtype)
    exact = wide_dtype(dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64, device=drawn_on)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=random, dtype=torch.float64, device=drawn_on)

    gates = (HV,) if spec.gate_per_head else (HV, spec.K)
    heads = (spec.H, spec.K), (spec.H, spec.K), (HV, spec.V), gates
    q, k, v, logits = (normal(B, T, *each) for each in heads)
    slow = spec.regime == "slow"
    A_log = torch.zeros(HV, dtype=torch.float64, device=drawn_on) if slow else uniform(0, 1, HV)
    dt_bias = uniform(-8, -6, *gates) if slow else uniform(0, 1, *gates)
    beta = normal(B, T, HV)
    N = B if spec.lengths is None else len(spec.lengths)
    h0, do, dht = normal(N, HV, spec.K, spec.V), normal(B, T, HV, spec.V), normal(N, HV, spec.K, spec.V)
    if spec.gate == "given":
        logits = log_decay(Problem(gate="softplus"), logits, A_log.view(HV, *(1,) * (len(gates) - 1)), dt_bias)
    rows = {
        "q": q if spec.l2norm else l2norm(q), "k": k if spec.l2norm else l2norm(k), "v": v, "g": logits,
        "beta": beta.sigmoid() if spec.beta == "given" else beta,
    }
    keywords: dict[str, Any] = {name: _poisoned(x, spec).to(device, dtype) for name, x in rows.items()}
    if spec.gate != "given":
        gate = {"A_log": A_log.to(device, exact), "dt_bias": dt_bias.flatten().to(device, exact)}
        keywords |= {**gate, "use_gate_in_kernel": True}
    if spec.gate == "bounded":
        keywords["lower_bound"] = LOWER_BOUND
    if spec.initial_state:
        keywords["initial_state"] = h0.to(device, exact)
    if spec.offsets is not None:
        keywords["cu_seqlens"] = torch.tensor(spec.offsets, device=device)
    keywords |= {
        "use_qk_l2norm_in_kernel": spec.l2norm, "use_beta_sigmoid_in_kernel": spec.beta != "given",
        "allow_neg_eigval": spec.beta == "2*sigmoid", "chunk_size": spec.C, "output_final_state": True,
    }
    return Case(spec, keywords, _poisoned(do, spec).to(device, dtype), dht.to(device, exact))


def _poisoned(x: Tensor, spec: Spec) -> Tensor:
    """Put nan into the tokens that belong to no sequence: nothing may come of them."""
    if spec.padding:
        x[:, -spec.padding :] = torch.nan
    return x


def make_inputs(lengths: tuple[int, ...] | list[int] | None = None, device: str = "cpu", **spec: Any) -> Case:
    """Make a case from the fields of a Spec."""
    return make(Spec(lengths=None if lengths is None else tuple(lengths), **spec), device)


def save(case: Case, file: str) -> None:
    on_cpu = case.map(lambda x: x.cpu())
    tensors = {"keywords": on_cpu.keywords, "do": on_cpu.do, "dht": on_cpu.dht}
    torch.save({"kda": 1, "spec": dataclasses.asdict(case.spec), **tensors}, file)


def load(file: str, device: str = "cpu") -> Case:
    """Return what `save` wrote; raises ValueError for anything else."""
    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
        spec = Spec(**data["spec"])
        spec = dataclasses.replace(spec, lengths=spec.lengths and tuple(spec.lengths))
        case = Case(spec, data["keywords"], data["do"], data["dht"])
    except Exception as error:
        says = str(error).partition("\n")[0].partition(". ")[0]               # torch explains at length
        why = ": ".join(filter(None, (type(error).__name__, says)))
        raise ValueError(f"{file} is not a case that `kda verify --dump` wrote ({why})") from error
    return case.map(lambda x: x.to(device))
