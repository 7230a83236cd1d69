"""What `import kda.fla` rests on, without FLA: who takes a call, and what is said once.  tests/peers has the rest."""

import importlib
import sys
import types
import typing
import warnings

import pytest
import torch
from naive import make

import kda
from kda import notices
from kda.calls.rehearsal import rehearse
from kda.notices import KdaNotice, reason_of, say_once


@pytest.mark.parametrize("recorded", [False, True], ids=["forward alone", "recorded"])
def test_a_rehearsal_names_who_takes_each_direction_and_computes_nothing(recorded, monkeypatch):
    call = make(T=40)
    call = call.requiring_grad() if recorded else call
    monkeypatch.setattr(kda.routing.dispatch, "launcher", None)
    choices = rehearse("chunk_kda", **call.arguments)
    assert [choice.problem.direction for choice in choices] == ["forward", "backward"][: 1 + recorded]
    assert {choice.backend for choice in choices} == {"reference"}


WRONG = [{"chunk_size": 16}, {"chunk_indices": None}, {"A_log": torch.zeros(2)}, {"k": None}]


@pytest.mark.parametrize("options", WRONG, ids=lambda options: next(iter(options)))
def test_a_rehearsal_raises_what_the_call_raises(options):
    call = make(T=20)
    raised = []
    for function in (kda.chunk_kda, lambda **arguments: rehearse("chunk_kda", **arguments)):
        with pytest.raises(kda.InputError) as error:
            function(**call.arguments | options)
        raised.append(str(error.value))
    assert raised[0] == raised[1]


def test_a_rehearsal_of_the_recurrence_raises_what_the_call_raises():
    call = make(T=3)
    q, k, v, g, beta, state = (call.tensors[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))
    (choice,) = rehearse("fused_recurrent_kda_fwd", q, k, v, g, beta, None, None, state, 0.5, True, False)
    assert (choice.backend, choice.problem.op, choice.problem.inplace) == ("reference", "recurrent", False)
    assert rehearse("fused_recurrent_kda", q, k, v, g, beta, None, None, 0.5, state)[0].problem.scale == 0.5
    by_name = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
    assert rehearse("fused_recurrent_kda_fwd", **by_name)[0].problem.inplace   # as its default says
    state.requires_grad_()                                                     # else the call is the same
    for arguments, why in (
        ({"initial_state": state}, "inplace_final_state.grad"),
        ({"initial_state": state.detach(), "out": v[:, :2]}, "out.shape"),
        ({"initial_state": state.detach(), "inplace_final_state": False, "chunk_size": 64}, "keyword.unknown"),
        ({}, "inplace_final_state.state"),
    ):
        with pytest.raises(kda.InputError) as error:
            rehearse("fused_recurrent_kda_fwd", q, k, v, g, beta, **arguments)
        assert error.value.check == why


def test_a_rehearsal_raises_where_no_backend_takes_the_call():
    call = make(T=20)
    with pytest.raises(kda.NoBackendError), kda.use_backend("sm90"):
        rehearse("chunk_kda", **call.arguments)


def test_a_rehearsal_under_autocast_sees_the_dtype_of_the_call_and_casts_nothing(monkeypatch):
    call = make(T=20, dtype=torch.float32).requiring_grad()
    with torch.autocast("cpu", torch.bfloat16):
        seen = kda.chunk_kda(**call.arguments)[0].dtype
        casts, to = [], torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "to", lambda x, dtype: casts.append(x.dtype == dtype) or to(x, dtype))
        choices = rehearse("chunk_kda", **call.arguments)
    assert casts == [True] * 3                            # q, k, v: asked for what they are, so that nothing is copied
    assert seen == torch.bfloat16 and [choice.problem.dtype for choice in choices] == ["bfloat16"] * 2


def test_something_is_said_once_of_its_kind():
    with pytest.warns(KdaNotice) as warned:
        for size in (1, 2):
            say_once(f"not taken: {size}", "test", "a")
            say_once("another reason", "test", "b")
        notices.forget("test")
        say_once("not taken: 3", "test", "a")
    assert [str(w.message) for w in warned] == ["not taken: 1", "another reason", "not taken: 3"]
    assert all(w.filename == __file__ for w in warned)
    notices.forget("test")


def test_a_reason_has_no_numbers():
    for sizes in ((20, 16), (30, 48)):
        with pytest.raises(kda.InputError) as wrong:
            rehearse("chunk_kda", **make(T=sizes[0], chunk_size=sizes[1]).arguments)
        assert reason_of(wrong.value) == "chunk_size.value chunk_size"
        with pytest.raises(kda.NoBackendError) as nobody:
            rehearse("chunk_kda", **make(T=sizes[0]).arguments, backend="sm90")
        assert "sm90." in reason_of(nobody.value) and not {"20", "30"} & set(reason_of(nobody.value).split())
    assert reason_of(TypeError("too many")) == "TypeError"


def test_each_unknown_keyword_is_a_reason_of_its_own():
    reasons = set()
    for name in ("cu_seqlen", "outputfinalstate"):
        with pytest.raises(kda.InputError) as wrong:
            rehearse("chunk_kda", **make(T=8).arguments, **{name: True})
        reasons.add(reason_of(wrong.value))
    assert reasons == {"keyword.unknown cu_seqlen", "keyword.unknown outputfinalstate"}


