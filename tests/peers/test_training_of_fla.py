"""`benchmarks.training` with FLA's own model, on a CPU: what surrounds its layers is torch's there."""

import pytest
import torch

pytest.importorskip("fla.models", reason="needs flash-linear-attention, see tests/peers/conftest.py")

from benchmarks import training

pytestmark = pytest.mark.peers

TINY = training.Settings(
    heads=2, head_dim=8, hidden=16, layers=2, batch=2, tokens=24, steps=3, lr=3e-2, device="cpu", text="kda/model",
)


def test_kda_layers_in_flas_model_have_its_weights():
    theirs, ours = training.model_of_fla(TINY), training.model_of_layers(TINY)
    for theirs_block, block in zip(theirs.model.layers, ours.model.layers, strict=True):
        mine = block.attn.layer.to_checkpoint("fla")
        assert theirs_block.attn.state_dict().keys() == mine.keys()
        assert all(torch.equal(x, mine[name].view_as(x)) for name, x in theirs_block.attn.state_dict().items())
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())


def test_flas_model_trains_with_layers_of_kda(monkeypatch):
    monkeypatch.chdir(training.common.ROOT)
    losses = training.train("kda.nn", TINY)["losses"]
    assert len(losses) == 3 and losses["3"] < losses["1"] and 5 < losses["1"] < 6
