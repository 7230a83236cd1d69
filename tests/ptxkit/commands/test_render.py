"""Colour, marks, tables, progress and errors of the `kda` commands."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from kda.cli import COMMANDS, cli
from kda.errors import KdaError
from ptxkit.commands import progress, render
from ptxkit.commands.layout import fold, is_terminal, shell_lines, strip_ansi, table, width_of
from ptxkit.commands.progress import Progress
from ptxkit.commands.render import Screen, common_options, speaks_utf8, wants_color
from ptxkit.engine.build import compiler


@pytest.mark.parametrize(("choice", "terminal", "env", "colored"), [
    ("always", False, {"NO_COLOR": "1"}, True),
    ("never", True, {"FORCE_COLOR": "1"}, False),
    ("auto", True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ("auto", True, {"NO_COLOR": ""}, True),
    ("auto", False, {"FORCE_COLOR": "1"}, True),
    ("auto", True, {"FORCE_COLOR": "0"}, False),
    ("auto", True, {}, True),
    ("auto", False, {}, False),
])
def test_color_follows_the_option_then_no_color_then_force_color_then_the_terminal(choice, terminal, env, colored):
    assert wants_color(choice, terminal, env) is colored


def test_a_dumb_terminal_is_no_terminal(monkeypatch):
    class Tty(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert is_terminal(Tty())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Tty())
    assert not is_terminal(None)


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


class Slow:
    """A clock of a test's own."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("ptxkit.commands.progress.time.monotonic", lambda: self.now)


def test_progress_says_how_many_of_how_many_and_the_time_left(monkeypatch):
    clock = Slow(monkeypatch)
    shown = Progress("building", total=4)
    clock.now += 3
    assert shown.words() == "building; 0 of 4 done; 3 s"
    shown.count()
    assert shown.words() == "building; 1 of 4 done; about 9 s left"
    clock.now += 4
    assert shown.words() == "building; 1 of 4 done; about 5 s left"
    clock.now += 4.4                                     # "about 0 s" would be no news
    assert shown.words() == "building; 1 of 4 done; 11 s"
    clock.now += 15.6                                    # longer than was to be expected: no promise
    assert shown.words() == "building; 1 of 4 done; 27 s"


def test_a_step_counts_the_step_before_it(monkeypatch):
    clock = Slow(monkeypatch)
    shown = Progress("verifying", total=3)
    shown.step("first")
    assert "first; 0 of 3 done" in shown.words()
    clock.now += 200
    shown.step("second")
    assert shown.words() == "second; 1 of 3 done; about 7 min left"
    shown.expect(2)
    assert shown.words() == "second; 0 of 2 done; 0 s"


def test_kernels_that_are_built_meanwhile_are_counted():
    shown = Progress("timing")
    with shown.of_builds([None] * 3) as built:
        built(None)
        assert "timing; building kernels; 1 of 3 done;" in shown.words()
    assert "building" not in shown.words()


def test_a_progress_line_too_long_for_the_terminal_keeps_its_end():
    words = "triton: fwd/gate+intra+wy, simulated; building kernels; 2 of 5 done; about 2 s left ..."
    assert progress.fitting(words, len(words)) == words
    assert progress.fitting(words, 79) == "... simulated; building kernels; 2 of 5 done; about 2 s left ..."
    assert progress.fitting(words, 24) == "... about 2 s left ..."


