"""What commands print fits a terminal of 80 columns, and no word is broken."""

import contextlib
import os
import re
import struct
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kda.cli import COMMANDS, cli
from ptxkit.commands.groups import HELP_WIDTH
from ptxkit.commands.layout import fold, strip_ansi

TINY = ("--tokens", "70", "--heads", "1", "-K", "8", "-V", "8", "--dtype", "float32", "--repeats", "3")
SMALL = ("--lengths", "33,0,5", "-K", "8", "-V", "8", "--chunk-size", "32", "--dtype", "float32")
RUNS = {
    "help": ("--help",),
    **{f"help of {name}": (name, "--help") for name in COMMANDS},
    "doctor": ("doctor", "python.version", "env.overrides", "cache.dir", "simulator.compiler", "-v"),
    "doctor's list": ("doctor", "--list"),
    "doctor's problem": ("doctor", "--problem", "K=64 V=128 float32 packed cuda"),
    "selftest": ("selftest", "--backend", "reference", "--stage", "fwd/output"),
    "verify": ("verify", *SMALL, "-v"),
    "verify, wrong": ("verify", *SMALL, "--fault", "state-stale"),
    "verify's faults": ("verify", "--fault", "list"),
    "bench": ("bench", *TINY, "--regime", "slow"),
    "bench -v": ("bench", *TINY, "--regime", "slow", "--against", "reference", "-v"),
    "bench's list": ("bench", "--list"),
    "cache": ("cache", "-v"),
    "no such command": ("doctorr",),
    "no such check": ("doctor", "driver.versoin"),
    "no such arch": ("selftest", "--arch", "h101"),
    "no such backend": ("verify", "--backend", "refrence"),
    "no such word of a problem": ("doctor", "--problem", "K=64 whatever"),
    "wrong options": ("verify", "--lengths", "65", "--tokens", "7"),
    "no kernels of the backend": ("verify", "--arch", "h100", "--backend", "reference"),
}


@pytest.fixture(autouse=True)
def made_up_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "kda"))


@pytest.mark.parametrize(("name", "width"), [*((name, 80) for name in RUNS), ("doctor", 120), ("bench's list", 120)])
def test_every_line_fits(name, width):
    result = CliRunner().invoke(cli, RUNS[name], env={"COLUMNS": str(width)})
    lines = strip_ansi(result.output).splitlines()
    longest = max(lines, key=len)
    alone = " " not in longest.strip()                   # a path, which is never broken
    assert len(longest) <= width or alone, longest


def test_help_uses_a_wide_terminal_up_to_a_width_that_reads_well():
    for columns, most in (("80", 80), ("160", HELP_WIDTH)):
        command = [sys.executable, "-m", "kda", "bench", "--help"]               # CliRunner always gives it 80
        env = {**os.environ, "COLUMNS": columns}
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert most - 10 <= max(map(len, run.stdout.splitlines())) <= most


def test_without_a_command_the_help_is_laid_out_as_with_help():
    asked, alone = (CliRunner().invoke(cli, args, prog_name="kda", env={"COLUMNS": "80"}) for args in (["--help"], []))
    assert asked.stdout.strip() == alone.output.strip()


def test_a_terminal_gets_the_words_that_a_file_gets():
    """Folding moves words and breaks none."""

    def words(**env):
        result = CliRunner().invoke(cli, ["verify", *SMALL, "--fault", "state-stale"], env=env)
        return sorted(re.sub(r" \\$", "", result.stdout, flags=re.MULTILINE).split())

    assert words(COLUMNS="60") == words()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_tells_its_width_and_gets_colour():
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 72, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, "-m", "kda", "doctor", "simulator.compiler", "python.version"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"}):
        os.close(theirs)
        read = b""
        with contextlib.suppress(OSError):               # the end of a terminal
            while more := os.read(ours, 4096):
                read += more
    os.close(ours)
    text = read.decode()
    assert "\x1b[32m" in text and "python.version" in text
    lines = strip_ansi(text).splitlines()
    assert max(map(len, lines)) <= 72 and lines == [part for line in lines for part in fold(line, 72)]
