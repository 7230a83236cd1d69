"""Problem, Host, Capability, Choice: who takes a call, who does not, and why."""

import copy
import dataclasses
import gc
import inspect
import itertools
import os
import pickle
import re
import subprocess
import sys
import threading

import pytest
import torch
from naive import make

import kda
from kda import notices
from kda.checks import calls as checks
from kda.model.host import Host, detect, host_of
from kda.model.problem import Inputs, Options, Problem
from kda.routing import dispatch
from kda.routing.capability import Capability, Rule
from ptxkit.compile.target import code_for

H200 = Host(device="cuda:0", name="NVIDIA H200", cc=(9, 0), sms=132, smem=232448, memory=150 * 2**30)

FAST = Capability(
    backend="fast",
    rank=10,
    summary="a backend for tests",
    rules=(
        Rule("fast.arch", lambda p, h: h.cc == (9, 0), "needs 9.0, found {h.cc}", "`kda selftest --arch sm90`"),
        Rule(
            "fast.head_dim", lambda p, h: p.K == p.V == 128, "needs K=V=128, got K={p.K} V={p.V}", "backend='reference'"
        ),
    ),
)


@pytest.fixture
def with_fast(monkeypatch):
    reference = dispatch.capabilities()
    monkeypatch.setattr(dispatch, "capabilities", lambda: (FAST, *reference))
    monkeypatch.setattr(dispatch, "_decided", {})


def problem(**fields):
    return Problem(**{"device": "cpu", **fields})


def test_the_reference_is_found_by_walking_the_folder():
    assert "reference" in dispatch.backend_names()
    assert [c.rank for c in dispatch.capabilities()] == sorted(c.rank for c in dispatch.capabilities())


def test_a_folder_with_a_capability_is_a_backend(tmp_path, monkeypatch):
    from kda import backends

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "capability.py").write_text(
        "from kda.routing.capability import Capability\nCAPABILITY = Capability('mine', rank=5, summary='')\n"
    )
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    names = [c.backend for c in dispatch.capabilities.__wrapped__()]
    assert names == ["mine", *dispatch.backend_names()]
    monkeypatch.delitem(sys.modules, "kda.backends.mine.capability")
    monkeypatch.delitem(sys.modules, "kda.backends.mine")


@pytest.mark.parametrize(("text", "says"), [
    ("from kda.routing.capability import Capability as C\nCAPABILITY = C('broken', rnak=5)", "keyword argument 'rnak'"),
    ("capability = 1", "has no attribute 'CAPABILITY'"),
], ids=["a misspelt field", "no declaration"])
def test_a_capability_that_is_none_is_named(tmp_path, monkeypatch, text, says):
    from kda import backends

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "capability.py").write_text(text)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    with pytest.raises(kda.KdaError, match=rf"kda\.backends\.broken\.capability declares no backend: .*{says}"):
        dispatch.capabilities.__wrapped__()
    for name in ("kda.backends.broken.capability", "kda.backends.broken"):
        sys.modules.pop(name, None)


def test_a_backend_without_a_backward_accepts_none(monkeypatch):
    forward = dataclasses.replace(FAST, rules=(), backward=False)
    others = dispatch.capabilities()
    monkeypatch.setattr(dispatch, "capabilities", lambda: (forward, *others))
    assert dispatch.weigh(problem(), detect("cpu")).backend == "fast"
    backward = dispatch.weigh(problem(direction="backward"), detect("cpu"))
    assert backward.backend == "reference" and dict(backward.tried)["fast"] == ("fast.backward: it has no backward",)
    assert dispatch.weigh(problem(direction="backward"), detect("cpu"), "fast").backend is None


def test_auto_takes_the_lowest_rank_whose_rules_hold(with_fast):
    assert dispatch.weigh(problem(device="cuda:0"), H200).backend == "fast"
    assert dispatch.weigh(problem(), detect("cpu")).backend == "reference"


def test_every_broken_rule_is_reported_with_a_way_out():
    reasons = FAST.rejections(problem(K=64, V=32), Host())
    assert reasons == [
        "fast.arch: needs 9.0, found None -> `kda selftest --arch sm90`",
        "fast.head_dim: needs K=V=128, got K=64 V=32 -> backend='reference'",
    ]


def test_auto_never_takes_a_gpu_call_to_the_reference(with_fast):
    choice = dispatch.weigh(problem(device="cuda:0", K=64), H200)
    assert choice.backend is None
    assert "reference.auto" in str(choice) and "fast.head_dim" in str(choice)
    assert dispatch.weigh(problem(device="cuda:0", K=64), H200, "reference").backend == "reference"


