"""The examples and the layer's benchmark run, small, and do what they say."""

import itertools
import json
import math
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import Checkpoint, save, write_index

from kda.nn import LAYOUTS, KimiDeltaAttention, layout_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--batch", 2, "--length", 32, "--hidden", 32, "--heads", 2, "--layers", 4, "--device", "cpu"]


def run(monkeypatch, program, *arguments):
    """A program in this process; what it exits with."""
    monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delitem(sys.modules, program, raising=False)       # a module that another test has imported
    is_file, how = program.endswith(".py"), {"run_name": "__main__"}
    try:
        runpy.run_path(str(ROOT / program), **how) if is_file else runpy.run_module(program, **how)
    except SystemExit as left:
        return left.code or 0
    return 0


def losses(folder):
    return json.loads((folder / "losses.json").read_text())


def test_training_learns_and_a_resumed_one_goes_on_as_if_it_had_not_stopped(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    small = [*SMALL, "--lr", 1e-2]
    assert run(monkeypatch, "examples/train.py", *small, "--steps", 12, "--out", tmp_path / "whole") == 0
    run(monkeypatch, "examples/train.py", *small, "--steps", 5, "--out", tmp_path / "two")
    run(monkeypatch, "examples/train.py", *small, "--steps", 12, "--out", tmp_path / "two", "--resume")
    found = losses(tmp_path / "whole")
    assert found == losses(tmp_path / "two") and len(found) == 12
    assert found[0] == pytest.approx(math.log(256), rel=0.15) and min(found[-4:]) < 0.85 * found[0]
    assert (tmp_path / "two" / "losses.png").stat().st_size > 5000
    assert "'The state " in capsys.readouterr().out


def test_training_that_cannot_go_on_says_so(monkeypatch, tmp_path, capsys):
    def train(*words):
        code = run(monkeypatch, "examples/train.py", *SMALL, "--steps", 2, "--out", tmp_path, *words)
        return code, "".join(capsys.readouterr())

    train()
    code, says = train("--resume")
    assert code == 0 and "the checkpoint has 2 steps already; more --steps go on from there" in says
    code, _ = train("--resume", "--layers", 3)
    assert "--layers 4, and this one has" in code and "--layers 3. Pass those, or name another --out." in code
    code, says = train("--hidden", 33)
    assert code == 2 and "--hidden 33 must be a multiple of --heads" in says
    code, says = train("--device", "cuda:99")
    assert code == 2 and "error: --device cuda:99: " in says


def test_training_says_how_much_time_is_left_while_there_is_some(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)      # a step takes a second
    run(monkeypatch, "examples/train.py", *SMALL, "--steps", 4, "--out", tmp_path)
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.partition(" s")[2] for line in steps] == ["", ", about 2 s left", ", about 1 s left", ""]


def test_text_made_token_by_token_is_that_of_whole_calls(tmp_path):
    names = runpy.run_path(str(ROOT / "examples" / "train.py"))
    torch.manual_seed(0)
    model = names["Model"](32, 2, 4).double()
    text = model.continued(b"KDA ", 12)
    given = torch.tensor([[*b"KDA "]])
    for _ in range(12):
        given = torch.cat([given, model(given)[:, -1:].argmax(-1)], 1)
    assert bytes(given[0, 4:].tolist()) == text


def test_the_server_says_what_it_needs_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert run(monkeypatch, "examples/serve.py", "--load", 1, "--device", "cpu") == 2
    assert "starlette is not installed: pip install starlette uvicorn" in capsys.readouterr().err


