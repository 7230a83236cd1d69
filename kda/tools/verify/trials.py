"""The small calls of `kda selftest`: training with `chunk_kda`, decoding with `fused_recurrent_kda`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

import kda
from kda.model.gates import wide_dtype
from kda.model.problem import Problem

from .budget import Budget
from .cases import Case, Spec, make
from .definition import definition, stored_as, summed
from .doors import Door
from .literal import one_thread
from .parity import ParityRow, judge, whole_call

Tensor = torch.Tensor


class OperatorTrial(NamedTuple):
    name: str
    spec: Spec
    decode: bool = False                     # through a pool of states, in place
    quick: bool = False

    @property
    def words(self) -> str:
        s = self.spec
        shape = f"packed {list(s.lengths)}" if s.lengths is not None else f"B={s.B} T={s.T}"
        heads = f"H={s.H}" if s.heads == s.H else f"H={s.H} HV={s.heads}"
        return f"{shape} {heads} {s.dtype}, {s.gate} gate, {s.regime}"


RAGGED = (65, 0, 1, 30)
TRIALS = (
    OperatorTrial("one exact chunk", Spec(T=64, H=2, dtype="float32", gate="softplus", regime="fast", seed=1),
                  quick=True),
    OperatorTrial("a batch with a tail", Spec(B=2, T=70, H=2, regime="slow", seed=2)),
    OperatorTrial("empty and one-token sequences", Spec(lengths=RAGGED, H=2, regime="slow", seed=3), quick=True),
    OperatorTrial("the same in float32", Spec(lengths=RAGGED, H=2, dtype="float32", regime="slow", seed=3)),
    OperatorTrial("two value heads per q/k head",
                  Spec(lengths=(33, 64), H=2, HV=4, gate="softplus", regime="slow", seed=4), quick=True),
    OperatorTrial("fast gates", Spec(lengths=RAGGED, H=2, dtype="float32", regime="fast", seed=5)),
    OperatorTrial("given decays, no l2norm",
                  Spec(T=100, H=2, gate="given", beta="given", l2norm=False, regime="slow", seed=6)),
    OperatorTrial("beta up to 2",
                  Spec(T=128, H=1, dtype="float32", gate="softplus", beta="2*sigmoid", regime="slow", seed=7)),
    OperatorTrial("no initial state, tokens past the end",
                  Spec(lengths=(70, 5), H=2, initial_state=False, padding=9, seed=8)),
    OperatorTrial("chunks of 32", Spec(lengths=RAGGED, H=2, C=32, regime="slow", seed=9)),
    OperatorTrial("decode, one token", Spec(B=3, T=1, H=2, HV=4, seed=10), decode=True, quick=True),
    OperatorTrial("decode, float32, softplus",
                  Spec(B=3, T=4, H=2, dtype="float32", gate="softplus", regime="fast", seed=11), decode=True),
)


def trials(quick: bool) -> list[OperatorTrial]:
    return [trial for trial in TRIALS if trial.quick or not quick]


def against(door: Door, trial: OperatorTrial) -> tuple[str, ...]:
    """Return the reasons why the backend does not accept the call here."""
    case = make(trial.spec)
    if not trial.decode:
        return door.against(case)
    return door.against_problem(dataclasses.replace(decode_problem(case), device=door.device))


@one_thread()
def attempt(door: Door, trial: OperatorTrial) -> list[ParityRow]:
    case = make(trial.spec)
    if trial.decode:
        return decode(door, case)
    return whole_call(door, case, backward=not door.against(case, "backward"))[0]


# ---------------------------------------------------------------------------------------------- decoding


def decode_problem(case: Case) -> Problem:
    slots = case.spec.B + 2
    return dataclasses.replace(case.problem(), op="recurrent", final_state=False, slots=slots, inplace=True)


def decode(door: Door, case: Case) -> list[ParityRow]:
    """Decode one row of the batch per user, whose state is in a slot of a pool and is written back there."""
    p, spec = case.problem(), case.spec
    slots = torch.arange(spec.B).flip(0) + 1                                  # slots 0 and B + 1 are unused
    pool = torch.full((spec.B + 2, p.HV, p.K, p.V), 7.0, dtype=wide_dtype(case.inputs.q.dtype))
    pool[slots] = case.inputs.initial_state
    keywords = {
        n: x for n, x in case.keywords.items() if n not in ("initial_state", "chunk_size", "output_final_state")
    }
    keywords |= {"initial_state": pool, "ssm_state_indices": slots}
    moved: dict[str, Any] = {n: x.to(door.device) if isinstance(x, Tensor) else x for n, x in keywords.items()}
    o, pool = kda.fused_recurrent_kda(**moved, backend=door.name)
    pool = pool.cpu()
    results = {"o": o.cpu(), "ht": pool[slots]}
    exact, rounded = (
        definition(case, dtype, backward=False) for dtype in (torch.float64, wide_dtype(case.inputs.q.dtype))
    )
    rows = [judge("decode", n, _budget(case, n, exact, rounded), results[n], case, whole=True) for n in ("o", "ht")]
    untouched = Budget(torch.full_like(pool[[0, -1]], 7.0).double(), 0.0, 0.0)
    return [*rows, judge("decode", "ht", untouched, pool[[0, -1]], case, whole=True)]


def _budget(case: Case, name: str, exact: dict[str, Tensor], rounded: dict[str, Tensor]) -> Budget:
    stored = stored_as(case, name)
    return Budget.of(exact[name], rounded[name].to(stored), compute=wide_dtype(case.inputs.q.dtype), stored=stored,
                     summed=summed(case, name))
