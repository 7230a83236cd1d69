"""The Hopper backward, run on the CPU from its PTX: what it alone promises, its stages and its routing."""

import dataclasses

import pytest
import torch
from cute_calls import (
    COMMIT,
    assert_right,
    changed,
    check_gradients,
    drawn,
    gradients,
    has_products_that_wait_for_no_other,
)
from kernel_faults import plant
from sm90_faults import FAULTS

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import kda
from kda.backends.common.cute.training import LOAD_WARPS
from kda.backends.sm90 import launch, plan
from kda.errors import InputError
from kda.model.bundles import Save
from kda.model.host import host_of, standing_in
from kda.model.problem import Problem
from kda.routing.dispatch import route, weigh
from kda.tools.measure.host import StandIn, launches_of
from kda.tools.measure.host import calls as host_calls
from kda.tools.verify.parity import examine, prove
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit import capture
from ptxkit.compile.errors import BuildError
from ptxkit.compile.target import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread", "kernels_apart")]
SMALL = dict(K=64, V=64)
RARELY_WIDE = pytest.mark.parametrize("dims", [SMALL, pytest.param({}, marks=pytest.mark.exhaustive)], ids=str)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "close"), [
    (torch.bfloat16, 2.0**-8), pytest.param(torch.float32, 1e-5, marks=pytest.mark.exhaustive),
], ids=str)
def test_a_beta_has_the_gradient_of_the_sigmoid_that_gives_it(dtype, close):
    of_logits = changed(drawn(T=70), beta=lambda logits: logits.to(dtype))
    beta = of_logits.keywords["beta"].float().sigmoid()
    given = dataclasses.replace(of_logits, keywords=of_logits.keywords | {
        "beta": beta, "use_beta_sigmoid_in_kernel": False,
    })
    (of_sigmoid, _), (found, _) = gradients(of_logits, "sm90"), gradients(given, "sm90")
    expected = of_sigmoid["dbeta"] / (beta * (1 - beta))
    assert (found["dbeta"] - expected).norm() <= close * expected.norm()


OF_BETA = pytest.mark.parametrize("dtype", [
    torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive),
], ids=str)


@pytest.mark.exhaustive
@OF_BETA
def test_a_beta_of_nothing_has_a_gradient(dtype):
    tokens = torch.arange(70)[:, None]

    def almost(beta):
        return torch.where(tokens % 3 == 0, 0.0, torch.where(tokens % 3 == 1, 2.0**-120, beta)).to(dtype)

    found = check_gradients(changed(drawn(T=70, beta="given"), beta=almost), "sm90")
    assert found["dbeta"].abs().min() > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_a_gate_may_have_no_parameters(name):
    case = drawn(T=40)
    found = check_gradients(dataclasses.replace(case, keywords=case.keywords | {name: None}), "sm90")
    assert f"d{name}" not in found


@RARELY_WIDE
def test_no_gradient_of_a_final_state_is_one_of_zeros(dims):
    case = drawn(T=40, **dims)
    without, of_zeros = (dataclasses.replace(case, dht=dht) for dht in (None, torch.zeros_like(case.dht)))
    (found, _), (expected, _) = gradients(without, "sm90"), gradients(of_zeros, "sm90")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("words", [
    dict(T=40, HV=2),
    pytest.param(dict(lengths=(65, 0, 1, 30), padding=140, HV=2, **SMALL), marks=pytest.mark.exhaustive),
], ids=str)
def test_gradients_have_the_shapes_of_inputs_and_are_no_views(words):
    case = drawn(**words)
    for name, x in gradients(case, "sm90")[0].items():
        given = case.keywords["initial_state" if name == "dh0" else name[1:]]
        assert (x.shape, x.dtype) == (given.shape, given.dtype) and not x._is_view(), name


