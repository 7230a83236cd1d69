"""What `benchmarks.training` compares, on a CPU, with a small model in the place of FLA's."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import common, training
from kda.nn import KimiDeltaAttention
from kda.notices import KdaNotice

TINY = training.Settings(heads=2, head_dim=8, hidden=16, layers=2, batch=2, tokens=24, steps=4, lr=3e-2, device="cpu")


class Attention(nn.Module):
    """A layer with the weights, under the names, and the results of FLA's."""

    def __init__(self, config):
        super().__init__()
        sizes = config.hidden_size, config.num_heads, config.head_dim
        self.inner = KimiDeltaAttention(*sizes, gate_bias=True, layer_idx=0)
        self.o_norm = self.inner.o_norm

    def state_dict(self, *args, **keywords):
        return self.inner.to_checkpoint("fla")

    def forward(self, hidden_states, **_):
        return self.inner(hidden_states), None, None


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = SimpleNamespace()

    def forward(self, x):
        return x + self.attn(hidden_states=x)[0]


class Model(nn.Module):
    warning = None

    def __init__(self, config):
        super().__init__()
        self.embed, self.head = nn.Embedding(config.vocab_size, config.hidden_size), nn.Linear(config.hidden_size, 256)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))

    def forward(self, input_ids, labels):
        if self.warning:
            warnings.warn(self.warning, stacklevel=1)
        x = self.embed(input_ids)
        for block in self.model.layers:
            x = block(x)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))


@pytest.fixture
def fla(monkeypatch, tmp_path):
    """Put the small model where FLA's is imported from, and let the text be short."""
    module = SimpleNamespace(KDAConfig=lambda **given: SimpleNamespace(**given), KDAForCausalLM=Model)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(models=module))
    monkeypatch.setitem(sys.modules, "fla.models", module)
    (tmp_path / "b.py").write_text("x = 1\n" * 60)
    (tmp_path / "a.py").write_text("print('first')\n" * 20)
    return training.dataclasses.replace(TINY, text=str(tmp_path))


def row_of(side="fla", losses=(5.0, 4.0, 3.0, 2.0), rate=100.0, text="x"):
    return {"side": side, "tokens_per_second": rate, "first_step_seconds": 1.0, "from_step": 3, "text": text,
            "step_seconds": [1.0, 1.0], "parameters": 1,
            "losses": {str(step): loss for step, loss in enumerate(losses, 1)}}


def test_layers_of_kda_begin_with_the_weights_of_those_they_replace_and_train_to_the_same_losses(fla):
    theirs, ours = training.train("fla", fla), training.train("kda.nn", fla)
    assert theirs["losses"].keys() == {"1", "2", "3", "4"} and theirs["losses"]["4"] < theirs["losses"]["1"] - 0.1
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5) and ours["parameters"] == theirs["parameters"]
    assert training.wrong([theirs, ours]) == {} and ours["text"] == theirs["text"]


def test_another_seed_is_another_model_on_other_batches(fla):
    one, other = (training.train("fla", training.dataclasses.replace(fla, seed=seed)) for seed in (0, 1))
    assert one["losses"]["1"] != other["losses"]["1"] and one["text"] == other["text"]


def test_batches_are_those_of_the_step_and_the_seed_alone(fla):
    text = training.text_of(fla.text)
    assert bytes(text[:14].tolist()) == b"print('first')", "files are read in the order of their names"
    first, again, second = (training.batch_of(text, step, fla) for step in (1, 1, 2))
    assert first.shape == (2, 24) and torch.equal(first, again) and not torch.equal(first, second)


def test_the_rate_leaves_out_the_steps_that_build_and_warm_up_and_one_that_waited_for_something_else(fla):
    seconds = itertools.accumulate((100, 0, 50, 0, 2, 0, 40, 0, 1, 0), initial=0)
    row = training.train("fla", training.dataclasses.replace(fla, steps=5), clock=lambda: next(seconds))
    assert row["first_step_seconds"] == 100 and row["from_step"] == 3 and row["step_seconds"] == [2, 40, 1]
    assert row["tokens_per_second"] == 2 * 24 / 2 and "GiB" not in row


