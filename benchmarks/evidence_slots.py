"""The cases of `benchmarks/evidence_cases.py` whose calls update a pool of states, or walk over tokens: their inputs,
their results, and the budgets of these.

They are chunk_kda from and to slots, fused_recurrent_kda and decode_step.  A result is o, a tensor that is updated in
place, by the name of its keyword, or the states that are written: they may be much smaller than those that stay.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

import kda
from kda.tools.verify import cases, steps
from kda.tools.verify.budget import Budget
from kda.tools.verify.definition import budgets
from kda.tools.verify.doors import Door
from kda.tools.verify.steps import copied

from .evidence_cases import DECODE, RECURRENT, SLOTS, STEPS, Case

Tensor = torch.Tensor
FUNCTIONS = {SLOTS: kda.chunk_kda, RECURRENT: kda.fused_recurrent_kda, DECODE: kda.decode_step}
UPDATED = (*steps.UPDATED, "initial_state")
WRITTEN = ("ssm_state_indices", "checkpoint_indices")          # which slots are
# Of SLOTS, for each of the four sequences of a row: the slot that it starts from, the one where it ends, and those
# where its states are stored at its beginning and at the last chunk.  -1 is none.  Slots 8 and 9 stay as they were.
STARTS, ENDS, FIRST, LAST = (0, 1, 2, -1), (0, 3, -1, 4), (-1, -1, -1, 5), (6, -1, -1, 7)
POOL = 10
OF_SLOTS = ("ssm_state_indices", "initial_state_indices", "checkpoint_offsets", "checkpoint_indices", "state_v_first",
            "batch_invariant")


def with_slots(case: Case, plain: cases.Case) -> cases.Case:
    """Return a call of chunks as one from and to slots of a pool, or as one of fused_recurrent_kda."""
    p, x, spec = case.problem, dict(plain.keywords), plain.spec
    random = torch.Generator().manual_seed(spec.seed)
    if case.call == RECURRENT:
        del x["chunk_size"]
        x["output_final_state"] = p.final_state
    if p.slots:
        pool = torch.randn(POOL, *p.state_shape, generator=random).to(x["initial_state"].dtype)
        places = [*torch.randperm(POOL, generator=random).tolist(), -1]        # place -1 is -1

        def index(*slots: int) -> Tensor:
            return torch.tensor([places[slot] for slot in slots], dtype=getattr(torch, case.slots))

        x |= {"initial_state": pool, "ssm_state_indices": index(*ENDS), "state_v_first": p.state_v_first}
        if p.start_slots:
            x["initial_state_indices"] = index(*STARTS)
        if p.checkpoints:
            last = [tokens // p.C * p.C for tokens in spec.lengths or ()]
            slots = [slot if offset else -1 for slot, offset in zip(LAST, last)]
            x["checkpoint_offsets"] = torch.tensor([(0, offset) for offset in last], dtype=getattr(torch, case.slots))
            x["checkpoint_indices"] = torch.stack((index(*FIRST), index(*slots)), 1)
    if p.batch_invariant:
        x["batch_invariant"] = True
    return cases.Case(spec, x, plain.do, plain.dht)


def step(case: Case, regime: str, seed: int) -> cases.Case:
    """Return a call of decode_step; after the first token of a call, drafts of before were accepted or not."""
    p = case.problem
    x = steps.make_step(
        STEPS, p.T, p.H, p.HV, p.K, p.V, dtype=p.dtype, states=p.state_dtype or "float32", gate=p.gate, beta=p.beta,
        l2norm=p.qk_l2norm, drafts=p.accepted_tokens, per_head=p.gate_per_head, seed=seed, pool=POOL,
    )
    random = torch.Generator().manual_seed(seed)
    if regime == "slow":
        x["A_log"].zero_()
        x["dt_bias"] = -6 - 2 * torch.rand(x["dt_bias"].shape, generator=random)
    x["ssm_state_indices"][seed % STEPS] = -1
    if p.accepted_tokens:
        keys, decays, changes = x["records"].split((p.K, p.K, p.V), -1)
        x["records"] = torch.cat((torch.nn.functional.normalize(keys, dim=-1), decays.sigmoid(), changes), -1)
        x["num_accepted_tokens"] = 1 + (torch.arange(STEPS) + seed) % p.T
    for name in ("ssm_state_indices", "num_accepted_tokens"):
        if name in x:
            x[name] = x[name].to(getattr(torch, case.slots))
    for name, turned in (("states", case.by_column), ("conv_states", case.by_channel)):
        if turned:
            x[name] = x[name].mT.contiguous().mT
    return cases.Case(cases.Spec(regime=regime, seed=seed), x, torch.empty(0), torch.empty(0))


def called(case: Case, given: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
    """Return the results of a call on tensors of its own."""
    x = copied(given)
    with torch.no_grad():
        o = FUNCTIONS[case.call](**x, **options)
    results = {"o": o if isinstance(o, Tensor) else o[0]} | {name: x[name] for name in UPDATED if name in x}
    if "ssm_state_indices" in x:
        slots = torch.cat([x[name].flatten().long() for name in WRITTEN if name in x])
        pool = x["states" if case.call == DECODE else "initial_state"]
        results["written"] = pool[slots.clamp(min=0)] * (slots >= 0).view(-1, 1, 1, 1)
    return results


def limits_of(case: Case, given: cases.Case, device: str) -> dict[str, Budget]:
    """Return the budget of each result, around what the reference computes in float64."""
    if case.call != SLOTS:
        return steps.budgets(given.keywords, functools.partial(called, case))
    exact = called(case, copied(given.keywords, torch.float64), backend="reference")
    pool = given.keywords["initial_state"]
    starts = given.keywords["initial_state_indices" if case.problem.start_slots else "ssm_state_indices"].long()
    begins = pool[starts.clamp(min=0)] * (starts >= 0).view(-1, 1, 1, 1)
    whole = {name: x for name, x in given.keywords.items() if name not in OF_SLOTS}
    whole["initial_state"] = begins.mT if case.problem.state_v_first else begins
    plain = cases.Case(given.spec, whole, given.do, given.dht)
    limits = budgets(plain, Door(case.backend, device).rounding(plain), backward=False)
    states = limits["ht"]
    pools = {name: Budget(exact[name], states.norm, states.peak) for name in ("initial_state", "written")}
    return {"o": limits["o"], **pools}
