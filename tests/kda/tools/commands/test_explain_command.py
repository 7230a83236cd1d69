"""`kda explain`: a call in words, on a GPU that is not here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import kda
from kda.cli import cli
from kda.model.problem import Problem
from kda.tools.commands import explain
from kda.tools.measure.shapes import MODELS, SHAPES
from kda.tools.verify import ran

ASKED = "chunk_kda B1 T8192 H64 softplus bf16"


def run(*words):
    return CliRunner().invoke(cli, ["explain", *words], env={"COLUMNS": "400"})


def asked(*words):
    result = run("--json", *words)
    return json.loads(result.stdout), result.exit_code


def test_a_call_in_words_is_explained_with_and_without_gradients():
    result = run("--arch", "h100", ASKED)
    assert result.exit_code == 0
    first, form, note, evidence, *rest = result.stdout.splitlines()
    assert first.endswith(" without gradients: sm90") and "kernels: fused" in form and "132 SMs of one H200" in note
    assert evidence.startswith("  evidence, sm90 for sm90: ")
    assert any(line.endswith(" with gradients: sm90") for line in rest)
    assert any(line.startswith("  backward on sm90: ") for line in rest) and "* sm90       accepts it" in rest
    assert sum("sm90 accepts chunk" in line for line in rest) == 1, "the same reasons are given once"


def test_the_words_of_one_call_may_be_one_argument_or_several():
    assert run("--arch", "b200", ASKED).stdout == run("--arch", "b200", *ASKED.split()).stdout


@pytest.mark.parametrize("word, calls", [("forward", [False]), ("backward", [True]), ("chunk", [False, True])])
def test_a_direction_leaves_the_other_call_out(word, calls):
    found, _ = asked("--arch", "h100", f"T512 {word}")
    assert [each["gradients"] for each in found["calls"]] == calls


def test_a_fallback_is_named_with_its_reason():
    result = run("--arch", "h100", "bf16 K64 V128 backward")
    assert "with gradients: forward sm90, backward triton" in result.stdout
    assert "sm90.backward_shape: has a backward only for K = V, got K=64 V=128" in result.stdout


def test_a_call_that_no_backend_accepts_is_a_finding():
    found, code = asked("--arch", "sm90", "fp64")
    assert code == found["exit"] == 1 and found["calls"][0]["forward"]["backend"] is None
    assert "triton.dtype" in found["calls"][0]["forward"]["rejections"]["triton"][0]
    said = run("--arch", "sm90", "fp64").stdout
    assert "with gradients: no backend accepts it\n" in said and "without gradients: no backend accepts it\n" in said


def test_words_that_are_not_understood_are_named_with_those_that_are():
    result = run("--arch", "h100", "chunk_kda T64 wombat sofplus")
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert "'wombat' and 'sofplus' are not known words. Did you mean 'softplus'? Known: bfloat16" in text
    assert "sizes also as in T8192" in text and text.endswith(f"models: {', '.join(MODELS)}")
    assert "models:" not in run("--arch", "h100", "K300").stderr


@pytest.mark.parametrize("wrong, right", [("kimi-linaer", "kimi-linear"), ("h64-8kk", "h64-8k"), ("ling3", "ling-3")])
def test_a_misspelt_model_or_shape_is_suggested(wrong, right):
    assert f"'{wrong}' is not a known word. Did you mean '{right}'?" in run("--arch", "h100", wrong).stderr


def test_a_wrong_combination_of_options_is_the_error_of_the_function():
    result = run("--arch", "h100", "given dt_bias")
    assert result.exit_code == 2 and "dt_bias must be left out unless use_gate_in_kernel=True" in result.stderr


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_a_word_for_its_heads_and_its_gate(name):
    found, code = asked("--arch", "h100", name, "T4096")
    assert code == 0 and f"H={MODELS[name].heads} K=128" in found["problem"] and MODELS[name].gate in found["problem"]


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_of_bench_is_a_word(name):
    p = Problem.parse(explain.words_of(SHAPES[name]))
    shape = SHAPES[name]
    dims = shape.H, shape.heads, shape.K, shape.V
    assert (shape.tokens, *dims) == (p.B * p.T, p.H, p.HV, p.K, p.V) and max(len(shape.lengths), shape.B) == p.N
    assert (p.dtype, p.gate) == (shape.dtype, shape.gate)
    found = explain.explained(p, True, "auto", None)
    assert found.backward.backend == "reference"


WORDS = ("", "packed N=3", "gate_per_head bounded dt_bias", "softplus beta=2*sigmoid state_dtype=float32", "C=32 fp32",
         "intermediate_states state_v_first final_state", "batch_invariant l2norm scale=0.5",
         "HV=16 K=64 V=32 g_dtype=float32 beta_dtype=float32 beta=sigmoid lower_bound=-3 bounded")


@pytest.mark.parametrize("words", WORDS)
def test_the_call_that_is_explained_is_the_one_that_the_words_describe(words):
    p = Problem.parse(f"{words} T=70 cpu")
    assert explain.explained(p, False, "auto", None).forward.problem == p


def test_what_is_saved_is_said_of_a_call_that_saves_everything():
    keeps = "  between forward and backward sm90 keeps 424.0 MiB beside the inputs"
    assert keeps in run("--arch", "h100", "T8192 H32 disable_recompute").stdout.splitlines()
    assert keeps not in run("--arch", "h100", "T8192 H32").stdout.splitlines()


@pytest.mark.parametrize("words", ["decode_step H32 slots=4 inplace state_v_first state_dtype=float32 softplus",
                                   "fused_recurrent_kda B4 T1 K512", "packed N=2 slots=8 inplace state_dtype=float32"])
def test_decoding_and_slots_are_explained_without_gradients(words):
    found, code = asked("--arch", "a100", words)
    (only,) = found["calls"]
    assert code == 0 and not only["gradients"] and only["forward"]["backend"] == "triton"
    (planned,) = only["planned"]
    assert planned["form"] == ("all that calls with a pool can launch" if "packed" in words else "")
    assert planned["kernels"] and (len(planned["kernels"]) == 1 or "packed" in words), "a step has one launch"


@pytest.mark.parametrize("words", [
    "T=64", "T64 slots=8", "T8192 packed slots=64 kimi-linear", "fused_recurrent_kda H4", "decode_step",
    "kimi-linear decode_step", "decode_step H32 slots=64 inplace state_v_first state_dtype=float32",
])
def test_without_an_arch_or_a_gpu_every_call_is_one_on_the_cpu(words):
    found, code = asked(words)
    assert code == 0 and {call["forward"]["backend"] for call in found["calls"]} == {"reference"}
    assert ", cpu, " in found["problem"]


def test_a_gpu_that_is_asked_for_and_is_not_here_is_a_wrong_command():
    result = run("chunk_kda cuda T64")
    assert result.exit_code == 2 and "no GPU for 'cuda:0': name one by --arch, or leave it out" in result.stderr
    assert run("--arch", "h100", "chunk_kda cuda T64").exit_code == 0


def test_a_backend_can_be_named_here_as_in_the_call(monkeypatch):
    found, _ = asked("--arch", "h100", "--backend", "triton", ASKED)
    assert found["calls"][0]["planned"][0]["backend"] == "triton"
    monkeypatch.setenv("KDA_BACKEND", "triton")
    assert "(requested: KDA_BACKEND=triton)" in run("--arch", "h100", ASKED).stdout


def test_nothing_is_allocated_or_built_for_an_answer(monkeypatch):
    monkeypatch.setattr("ptxkit.compile.fetching.build_together", None)
    found, code = asked("--arch", "b200", "B64 T1048576 H128 bf16 kimi-k3")
    assert code == 0 and found["calls"][1]["planned"][1]["direction"] == "backward"
    assert kda.explain(**explain.tensors_of(Problem(T=9), False), arch="b200").forward.problem.T == 9
    assert not torch.is_grad_enabled() or explain.tensors_of(Problem(T=9), True)["q"].requires_grad


@pytest.mark.exhaustive
def test_a_laptop_without_any_compiler_gets_the_same_answer():
    code = """