def test_the_one_line_of_kda_comes_before_the_model_is_made(fla, monkeypatch):
    called, order = [], ["kda", "triton"]
    registered = SimpleNamespace(asked=lambda: {"chunk_kda": order})
    monkeypatch.setattr(training.importlib, "import_module", lambda name: called.append(name) or registered)
    monkeypatch.setattr(training, "model_of_fla", lambda s: called.append("model"))
    training.model_with_kda(fla)
    assert called == ["kda.fla", "model"]
    order.reverse()
    with pytest.raises(RuntimeError, match="FLA asks triton, kda for chunk_kda, not kda first"):
        training.model_with_kda(fla)


def test_a_call_that_fla_runs_in_place_of_kda_ends_the_side(fla, monkeypatch):
    monkeypatch.setattr(Model, "warning", KdaNotice("kda.fla: FLA runs this call"))
    with pytest.raises(KdaNotice):
        training.train("fla", fla)


@pytest.mark.parametrize("losses, says", [
    ((5.0, 4.0, 3.0, float("nan")), "not finite"), ((5.2, 4.0, 3.0, 2.0), "first loss is 4.0% off that of fla"),
    ((5.0, 4.0, 3.0, 2.2), "last losses are 10.0% off those of fla"), ((5.0, 4.0, 3.0), "for another time than fla"),
])
def test_a_side_that_does_not_train_as_the_first_one_is_named_and_not_saved(losses, says, tmp_path, capsys):
    rows = {"fla": row_of(), "kda": row_of("kda", losses, 150.0)}
    file = tmp_path / "x.json"
    if len(losses) == len(rows["fla"]["losses"]):
        assert training.compare(["fla", "kda"], TINY, lambda side, s: rows[side], file) == 1
        assert [row["side"] for row in json.loads(file.read_text())["rows"]] == ["fla"]
        assert says in capsys.readouterr().out
    assert list(training.wrong([*rows.values()])) == ["kda"] and says in training.wrong([*rows.values()])["kda"]


def test_other_roundings_are_no_fault():
    assert training.wrong([row_of(), row_of("kda", (5.01, 4.2, 2.9, 2.02))]) == {}
    assert list(training.wrong([row_of(), row_of("kda", text="another")])) == ["kda"]


def test_what_is_saved_is_what_the_picture_and_the_readme_read(tmp_path, capsys):
    rows = {"fla": row_of(), "kda": row_of("kda", rate=140.0), "kda.nn": row_of("kda.nn", rate=150.0)}
    file, plot = tmp_path / "x.json", tmp_path / "x.svg"
    pytest.importorskip("matplotlib")
    assert training.compare([*rows], TINY, lambda side, s: rows[side], file, plot) == 0
    found, on_record = (json.loads(path.read_text()) for path in (file, common.RESULTS / "h200-model.json"))
    assert found.keys() == on_record.keys() and found["gate"] == "softplus"
    assert found["settings"].keys() == on_record["settings"].keys()
    for row, other in zip(found["rows"], on_record["rows"], strict=True):
        assert row.keys() == other.keys() - {"GiB"}
    assert "1.40 x" in capsys.readouterr().out and plot.read_text().startswith("<?xml")


def test_each_side_runs_in_a_process_of_its_own_with_the_same_settings(monkeypatch, tmp_path):
    asked = []
    row = row_of("fla", [5.0] * 8)
    monkeypatch.setattr(training, "train", lambda side, s: asked.append((side, s)) or row | {"side": side})
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(returncode=training.main(command[3:])))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training.main(["--heads", "64", "--lower-bound", "-5", "--sides", "fla,kda", "--steps", "8"]) == 0
    assert [side for side, _ in asked] == ["fla", "kda"] and asked[0][1] == asked[1][1]
    s = asked[0][1]
    assert (s.heads, s.hidden, s.layers, s.steps, s.gate) == (64, 4096, 4, 8, "bounded")


def test_a_side_whose_process_fails_ends_the_comparison(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="kda was not trained"):
        training.in_a_process("kda", TINY)


@pytest.mark.parametrize("words, says", [
    (["--sides", "fla,torch"], "no side 'torch'; there are fla, kda, kda.nn"),
    (["--device", "cpu"], "the layer of 'fla' is FLA's, whose kernels need a GPU"),
])
def test_a_wrong_command_is_answered_before_anything_is_trained(words, says, capsys):
    with pytest.raises(SystemExit) as left:
        training.main(words)
    assert left.value.code == 2 and says in capsys.readouterr().err
