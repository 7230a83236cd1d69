"""`kda compile`: kernels of a made-up backend, built ahead of time."""

import dataclasses
import json
import sys
import types
from collections import Counter

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from kda.cli import cli
from kda.routing import dispatch
from kda.routing.capability import Capability, Rule
from kda.routing.dispatch import capabilities
from kda.tools.commands import compile as command
from ptxkit.compile import builders, fetching, store, watching
from ptxkit.compile.target import parse
from ptxkit.compile.triton import Recipe

pytestmark = pytest.mark.compiler

FAST = Capability(
    backend="fast",
    rank=1,
    summary="for tests",
    archs=("sm90",),
    rules=(Rule("fast.head_dim", lambda p, h: p.K <= 128, "needs K <= 128, got {p.K}", "backend='reference'"),),
)


@pytest.fixture
def asked(tmp_path, monkeypatch, builders_that_stay):
    """Return the problems and hosts that the backend was asked about."""
    asked = []

    def recipes(problem, host, training=True):
        asked.append((problem, host))
        arch = "sm{}{}".format(*host.cc)
        types = {"x": "*bf16" if problem.dtype == "bfloat16" else "*fp32", "y": "*fp32"}
        names = {"forward": ["scale"], "backward": ["scale", "total"]}[problem.direction]
        return [Recipe(f"triton_kernels:{name}", types, {"BLOCK": problem.K}, target=arch) for name in names]

    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "_FETCHED", {})
    monkeypatch.setattr(fetching, "Builders", builders_that_stay)
    for name, content in {"fast": {"__path__": []}, "fast.plan": {"recipes": recipes}}.items():
        module = types.ModuleType(f"kda.backends.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    others = dispatch.capabilities()
    monkeypatch.setattr(dispatch, "capabilities", lambda: (FAST, *(c for c in others if not c.archs)))
    return asked


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, ["compile", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_kernels_are_built_once_and_kept(asked):
    words = ("--arch", "sm90", "--problem", "K=64 V=64 backward", "--problem", "K=64 V=64")
    summary, _, header, *rows = run(*words).stdout.splitlines()
    assert header.split() == ["backend", "arch", "kernel", "variants", "registers", "spills", "shared", "seconds"]
    assert [row.split()[:3] for row in rows] == [["fast", "sm90", "scale"], ["fast", "sm90", "total"]]
    folder = store.default().folder
    assert summary == f"[✓] 2 kernels: 0 already there, 2 built now; kept in {folder}"
    assert run(*words).stdout.splitlines()[0] == f"[✓] 2 kernels: 2 already there, 0 built now; kept in {folder}"
    assert len(list(store.default().entries())) == 2
    again = json.loads(run(*words, "--json").stdout)
    assert {k["kernel"] for k in again["kernels"]} == {"scale", "total"} and again["refused"] == {}
    for k in again["kernels"]:
        assert k["registers"] > 0 and k["spills"] == 0 and k["seconds"] > 0 and k["kept"] and not k["built"]


def test_kernels_with_nested_configurations_are_distinguished_by_what_differs_in_them():
    def line(ht, cut):
        config = {"chain": {"K": 128, "ht": ht, "h0": None}, "cut": cut}
        recipe = types.SimpleNamespace(name="stream", target="sm90", constants={}, options=config, signature=())
        return types.SimpleNamespace(backend="sm90", recipe=Hashed(recipe))

    class Hashed:
        def __init__(self, recipe):
            self.__dict__ = recipe.__dict__

    named = command.names([line(True, False), line(False, False)])
    assert [*named.values()] == ["stream chain.ht=True", "stream chain.ht=False"]


def test_kernels_of_one_name_are_distinguished(asked):
    words = ("K=64 V=64", "K=128 V=128", "K=128 V=128 float32")
    problems = [f"--problem={w}" for w in words]
    together = run("--arch", "sm80", *problems).stdout.splitlines()
    assert together[3].split()[2:4] == ["scale", "3"] and together[-1] == "-v prints each variant."
    rows = run("--arch", "sm80", *problems, "-v").stdout.splitlines()[3:]
    assert [row.split()[2:5] for row in rows] == [
        ["scale", "BLOCK=64", rows[0].split()[4]],
        ["scale", "BLOCK=128", "x=*bf16"],
        ["scale", "BLOCK=128", "x=*fp32"],
    ]


def test_the_usual_problems_are_both_directions_and_decoding_with_every_gate():
    problems = command.usual(FAST)
    assert len(set(problems)) == len(problems) == 18
    assert {(p.op, p.direction) for p in problems} == {
        ("chunk", "forward"), ("chunk", "backward"), ("recurrent", "forward")
    }
    for p in problems:
        assert (p.K, p.V, p.dtype) == (128, 128, "bfloat16")
    assert {(p.gate, p.A_log, p.dt_bias, p.qk_l2norm, p.beta) for p in problems} == {
        ("given", False, False, False, "given"),
        ("softplus", True, True, True, "sigmoid"),
        ("bounded", True, True, True, "sigmoid"),
    }


def test_a_backend_without_bfloat16_is_tested_in_the_dtype_that_it_is_proven_in(asked, monkeypatch):
    narrow = Rule("fast.dtype", lambda p, h: p.dtype == "float32", "needs float32, got {p.dtype}")
    fast = dataclasses.replace(FAST, rules=(narrow,), proof_dtypes=("float32",))
    assert {p.dtype for p in command.usual(fast)} == {"float32"}
    assert {c.backend: c.usual_dtype for c in capabilities()} == {
        "sm100": "bfloat16", "sm90": "bfloat16", "sm89": "float32", "triton": "bfloat16", "reference": "bfloat16"
    }


def test_only_the_backends_of_an_arch_are_asked_where_nothing_is_named(asked):
    lines, refused = command.offered([parse("sm90")], None, command.usual(FAST)[:1])
    assert len(lines) == 1 and not refused
    assert command.offered([parse("sm80")], None, []) == ([], {})


def test_a_model_is_built_for_as_its_layers_call_it_with_its_heads_divided(asked):
    printed = run("--arch", "h100", "--model", "kimi-linear", "--tp", "4").stdout
    assert "Kimi-Linear-48B-A3B: 8 heads per GPU, 20 layers with KDA, softplus gate" in printed
    assert {row.split()[2] for row in printed.splitlines()[4:6]} == {"scale", "total"}
    problems = [problem for problem, _ in asked]
    assert {p.H for p in problems} == {p.HV for p in problems} == {8} and len(problems) == len(set(problems)) == 20
    assert {(p.gate, p.g_dtype) for p in problems} == {("softplus", "bfloat16"), ("given", "float32")}
    assert {(p.op, p.direction) for p in problems} == {
        ("chunk", "forward"), ("chunk", "backward"), ("recurrent", "forward")
    }


def test_a_model_is_built_for_the_backend_that_serves_it_alone(asked, monkeypatch):
    second = dataclasses.replace(FAST, backend="second", rank=2)
    others = dispatch.capabilities()
    monkeypatch.setattr(dispatch, "capabilities", lambda: (*others, second))
    lines, refused = command.offered([parse("sm90")], None, [], command.of_model("ling-3", 1)[:1])
    assert {line.backend for line in lines} == {"fast"} and not refused


def names_for(words, backend):
    """Return the names of kernels that a backend offers for a problem, and how many variants of each."""
    problem = command.problem_of(words)
    alone = [] if command.may_train(words, problem) else [problem]
    arch = parse(backend if backend != "triton" else "sm90")
    lines, _ = command.offered([arch], backend, [problem], alone=alone)
    return Counter(line.recipe.name for line in lines)


@pytest.mark.parametrize(("backend", "of_gradients"), [
    ("sm100", {"operands", "record", "walk", "grads", "shares"}), ("sm90", {"walk", "grads", "shares"}),
    ("sm89", set()), ("triton", set()),
])
def test_a_problem_that_says_forward_needs_no_kernels_of_gradients(backend, of_gradients):
    dtype = "float32" if backend == "sm89" else "bfloat16"
    forward, whole = (names_for(f"packed {word} softplus {dtype}", backend) for word in ("forward", ""))
    assert set(whole) - set(forward) >= of_gradients and not of_gradients & set(forward)
    assert forward < whole


@pytest.mark.parametrize("words", ["", "packed", "forward"])
def test_of_heads_of_64_a_blackwell_has_the_kernels_that_it_has_of_128(words):
    of_64, of_128 = (names_for(f"K={K} V={K} bounded l2norm bfloat16 {words}", "sm100") for K in (64, 128))
    one_grid = {"reverse"} & of_128.keys()                                    # heads of 64 have none
    one_kernel = {name for name in of_64 if of_64[name] != of_128[name]}      # with 128 channels it may keep
    assert of_64.keys() == of_128.keys() - one_grid and one_kernel <= {"fused", "shares"}
    assert ("grads" in of_64) == (words != "forward")


def test_a_forward_that_keeps_intermediates_may_be_one_of_gradients():
    kept, whole = (names_for(f"{word} disable_recompute=true", "triton") for word in ("forward", ""))
    assert kept == whole and set(kept) == {"compose", "prepare", "state", "transition"}


def test_a_backend_sees_a_gpu_of_the_arch_that_was_named(asked):
    run("--arch", "sm80", "--arch", "sm_90a", "--problem", "K=64")
    assert [(host.cc, host.is_gpu, host.simulated) for _, host in asked] == [
        ((8, 0), True, False), ((9, 0), True, False)
    ]


def test_a_problem_that_no_backend_takes_is_more_than_can_be_judged(asked):
    words = ("--arch", "sm90", "--problem", "K=256")
    said = run(*words, code=3).stderr
    assert "fast.head_dim: needs K <= 128, got 256" in said and "name another --problem, --backend or --arch" in said
    found = json.loads(run(*words, "--json", code=3).stdout)
    assert found["exit"] == 3 and found["kernels"] == [] and "fast.head_dim" in found["why"][0]
    said = run("--arch", "sm90", "--backend", "reference", code=2).stderr
    assert "--arch sm90: reference has no kernels. Leave out --backend" in " ".join(said.split())


def test_the_first_call_says_on_stderr_what_it_builds_and_the_next_one_says_nothing(asked, capsys, monkeypatch):
    monkeypatch.setattr(watching, "_explained", False)
    monkeypatch.delenv("KDA_QUIET", raising=False)
    recipe = Recipe("triton_kernels:scale", {"x": "*bf16", "y": "*fp32"}, {"BLOCK": 32}, target="sm90")
    fetching.fetch(recipe)
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert first.startswith("kda: building 1 kernel for sm90: scale (kept in ") and out == ""
    assert second.startswith("kda: built 1 kernel in ")
    fetching.fetch(recipe)
    monkeypatch.setattr(fetching, "_FETCHED", {})                            # as in the next process
    fetching.fetch(recipe)
    assert capsys.readouterr().err == ""


def test_what_cannot_be_built_is_named_and_the_rest_is_built(asked):
    problems = ("--problem", "K=100", "--problem", "K=64 backward")  # a range is a power of two
    printed = run("--arch", "sm90", *problems, code=1).stdout
    assert "Triton" in printed and "cannot build scale for sm_90a" in printed
    assert "3 kernels: 0 already there, 2 built now, 1 cannot be built" in printed
    errors = [k["error"] for k in json.loads(run("--arch", "sm90", *problems, "--json", code=1).stdout)["kernels"]]
    assert "cannot build scale" in errors[0] and errors[1:] == [None, None]


def test_a_cache_that_keeps_nothing_is_a_finding(asked, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot keep built kernels"):
        printed = run("--arch", "sm90", "--problem", "K=64", code=1).stdout
    assert "not kept" in printed and "1 cannot be kept" in printed


@pytest.mark.parametrize(("arguments", "says"), [
    (("--arch", "sm42"), "no GPU arch or card is called 'sm42'"),
    (("--arch", "sm90", "--problem", "K=big"), "--problem: 'K=big' needs a whole number for K, found 'big'"),
    (("--arch", "sm90", "--backend", "fsat"), "Did you mean 'fast'"),
    (("--arch", "sm90", "--model", "kimi-liner"), "Did you mean 'kimi-linear'"),
    (("--arch", "sm90", "--model", "kimi-linear", "--tp", "5"), "--tp 5 does not divide the 32 heads"),
    (("--arch", "sm90", "--tp", "2"), "name one with --model"),
])
def test_a_wrong_use_is_refused(asked, arguments, says):
    assert says in run(*arguments, code=2).stderr


def test_without_an_arch_it_builds_for_this_machine(asked, monkeypatch):
    monkeypatch.setattr("kda.tools.verify.doors.default_device", lambda: "cpu")
    assert "name an --arch" in run(code=2).stderr


def test_without_triton_nothing_is_built_and_the_error_says_how_to_get_it(asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(builders.Builders, "build", lambda self, recipe: recipe.build())
    assert "pip install triton" in run("--arch", "sm90", "--problem", "K=64", code=3).stderr