import sys
sys.modules |= dict.fromkeys(("cutlass", "triton", "cuda"))                # importing one of them fails
from kda.cli import main
sys.argv = ["kda", "explain", "--json", "--arch", "h100", "kimi-linear T8192 disable_recompute"]
main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert json.loads(ran.stdout)["calls"] == asked("--arch", "h100", "kimi-linear T8192 disable_recompute")[0]["calls"]


@pytest.mark.parametrize(("words", "said"), [
    ("kimi-8k tiny", "kimi-8k and tiny are both names of a call; leave one out"),
    ("kimi-8k kimi-linear", "kimi-8k and kimi-linear are both names of a call; leave one out"),
    ("chunk_kda decode_step", "'chunk_kda' and 'decode_step' give op two values: leave one out"),
    ("softplus bounded", "'softplus' and 'bounded' give gate two values: leave one out"),
    ("kimi-linear B8 B=4", "'B8' and 'B=4' give B two values: leave one out"),
    ("bf16 fp32", "'bf16' and 'fp32' give dtype two values: leave one out"),
    ("forward backward", "'forward' and 'backward' give direction two values: leave one out"),
])
def test_two_words_for_one_thing_are_one_too_many(words, said):
    result = run(*words.split())
    assert result.exit_code == 2 and said in result.stderr


