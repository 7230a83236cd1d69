"""Whole calls that are predicted from a part of them: a part says what all says, and nothing runs that need not."""

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from kda.measure import predicted
from kda.measure.shapes import Shape
from kda.simulator.timing.clock import Setting

FEW_HEADS = Shape(T=2048, H=40)


def forward(shape, short=predicted.SHORT, monkeypatch=None):
    if monkeypatch:
        monkeypatch.setattr(predicted, "SHORT", short)
    return predicted.predict("sm_90a", "h200", "sm90", shape, step=False)


def test_a_row_is_predicted_from_two_shorter_ones(monkeypatch):
    from_short = forward(FEW_HEADS, ((256, 512),), monkeypatch)
    whole = forward(FEW_HEADS, (), monkeypatch)
    names = [one.kernel for one in whole.launches]
    assert [one.kernel for one in from_short.launches] == names and names
    assert from_short.milliseconds() == pytest.approx(whole.milliseconds(), rel=0.05)
    assert from_short.milliseconds() == forward(FEW_HEADS, ((256, 512),), monkeypatch).milliseconds()


def test_a_packed_grid_counts_as_its_work_and_its_tables_run_in_full():
    """Two sequences of 128 tokens: the grid has room for the most chunks that two may have, and a CTA reads the table
    before its rows, two accesses one after the other."""
    packed = Shape(H=2, lengths=(128, 128))
    trial = predicted._Trial("sm_90a", "sm90", packed, False, "bounded", 128)
    asked = {predicted.family_of(one.kernel.name): one for one in trial.launches()}
    works = dict(zip(asked, predicted._working([*asked.values()], *trial_of(trial))))
    assert works["prepare"] < predicted._clusters(asked["prepare"]) and works["chain"] > 0
    tables, chain = (predicted._setting("h200", asked[name], 1) for name in ("tables", "chain"))
    assert tables.waves == 0 < chain.waves
    batch = forward(Shape(H=2, B=2, T=128)).kernel("prepare").milliseconds
    read = 2 * 700 / 1.98e6
    assert batch < forward(packed).kernel("prepare").milliseconds < batch + read


def trial_of(trial):
    return trial.arch, trial.backend, trial.shape, trial.step, trial.gate, trial.row


def test_a_launch_is_found_by_its_stage_or_the_error_lists_them():
    call = forward(Shape(T=128, H=2))
    assert call.kernel("prepare").milliseconds > 0
    with pytest.raises(LookupError, match=r"no such launch of fused; it has prepare, chain"):
        call.kernel("fused")


def test_a_setting_of_some_waves_leaves_the_other_clusters_alone():
    import torch

    from kda.simulator import launch

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
