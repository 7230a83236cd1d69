"""What all commands have in common."""

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kda.cli import COMMANDS, cli, main
from kda.routing.dispatch import capabilities
from kda.tools.commands import cache
from kda.tools.commands.doctor import archs_without_kernels
from kda.tools.commands.findings import backends_with_kernels
from ptxkit.compile.target import TARGETS, parse

ASKING_FOR_A_BACKEND = {
    "doctor": ("doctor", "--require"),
    "selftest": ("selftest", "--backend"),
    "verify": ("verify", "--backend"),
    "bench": ("bench", "--backend"),
}


@pytest.fixture
def no_kernels(monkeypatch):
    reference = [c for c in capabilities() if c.backend == "reference"]
    monkeypatch.setattr("kda.routing.dispatch.capabilities", lambda: tuple(reference))


@pytest.mark.parametrize("command", ASKING_FOR_A_BACKEND)
def test_an_arch_without_kernels_is_said_to_have_none_with_exit_3(command, no_kernels):
    result = CliRunner().invoke(cli, [*ASKING_FOR_A_BACKEND[command], "sm120"])
    assert result.exit_code == 3
    assert "sm120 (RTX 50, RTX PRO 6000): no backend has kernels for it yet" in result.stderr


@pytest.mark.parametrize(("name", "says"), [
    ("sm103", "sm103 is an arch, and no backend is called so; kernels for it: sm100, triton."),
    ("refrence", "Did you mean 'reference'"),
])
@pytest.mark.parametrize("command", ASKING_FOR_A_BACKEND)
def test_what_is_no_backend_is_a_wrong_command_and_gets_the_names_of_backends(command, name, says):
    result = CliRunner().invoke(cli, [*ASKING_FOR_A_BACKEND[command], name])
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.parametrize("command", ["verify", "selftest", "compile", "bench --predicted", "bench --host"])
def test_a_backend_without_kernels_for_the_arch_is_a_wrong_command(command):
    result = CliRunner().invoke(cli, [*command.split(), "--arch", "h100", "--backend", "sm100"])
    assert result.exit_code == 2
    assert "--arch sm90: sm100 has kernels for sm100, sm103, sm110. Leave out --backend, or name " in result.stderr
    if command != "bench --host":            # it does what a GPU does
        older = CliRunner().invoke(cli, [*command.split(), "--arch", "h100", "--backend", "sm89"]).stderr
        assert "--arch sm90: sm89 has kernels for sm89, which these GPUs run, too. Name --arch sm89." in older


@pytest.mark.parametrize(("words", "says"), [
    ("verify --heads x", "'x' is not a valid integer."),
    ("cache clean --older-than x", "'x' is not a valid number."),
    ("doctor torch", "Did you mean 'torch.import'?"),
    ("bench --tokens 9 --heads 2 --value-heads 3", "--value-heads must be a multiple of --heads 2; found 3"),
])
def test_a_wrong_word_is_answered_in_plain_words(words, says):
    result = CliRunner().invoke(cli, words.split())
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.exhaustive
def test_a_dtype_has_a_short_name_too():
    short, long = (
        CliRunner().invoke(cli, ["doctor", "--problem", f"K=64 V=64 {dtype}"]).stdout for dtype in ("bf16", "bfloat16")
    )
    assert short == long and " bfloat16, cpu" in short
    words = ("verify", "--dtype", "fp32", "--lengths", "9", "-K", "8", "-V", "8")
    assert " float32, packed [9]" in CliRunner().invoke(cli, words).stdout


def test_an_interruption_is_told_from_a_finding(monkeypatch, capsys):
    def stop(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.command, "callback", stop)
    monkeypatch.setattr(sys, "argv", ["kda", "cache"])
    with pytest.raises(SystemExit) as left:
        main()
    assert (left.value.code, *capsys.readouterr()) == (130, "", "kda: interrupted\n")


@pytest.mark.parametrize("arch", TARGETS)
def test_an_arch_without_kernels_can_be_requested(arch, no_kernels):
    result = CliRunner().invoke(cli, ["selftest", "--arch", arch])
    assert result.exit_code == 3 and arch in result.stdout


def test_doctor_names_the_archs_that_no_backend_covers_and_those_alone():
    """Triton builds its kernels for every arch from sm_80 on, and code for sm_89 runs on all later GPUs."""
    assert archs_without_kernels(capabilities()) == []
    assert "triton" in backends_with_kernels((8, 6), capabilities())
    assert set(backends_with_kernels((12, 0), capabilities())) == {"sm89", "triton"}
    assert set(backends_with_kernels((12, 1), capabilities())) == {"sm89", "triton"}
    assert set(backends_with_kernels((11, 0), capabilities())) == {"sm100", "sm89", "triton"}
    assert backends_with_kernels((7, 5), capabilities()) == []
    assert "sm90" not in backends_with_kernels((10, 0), capabilities())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_json_and_colour(command):
    help = CliRunner().invoke(cli, [command, "--help"]).stdout
    assert all(option in help for option in ("--json", "--color", "--debug"))


# ---------------------------------------------------------------------------------------------- names