def test_sizes_that_are_the_same_are_one_word_and_an_initial_state_is_a_word():
    problem = asked("--arch", "h100", "K=V=64 initial_state")[0]["problem"]
    assert "K=64 V=64" in problem and "initial state float32" in problem
    assert "'cpu' and --arch sm90 name two machines: leave one out" in run("--arch", "h100", "cpu").stderr


def test_a_step_that_keeps_states_is_a_word_and_other_functions_have_no_such_option():
    answer = asked("--arch", "h100", "kimi-k3 disable_recompute=states")[0]
    assert any("between forward and backward sm90 keeps" in note for note in answer["calls"][1]["notes"])
    assert "nothing is kept" in str(asked("--arch", "h100", "kimi-k3")[0]["calls"][1]["notes"])
    for words in ("decode_step disable_recompute", "fused_recurrent_kda intermediate_states"):
        assert f"has no `{words.split()[1]}`: leave one out" in run("--arch", "h100", words).stderr


@pytest.mark.parametrize(("words", "says"), [
    ("decode_step packed", "`decode` has no `packed`: leave one out"),
    ("kimi-8k decode_step", "kimi-8k is a shape of chunk_kda: give decode_step sizes, or a model"),
    ("chunk_kda beta_per_value", "`chunk` has no `beta_per_value`: leave one out"),
    ("fused_recurrent_kda checkpoints=float32 slots=4", "`recurrent` has no `checkpoints`: leave one out"),
    ("fused_recurrent_kda accepted_tokens", "`accepted_tokens` needs slots of a pool: give slots=, or leave it out"),
    ("slots=8 backward", "a call with slots records no gradients, so it has no backward: leave one out"),
    ("B=99999999999 T=9999999999", "no memory has tensors of such sizes"),
])
def test_what_a_function_always_refuses_is_a_wrong_command(words, says):
    result = run("--arch", "h100", words)
    assert result.exit_code == 2 and says in result.stderr


def test_short_names_of_dtypes_stand_for_them_in_every_field():
    assert "initial state bfloat16" in asked("--arch", "h100", "state_dtype=bf16")[0]["problem"]


def test_a_named_backend_that_refuses_is_told_by_name():
    first, *_ = run("--arch", "b200", "--backend", "sm90", "T8").stdout.splitlines()
    assert first.endswith("without gradients: sm90 does not accept it")


@pytest.mark.parametrize("words", ["H32 h64-8k softplus", "softplus h64-8k H=32"])
def test_a_word_beside_a_name_says_what_is_different_wherever_it_stands(words):
    problem = asked("--arch", "h100", words)[0]["problem"]
    assert "H=32 K=128" in problem and "T=8192" in problem and "softplus gate" in problem


def test_a_step_of_decoding_has_the_defaults_of_its_function_and_launches_one_of_its_variants():
    answer = asked("--arch", "h100", "decode_step B8 H32 bf16")[0]
    assert answer["problem"].endswith("softplus gate, l2norm, beta sigmoid, initial state float32, in place, "
                                      "states (V, K)")
    assert "given gate" in asked("--arch", "h100", "decode_step given")[0]["problem"]
    for words in ("decode_step kimi-k3", "kimi-k3 decode_step"):
        assert "bounded gate >= -5" in asked("--arch", "h100", words)[0]["problem"]
    assert "`softplus` has no lower_bound, found -5: say `bounded`" in run("decode_step lower_bound=-5").stderr
    (ran_there,) = answer["calls"][0]["ran"]
    assert ran_there["one_of"] and "variants, of which such a call launches one" in str(ran.RanKernels(**ran_there))


@pytest.mark.parametrize("words", [ASKED, *(f"{model} T8192" for model in MODELS)])
def test_the_ledger_lists_every_kernel_of_the_default_calls_of_models(words, monkeypatch):
    pytest.importorskip("cutlass")
    asked_for = set()
    monkeypatch.setattr(ran, "ran_of", lambda backend, recipes, *others: asked_for.update(recipes) or [])
    assert run("--arch", "h100", words).exit_code == 0
    assert asked_for and asked_for <= ran._labels("sm90", "sm90").keys()