def test_the_server_says_that_a_port_is_in_use():
    names = runpy.run_path(str(ROOT / "examples" / "serve.py"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"cannot listen at 127.0.0.1:{number}: .* Name another --port or --host."):
            names["refuse_a_port_in_use"]("127.0.0.1", number)
    names["refuse_a_port_in_use"]("127.0.0.1", number)


@pytest.mark.parametrize("program", ["convert", "long_context", "serve", "train"])
def test_the_help_of_an_example_fits_a_terminal_of_80_columns(monkeypatch, capsys, program):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, f"examples/{program}.py", "--help") == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("program", "arguments", "code", "says"), [
    ("serve", ["--slots", "0"], 2, "--slots: '0' is not a positive whole number"),
    ("serve", ["--load", "0"], 2, "--load: '0' is not a positive whole number"),
    ("train", ["--steps", "0"], 2, "--steps: '0' is not a positive whole number"),
    ("long_context", ["--tokens", "many"], 2, "--tokens: 'many' is not a positive whole number"),
    ("train", ["--resume", "--out", "nowhere"], "there is no nowhere/checkpoint.pt to resume from", ""),
    ("long_context", ["--lengths", "100,x"], 2, "--lengths: invalid numbers value: '100,x'"),
    ("train", ["--out", f"{__file__}/a"], f"there can be no folder {__file__}/a: Not a directory.", ""),
    ("serve", ["--dtype", "int8"], 2, "--dtype: invalid choice: 'int8'"),
    ("serve", ["--port", "99999"], 2, "--port: '99999' is not a port: 0, for any free one, to 65535"),
    ("serve", ["--port", "abc"], 2, "--port: 'abc' is not a port: 0, for any free one, to 65535"),
    ("serve", ["--batch", "63"], 2, "--batch 63 is less than the 64 tokens by which a prompt advances"),
    ("serve", ["--check"], 2, "--check, --clients and --max-tokens are for --load"),
    ("serve", ["--clients", "3"], 2, "--check, --clients and --max-tokens are for --load"),
    ("train", ["--lr", "-1"], 2, "--lr: '-1' is not a positive number"),
    ("train", ["--lr", "fast"], 2, "--lr: 'fast' is not a positive number"),
    ("train", ["--length", "10000000"], 2, "--length 10000000: the text has "),
    ("convert", ["--demo", "fla", "--lower-bound", "5"], "--lower-bound 5 is for a config that does not say it", ""),
    ("convert", ["--demo", "kimi_linear", "--lower-bound", "-5"], "--lower-bound -5 is for a config that does", ""),
    ("convert", ["nowhere"], "nowhere is no folder", ""),
    ("convert", ["--demo", "fla", "--layer", "-1"], "the checkpoint has 1 KDA layer; --layer counts them", ""),
    ("convert", ["--demo", "fla", "--to", "fla", "--out", "no/x"], 2, "--out: there is no folder no. Create it"),
    ("convert", ["--demo", "fla", "--to", "fla", "--out", "examples"], 2, "examples exists and is no empty folder"),
    ("serve", ["--model", "a", "--heads", "2"], 2, "--heads: the model in a has its sizes. Leave out either."),
    ("convert", ["--demo", "fla", "--out", "x"], 2, "--out is for --to: name a layout, or leave it out"),
    ("serve", ["--hidden", "33"], 2, "--hidden 33 must be a multiple of --heads 4"),
])
def test_what_an_example_cannot_do_is_said_without_a_traceback(monkeypatch, capsys, program, arguments, code, says):
    found = run(monkeypatch, f"examples/{program}.py", *arguments)
    assert found == code if isinstance(code, int) else found.startswith(code)
    assert says in capsys.readouterr().err


