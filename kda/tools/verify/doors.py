"""What can be verified: a backend's whole calls and its single stages, both with tensors on the CPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import kda
from kda.errors import KdaError
from kda.model.gates import wide_dtype
from kda.model.host import detect
from kda.model.problem import Problem
from kda.model.stages import OPERANDS, SHAPES
from kda.routing.dispatch import Choice, backend_of_backward, capabilities, launcher, weigh

from .budget import Rounding
from .cases import Case
from .definition import by_gradient, leaves_of
from .evidence import stages_of

Tensor = torch.Tensor

ROUNDS_EVERY_OPERAND = dict.fromkeys(
    ("qn", "kn", "A_qk", "A_inv", "w", "u", "qg", "kb", "kg", "h", "v_new", "dv_local", "dh", "dv_new", "dv"),
    "bfloat16",
)


def default_device() -> str:
    """Return the device that calls are made on."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def stored_by(backend: str, problem: Problem) -> Mapping[str, str]:
    """Return the roundings that a backend declares."""
    stored = launcher(backend).rounded_to(problem)
    if unknown := set(stored) - {*SHAPES, *OPERANDS}:
        raise ValueError(f"{backend} rounds {', '.join(sorted(unknown))}, which kda.model.stages does not contain")
    return stored


class Door:
    def __init__(self, name: str, device: str | None = None):
        self.name, self.device = name, device or default_device()
        self.capability = next(c for c in capabilities() if c.backend == name)

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def stages(self) -> tuple[str, ...]:
        return stages_of(self.capability)

    def absent(self) -> tuple[str, ...]:
        """Return the reasons why nothing at all runs by it on this machine."""
        return ()

    def against(self, case: Case, direction: str = "forward") -> tuple[str, ...]:
        """Return the reasons why this backend does not accept the case here."""
        return self.against_problem(case.problem(direction, self.device))

    def against_problem(self, problem: Problem) -> tuple[str, ...]:
        return dict(self.weighed(problem, self.name).tried)[self.name]

    def weighed(self, problem: Problem, requested: str) -> Choice:
        return weigh(problem, detect(self.device), requested)

    def rounding(self, case: Case) -> Rounding:
        """Return the rounding of outputs by this backend, and of gradients by the backend that computes them here."""
        forward, backward = (case.problem(direction, self.device) for direction in ("forward", "backward"))
        requested, gradients = backend_of_backward(self.name), None
        if requested != self.name and (other := self.weighed(backward, requested).backend):
            gradients = stored_by(other, backward)
        return Rounding(wide_dtype(case.inputs.q.dtype), stored_by(self.name, forward), gradients=gradients)

    @contextlib.contextmanager
    def blamed(self, what: str) -> Iterator[None]:
        """An exception that is none of kda's own says whose fault it is."""
        try:
            yield
        except KdaError:
            raise
        except Exception as error:
            raise KdaError(f"{what} of the backend {self.name} failed: {type(error).__name__}: {error} "
                           "(--debug shows where)") from error

    def sees(self, case: Case) -> Case:
        """Return the case with the inputs that reach the backend."""
        return case

    def call(self, case: Case, backward: bool, **keywords) -> dict[str, Tensor]:
        """Return o, ht and the gradients of all inputs, by name, on the CPU."""
        return {name: x.cpu() for name, x in self.results(case, backward, **keywords).items()}

    def results(self, case: Case, backward: bool, **keywords) -> dict[str, Tensor]:
        """Return what `call` does, on the device of the call."""
        case = self.sees(case).map(lambda x: x.detach().to(self.device, copy=True))
        leaves = leaves_of(case.keywords) if backward else {}
        with self.blamed("a forward"):
            o, ht = self.chunk_kda(**case.keywords | leaves, **keywords)
            for name, x, shape in (("o", o, case.do.shape), ("ht", ht, case.dht.shape)):
                if x.shape != shape:
                    raise ValueError(f"{name} must have the shape {list(shape)}, and has {list(x.shape)}")
        results = {"o": o.detach(), "ht": ht.detach()}
        if backward:
            wanted, cotangents = by_gradient(leaves), (case.do, case.dht)
            with self.blamed("a backward"):
                grads = torch.autograd.grad((o, ht), list(wanted.values()), cotangents, allow_unused=True,
                                            materialize_grads=True)
            results |= dict(zip(wanted, grads))
        return results

    def chunk_kda(self, **keywords):
        return kda.chunk_kda(**keywords, backend=self.name)

    def stage_call(self, name: str, case: Case) -> Callable[[Mapping[str, Tensor | None]], Any]:
        """Return the stage as a function of tensors on the backend's device."""
        problem = case.problem("backward" if name.startswith("bwd") else "forward", self.device)
        return functools.partial(launcher(self.name).stage, name, problem, case.spec.offsets)

    def stage(self, name: str, case: Case, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        moved = {n: None if x is None else x.to(self.device) for n, x in tensors.items()}
        with self.blamed(f"the stage {name}"):
            written = self.stage_call(name, case)(moved)
        return {n: None if x is None else x.cpu() for n, x in written.items()}


def without_a_gpu(peer: Door) -> tuple[str, ...]:
    if peer.device != "cpu":
        return ()
    return (f"{peer.name}.gpu: it runs on a GPU and there is none -> run this on a machine with one",)


class Fla(Door):
    """flash-linear-attention, whose operands are rounded to the dtype of q."""

    stages = ()

    def __init__(self):
        self.name, self.device = "fla", default_device()

    def absent(self) -> tuple[str, ...]:
        missing = ("fla.installed: FLA is not installed -> pip install fla-core",)
        return (*without_a_gpu(self), *(missing if importlib.util.find_spec("fla") is None else ()))

    def against(self, case: Case, direction: str = "forward") -> tuple[str, ...]:
        return self.absent()

    def rounding(self, case: Case) -> Rounding:
        return Rounding(wide_dtype(case.inputs.q.dtype), ROUNDS_EVERY_OPERAND)

    def chunk_kda(self, **keywords):
        from fla.ops.kda import chunk_kda

        return chunk_kda(**keywords)


class Cudnn(Door):
    """cuDNN's `kimi_delta_attention` (nvidia-cudnn-frontend from 1.32), whose operands are rounded to the dtype of q.

    Its tensors are packed, (tokens, heads, channels), and its states are (V, K); a gate that it computes is bounded.
    Its backward on Hopper takes only gates, norms and beta that were computed before, so forwards alone are compared.
    """

    stages = ()

    def __init__(self) -> None:
        self.name, self.device = "cudnn", default_device()
        self._rows: dict[tuple[Any, ...], Tensor] = {}             # offsets of the rows of a batch

    def absent(self) -> tuple[str, ...]:
        found = importlib.util.find_spec("cudnn") and importlib.util.find_spec("cudnn.linear_attention")
        missing = ("cudnn.installed: its front end 1.32 or newer is not installed -> "
                   "pip install 'nvidia-cudnn-frontend[cutedsl]>=1.32'",)
        return (*without_a_gpu(self), *(() if found else missing))

    def against(self, case: Case, direction: str = "forward") -> tuple[str, ...]:
        if reasons := self.absent():
            return reasons
        p = case.problem(direction)
        rules = {
            "cudnn.backward: only its forward is compared -> --direction forward": direction == "forward",
            "cudnn.dtype: it needs bfloat16 or float16 q, k and v": p.dtype in ("bfloat16", "float16"),
            "cudnn.head_dim: it needs K=V=128": p.K == p.V == 128,
            "cudnn.gate: the gate that it computes is a bounded one -> --gate bounded or given": p.gate != "softplus",
            "cudnn.gate_per_head: it needs a gate for each channel": not p.gate_per_head,
        }
        return tuple(reason for reason, holds in rules.items() if not holds)

    def rounding(self, case: Case) -> Rounding:
        return Rounding(wide_dtype(case.inputs.q.dtype), ROUNDS_EVERY_OPERAND)

    def chunk_kda(
        self, q, k, v, g, beta, A_log=None, dt_bias=None, cu_seqlens=None, initial_state=None, scale=None,
        lower_bound=None, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        use_qk_l2norm_in_kernel=False, **_,
    ):
        from cudnn.linear_attention import kimi_delta_attention

        B, T, HV, V = v.shape
        if cu_seqlens is None:
            cu_seqlens = self._offsets(B, T, q.device)
        gate = {}
        if use_gate_in_kernel:
            bias = None if dt_bias is None else dt_bias.view(HV, -1)
            gate = {"safe_gate": True, "gate_lower_bound": lower_bound, "a_log": A_log, "dt_bias": bias}
        o, ht = kimi_delta_attention(
            *(x.flatten(0, 1) for x in (q, k, v, g, beta)), cu_seqlens, scale=scale, output_final_state=True,
            initial_state=None if initial_state is None else initial_state.mT.contiguous(),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, **gate,
        )[:2]
        return o.view(B, T, HV, V), ht.mT

    def _offsets(self, B: int, T: int, device: torch.device) -> Tensor:
        """Return the offsets of rows, made once: a timed call makes no tensor that it could have been given."""
        key = B, T, device
        if key not in self._rows:
            self._rows[key] = torch.arange(0, B * T + 1, max(T, 1), dtype=torch.int32, device=device)
        return self._rows[key]


# other projects, by the names that commands have
PEERS: dict[str, Callable[[], Door]] = {"fla": Fla, "cudnn": Cudnn}
