"""The C compiler: which it is, and what an error says of it."""

import sys

import pytest

from ptxkit.compile import c_compiler
from ptxkit.compile.errors import BuildError, MissingCompilerError

FAILS = "import sys; print('to stdout'); sys.exit({said!r} or 1)"


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Puts programs of these names, and nothing else, on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    def put(*names):
        for name in names:
            (tmp_path / name).touch(mode=0o755)
        return tmp_path

    return put


def test_cc_names_the_compiler_and_otherwise_it_is_gcc(programs, monkeypatch):
    folder = programs("gcc", "cc", "clang")
    assert c_compiler.path() == str(folder / "gcc")
    monkeypatch.setenv("CC", "clang")
    assert c_compiler.path() == c_compiler.required("A test") == str(folder / "clang")


def test_cc_stands_in_for_a_compiler_that_is_not_there(programs, monkeypatch):
    folder = programs("cc")
    assert c_compiler.path() == str(folder / "cc")
    monkeypatch.setenv("CC", "icx")
    assert c_compiler.path() == str(folder / "cc")


def test_without_a_compiler_the_error_says_what_asked_for_it_and_how_to_get_one(programs, monkeypatch):
    programs()
    monkeypatch.setenv("CC", "icx")
    assert c_compiler.path() is None
    said = r"^A test needs a C compiler \(icx or cc\), which is not installed here\. Install gcc .* set CC\.$"
    with pytest.raises(MissingCompilerError, match=said):
        c_compiler.required("A test")


@pytest.mark.parametrize("said, shown", [("wrong", "wrong"), ("", "to stdout")])
def test_a_command_that_fails_is_an_error_with_what_it_said(said, shown, tmp_path):
    command = [sys.executable, "-c", FAILS.format(said=said)]
    with pytest.raises(BuildError, match=f"^no library:\n{shown}$"):
        c_compiler.run(command, tmp_path, BuildError, "no library")


def test_a_command_runs_in_its_folder(tmp_path):
    command = [sys.executable, "-c", "open('here', 'w'); print('done')"]
    assert c_compiler.run(command, tmp_path, BuildError, "no library").stdout == "done\n"
    assert (tmp_path / "here").exists()