def on_two_ranks(program, *options):
    """Run a program of the examples on two processes; return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2,
               ROOT / "examples" / program, *options]
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [["--tokens", 600], ["--lengths", "100,0,300,4", "--layout", "zigzag"]], ids=str)
def test_a_sequence_over_two_ranks_has_the_gradients_of_one_process(options):
    pytest.importorskip("kda.parallel", reason="needs kda.parallel")
    said = on_two_ranks("long_context.py", "--device", "cpu", "--steps", 1, "--check", *options)
    assert "beside one process: loss" in said and "on 2 ranks" in said


@pytest.mark.exhaustive
def test_two_ranks_train_as_one_process_with_the_batches_of_both(tmp_path):
    options = *SMALL, "--steps", 3, "--out", tmp_path
    assert "2 x 2 sequences" in on_two_ranks("train.py", *options)
    on_two_ranks("train.py", *options, "--resume")           # all steps are made
    names, expected = runpy.run_path(str(ROOT / "examples" / "train.py")), []
    torch.manual_seed(0)
    model, text = names["Model"](32, 2, 4), names["text_of_the_repository"]()
    optimizer = names["optimizer_of"](model, 2e-3)
    for step in range(3):
        tokens = torch.cat([names["batch_of"](text, step, rank, 2, 32) for rank in (0, 1)])
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-4)


def test_a_file_that_ends_in_its_header_is_told_from_a_checkpoint(monkeypatch, tmp_path):
    (tmp_path / "cut.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{")
    said = run(monkeypatch, "examples/convert.py", tmp_path)
    assert said.startswith(f"{tmp_path / 'cut.safetensors'} is no complete safetensors file")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_of_every_layout_is_converted_there_and_back(monkeypatch, capsys, layout):
    assert run(monkeypatch, "examples/convert.py", "--demo", layout) == 0
    assert f"in the layout {layout}\n" in (out := capsys.readouterr().out) and "the same bits" in out


def test_a_layer_is_written_in_another_layout_and_read_again(monkeypatch, capsys, tmp_path):
    written = tmp_path / "fla"
    assert run(monkeypatch, "examples/convert.py", "--demo", "kimi_linear", "--to", "fla", "--out", written) == 0
    (written / "config.json").write_text(json.dumps({"model_type": "fla"}))
    assert run(monkeypatch, "examples/convert.py", written, "--lower-bound", -5, "--norm-eps", 1e-5) == 0
    assert "in the layout fla\n" in capsys.readouterr().out
    said = run(monkeypatch, "examples/convert.py", written, "--lower-bound", -5)
    assert said == "the config of fla has no rms_norm_eps, the epsilon of the norm. Pass --norm-eps."
    said = run(monkeypatch, "examples/convert.py", written, "--norm-eps", 1e-5)
    assert said.startswith("the config of fla names no lower bound of the gate. Pass --lower-bound, or write")
    said = run(monkeypatch, "examples/convert.py", written, "--lower-bound", 5, "--norm-eps", 1e-5)
    assert "lower_bound must be finite and negative, or None; found 5.0. Correct it in config.json, or in --lo" in said
    said = run(monkeypatch, "examples/convert.py", written, "--lower-bound", -5, "--norm-eps", 1e-5, "--layer", 3)
    assert said == "the checkpoint has 1 KDA layer; --layer counts them from 0, found 3."


def test_a_trained_model_is_converted_whole_and_every_other_tensor_stays_as_it_is(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "examples/train.py", *SMALL, "--layers", 5, "--steps", 1, "--out", tmp_path)
    assert run(monkeypatch, "examples/convert.py", tmp_path, "--to", "fla", "--out", tmp_path / "fla") == 0
    said = capsys.readouterr().out
    assert [f"blocks.{n}.mixes.: 15 tensors" in said for n in range(5)] == [True, True, True, False, True]
    assert "4 KDA layers in the layout fla" in said
    both = [Checkpoint(folder) for folder in (tmp_path, tmp_path / "fla")]
    others = [{name for name in each if ".mixes." not in name or "blocks.3" in name} for each in both]
    assert others[0] == others[1] and all(torch.equal(both[0][name], both[1][name]) for name in others[0])
    assert {layout_of(each, "blocks.4.mixes.") for each in both} == {"glm5_next", "fla"}
    read = runpy.run_path(str(ROOT / "examples" / "language_model.py"))["Model"].read
    assert len({read(folder).continued(b"The ", 8) for folder in (tmp_path, tmp_path / "fla")}) == 1
    tensors = dict(both[1])
    save(tensors | {"norm.weight": tensors["norm.weight"] / 0}, tmp_path / "fla" / "model.safetensors")
    with pytest.raises(SystemExit, match=r"norm\.weight must have finite numbers; found nan or infinity\. Train it"):
        read(tmp_path / "fla")
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong, says in (
        (None, f"{tmp_path} has no config.json, which says what the gate of its layers is. Copy it there, too."),
        ({"hidden_size": 64}, "must have a hidden size of 64, as config.json says; found 32. Copy both files"),
        ({"num_hidden_layers": 8}, "weights under 'blocks.5.mixes.'; found nothing."),
        ({"num_hidden_layers": 2}, "blocks.2."),
        ({"model_type": "llama"}, "found model_type 'llama'. Train one first."),
        ({"num_attention_heads": None}, "found model_type 'kda_example', num_attention_heads None. Train one first."),
        ({"num_attention_heads": 3}, "that its num_attention_heads divide; found 32 and 3. Copy it again."),
    ):
        if wrong is None:
            (tmp_path / "config.json").unlink()
        else:
            (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(SystemExit, match=f"(?i){re.escape(says)}") as left:
            read(tmp_path)
        assert "\n" not in left.value.code


def sharded(folder, prefixes):
    """Write layers into two files with an index, each layer in both; return their tensors."""
    tensors = {}
    for n, prefix in enumerate(prefixes):
        torch.manual_seed(n)
        tensors |= KimiDeltaAttention(8, 2, 4).to_checkpoint("kimi_linear", prefix)
    names = sorted(tensors)                                                    # layers.10 before layers.2
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save({name: tensors[name] for name in held}, folder / file)
    write_index(files, 0, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_linear", "rms_norm_eps": 1e-5}))
    return tensors


def test_a_checkpoint_in_several_files_is_read_by_its_index_and_written_again(monkeypatch, capsys, tmp_path):
    tensors = sharded(tmp_path, [f"model.layers.{n}.self_attn." for n in (0, 2, 10)])
    (tmp_path / "consolidated.safetensors").write_bytes(b"no part of this checkpoint")     # the index does not name it
    assert run(monkeypatch, "examples/convert.py", tmp_path, "--to", "fla", "--out", tmp_path / "fla") == 0
    said = capsys.readouterr().out
    assert re.findall(r"^model\.layers\.(\d+)\.", said, re.MULTILINE) == ["0", "2", "10"]
    assert said.count("the same bits") == 3 and said.count("KimiDeltaAttention(") == 1
    assert run(monkeypatch, "examples/convert.py", tmp_path / "fla", "--layer", 2, "--to", "kimi_linear", "--out",
               tmp_path / "back") == 0
    assert "model.layers.10.self_attn.: 16 tensors, named as in the layout fla" in capsys.readouterr().out
    back = Checkpoint(tmp_path / "back")
    prefix = "model.layers.10.self_attn."
    assert back.under(prefix).keys() == {name for name in tensors if name.startswith(prefix)}
    assert all(torch.equal(x, tensors[name]) for name, x in back.under(prefix).items())
    assert layout_of(back, "model.layers.2.self_attn.") == "fla"


def test_a_layout_that_has_no_place_for_a_layer_is_refused_before_anything_is_written(monkeypatch, tmp_path):
    said = run(monkeypatch, "examples/convert.py", "--demo", "fla", "--to", "bailing_hybrid", "--out", tmp_path / "new")
    assert "written in a layout with f of low rank; found 'bailing_hybrid', where its rank is full. Use " in said
    assert not (tmp_path / "new").exists()


INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(("damage", "says"), [
    (lambda folder: (folder / SECOND).unlink(), f"{INDEX} names 2 files; {SECOND} is missing. Copy the whole"),
    (lambda folder: (folder / INDEX).write_text("{"), f"{INDEX} is not JSON: Expecting"),
    (lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}'),
     f"{INDEX} must be an object of JSON whose weight_map has a file for each tensor; found"),
    (lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'), f"{INDEX} must be an object of JSON whose"),
    (lambda folder: save({"a": torch.ones(1)}, folder / SECOND), f"which {INDEX} places there; found 1 other tensors."),
    (lambda folder: (save({"a": torch.ones(1)}, folder / "b.safetensors"), (folder / INDEX).unlink(),
                     save({"a": torch.ones(1)}, folder / "a.safetensors")), "'a', and so has a.safetensors. Keep the"),
    (lambda folder: [(folder / INDEX).unlink(), (folder / SECOND).unlink()], "Read all files of the checkpoint first"),
    (lambda folder: [*map(Path.unlink, folder.glob("*.s*")), save({"a": torch.ones(1)}, folder / "a.safetensors")],
     "the checkpoint has no KDA layer: none of its 1 tensors has a name that ends with A_log."),
], ids=range(8))
def test_a_checkpoint_of_several_files_that_lacks_something_is_told_what(monkeypatch, tmp_path, damage, says):
    sharded(tmp_path, ["model.layers.0.self_attn."])
    damage(tmp_path)
    said = run(monkeypatch, "examples/convert.py", tmp_path)
    assert says in said and "\n" not in said


def test_a_checkpoint_with_other_bits_is_noticed(monkeypatch, capsys):
    right = KimiDeltaAttention.to_checkpoint

    def wrong(layer, *where):
        return {name: x + ("dt_bias" in name) for name, x in right(layer, *where).items()}

    names = runpy.run_path(str(ROOT / "examples" / "convert.py"))
    calls = []
    monkeypatch.setattr(KimiDeltaAttention, "to_checkpoint", lambda layer, *where: (
        calls.append(1) or (right if len(calls) == 1 else wrong)(layer, *where)))
    monkeypatch.setattr(sys, "argv", ["convert.py", "--demo", "kimi_k3"])
    with pytest.raises(SystemExit) as left:
        names["main"]()
    assert left.value.code == 1 and "OTHER BITS" in capsys.readouterr().out


def test_the_benchmark_of_the_layer_is_checked_before_it_times(monkeypatch, capsys, tmp_path):
    small = "--device cpu --heads 2 --head-dim 16 --hidden 32 --tokens 70 --sequences 1 --calls 3 --dtype float32"
    assert run(monkeypatch, "benchmarks.layer", *small.split(), "--json", tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    ours = [row for row in found["rows"] if row["side"] == "kda"]
    assert [row["what"] for row in ours] == [
        "step", "forward", "decode of 1", "convolution forward", "convolution step", "norm forward", "norm step",
    ]
    assert all(row["error"] < 1e-5 and row["ms"] > 0 for row in ours) and found["device"] == "a CPU"


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_benchmark_of_a_decoding_step_is_right_before_it_times(drafts, monkeypatch, capsys, tmp_path):
    small = f"--device cpu --heads 2 --sequences 1,4 --head-dim 16 --dtype float32 --states float32 --drafts {drafts}"
    assert run(monkeypatch, "benchmarks.decode_step", *small.split(), "--json", tmp_path / "found.json") == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["config"] for row in rows] == ["plan", "parts", "recurrence"] * 2
    assert all(row["seconds"] > 0 and row.get("error", 0) <= 1 for row in rows)


def test_weights_that_are_not_finite_end_a_conversion(monkeypatch, tmp_path):
    tensors = sharded(tmp_path, ["model.layers.0.self_attn."])
    for file in tmp_path.glob("*.s*"):
        file.unlink()
    name = "model.layers.0.self_attn.q_proj.weight"
    save(tensors | {name: torch.full_like(tensors[name], math.nan)}, tmp_path / "model.safetensors")
    said = run(monkeypatch, "examples/convert.py", tmp_path)
    assert f"{name} must have finite numbers; found nan or infinity. Get the file again." in said and "\n" not in said


def test_weights_that_are_nan_have_the_same_bits_as_themselves():
    same_bits = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "convert.py"))["same_bits"]
    x = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])
    assert same_bits(x, x.clone()) and same_bits(x.T, x.T.contiguous())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0])) and not same_bits(x, x.double())