@pytest.fixture
def fresh_memory_has_no_numbers():
    """torch fills what it allocates with nan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("fresh_memory_has_no_numbers")
@pytest.mark.parametrize("one_grid", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=str)
def test_tokens_of_no_sequence_have_no_gradients(one_grid, force):
    """An item, or more, has such tokens alone, and no CTA computes it."""
    force(form="two kernels", segment_chunks=0, reverse=one_grid, sms=3)
    case = drawn(lengths=(65, 0, 1, 30), padding=140, HV=2, **SMALL)
    with capture(arch="sm90", strict=True) as session:
        saved = kda.chunk_kda_fwd(**case.keywords, disable_recompute=True, backend="sm90").saved
        kept = kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords, saved=saved, backend="sm90")
    assert not session.findings
    for found in (gradients(case, "sm90")[0], kept._asdict()):
        assert not any(x.isnan().any() for x in found.values() if x is not None)
        assert not any(found[name][:, 96:].any() for name in ("dq", "dk", "dv", "dg", "dbeta"))


@pytest.mark.spread(every=4)
@pytest.mark.parametrize("words", [                          # the first: a kernel that other tests have built
    "H=1 HV=2 bounded dt_bias=true l2norm beta=sigmoid",
    pytest.param("bounded dt_bias=true l2norm beta=sigmoid", marks=COMMIT),
    "softplus dt_bias=true l2norm beta=sigmoid", "",
    "K=64 V=64 H=1 HV=2 packed bounded dt_bias=true l2norm beta=sigmoid",
    *(pytest.param(f"{of_64}{words}", marks=pytest.mark.exhaustive) for of_64 in ("", "K=64 V=64 ") for words in (
        "l2norm", "bounded lower_bound=-8 dt_bias=true l2norm beta=sigmoid",
        *(f"{gate} dt_bias=true l2norm beta=sigmoid gate_per_head=true" for gate in ("bounded", "softplus")),
        *(("softplus dt_bias=true l2norm beta=sigmoid", "bounded dt_bias=true l2norm beta=sigmoid") if of_64 else ()),
    )),
])
def test_no_product_waits_for_another(words, tmp_path):
    p = Problem.parse(f"bfloat16 {words} backward")
    has_products_that_wait_for_no_other(launch.kernel(plan.TRAINING.grads(p)), tmp_path)


@pytest.mark.parametrize("K", [64, 128])
def test_an_SM_has_room_for_as_many_ctas_of_grads_as_are_launched(K):
    p = Problem.parse(f"bfloat16 K={K} V={K} bounded l2norm beta=sigmoid backward T=8192 H=64")
    planned = plan.training_plan(p, 132)
    of_math, of_load = planned.grads.registers
    registers = 32 * (planned.grads.math_warps * of_math + LOAD_WARPS * of_load)
    assert planned.grads_grid == 132 * planned.grads.ctas == 132 * 128 // K
    assert planned.grads.ctas * registers <= 65536 and planned.grads.ctas * (planned.grads.shared + 1024) <= 228 << 10


@RARELY_WIDE
def test_what_was_kept_of_another_call_is_refused(dims):
    case, other = drawn(T=33, **dims), drawn(T=70, **dims)
    with capture(arch="sm90"):
        saved = kda.chunk_kda_fwd(**other.keywords, disable_recompute=True, backend="sm90").saved
        with pytest.raises(InputError, match=r"for q=\S+ \[1, 70, .* Pass both functions the same arguments"):
            kda.chunk_kda_bwd(do=case.do, **case.keywords, saved=saved, backend="sm90")
        with pytest.raises(InputError, match=r"for scale=\S+, beside scale=0\.5 here\. Pass both functions the same"):
            kda.chunk_kda_bwd(do=other.do, **other.keywords | {"scale": 0.5}, saved=saved, backend="sm90")


@RARELY_WIDE
def test_another_backend_recomputes_what_was_kept_here(dims):
    case = drawn(T=33, **dims)
    with capture(arch="sm90"):
        saved = kda.chunk_kda_fwd(**case.keywords, disable_recompute=True, backend="sm90").saved
    found = kda.chunk_kda_bwd(do=case.do, **case.keywords, saved=saved, backend="reference")
    expected = kda.chunk_kda_bwd(do=case.do, **case.keywords, backend="reference")
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_a_call_that_returns_states_as_well_keeps_what_every_backend_knows():
    p = drawn(T=33).problem()
    with standing_in(host_of("sm90")):
        both = [dataclasses.replace(p, disable_recompute=True, intermediate_states=more) for more in (False, True)]
        assert [route(each, training=True).save for each in both] == [Save.OWN, Save.ALL]


@RARELY_WIDE
def test_the_hosts_launches_are_those_of_the_call(dims):
    case = drawn(T=33, **dims)
    stand_in, found = StandIn(parse("sm90")), {}
    with stand_in.used():
        for name, timed in host_calls("sm90", case).items():
            found[name] = launches_of(timed.call)
    for name, timed in host_calls("sm90", case).items():
        with capture(arch="sm90") as session:
            timed.call()
        assert found[name] == len(session.runs) > 1, name


ANEW = "bwd/output+state+wy+intra+gate from inputs"


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [
    dict(lengths=(65, 0, 1, 30), HV=2), dict(T=70, gate="softplus"), dict(T=40, gate="given", beta="given"),
], ids=str)
def test_the_backward_is_a_stage_of_verify(words):
    case, door = drawn(**words), SimulatedDoor("sm90", parse("sm90"))
    rows = examine(door, case, only_stage=ANEW).rows
    assert not door.findings and {row.tensor for row in rows} >= {"dq", "dk", "dv", "dg", "dbeta", "dh0"}
    assert_right(rows)


@pytest.mark.exhaustive
def test_a_fault_of_the_walk_is_one_of_that_stage(tmp_path, monkeypatch):
    plant(FAULTS["gradients: dh does not decay"], tmp_path, monkeypatch)
    found = prove(SimulatedDoor("sm90", parse("sm90")), ANEW)
    assert not found.passed and any("dh0: " in line for line in found.details)


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [
    dict(lengths=(65, 0, 1, 30), HV=2), dict(T=70, gate="softplus", regime="fast"),
    dict(T=40, gate="given", beta="given"), dict(T=70, **SMALL),
], ids=str)
def test_its_second_kernel_is_a_stage_of_its_own(words):
    case, door = drawn(**words), SimulatedDoor("sm90", parse("sm90"))
    rows = examine(door, case, only_stage="bwd/grads").rows
    assert not door.findings and {row.tensor for row in rows} >= {"dq", "dk", "dg", "dbeta"}
    assert_right(rows)


def test_that_stage_takes_chunks_of_64_tokens():
    with pytest.raises(BuildError, match="bwd/grads: chunk_size must be 64; found 32"):
        examine(SimulatedDoor("sm90", parse("sm90")), drawn(T=40, C=32), only_stage="bwd/grads")


def test_other_head_dims_go_to_triton():
    p = Problem.parse("bfloat16 backward beta=sigmoid bounded l2norm K=64 V=128")
    choice = weigh(p, host_of("sm90"))
    assert choice.backend == "triton"
    assert [reason.split(":")[0] for reason in dict(choice.tried)["sm90"]] == ["sm90.backward_shape"]