def test_without_fla_the_import_says_what_to_install_and_kda_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.delitem(sys.modules, "kda.fla", raising=False)
    with pytest.raises(ImportError, match=r"found no package fla\. pip install 'fla-core>=") as error:
        importlib.import_module("kda.fla")
    assert isinstance(error.value, kda.PackageError) and error.value.name == "fla"
    assert kda.chunk_kda(**make(T=3).arguments)[0].shape == (1, 3, 2, 3)


@pytest.mark.parametrize(("file", "code", "says"), [
    ("fla/__init__.py", "import einopsen", "importing fla failed: No module named 'einopsen'"),
    ("fla/__init__.py", "# flash-linear-attention without fla-core",
     r"in part: No module named 'fla\.ops'\. pip install 'fla-core>=.*'$"),
    ("fla.py", "# a program of the user", r"found the file .*fla\.py, which hides it\. Give that another name"),
], ids=["cannot be imported", "a part is missing", "a file hides it"])
def test_an_fla_that_does_not_work_is_reported_as_such(file, code, says, monkeypatch, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla" or name == "kda.fla"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(kda.PackageError, match=says):
        importlib.import_module("kda.fla")


def test_looking_at_kda_does_not_register_it_anywhere():
    with warnings.catch_warnings(), pytest.raises(AttributeError):
        warnings.simplefilter("error")
        sys.modules.pop("kda.fla", None)
        vars(kda).pop("fla", None)
        _ = kda.fla


class Registry:
    """What FLA keeps of a function, or of an operation."""

    _registries: typing.ClassVar[dict] = {}

    def __init__(self):
        self._backends, self._logged = {}, {"kda:chunk_kda:kda", "kda:chunk_kda:other"}

    @classmethod
    def ensure_initialized(cls, operation):
        cls._registries.setdefault(operation, Registry())

    def register(self, backend):
        self._backends[backend.backend_type] = backend

    def _get_sorted_backends(self):
        return sorted(self._backends.values(), key=lambda backend: backend.priority)

    def call(self, function, *args, **keywords):
        for backend in self._get_sorted_backends():
            if getattr(backend, f"{function}_verifier")(*args, **keywords)[0]:
                return getattr(backend, function)(*args, **keywords)
        return "FLA"


class Base:
    def is_available(self):
        return True

    is_enabled = is_available


def chunk_of_fla(q, k, v, g, beta, scale=None, **more): ...


@pytest.fixture(params=["0.5", "0.6"])
def registries(request, monkeypatch):
    """Make a package fla with that version's registry alone; yield its registries of chunk_kda and of the operation."""
    chunk, operation = Registry(), Registry()
    contents = {name: {} for name in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.kda.chunk")}
    contents["fla"]["__version__"], contents["fla.ops.kda.chunk"]["chunk_kda"] = request.param, chunk_of_fla
    common = {"BaseBackend": Base, "_DISPATCH_DISABLED": False, "BackendRegistry": Registry}
    if request.param == "0.5":
        monkeypatch.setitem(sys.modules, "fla.backends", None)
        contents["fla.ops.backends"], chunk = common, operation
        monkeypatch.setattr(Registry, "_registries", {"kda": operation})
    else:
        functions = {"_function_registries": {chunk_of_fla: chunk}, "_get_operation_registry": {"kda": operation}.get}
        monkeypatch.delattr(Registry, "ensure_initialized")
        contents["fla.backends"] = common | functions
    modules = {name: types.ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above:
            setattr(modules[above], last, module)
    monkeypatch.delitem(sys.modules, "kda.fla", raising=False)
    yield chunk, operation
    sys.modules.pop("kda.fla", None)
    vars(kda).pop("fla", None)
    notices.forget("kda.fla")


def test_the_import_registers_kda_and_disable_takes_it_out(registries):
    chunk, operation = registries
    in_fla, call = importlib.import_module("kda.fla"), make(T=20)
    expected = [name for name in in_fla.FUNCTIONS if chunk is not operation or name != "fused_recurrent_kda_fwd"]
    assert list(in_fla.in_use()) == expected             # FLA 0.5 asks nobody for the recurrence
    assert torch.equal(chunk.call("chunk_kda", **call.arguments)[0], kda.chunk_kda(**call.arguments)[0])
    with pytest.warns(KdaNotice, match=r"FLA runs this call.*chunk_size\.value"):
        assert chunk.call("chunk_kda", **call.arguments | {"chunk_size": 16}) == "FLA"
    in_fla.disable()
    assert in_fla.in_use() == () and chunk.call("chunk_kda", **call.arguments) == "FLA"
    assert not operation._backends and chunk._logged == {"kda:chunk_kda:other"}
    in_fla.use()
    assert list(in_fla.in_use()) == expected


def test_an_fla_whose_arguments_stand_elsewhere_is_refused(registries, monkeypatch):
    def other(q, k, v, beta, g): ...

    monkeypatch.setattr(sys.modules["fla.ops.kda.chunk"], "chunk_kda", other)
    with pytest.raises(kda.PackageError, match=r"found 0\.[56]\. pip install"):
        importlib.import_module("kda.fla")
    assert not registries[0]._backends
