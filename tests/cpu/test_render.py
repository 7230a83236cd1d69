"""Colour, marks, tables, progress and errors of the `kda` commands."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from kda.cli import COMMANDS, cli
from kda.commands import render
from kda.commands.render import Screen, common_options, speaks_utf8, strip_ansi, table, wants_color
from kda.errors import KdaError
from kda.simulator.engine.build import compiler


@pytest.mark.parametrize(
    ("choice", "terminal", "env", "colored"),
    [
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {"FORCE_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", False, {"FORCE_COLOR": "1"}, True),
        ("auto", True, {"FORCE_COLOR": "0"}, False),
        ("auto", True, {}, True),
        ("auto", False, {}, False),
    ],
)
def test_color_follows_the_option_then_no_color_then_force_color_then_the_terminal(choice, terminal, env, colored):
    assert wants_color(choice, terminal, env) is colored


def test_a_dumb_terminal_is_no_terminal(monkeypatch):
    class Tty(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert render.is_terminal(Tty())
    monkeypatch.setenv("TERM", "dumb")
    assert not render.is_terminal(Tty())
    assert not render.is_terminal(None)


def test_strip_ansi_takes_colours_links_and_cursor_moves_away():
    assert strip_ansi("\x1b[1;31mred\x1b[0m \x1b[2K\x1b]8;;http://x\x07link\x1b]8;;\x07") == "red link"


def test_a_table_is_aligned_by_what_is_seen_and_has_no_trailing_space():
    red = click.style("x", fg="red")
    assert table([("a", red, "1"), ("bbb", "yy", "22")], header=("n", "c", "#"), align="llr", indent=1) == [
        " n    c    #",
        f" a    {red}    1",
        " bbb  yy  22",
    ]
    assert table([("a", ""), ("b",)]) == ["a", "b"]
    assert table([]) == []


def test_marks_are_words_without_utf8_and_colour_repeats_them():
    assert [Screen().mark(s) for s in render.SIGNS] == ["[✓]", "[·]", "[!]", "[✗]", "[☠]"]
    assert [Screen(utf8=False).mark(s) for s in render.SIGNS] == ["[ok]", "[--]", "[!!]", "[XX]", "[XX]"]
    assert strip_ansi(Screen(color=True).mark("fail")) == "[✗]" != Screen(color=True).mark("fail")
    assert Screen(utf8=False).sign("fail") == "XX"


def test_only_utf8_streams_get_signs():
    assert speaks_utf8(io.TextIOWrapper(io.BytesIO(), encoding="UTF8"))
    assert not speaks_utf8(io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert not speaks_utf8(None)


def test_a_letter_that_the_stream_cannot_write_becomes_a_question_mark(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Screen(utf8=False).line("naïve ✗")
    assert raw.getvalue() == b"na?ve ?\n"


def test_progress_is_silent_for_fast_work_and_speaks_on_stderr_for_slow_work(monkeypatch, capsys):
    monkeypatch.setattr(render, "PATIENCE", 0.05)
    with Screen().progress("fast"):
        pass
    with Screen().progress("slow") as tell:
        time.sleep(0.2)
        tell("slower")
    assert tuple(capsys.readouterr()) == ("", "slow ...\nslower ...\n")


def make_command(function):
    return click.command()(common_options(function))


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (render.FINDING, 1), (render.CANNOT_JUDGE, 3)])
def test_what_a_command_returns_is_its_exit_code(returned, code):
    assert CliRunner().invoke(make_command(lambda screen: returned), []).exit_code == code


def fails_on_purpose(screen):
    raise KdaError("asked, found, do")


def is_broken(screen):
    raise KeyError("x")


def test_errors_of_kda_print_their_message_and_exit_with_2():
    result = CliRunner().invoke(make_command(fails_on_purpose), [])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "asked, found, do\n")


def test_a_compiler_that_is_not_installed_exits_with_3_for_this_host_cannot_judge(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    result = CliRunner().invoke(make_command(lambda screen: compiler()), [])
    assert (result.exit_code, result.stdout) == (3, "")
    assert "kda.simulator needs a C compiler (gcc or cc), which is not installed here. Install gcc" in result.stderr


def test_other_errors_exit_with_2_and_a_traceback_only_under_debug():
    quiet, loud = (CliRunner().invoke(make_command(is_broken), args) for args in ([], ["--debug"]))
    assert quiet.exit_code == loud.exit_code == 2
    assert "internal error, KeyError" in quiet.stderr and "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr and "is_broken" in loud.stderr


def test_json_is_one_object_on_stdout():
    def tells(screen):
        assert screen.json
        screen.emit_json({"a": "✗\x1b"})

    result = CliRunner().invoke(make_command(tells), ["--json"])
    assert json.loads(result.stdout) == {"a": "✗\x1b"} and "\x1b" not in result.stdout


def test_help_lists_every_command_on_one_line_each():
    lines = CliRunner().invoke(cli, ["--help"]).stdout.splitlines()
    for name, (_, says) in COMMANDS.items():
        assert any(line.split() == [name, *says.split()] for line in lines)


def test_the_error_of_a_misspelt_command_names_the_nearest_one():
    result = CliRunner().invoke(cli, ["doctr"])
    assert result.exit_code == 2 and "'doctor'" in result.stderr


def test_a_command_that_cannot_be_imported_exits_with_2_and_points_to_doctor(monkeypatch):
    monkeypatch.setitem(COMMANDS, "verify", ("kda.commands.no_such_module", "-"))
    result = CliRunner().invoke(cli, ["verify"])
    assert result.exit_code == 2 and "kda doctor" in result.stderr and "Traceback" not in result.stderr
    assert "Traceback" in CliRunner().invoke(cli, ["verify", "--debug"]).stderr


def test_version_is_printed():
    assert CliRunner().invoke(cli, ["--version"]).stdout.startswith("kda ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["cache"], ["cache", "--json"], ["--help"], ["cache", "--help"]], ids=" ".join)
def test_a_full_disk_under_the_output_is_said_in_one_line(arguments, tmp_path):
    with open("/dev/full", "wb") as full:
        found = subprocess.run(
            [sys.executable, "-m", "kda", *arguments], stdout=full, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"KDA_CACHE_DIR": str(tmp_path)},
        )  # fmt: skip
    assert found.returncode == 2
    assert found.stderr == "kda: the output cannot be written (No space left on device). Send it elsewhere.\n"
