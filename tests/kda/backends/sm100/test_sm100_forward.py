"""The Blackwell forward on the CPU, from its PTX: whole calls against the definition, clean in several schedules."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from cute_calls import (
    COMMIT,
    RAGGED,
    called,
    check,
    kept_nowhere,
    rows_of,
)
from kernel_faults import assert_a_call_notices, plant
from sm100_faults import FORWARD as FAULTS

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from benchmarks.counted import blackwell as counted
from kda.backends.common.cute.configs import JoinConfig
from kda.backends.common.cute.tile import C
from kda.backends.sm100 import launch, plan
from kda.backends.sm100.capability import ARCHS
from kda.backends.sm100.configs import TMEM, FusedConfig, GradsConfig
from kda.backends.sm100.reverse_config import ReverseConfig
from kda.model.bundles import Save
from kda.model.host import host_of, standing_in
from kda.model.problem import Problem
from kda.routing import dispatch
from kda.routing.dispatch import weigh
from kda.tools.verify.cases import make_inputs
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread")]
WALK = dict(lengths=(130, 1, 0, 70, 200))
# Channels, and columns: one code handles both, and is proven with both.
SIZES = 128, 64
OFTEN_128 = 128, pytest.param(64, marks=pytest.mark.exhaustive)


def case_of(K=128, **options):
    return make_inputs(**dict(H=1, K=K, V=K, gate="bounded") | options)


def seen(case, **options):
    return called(case, backend="sm100", **options)


def proven(case, **options):
    return check(case, backend="sm100", **options)


ONE_CLUSTER = dict(sms=2)                    # it computes all sequences and heads, one after the other


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [WALK, dict(T=140, HV=3), dict(B=3, T=70, gate="softplus")], ids=str)
@pytest.mark.parametrize("K", SIZES)
def test_one_cluster_walks_over_one_sequence_and_head_after_the_other(shape, K, force):
    case = case_of(K, **shape)
    expected, _ = seen(case)
    force(**ONE_CLUSTER)
    for schedule in range(3):
        found = proven(case, schedule=schedule, early=bool(schedule))
        assert all(torch.equal(found[x], expected[x]) for x in expected)


@pytest.mark.spread(every=2)
@pytest.mark.parametrize("arch", ARCHS)
def test_it_is_one_kernel_for_every_arch(arch):
    found, session = seen(case_of(T=70), arch=arch)
    assert len(session.launches) == 1 and not session.findings
    assert [note.kind for note in session.notes] == ["mbarrier-scope"]      # CTAs of the pair arrive as CUTLASS's do
    assert session.launches[0].kernel.target.spelling == parse(arch).spelling
    assert torch.equal(found["o"], seen(case_of(T=70))[0]["o"])


FAULTY = {
    "long": dict(T=390), "tail": dict(T=33, regime="fast"), "heads": dict(T=33, HV=2), "walk": WALK,
    "packed": dict(padding=9, **RAGGED), "any gate": dict(T=70, gate="softplus"),
    "fast": dict(T=40, gate="softplus", regime="fast"), "64": dict(T=70),
}


PLANTED = {f"{name}, K = {K}": (name, K) for K in SIZES for name in FAULTS if K == 64 or FAULTS[name].case != "64"}


@rows_of(PLANTED, "the product does not see the operands, K = 64",
         commit=["the product does not see the operands, K = 128"])
def test_a_planted_fault_is_noticed(name, tmp_path, monkeypatch, force):
    name, K = PLANTED[name]
    fault = FAULTS[name]
    plant(fault, tmp_path, monkeypatch, "sm100")
    force(**ONE_CLUSTER)
    assert_a_call_notices(fault, case_of(K, **FAULTY[fault.case]), "sm100")


@pytest.mark.exhaustive
def test_its_page_says_what_is_counted():
    """Bytes are at most 1.6 times what q, k, v, g, beta and o are."""
    found = counted.of_a_chunk(256, 512)
    page = (Path(__file__).parents[4] / "docs" / "stages" / "sm100_forward.md").read_text()
    assert found["bytes"] / C <= 1.6 * 1282
    for name, said in {
        "warp_instructions": "{:,.0f} warp instructions", "shared_wavefronts": "{:,.0f} wavefronts",
        "bank_conflicts": "{:.0f} of conflicts", "bytes": "{:,.0f} requested",
    }.items():
        assert said.format(found[name] / (C if name == "bytes" else 1)) in page
    one = counted.chunk(found)
    for clocks in (
        f"{one.instructions:,.0f} at 1.9", f"per CTA | {one.shared:,.0f} |", f"| {one.tensor:,.0f} (operands",
        f"four hops | {one.chain:,.0f} |", f"| {one.memory:,.0f} (7.2 TB/s",
    ):
        assert clocks in page
    for gate, said in {
        "given": "{:,.0f} instructions and {:.0f} MUFU (given", "softplus": "{:,.0f} and {:.0f} (softplus)",
    }.items():
        found = counted.of_a_chunk(256, 512, gate)
        assert said.format(found["warp_instructions"], found["mufu"]) in page


def test_its_memory_is_what_its_configuration_says():
    for K in SIZES:
        of_bounded, *_ = plan.recipes(case_of(K, T=33).problem(), host_of("sm100"))
        config = of_bounded.config
        assert config.shared <= 232448 and TMEM // 2 < config.tmem.end <= TMEM == 512
        kernel = launch.kernel(config, parse("sm100"))
        assert 640 * kernel.registers <= 65536 and kernel.spills <= 16 * (K == 128)


GATES = (
    "bounded l2norm dt_bias=true beta=sigmoid", "bounded", "bounded l2norm beta=2*sigmoid beta_dtype=float32",
    "softplus l2norm dt_bias=true beta=sigmoid", "gate=given g_dtype=float32", "bounded lower_bound=-9 l2norm",
    "softplus A_log=false",
)
HEADS = "H=2 HV=2", "H=2 HV=4", "H=1 HV=3 packed", "H=4 packed", "H=1 HV=2 B=2"
STATES = (
    "", "final_state=true", "state_dtype=float32 final_state=true", "intermediate_states=true final_state=true",
    "state_dtype=bfloat16 final_state=true intermediate_states=true state_v_first=true", "state_dtype=float32",
)
CLASSES = [" ".join(words) for words in itertools.product(GATES, HEADS, STATES)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_heads_of_64_channels_spill_8_bytes_at_most_and_gradients_112(arch):
    recipes = {}
    for words in CLASSES[:: 11 if arch == "sm100" else 37]:
        for recipe in plan.recipes(Problem.parse(f"K=64 V=64 bfloat16 {words}"), host_of(arch)):
            recipes.setdefault(recipe.key, recipe)
    assert len(recipes) > 12
    for recipe in recipes.values():
        most = 112 if isinstance(recipe.config, GradsConfig) else 8
        assert launch.kernel(recipe.config, recipe.target).spills <= most, recipe


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_spill_what_their_pages_say_at_most(arch):
    """A part of all classes, that has each word many times.  Pages: docs/stages."""
    recipes = {}
    for words in CLASSES[:: 31 if arch == "sm100" else 71]:
        for recipe in plan.recipes(Problem.parse(f"K=128 V=128 bfloat16 {words}"), host_of(arch)):
            recipes.setdefault(recipe.key, recipe)
    spilt = {recipe.config: launch.kernel(recipe.config, recipe.target).spills for recipe in recipes.values()}
    most: dict[object, int] = {}
    for config, spills in spilt.items():
        kind = type(config)
        if isinstance(config, FusedConfig):
            kind = config.one_product, "keeps" if config.keeps else config.cut
        most[kind] = max(most.get(kind, 0), spills)
    allowed = {GradsConfig: 136, ReverseConfig: 80, JoinConfig: 16}
    allowed |= {(True, False): 24, (True, True): 16, (True, "keeps"): 24}
    allowed |= {(False, False): 80 if arch == "sm103" else 56, (False, True): 88, (False, "keeps"): 104}
    assert len(recipes) > 6
    assert all(spills <= allowed.get(kind, 0) for kind, spills in most.items()), most


@pytest.mark.parametrize("K", OFTEN_128)
def test_it_takes_the_shared_memory_that_its_configuration_says(K, monkeypatch):
    """With 16 bytes less it reaches beyond it."""
    monkeypatch.setattr(FusedConfig, "shared", property(lambda config: config.struct.end - 16))
    kept_nowhere(monkeypatch, launch)
    _, session = seen(case_of(K, T=100))
    assert any(finding.kind == "out-of-bounds" for finding in session.findings)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_blackwell_gpu_picks_it_and_its_backward(arch):
    case = case_of(T=33)
    taken = [weigh(case.problem(direction), host_of(arch)).backend for direction in ("forward", "backward")]
    assert taken == ["sm100", "sm100"]


@pytest.mark.parametrize("arch", ["sm100", *(pytest.param(arch, marks=COMMIT) for arch in ARCHS[1:])])
def test_a_call_launches_one_kernel(arch):
    door = SimulatedDoor("sm100", parse(arch))
    assert door.call(case_of(T=33), False).keys() == {"o", "ht"} and door.launches == 1 and not door.findings


def test_a_forward_that_is_recorded_is_made_by_who_takes_the_backward():
    def writer(p, requested):
        return dispatch.route(p, requested, training=True, save=Save.PRODUCTS).backend

    problem = case_of(T=33).problem()
    with standing_in(host_of("sm100")):
        assert writer(problem, "sm100") == "sm100"
        assert writer(case_of(64, T=33).problem(), "sm100") == "sm100"
        assert writer(dataclasses.replace(problem, packed=True, N=70_000), "sm100") == "triton"
    with standing_in(host_of("sm90")):
        assert writer(problem, "sm90") == "sm90"


@pytest.mark.parametrize(("save", "said"), [(Save.PRODUCTS, True), (Save.NOTHING, False)])
def test_explain_says_who_makes_a_forward_that_is_recorded(save, said, monkeypatch):
    monkeypatch.setattr(dispatch, "what_is_saved", lambda *asked: save)     # as on a GPU; as here
    case = case_of(T=33, initial_state=False)
    many = torch.cat([torch.zeros(70_000, dtype=torch.int64), torch.tensor([33])])    # sequences, for a backward
    with standing_in(host_of("sm100")):
        found = kda.explain(**case.keywords | {"q": case.keywords["q"].detach().requires_grad_(), "cu_seqlens": many})
    lines = str(found).splitlines()
    assert all(any(line.startswith(f"{name} accepts") for line in lines) for name in ("sm100", "triton"))
    line = "triton also runs the forward: gradients are recorded, and sm100 keeps nothing for them"
    assert (line in lines) == said


