"""Whole calls that are predicted from a part of them: a part says what all says, and nothing runs that need not."""

import importlib

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.model.force import forcing
from kda.tools.measure import predicted
from kda.tools.measure.shapes import BenchShape
from ptxkit.timing.clock import Setting

pytestmark = pytest.mark.simulated

FEW_HEADS = BenchShape(T=2048, H=40)


@pytest.fixture(autouse=True)
def _nothing_kept():
    predicted.forget()
    yield
    predicted.forget()


def forward(shape, short=predicted.SHORT, monkeypatch=None):
    if monkeypatch:
        monkeypatch.setattr(predicted, "SHORT", short)
        predicted.forget()
    return predicted.predict("sm_90a", "h200", "sm90", shape, step=False)


@pytest.mark.exhaustive
def test_a_row_is_predicted_from_two_shorter_ones(monkeypatch):
    short = predicted.SHORT[:1]
    from_short = forward(FEW_HEADS, short, monkeypatch)
    whole = forward(FEW_HEADS, (), monkeypatch)
    names = [one.kernel for one in whole.launches]
    assert [one.kernel for one in from_short.launches] == names and names
    assert from_short.milliseconds() == pytest.approx(whole.milliseconds(), rel=0.05)
    assert from_short.milliseconds() == forward(FEW_HEADS, short, monkeypatch).milliseconds()


def test_a_packed_grid_counts_as_its_work_and_its_tables_run_in_full():
    """Two sequences of 128 tokens: the grid has room for the most chunks that two may have, and a CTA reads the table
    before its rows, two accesses one after the other."""
    packed = BenchShape(H=2, lengths=(128, 128))
    call = predicted.PredictedCall("sm_90a", "sm90", packed, step=False)
    asked = {predicted.family_of(one.kernel.name): one for one in call.launches(128, backward=False)}
    works = dict(zip(asked, predicted._working([*asked.values()], call, backward=False)))
    assert works["prepare"] < predicted._clusters(asked["prepare"]) and works["chain"] > 0
    tables, chain = (predicted._setting("h200", asked[name], 1) for name in ("tables", "chain"))
    assert tables.waves == 0 < chain.waves
    batch = forward(BenchShape(H=2, B=2, T=128)).kernel("prepare").milliseconds
    read = 2 * 700 / 1.98e6
    assert batch < forward(packed).kernel("prepare").milliseconds < batch + read


@pytest.mark.exhaustive
def test_segments_are_walked_back_over_by_more_than_the_ctas_that_have_nothing_to_do():
    """No dh enters the first segment's walk from one before it, so the first nine CTAs end at once."""
    with forcing(segment_chunks=8, reverse=False):
        step = predicted.predict("sm_100a", "b200", "sm100", BenchShape(T=512, H=9), step=True)
    ahead, walk = (step.kernel("walk", backward=True, nth=n).clocks for n in (0, 1))
    assert 0.5 * walk < ahead < walk


@pytest.mark.exhaustive
def test_a_grid_whose_ctas_wait_for_each_other_runs_on_a_few_sms_with_their_share_of_the_heads():
    call = predicted.PredictedCall("sm_100a", "sm100", BenchShape(T=512, H=64), step=True, keeps=True)
    grids = [one.grid[0] for one in call.launches(512, backward=True) if predicted._waits_inside(one)]
    clock = predicted._on_few_sms(call, "b200", True, 512)
    assert grids == [148] and clock.detailed in predicted.FEW_SMS and clock.resident == clock.share == 1


@pytest.mark.parametrize("backend", ["sm90", "sm100"])
def test_every_kernel_of_a_plan_has_a_name_of_its_own(backend):
    modules = importlib.import_module(f"kda.backends.{backend}.plan").KERNELS.values()
    for module in modules:
        kernel = f"kernel_cutlass_kernel_kdabackends{module.replace('.', '')}_object_at__"
        assert predicted.family_of(kernel) == module.rpartition(".")[2]


def test_a_launch_is_found_by_its_stage_or_the_error_lists_them():
    call = forward(BenchShape(T=128, H=2))
    assert call.kernel("prepare").milliseconds > 0
    with pytest.raises(LookupError, match=r"no such launch of fused; it has prepare, chain"):
        call.kernel("fused")