def test_when_no_backend_accepts_a_call_the_error_lists_all_and_those_that_would_if_named(with_fast, monkeypatch):
    monkeypatch.setattr(dispatch, "detect", lambda device: H200)
    with pytest.raises(kda.NoBackendError) as caught:
        dispatch.choose(problem(device="cuda:0", dtype="float64", K=64))
    first, *reasons, last = str(caught.value).splitlines()
    assert first.startswith("no backend accepts chunk forward B=1 T=4096")
    assert {line.split()[0] for line in reasons} >= {"triton", "reference"}
    assert last == "backend='reference' accepts it"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_named_backend_that_refuses_gives_its_own_reasons_first_and_then_who_accepts_the_call(with_fast):
    with pytest.raises(kda.NoBackendError) as caught:
        dispatch.choose(problem(K=64), "fast")
    first, *reasons, last = str(caught.value).splitlines()
    assert first.startswith("backend='fast' does not accept chunk forward B=1 T=4096")
    assert "fast.arch: needs 9.0, found None" in reasons[0] and "fast.head_dim: needs K=V=128" in reasons[1]
    assert len(reasons) == 2 and last == "backend='reference' accepts it"


def test_no_refusal_advises_a_backend_that_refuses_too():
    """On a CPU and on GPUs the last line's advice is true for every backend, and no reason advises a backend."""
    hosts = [detect("cpu"), *(dataclasses.replace(H200, cc=cc) for cc in ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0)))]
    calls = [problem(), problem(dtype="float64"), problem(K=200), problem(direction="backward", disable_recompute=True)]
    refused = 0
    for host, call, name in itertools.product(hosts, calls, dispatch.backend_names()):
        call = dataclasses.replace(call, device=host.device)
        choice = dispatch.weigh(call, host, name)
        if choice.backend is None:
            refused += 1
            _, *reasons, last = str(choice).splitlines()
            advised = re.findall(r"backend='(\w+)'", last)
            assert advised and all(dispatch.weigh(call, host, other).backend == other for other in advised)
            assert not re.findall(r"backend='\w+'", "".join(reasons))
    assert refused > 30


def test_chunk_kda_and_explain_refuse_a_named_backend_alike():
    call = make(B=1, T=3)
    with pytest.raises(kda.NoBackendError) as caught:
        kda.chunk_kda(**call.arguments, backend="triton")
    assert str(kda.explain(**call.arguments, backend="triton")) == str(caught.value)
    assert str(caught.value).splitlines()[1].split()[:2] == ["triton", "triton.gpu:"]


@pytest.mark.exhaustive
def test_a_problem_from_another_process_has_the_hash_of_this_one():
    code = (
        "import pickle, sys; from kda.model.problem import Problem; "
        "sys.stdout.buffer.write(pickle.dumps(Problem(T=5)))"
    )
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        written = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout
        found = pickle.loads(written)
        assert found == Problem(T=5) and hash(found) == hash(Problem(T=5)) and {found: 1}[Problem(T=5)]
        assert copy.deepcopy(found) == found


def test_a_rule_that_raises_is_a_bug_and_propagates(monkeypatch):
    broken = Capability("broken", 1, "", rules=(Rule("broken.rule", lambda p, h: 1 / 0, "", ""),))
    monkeypatch.setattr(dispatch, "capabilities", lambda: (broken,))
    with pytest.raises(ZeroDivisionError):
        dispatch.weigh(problem(), Host())


def test_argument_wins_over_context_over_environment(monkeypatch):
    assert dispatch.backend_asked() == "auto"
    monkeypatch.setenv("KDA_BACKEND", "fast")
    assert dispatch.backend_asked() == "fast"
    with kda.use_backend("reference"):
        assert dispatch.backend_asked() == "reference"
        assert dispatch.backend_asked("auto") == "auto"
    assert dispatch.backend_asked() == "fast"


def test_a_context_ends_with_its_block_and_stays_in_its_thread():
    seen = []
    with pytest.raises(ValueError, match="inside"), kda.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.backend_asked()))
        thread.start()
        thread.join()
        raise ValueError("inside")
    assert seen == ["auto"] and dispatch.backend_asked() == "auto"


@pytest.fixture
def notices_again():
    notices.forget("use_backend")


