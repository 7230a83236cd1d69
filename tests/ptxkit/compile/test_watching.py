"""What is said of kernels that are being built: by whom, once, and when not."""

import contextlib
from types import SimpleNamespace

import pytest

from ptxkit.compile import watching
from ptxkit.compile.target import parse

RECIPES = [SimpleNamespace(name=name, target=parse("sm90")) for name in ("prepare", "fused", "prepare")]


@pytest.fixture(autouse=True)
def first_build_of_a_process(monkeypatch, tmp_path):
    monkeypatch.setattr(watching, "_explained", False)
    monkeypatch.setattr(watching, "_watchers", [])
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path))
    for name in ("KDA_QUIET", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def build(recipes=RECIPES):
    with watching.watched(recipes) as built:
        for recipe in recipes:
            built(recipe)


def test_the_first_build_says_what_it_builds_where_it_goes_and_how_long_it_took(capsys, tmp_path):
    build()
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == ""
    assert first.startswith("kda: building 3 kernels for sm90: fused, prepare (2) (kept in ")
    assert str(tmp_path) in first and "`kda compile`" in first and "KDA_QUIET=1" in first
    assert second == "kda: built 3 kernels in 0 s"


def test_it_is_explained_once_and_later_builds_say_what_they_build(capsys):
    build()
    capsys.readouterr()
    build(RECIPES[:1])
    assert capsys.readouterr().err == "kda: building 1 kernel for sm90: prepare\n"


@pytest.mark.parametrize(("variable", "value"), [("KDA_QUIET", "1"), ("LOCAL_RANK", "3")])
def test_nothing_is_said_with_kda_quiet_and_by_any_rank_but_the_first(capsys, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    build()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(variable, "0")
    build()
    assert "KDA_QUIET=1" in capsys.readouterr().err      # nobody has heard it yet


def test_a_build_that_fails_is_not_said_to_be_built(capsys):
    with contextlib.suppress(KeyError), watching.watched(RECIPES):
        raise KeyError
    assert "built" not in capsys.readouterr().err


def test_a_command_shows_builds_in_its_own_way(capsys):
    seen = []

    @contextlib.contextmanager
    def watcher(recipes):
        yield seen.append

    with watching.told_to(watcher):
        build()
    assert seen == RECIPES and capsys.readouterr().err == ""
    build()
    assert "kda: building" in capsys.readouterr().err


def test_what_a_machine_builds_once_is_said_unless_a_command_shows_its_progress(capsys, tmp_path):
    with watching.once("the engine"):
        pass
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"kda: building the engine (kept in {tmp_path}; KDA_QUIET=1 silences this)"
    assert second == "kda: built it in 0 s"
    with watching.told_to(contextlib.nullcontext), watching.once("the engine"):
        pass
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_is_not_said_to_keep_anything(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    build()
    with watching.once("the engine"):
        pass
    said = capsys.readouterr().err
    assert said.count("(not kept: `kda doctor cache.dir` says why;") == 2 and "kept in" not in said
