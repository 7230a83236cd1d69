"""The model of docs/fla.md runs as it stands there, on kda, and computes what transformers computes."""

import pytest
import torch
from programs import ROOT, said_by

pytest.importorskip("fla", reason="needs fla-core, see tests/peers/conftest.py")
pytest.importorskip("transformers", reason="needs transformers, see tests/peers/conftest.py")

pytestmark = pytest.mark.peers

LIMIT = 100 * torch.finfo(torch.float32).eps             # for sums in another order
PROGRAM = """
import json
import re
import sys
from pathlib import Path

import torch
from programs import counted
from small_models import distance, in_torch

import kda

calls = counted(kda.calls.api, "chunk_kda", "fused_recurrent_kda_fwd")
page = Path(sys.argv[1])
code, = re.findall(r"^## A model\\n.*?^```py\\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
found, alone = {}, {}
exec(compile(code, page.name, "exec"), found)
on_kda = list(calls)
with in_torch("kimi_linear"):
    exec(compile(code, page.name, "exec"), alone)
print(json.dumps({
    "calls": on_kda, "calls of transformers": calls[len(on_kda):],
    "gradient": any(bool(p.grad.any()) for p in found["model"].model.layers[0].self_attn.parameters()),
    "loss": distance(found["loss"].detach(), alone["loss"].detach()), "shape": list(found["answer"].shape),
    "tokens": torch.equal(found["answer"], alone["answer"]),
}))
"""


def test_the_model_of_the_page_runs_on_kda_with_the_loss_and_the_tokens_of_transformers():
    """In a process of its own: transformers keeps the functions that it has found first."""
    said = said_by(PROGRAM, ROOT / "docs" / "fla.md")
    assert said["calls"] == ["chunk_kda"] * 2 + ["fused_recurrent_kda_fwd"] * 5    # a step, the prompt, five tokens
    assert said["gradient"] and said["calls of transformers"] == [] and said["loss"] < LIMIT
    assert said["tokens"] and said["shape"] == [2, 26]
