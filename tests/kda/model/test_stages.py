"""The reference's stages against the same formulas written out, and those against the definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from kda.backends.reference import launch
from kda.model.stages import BACKWARD, FORWARD, SHAPES, STAGES
from kda.tools.verify import literal
from kda.tools.verify.cases import Spec, make, make_inputs
from kda.tools.verify.definition import definition, from_stages
from kda.tools.verify.layout import ChunkLayout

NAMES = [stage.name for stage in FORWARD + BACKWARD]
GATES = {"given": ("given", False), "softplus": ("2*sigmoid", True), "bounded": ("sigmoid", True)}     # beta, l2norm
LAYOUTS = {
    "ragged": {"lengths": (65, 0, 3, 1, 32), "padding": 5},
    "batch": {"B": 2, "T": 70},
    "exact": {"lengths": (64, 128)},
}


def relative(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x - exact).norm()) / (float(exact.norm()) or 1.0)


def small(layout: str, gate: str, C: int, regime: str, **more):
    beta, l2norm = GATES[gate]
    spec = {"H": 2, "HV": 4, "K": 20, "V": 12, "dtype": "float64", "seed": 3, **LAYOUTS[layout], **more}
    return make_inputs(C=C, gate=gate, regime=regime, beta=beta, l2norm=l2norm, **spec)


@pytest.mark.spread(every=3)
@pytest.mark.parametrize("regime", ["fast", "slow"])
@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_of_the_reference_is_its_formula_and_all_of_them_the_definition(layout, gate, C, regime):
    case = small(layout, gate, C, regime)
    p, env = case.problem(), case.stage_tensors(torch.float64)
    for name in NAMES:
        wanted = literal.run_stage(name, p, case.layout, env, torch.float64)
        found = launch.stage(name, p, case.spec.offsets, env)
        assert list(found) == list(wanted)
        for n, x in wanted.items():
            assert (x is None) == (found[n] is None), f"{name} {n}"
            assert x is None or (found[n].shape == x.shape and relative(found[n], x) < 1e-12), f"{name} {n}"
        env |= wanted
    exact, chained = definition(case, torch.float64), from_stages(case, env)
    assert chained.keys() == exact.keys()
    for n, x in exact.items():
        assert relative(chained[n], x) < 1e-12, n


def test_the_literal_stages_have_the_shapes_that_the_table_says():
    case = small("ragged", "softplus", 32, "slow")
    s, env = case.spec, case.stage_tensors(torch.float64)
    env = literal.chain(NAMES, case.problem(), case.layout, env, torch.float64)
    axes = {"C": s.C, "K": s.K, "V": s.V}
    for stage in STAGES.values():
        for n in stage.writes:
            letters = [axes[word.strip()] for word in SHAPES[n].strip("()").split(",") if word.strip()]
            shape = list(env[n].shape)
            if SHAPES[n] == "(C)":
                letters.append(1)                                             # b and its like are columns
            assert shape[len(shape) - len(letters) :] == letters, n


def test_a_decay_of_minus_infinity_forgets_and_makes_no_nan():
    case = small("ragged", "given", 32, "slow")
    case.keywords["g"][:, 40] = -torch.inf
    p, env = case.problem(), case.stage_tensors(torch.float64)
    env = literal.chain([stage.name for stage in FORWARD], p, case.layout, env, torch.float64)
    assert all(env[n].isfinite().all() for n in ("A_qk", "A_kk", "w", "u", "h", "o", "ht"))
    assert relative(from_stages(case, env)["o"], definition(case, torch.float64, backward=False)["o"]) < 1e-12


def test_tokens_go_into_chunks_and_come_back():
    layout = ChunkLayout.from_problem(make(Spec(lengths=(65, 0, 3), padding=4, C=32)).problem(), [0, 65, 65, 68])
    x = torch.arange(72 * 2.0).view(72, 2, 1)
    chunks = layout.chunk(x)
    assert chunks.shape == (4, 2, 32, 1) and not chunks[2, :, 1:].any() and not chunks[3, :, 3:].any()
    back = layout.unchunk(chunks)
    assert torch.equal(back[:68], x[:68]) and not back[68:].any()
    pieces = [(p.seq, p.chunk, p.start, p.rows) for p in layout.pieces]
    assert pieces == [(0, 0, 0, 32), (0, 1, 32, 32), (0, 2, 64, 1), (2, 0, 65, 3)]


def test_a_seed_draws_the_same_case_and_another_seed_another():
    first, again, other = (make(Spec(lengths=(5, 3), seed=seed)) for seed in (1, 1, 2))
    for n, x in first.keywords.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, again.keywords[n])
    assert not torch.equal(first.keywords["q"], other.keywords["q"])


@pytest.mark.parametrize(("gate", "regime"), list(itertools.product(GATES, ("fast", "slow"))))
def test_the_regimes_forget_within_tokens_or_remember_for_hundreds(gate, regime):
    case = make_inputs(T=64, H=2, K=64, dtype="float32", gate=gate, regime=regime, seed=1)
    p = case.problem()
    decay = launch.stage("fwd/gate", p, None, case.stage_tensors(torch.float64))["g2"].mean()
    assert decay < -1.5 if regime == "fast" else -0.05 < decay < 0