def test_a_setting_of_some_waves_leaves_the_other_clusters_alone():
    import torch

    from ptxkit import launch

    ptx = """.version 8.0
.target sm_90
.address_size 64
.visible .entry mark(.param .u64 x) {
    .reg .b32 %r<2>; .reg .b64 %d<3>;
    ld.param.u64 %d1, [x]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %d2, %r1, 4; add.s64 %d1, %d1, %d2;
    mov.u32 %r1, 1; st.global.u32 [%d1], %r1; ret;
}"""
    for clock, ran in (("h200", 400), (Setting("h200", 100_000, waves=1), 256)):
        x = torch.zeros(400, dtype=torch.int32)
        run = launch(ptx, grid=400, block=32, args=[x], clock=clock)
        assert x.sum() == ran and run.clock.clocks > 0
    assert run.clock.of(200_000).clocks == pytest.approx(2 * run.clock.clocks, rel=0.1)
    assert run.clock.share == 758


LARGE = [BenchShape(T=1024, H=64, K=64, V=64), BenchShape(T=1024, H=96, K=64, V=64)]


@pytest.fixture
def small_stand_in(monkeypatch):
    """Make the call that stands for others small; return a list that gets (heads, row, kernels that ran) of calls."""
    for name, value in dict(TOKENS=128, HEADS=8, WAVES=1, SHORT=((64, 128),)).items():
        monkeypatch.setattr(predicted, name, value)
    ran, clocks = [], predicted.PredictedCall.clocks

    def noted(self, row, backward, settings, known):
        found = clocks(self, row, backward, settings, known)
        ran.append((self.shape.H, row, sum(clock is None for clock in known)))
        return found

    monkeypatch.setattr(predicted.PredictedCall, "clocks", noted)
    return ran


def triton(shape, step=False):
    return predicted.predict("sm_90a", "h200", "triton", shape, step)


@pytest.mark.exhaustive
def test_a_kernel_whose_grid_grows_runs_once_for_all_shapes(small_stand_in):
    times = [triton(shape).kernel("prepare").milliseconds for shape in LARGE]
    assert small_stand_in == [(8, 128, 2), (64, 64, 2), (64, 128, 1), (96, 64, 2), (96, 128, 1)]
    assert times[1] == pytest.approx(1.5 * times[0], rel=0.15)


@pytest.mark.exhaustive
def test_a_prediction_does_not_depend_on_those_before(small_stand_in):
    found = []
    for order in (LARGE, LARGE[::-1]):
        predicted.forget()
        found.append({shape: [one.clocks for one in triton(shape).launches] for shape in order})
    assert found[0] == found[1]


def test_what_stands_for_several_calls_is_named_once():
    packed = BenchShape(H=64, lengths=(1024,) * 8)
    shapes = *LARGE, packed, BenchShape(T=64, K=64, V=64)
    calls = [predicted.PredictedCall("sm_90a", "triton", shape, step=True) for shape in shapes]
    stands = predicted.stands_for(calls, "h200")
    assert stands == [(calls[0].like, "h200", False), (calls[0].like, "h200", True)]
    predicted.keep(stands[0], {})
    assert predicted.stands_for(calls, "h200") == stands[1:]
    assert calls[2].like.shape.lengths == packed.lengths
    grouped = predicted.PredictedCall("sm_90a", "triton", BenchShape(T=64, H=4, HV=16), step=False).like.shape
    assert (grouped.T, grouped.H, grouped.HV) == (1024, 16, 64)


@pytest.mark.usefixtures("libnvrtc")
def test_a_backward_apart_from_its_forward_computes_what_a_step_saves():
    shape = BenchShape(T=64, H=1, K=64, V=64, dtype="float32", gate="softplus")
    step = predicted.PredictedCall("sm_90a", "sm89", shape, step=True)
    (of_step,), (apart,) = (
        [one.kernel.ptx for one in call.launches(64, backward=True) if one.kernel.name == "prepare"]
        for call in (step, step._replace(apart=True))
    )
    assert of_step.count("mma.sync") < apart.count("mma.sync")


@pytest.mark.exhaustive
def test_the_forward_of_a_step_is_the_forward_alone(small_stand_in):
    shape = BenchShape(T=128, H=2, K=64, V=64)
    forward = triton(shape)
    ran = len(small_stand_in)
    step = triton(shape, step=True)
    assert step.launches[: len(forward.launches)] == forward.launches and len(small_stand_in) == ran + 1
    assert all(one.backward for one in step.launches[len(forward.launches) :])