def test_progress_is_silent_for_fast_work_and_speaks_on_stderr_for_slow_work(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", {False: 0.05})
    monkeypatch.setattr(progress, "_command_began", None)
    monkeypatch.setattr(progress, "PATIENCE", 600)
    with Screen().progress("fast"):
        pass
    assert tuple(capsys.readouterr()) == ("", "")
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    said = []

    def wait_for(text):
        ends = time.monotonic() + 300
        while not any(text in line for line in said) and time.monotonic() < ends:
            time.sleep(0.01)
            out, err = capsys.readouterr()
            assert out == ""
            said.extend(err.splitlines(keepends=True))

    with Screen().progress("slow", total=2) as tell:
        wait_for("slow;")
        tell("slower")
        wait_for("slower;")
    assert re.fullmatch(r"slow; 0 of 2 done; \d+ s \.\.\.\n", said[0]) and "slower; 0 of 2 done" in said[-1]
    capsys.readouterr()
    monkeypatch.setenv("KDA_QUIET", "1")
    with Screen().progress("slow"):
        time.sleep(0.2)
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.parametrize(("gone", "wait"), [(None, 2.0), (0.5, 1.5), (1.8, 0.5), (60, 0.5)])
def test_what_a_command_did_before_counts_as_part_of_the_wait(monkeypatch, gone, wait):
    clock = Slow(monkeypatch)
    monkeypatch.setattr(progress, "_command_began", None if gone is None else clock.now - gone)
    assert progress._patience() == pytest.approx(wait)


# ---------------------------------------------------------------------------------------------- width


@pytest.mark.parametrize(("text", "width", "lines"), [
    ("one two three", 8, ["one two", "  three"]),
    ("[✓] one two three", 12, ["[✓] one two", "    three"]),
    ("replay   one two three", 17, ["replay   one two", "        three"]),
    ("a pneumonoultramicroscopic word", 10, ["a", "  pneumonoultramicroscopic", "  word"]),
    ("    one two three", 11, ["    one two", "    three"]),
    ("one two three", None, ["one two three"]),
    ("\x1b[1mone two\x1b[0m three", 8, ["\x1b[1mone two\x1b[0m", "  three"]),
    # a command between backticks stays on one line where it fits
    ("ask `kda doctor` for it", 14, ["ask", "  `kda doctor`", "  for it"]),
    ("ask `kda doctor gpu` for it", 10, ["ask `kda", "  doctor", "  gpu` for", "  it"]),
])
def test_text_is_folded_between_words_and_hangs_below_what_its_mark_or_label_belongs_to(text, width, lines):
    assert fold(text, width) == lines


def test_a_command_that_is_too_long_goes_on_after_a_backslash():
    words = ["kda", "verify", "--problem", "a b", "--seed", "7"]
    lines = shell_lines(words, 20)
    assert all(len(line) <= 20 for line in lines) and len(lines) == 3
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines)) == words


WIDE = [("sm100", "needs a GPU of compute capability 10.0", "1.25", "out of reach"), ("sm90", "runs", "1234.5", "")]


@pytest.mark.parametrize("width", [24, 32, 40, 50, 60, 80, None])
def test_a_table_fits_and_breaks_no_word(width):
    lines = table(WIDE, header=("backend", "why", "ms", "more"), align="llrl", width=width)
    assert width is None or all(len(line) <= width for line in lines)
    words = sorted(" ".join(lines).split())
    assert words == sorted(" ".join(map(" ".join, [("backend", "why", "ms", "more"), *WIDE])).split())


def test_columns_without_room_go_to_lines_of_their_own():
    assert table([("aaaa", "bbbb", "cccc")], header=("a", "b", "c"), width=11) == [
        "a     b",
        "    c",
        "aaaa  bbbb",
        "    cccc",
    ]


def test_a_long_last_column_goes_below_the_others_where_that_takes_fewer_lines():
    rows = [("alpha", "1", "one two three four five six seven"), ("beta", "2", "")]
    assert table(rows, header=("name", "y", "why"), width=16) == [
        "name   y", "    why", "alpha  1", "    one two", "    three four", "    five six", "    seven", "beta   2",
    ]
    assert table(rows[1:], header=("name", "y", "why"), width=16) == ["name  y  why", "beta  2"]
    assert len(table(rows, header=("name", "y", "why"), width=43)) == 3


def test_the_width_is_that_of_columns_or_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "97")
    assert width_of(None) == 97
    monkeypatch.delenv("COLUMNS")
    assert width_of(None) is None and width_of(io.StringIO()) is None


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
    assert "ptxkit needs a C compiler (gcc or cc), which is not installed here. Install gcc" in result.stderr


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
    monkeypatch.setitem(COMMANDS, "verify", ("kda.tools.commands.no_such_module", "-"))
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
        )
    assert found.returncode == 2
    assert found.stderr == "kda: the output cannot be written (No space left on device). Send it elsewhere.\n"
