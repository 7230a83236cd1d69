"""kda as a plug-in of inference engines, without these: what is declared, what fails, what is switched off."""

import importlib
import pathlib
import sys

import pytest

import kda.engines
from kda import notices
from kda.model.problem import Problem

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
ROOT = pathlib.Path(__file__).parents[3]
ENGINES = ("vllm", "sglang")


def declared():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_entry_points_name_functions_that_exist():
    for group, points in declared()["entry-points"].items():
        if not group.startswith(ENGINES):
            continue
        module, _, name = points["kda"].partition(":")
        assert callable(getattr(importlib.import_module(module), name)) and group.split(".")[0] in name


def test_each_engine_is_an_extra():
    assert set(ENGINES) <= set(declared()["optional-dependencies"])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_not_as_it_was_goes_on_without_kda_and_is_told_why(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, engine, None)
    notices.forget("kda.engines")
    with pytest.warns(notices.KdaNotice, match=f"{engine} runs without kda"):
        getattr(kda.engines, f"{engine}_plugin")()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_variable_switches_a_plug_in_off(engine, monkeypatch, recwarn):
    monkeypatch.setitem(sys.modules, engine, None)
    monkeypatch.setenv(kda.engines.SWITCHES[engine], "0")
    notices.forget("kda.engines")
    getattr(kda.engines, f"{engine}_plugin")()
    assert not recwarn.list


def test_a_refusal_has_the_reasons_of_dispatch(monkeypatch):
    assert kda.engines.refusal(Problem(device="cpu", slots=2, state_dtype="float32", inplace=True)) is None
    monkeypatch.setenv("KDA_BACKEND", "sm90")
    assert "sm90.gpu" in kda.engines.refusal(Problem(device="cpu", slots=3, state_dtype="float32", inplace=True))