@pytest.mark.usefixtures("notices_again")
def test_a_backend_that_is_named_without_a_block_is_said_once_to_have_no_effect(recwarn):
    line = inspect.currentframe().f_lineno + 2
    for _ in range(3):
        kda.use_backend("reference")
    [warning] = recwarn.list
    assert (warning.filename, warning.lineno) == (__file__, line) and warning.category is notices.KdaNotice
    assert "has no effect. Write `with kda.use_backend('reference'):`" in str(warning.message)
    assert "KDA_BACKEND=reference" in str(warning.message) and dispatch.backend_asked() == "auto"


def test_a_name_that_was_not_entered_cannot_be_left():
    with pytest.raises(kda.InputError, match="entered before it is left"):
        kda.use_backend("reference").__exit__(None, None, None)


@pytest.mark.usefixtures("notices_again")
def test_a_backend_that_holds_in_a_block_or_a_function_is_no_mistake(recwarn):
    named = kda.use_backend("reference")
    assert "with kda.use_backend('reference'):" in repr(named)
    with named, kda.use_backend("triton"):
        assert dispatch.backend_asked() == "triton"
    with named, named:  # again, and within itself
        assert dispatch.backend_asked() == "reference"

    @kda.use_backend("sm90")
    def asked(depth):
        return asked(depth - 1) if depth else dispatch.backend_asked()

    assert asked(2) == "sm90" and dispatch.backend_asked() == "auto"

    @kda.use_backend("sm90")
    def never_called():
        pass

    del named, never_called
    gc.collect()
    assert not recwarn.list


def test_a_name_is_repeated_where_it_was_written(monkeypatch):
    call = make(B=1, T=3)

    def said(**keywords):
        with pytest.raises(kda.NoBackendError) as error:
            kda.chunk_kda(**call.arguments, **keywords)
        return str(error.value)

    assert said(backend="sm90").startswith("backend='sm90' does not accept")
    with kda.use_backend("sm90"):
        assert said().startswith("use_backend('sm90') does not accept")
        assert said(backend="triton").startswith("backend='triton' does not accept")
    monkeypatch.setenv("KDA_BACKEND", "sm90")
    assert said().startswith("KDA_BACKEND=sm90 does not accept")
    with kda.use_backend("triton"):  # the variable is not in force
        assert said(backend="sm90").startswith("backend='sm90' does not accept")
    monkeypatch.setenv("KDA_BACKEND", "reference")
    assert str(kda.explain(**call.arguments)).splitlines()[0].endswith("(requested: KDA_BACKEND=reference)")
    monkeypatch.setenv("KDA_BACKEND", "refrence")
    with pytest.raises(kda.InputError, match=r"^kda: KDA_BACKEND must be one of .*; found 'refrence'"):
        kda.explain(**call.arguments)


@pytest.mark.parametrize("name, builders", [
    ("h100", "'sm90' and 'triton' have kernels for sm90"), ("NVIDIA B200", "'sm100' and 'triton' have kernels for"),
    ("a100", "'triton' has kernels for sm80"), ("rtx4090", "'sm89' and 'triton' have kernels for sm89"),
])
def test_the_name_of_a_card_is_answered_with_the_backends_for_it(name, builders):
    """The nearest name, which is 'sm100' for h100, would mislead."""
    with pytest.raises(kda.InputError, match=f"A GPU is no backend: {builders}"):
        kda.chunk_kda(**make(B=1, T=3).arguments, backend=name)


def test_a_wrong_name_is_refused_wherever_it_comes_from(monkeypatch):
    call = make(B=1, T=3)
    for use in (
        lambda: kda.chunk_kda(**call.arguments, backend="refrence"),
        lambda: kda.use_backend("refrence"),  # at once
    ):
        with pytest.raises(kda.InputError, match="Did you mean 'reference'"):
            use()
    with pytest.raises(kda.InputError, match="Did you mean 'auto'"), kda.use_backend("AUTO"):
        pass
    with pytest.raises(kda.InputError, match="Did you mean 'sm90'"), kda.use_backend("SM90"):
        pass
    monkeypatch.setenv("KDA_BACKEND", "refrence")
    with pytest.raises(kda.InputError, match=r"KDA_BACKEND must be one of .*Did you mean 'reference'"):
        kda.chunk_kda(**call.arguments)


def test_the_forward_and_its_backward_use_the_requested_backend(monkeypatch):
    asked, launcher = [], dispatch.launcher
    monkeypatch.setattr("kda.calls.plain.launcher", lambda name: asked.append(name) or launcher(name))
    call = make(B=1, T=3).requiring_grad()
    with kda.use_backend("reference"):
        o, _ = kda.chunk_kda(**call.arguments)
    forward = len(asked)
    o.sum().backward()
    assert {*asked[:forward]} == {*asked[forward:]} == {"reference"}