CARDS = {
    "sm80": ["a100", "NVIDIA A100-SXM4-80GB", "A30"],
    "sm86": ["rtx3090ti", "A10G", "NVIDIA RTX A6000", "rtx 3060"],
    "sm89": ["rtx4090", "4090", "NVIDIA GeForce RTX 4090 Laptop GPU", "L40S", "NVIDIA RTX 6000 Ada Generation"],
    "sm90": ["h100", "NVIDIA H100 80GB HBM3", "H200", "GH200"],
    "sm100": ["b200", "NVIDIA B200", "GB200"],
    "sm103": ["B300"],
    "sm110": ["thor", "Jetson Thor", "NVIDIA Thor", "NVIDIA Jetson AGX Thor Developer Kit", "T5000", "jetson-t4000"],
    "sm120": ["rtx-5090", "NVIDIA RTX PRO 6000 Blackwell Server Edition"],
    "sm121": ["gb10", "NVIDIA GB10", "dgx spark", "Spark"],
}


@pytest.mark.parametrize("arch", CARDS)
def test_an_arch_is_known_by_the_names_of_its_cards(arch):
    assert set(CARDS) == set(TARGETS)
    assert [parse(card).name for card in CARDS[arch]] == [arch] * len(CARDS[arch])


@pytest.mark.parametrize("name", ["v100", "rtx2080", "h101", "a1000000", "90000", ""])
def test_a_card_that_kda_does_not_know_is_refused_with_those_that_it_does(name):
    with pytest.raises(ValueError, match=r"no GPU arch or card is called .*sm90 \(H100, H200, H20\)"):
        parse(name)


def test_a_card_is_suggested_only_if_it_is_near():
    with pytest.raises(ValueError, match="called 'h1000'; did you mean 'h100'\\? kda knows"):
        parse("h1000")
    with pytest.raises(ValueError, match="called 'sm42'; kda knows"):
        parse("sm42")


@pytest.mark.parametrize("command", ["selftest", "verify"])
def test_commands_accept_a_card(command, no_kernels):
    result = CliRunner().invoke(cli, [command, "--arch", "h100"])
    assert result.exit_code == 3 and "sm90 (H100, H200, H20): no backend" in result.output


@pytest.mark.parametrize(("arguments", "near"), [
    (["doctor", "nope"], None), (["doctor", "driver.versoin"], "driver.version"),
    (["verify", "--backend", "foo"], None), (["verify", "--backend", "tritn"], "triton"),
    (["bench", "--shape", "xyz"], None), (["bench", "--shape", "kimi8k"], "kimi-8k"),
    (["selftest", "--stage", "zzz"], None), (["selftest", "--stage", "fwd/stat"], "fwd/state"),
    (["frobnicate"], None), (["doctr"], "doctor"), (["version"], "kda --version"), (["help"], "kda --help"),
    (["selftest", "--list"], None), (["verify", "--dtpe", "float32"], "--dtype"),
])
def test_only_a_name_that_is_near_is_suggested(arguments, near):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert f"Did you mean {near!r}?" in result.stderr if near else "Did you mean" not in result.stderr


@pytest.mark.parametrize(("arguments", "says"), [
    (["bench", "--save", "none/x.json"], "there is no folder 'none' for 'none/x.json'. Create it"),
    (["bench", "--html", "none/x.html"], "there is no folder 'none'"),
    (["bench", "--plot", "x.doc"], "'x.doc' must end in .png, .svg or .pdf"),
    (["verify", "--dump", "none/x.pt"], "there is no folder 'none'"),
    pytest.param(
        ["timeline", "--arch", "sm90", "--out", "/proc/x.json"], "'/proc/x.json' cannot be written. Name another",
        marks=pytest.mark.skipif(not os.path.isdir("/proc"), reason="no folder that refuses every user"),
    ),
    (["timeline", "--arch", "sm90", "--out", "none/x.json"], "there is no folder 'none'"),
    (["timeline", "--arch", "sm90", "--out", "x.json", "--html", "./x.json"], "is the file of --out, too. Name"),
    (["timeline", "--arch", "sm90", "--html", "timeline.json"], "'timeline.json' is the file of --html, too. Name"),
    (["bench", "--html", "x.html", "--save", "x.html"], "'x.html' is the file of --html, too. Name another file."),
    (["simulate", "--sarif", "none/x.sarif", __file__], "there is no folder 'none'"),
    (["bench", "--save", "."], "is a directory"),
])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2 and says in result.stderr and not result.stdout


@pytest.mark.parametrize(("words", "found"), [
    ("kda ver", {"verify"}),
    ("kda selftest --arch sm1", {"sm100", "sm103", "sm110", "sm120", "sm121"}),
    ("kda selftest --arch h", {"h100", "h200", "h20"}),
    ("kda verify --backend tr", {"triton"}),
    ("kda verify --stage fwd/w", {"fwd/wy"}),
    ("kda selftest --stage fwd/g", {"fwd/gate"}),
    ("kda bench --shape tiny-", {"tiny-grouped", "tiny-packed"}),
    ("kda doctor cache.s", {"cache.stale"}),
    ("kda compile --model ki", {"kimi-linear", "kimi-k3"}),
    ("kda explain ki", {"kimi-linear", "kimi-k3", "kimi-8k"}),
])
def test_a_shell_completes_names(words, found):
    *_, last = words.split()
    env = {"_KDA_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    result = CliRunner().invoke(cli, [], prog_name="kda", env=env)
    assert {line.partition(",")[2] for line in result.stdout.splitlines()} == found
    assert all(name.startswith(last) for name in found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_that_the_docs_give_for_a_shell_makes_its_completion(shell):
    page = (Path(__file__).parents[4] / "docs" / "commands.md").read_text(encoding="utf-8")
    assert f"_KDA_COMPLETE={shell}_source kda" in page
    result = CliRunner().invoke(cli, [], prog_name="kda", env={"_KDA_COMPLETE": f"{shell}_source"})
    assert "_KDA_COMPLETE" in result.stdout
