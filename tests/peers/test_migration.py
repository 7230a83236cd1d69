"""The model of docs/fla.md runs as it stands there, on kda, and computes what transformers computes."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("fla", reason="needs fla-core, see tests/peers/conftest.py")
pytest.importorskip("transformers", reason="needs transformers, see tests/peers/conftest.py")

from small_models import distance, in_torch

import kda

pytestmark = pytest.mark.peers

PAGE = Path(__file__).parents[2] / "docs" / "fla.md"
LIMIT = 100 * torch.finfo(torch.float32).eps             # for sums in another order


def test_the_model_of_the_page_runs_on_kda_with_the_loss_and_the_tokens_of_transformers(in_fla, monkeypatch):
    calls = []
    for name in ("chunk_kda", "fused_recurrent_kda_fwd"):
        real = getattr(kda.calls.api, name)
        monkeypatch.setattr(kda.calls.api, name, lambda *args, real=real, name=name, **keywords: (
            calls.append(name) or real(*args, **keywords)))
    code, = re.findall(r"^## A model\n.*?^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    found = {}
    exec(compile(code, PAGE.name, "exec"), found)
    assert calls == ["chunk_kda"] * 2 + ["fused_recurrent_kda_fwd"] * 5        # a step, the prompt, five tokens
    assert any(p.grad.any() for p in found["model"].model.layers[0].self_attn.parameters())
    alone = {}
    with in_torch("kimi_linear"):
        exec(compile(code, PAGE.name, "exec"), alone)
    assert len(calls) == 7 and distance(found["loss"].detach(), alone["loss"].detach()) < LIMIT
    assert torch.equal(found["answer"], alone["answer"]) and found["answer"].shape == (2, 26)