def test_explain_returns_both_choices_and_prints_nothing_by_itself(capsys):
    call = make([3, 5], gate="softplus").requiring_grad()
    found = kda.explain(**call.arguments)
    assert not capsys.readouterr().out
    assert found.backend == found.forward.backend == found.backward.backend == "reference"
    assert str(found) == repr(found) == "\n".join(map(str, (found.forward, found.backward, *found.notes)))
    assert "chunk forward" in str(found) and "chunk backward" in str(found) and "packed" in str(found)
    with torch.no_grad():
        assert kda.explain(**call.arguments).backward is None


def test_explain_checks_its_input():
    call = make(B=1, T=3)
    with pytest.raises(kda.InputError, match="k must be"):
        kda.explain(**call.arguments | {"k": call.tensors["k"][:, :2]})
    with pytest.raises(TypeError, match="Did you mean"):
        kda.explain(**call.arguments, bakend="reference")


def test_a_problem_is_one_line_frozen_and_hashable():
    p = problem(H=2, HV=4, packed=True, N=3)
    assert "\n" not in str(p) and "H=2 HV=4" in str(p) and "packed" in str(p)
    assert p == problem(H=2, HV=4, packed=True, N=3) and hash(p) == hash(problem(H=2, HV=4, packed=True, N=3))
    assert p != problem(H=2, HV=4, packed=True, N=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.K = 3


def test_everything_that_a_problem_says_comes_from_the_call():
    call = make(
        [3, 5], gate="bounded", beta="2*sigmoid", HV=4, state_v_first=True, dtype=torch.bfloat16, disable_recompute=True
    )
    x = {n: call.tensors[n] for n in Inputs._fields if n in call.tensors}
    p = checks.problem_of(checks.Call("chunk_kda", Inputs(**x), Options(0.5, **call.options)))
    assert p == Problem(
        op="chunk", direction="forward", device="cpu", B=1, T=8, N=2, H=2, HV=4, K=5, V=3, C=32, dtype="bfloat16",
        g_dtype="bfloat16", beta_dtype="bfloat16", state_dtype="float32", packed=True, gate="bounded", lower_bound=-5.0,
        A_log=True, dt_bias=True, beta="2*sigmoid", qk_l2norm=True, scale=0.5, state_v_first=True,
        disable_recompute=True,
    )


@pytest.mark.parametrize("text", ["K=64 V=128 float32", "packed backward bounded", "H=2 HV=8 batch_invariant=true cpu"])
def test_a_problem_is_read_from_words(text):
    p = Problem.parse(text)
    assert isinstance(hash(p), int) and str(p)
    assert Problem.parse("K=64 V=128 float32").dtype == "float32" and Problem.parse("H=2").HV == 2


@pytest.mark.parametrize("text", [
    "K=big", "L=3", "flaot32", "packed=perhaps", "K=-64", "V=0", "dtype=foo", "C=48", "gate=open", "H=4 HV=6",
])
def test_wrong_words_are_refused(text):
    with pytest.raises(ValueError, match=r"known word|needs|must be"):
        Problem.parse(text)


@pytest.mark.parametrize(
    "word", ["K=0", "V=0", "H=0", "T=-1", "C=48", "dtype=int8", "op=foo", "gate=none", "lower_bound=5", "scale=nan",
             "device=gpu", "g_dtype=int8", "state_dtype=uint8"]
)
def test_words_that_no_call_accepts_are_refused(word):
    with pytest.raises(ValueError, match=f"^'{word}' needs"):
        Problem.parse(f"{word} float32")
    with pytest.raises(ValueError, match=r"^HV=4 must be a multiple of H=3"):
        Problem.parse("H=3 HV=4")
    with pytest.raises(ValueError, match=r"^N=5 sequences need `packed`; without it there are B=1 of"):
        Problem.parse("N=5")
    assert Problem.parse("B=0 T=0").T == 0 and Problem.parse("N=5 packed").N == 5


@pytest.mark.parametrize("text, why", [
    ("K=300", "K=300 is over 256, the most that chunk_kda permits; `recurrent` permits 1,024 on a GPU, any K on a CPU"),
    ("packed B=2", "B=2 is not 1, and `packed` sequences lie in one row"),
    ("recurrent backward", "`recurrent` has no `backward`"), ("backward decode", "`decode` has no `backward`"),
])
def test_words_that_each_are_right_and_together_make_no_call_are_refused(text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        Problem.parse(text)
    assert Problem.parse("recurrent packed K=300 device=cuda:1").K == 300


def test_a_problem_is_read_as_people_write_a_call():
    said = Problem.parse("chunk_kda B2 T8192 H32 HV64 K128, V128 softplus bf16 final_state")
    assert said == Problem.parse("op=chunk B=2 T=8192 H=32 HV=64 softplus bfloat16 final_state=true N=2")
    assert Problem.parse("decode_step H8").op == "decode" and Problem.parse("fused_recurrent_kda").op == "recurrent"


def test_every_word_that_is_not_understood_is_named():
    with pytest.raises(ValueError, match=r"^'Q8' and 'packd' are not known words\. Did you mean 'packed'") as failure:
        Problem.parse("chunk_kda T64 Q8 packd")
    assert "softplus" in str(failure.value) and "lower_bound=..." in str(failure.value)


def test_a_field_that_is_named_is_not_what_a_name_for_several_says():
    for text in ("bounded lower_bound=-9", "lower_bound=-9 bounded"):
        assert Problem.parse(text).lower_bound == -9
    assert Problem.parse("T=3 decode").T == 3 and Problem.parse("decode").T == 1


def test_a_repeated_decision_asks_no_rule(monkeypatch):
    asked = dispatch.backend_asked()
    first = dispatch.choose(problem(), asked)
    monkeypatch.setattr(Capability, "rejections", lambda *args, **keywords: pytest.fail("a rule was asked again"))
    assert dispatch.choose(problem(), asked) is first
    with pytest.raises(pytest.fail.Exception):
        dispatch.choose(problem(T=77), asked)


@pytest.mark.parametrize(("card", "target", "backend"), [
    ("Jetson Thor", "sm110", "sm100"), ("B300", "sm103", "sm100"), ("RTX 5090", "sm120", "triton"),
    ("GB10", "sm121", "triton"),
])
def test_a_card_gets_code_of_its_own_arch_from_the_first_backend_that_runs_there(card, target, backend):
    host = host_of(card)
    assert code_for(host.cc).name == target
    for direction in ("forward", "backward"):
        p = problem(device="cuda:0", direction=direction)
        assert dispatch.weigh(p, host).backend == backend
        float32 = dict.fromkeys(("dtype", "g_dtype", "beta_dtype"), "float32")
        assert dispatch.weigh(dataclasses.replace(p, **float32), host).backend == "sm89"


def keeps_of(host, **fields):
    """Return what explain says about `disable_recompute=True` for each backend."""
    tried = dict(dispatch.weigh(problem(device="cuda:0", disable_recompute=True, **fields), host).tried)
    return {name: reason for name, reasons in tried.items() for reason in reasons if f"{name}.keeps" in reason}


def test_without_its_gpu_a_backend_is_not_said_to_keep_too_little():
    """On its GPU it keeps all that its own backward reads: the tutorial says so of Hopper and Blackwell."""
    assert set(keeps_of(Host())) == set(keeps_of(dataclasses.replace(H200, cc=(8, 0)))) == {"sm89"}
    assert set(keeps_of(H200)) == {"sm90", "sm89"}
    for cc in ((10, 3), (11, 0)):
        assert set(keeps_of(dataclasses.replace(H200, cc=cc))) == {"sm100", "sm89"}
    assert "for its own backward alone" in keeps_of(H200)["sm90"]


def test_explain_on_a_cpu_gives_no_reason_about_what_hopper_keeps():
    call = make(B=1, T=32, dtype=torch.float32).requiring_grad()
    text = str(kda.explain(**call.arguments | {"disable_recompute": True}))
    assert "sm90.gpu" in text and "sm90.keeps" not in text and "sm100.keeps" not in text
    assert "reference keeps" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_that_a_backend_refuses_is_named_in_words_with_and_without_states(dtype):
    sm89 = dispatch.capability("sm89")
    without, given = (sm89.broken("dtype", problem(dtype=dtype, state_dtype=x), Host())[0] for x in (None, "float64"))
    assert f"got {dtype}, g bfloat16, beta bfloat16, no initial states -> cast them" in without
    assert "beta bfloat16, states float64 -> cast them" in given and "None" not in without + given


def generating():
    yield


def test_what_runs_its_body_after_the_call_is_not_decorated():
    async def waiting():
        pass

    for function, kind in ((generating, "a generator"), (waiting, "an async function"), (type("A", (), {}), "a class")):
        with pytest.raises(kda.InputError, match=kind):
            kda.use_backend("reference")(function)
