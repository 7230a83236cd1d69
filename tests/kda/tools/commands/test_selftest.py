"""`kda selftest`: made-up backends with made-up provers, and the real reference."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from kda.model.stages import STAGES
from kda.routing.capability import Capability, Rule
from kda.routing.dispatch import capabilities
from kda.tools.commands import selftest
from kda.tools.commands.selftest import LEVELS, command
from kda.tools.verify import evidence, parity, trials
from kda.tools.verify.evidence import Evidence, Proof
from ptxkit.commands.layout import strip_ansi
from ptxkit.commands.options import ARCH
from ptxkit.compile.errors import MissingCompilerError
from ptxkit.compile.target import TARGETS

DEADLOCK = (
    "fwd/state: MMA waits on v_new.full, STATE waits on h.empty: neither can move",
    "at tick 41: MMA   v_new.full  phase 1, 0 of 1 arrivals",
)

asked = []
together = []                                # what kernels were built for


def prover(level: Evidence):
    says = {Evidence.SIMULATED: "o 0.31", Evidence.EXECUTED: "o 0.30"}

    def prove(backend, stage, target):
        assert backend == "blackwell"
        asked.append((level, stage, target and target.name))
        if level is Evidence.SIMULATED and stage == "fwd/state":
            return Proof(False, "stuck", DEADLOCK)
        if level is Evidence.EXECUTED and stage == "bwd/wy":
            raise MemoryError("no room")
        return Proof(True, says[level])

    return prove


prove_simulated, prove_executed = map(prover, Evidence)

BLACKWELL = Capability("blackwell", 10, "made up", archs=("sm100",), stages=tuple(STAGES))
BARE = Capability("bare", 20, "made up", archs=("sm100",))
PLAIN = Capability("plain", 30, "made up", stages=("fwd/gate",))


@pytest.fixture
def made_up(monkeypatch):
    """Make backends up, beside the reference."""
    asked.clear()
    together.clear()
    monkeypatch.setattr(evidence, "PROVERS", {level: (__name__, f"prove_{level.word}") for level in Evidence})

    def make(*backends: Capability) -> None:
        every = (*backends, *(c for c in capabilities() if c.backend == "reference"))
        monkeypatch.setattr("kda.routing.dispatch.capabilities", lambda: every)

    return make


@pytest.fixture
def with_the_gpu(monkeypatch):
    monkeypatch.setattr(selftest, "is_here", lambda c, target: True)
    monkeypatch.setattr(selftest, "tried", lambda backend, quick, tell: [])
    monkeypatch.setattr(selftest, "build_together", lambda *what: together.append(what))


def kda_selftest(*args: str):
    return CliRunner().invoke(command, args)


# ---------------------------------------------------------------------------------------------- made-up backends


def test_the_levels_make_the_columns_and_a_failure_has_its_details_under_its_row(made_up, with_the_gpu):
    made_up(BLACKWELL)
    result = kda_selftest("--arch", "sm100")
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert "blackwell, arch sm_100a, on this host's GPU" in lines[0] and lines[0].endswith("this host's GPU: executed")
    assert lines[3].split() == ["stage", "simulated", "(of", "budget)", "executed", "(of", "budget)"]
    rows = {line.split()[0]: line for line in lines if line.startswith(("fwd/", "bwd/"))}
    assert list(rows) == list(STAGES)
    assert " ".join(rows["fwd/gate"].split()) == "fwd/gate o 0.31 o 0.30"
    assert rows["fwd/state"].split() == ["fwd/state", "FAIL", "not", "run"]
    row = lines.index(rows["fwd/state"])
    assert [line.strip() for line in lines[row + 1 : row + 3]] == [f"✗ {DEADLOCK[0]}", DEADLOCK[1]]
    assert rows["bwd/wy"].endswith("CRASH") and "MemoryError: no room" in result.stdout
    assert lines[1].startswith("[✗] blackwell: 8 of 10 stages within budget; executed on ")
    assert together == [("blackwell", tuple(STAGES), trials.trials(quick=False))]


def test_nothing_is_executed_and_nothing_says_so_without_the_gpu(made_up):
    made_up(BLACKWELL)
    printed = kda_selftest("--arch", "sm_100a").stdout
    assert not together
    first, second, *_ = printed.splitlines()
    assert "blackwell, arch sm_100a, on a host without one" in first and first.endswith(": simulated")
    assert second == (
        "[✗] blackwell: 9 of 10 stages within budget in the simulator; nothing was executed on sm_100a"
    )
    assert "executed (of budget)" not in printed and not any(level is Evidence.EXECUTED for level, *_ in asked)
    assert {target for *_, target in asked} == {"sm100"}


def test_a_stage_that_does_not_exist_is_told_of_runs_too():
    result = kda_selftest("--arch", "sm89", "--stage", "nope")
    assert result.exit_code == 2 and "such as fwd/gate+intra+wy." in " ".join(result.stderr.split())


def test_without_an_arch_the_verdict_names_the_gpu_that_the_simulator_stood_in_for(made_up):
    made_up(BLACKWELL)
    printed = kda_selftest("--backend", "blackwell", "--level", "simulate").stdout
    assert "in the simulator, as on sm100 (B200, GB200); nothing was executed on a GPU" in printed
    (backend,) = json.loads(kda_selftest("--backend", "blackwell", "--level", "simulate", "--json").stdout)["backends"]
    assert backend["simulated_as"] == "sm100"


def test_with_the_gpu_there_is_one_more_column_and_the_verdict_says_so(made_up, with_the_gpu):
    made_up(BLACKWELL)
    result = kda_selftest("--arch", "sm100", "--stage", "fwd/gate")
    assert result.exit_code == 0 and "simulated (of budget)" in result.stdout
    assert "executed (of budget)" in result.stdout and "--level" not in result.stdout
    assert "1 of 1 stages within budget; executed on " in result.stdout.splitlines()[1]


def test_without_an_arch_the_gpu_alone_gives_the_first_verdict_and_a_hint_says_how_to_go_on(made_up, with_the_gpu):
    made_up(BLACKWELL)
    printed = kda_selftest("--backend", "blackwell", "--stage", "fwd/gate").stdout
    assert {level for level, *_ in asked} == {Evidence.EXECUTED} and "simulated (of budget)" not in printed
    assert printed.endswith("--level execute simulates the kernels, too, which finds races and takes some minutes.\n")
    asked.clear()
    printed = kda_selftest("--backend", "blackwell", "--stage", "fwd/gate", "--level", "execute").stdout
    assert [level for level, *_ in asked] == [Evidence.SIMULATED, Evidence.EXECUTED] and "finds races" not in printed


@pytest.mark.parametrize(("level", "last"), LEVELS.items())
def test_level_fixes_how_far_to_go(made_up, with_the_gpu, level, last):
    made_up(BLACKWELL)
    words = [level.word for level in Evidence if level <= last]
    data = json.loads(kda_selftest("--arch", "sm100", "--level", level, "--stage", "fwd/gate", "--json").stdout)
    (backend,) = data["backends"]
    assert backend["levels"] == words and list(backend["stages"][0]["proofs"]) == words
    assert backend["stages"][0]["evidence"] == last.word and data["exit"] == 0


def test_a_level_that_this_host_or_backend_cannot_reach_exits_with_3(made_up):
    made_up(BLACKWELL, PLAIN)
    result = kda_selftest("--arch", "sm100", "--level", "execute")
    says = "blackwell cannot be executed here: this host has no sm_100a. Leave out --level"
    assert result.exit_code == 3 and says in result.stdout
    result = kda_selftest("--backend", "plain", "--level", "simulate")
    assert result.exit_code == 3 and "plain cannot be simulated: it has no kernels; --arch, such as" in result.stdout


def test_a_backend_that_cannot_go_as_far_as_another_is_named_and_not_counted(made_up):
    made_up(BLACKWELL, BARE)
    asked_for = "--arch", "sm100", "--level", "simulate", "--stage", "fwd/gate"
    result = kda_selftest(*asked_for)
    assert result.exit_code == 0 and result.stdout.splitlines()[-1] == "bare cannot be simulated: it has no stages"
    data = json.loads(kda_selftest(*asked_for, "--json").stdout)
    assert [(b["name"], b["passed"]) for b in data["backends"]] == [("blackwell", True)]


def test_json_never_calls_a_simulated_stage_executed(made_up):
    made_up(BLACKWELL)
    result = kda_selftest("--arch", "sm100", "--json", "--color", "always")
    assert "\x1b" not in result.stdout and "\\u001b" not in result.stdout
    data = json.loads(result.stdout)
    assert (data["schema"], data["command"], data["arch"], data["exit"]) == (1, "selftest", "sm100", 1)
    (backend,) = data["backends"]
    reached = {line["stage"]: line["evidence"] for line in backend["stages"]}
    assert backend["device"] is None and "executed" not in reached.values()
    assert (reached["fwd/gate"], reached["fwd/state"]) == ("simulated", None)
    state = next(line for line in backend["stages"] if line["stage"] == "fwd/state")
    assert state["proofs"]["simulated"] == {"passed": False, "says": "stuck", "details": list(DEADLOCK)}
    assert not state["passed"] and "executed" not in state["proofs"]


def test_colour_only_repeats_what_the_words_say(made_up):
    made_up(BLACKWELL)
    plain, painted = (kda_selftest("--arch", "sm100", "--color", choice).stdout for choice in ("never", "always"))
    assert strip_ansi(painted) == plain != painted


def test_a_backend_without_stages_cannot_be_judged(made_up):
    made_up(BARE)
    result = kda_selftest("--backend", "bare")
    assert result.exit_code == 3 and "bare declares no `stages` that can be proven here" in result.stdout


def without_its_compiler(*args):
    raise MissingCompilerError("building CUDA C++", "libnvrtc", "`pip install nvidia-cuda-nvrtc` has it.")


def test_a_compiler_that_is_not_installed_is_named_and_exits_with_3(made_up, monkeypatch):
    made_up(BLACKWELL)
    monkeypatch.setattr(sys.modules[__name__], "prove_simulated", without_its_compiler)
    result = kda_selftest("--arch", "sm100")
    assert result.exit_code == 3 and "CRASH" not in result.stdout
    assert result.stdout == (
        "blackwell cannot be simulated here: building CUDA C++ needs libnvrtc, which is not installed here. "
        "`pip install nvidia-cuda-nvrtc` has it.\n"
    )


def test_without_a_c_compiler_nothing_is_built_first(made_up, monkeypatch):
    made_up(BLACKWELL)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "no-such-compiler")
    result = kda_selftest("--arch", "sm100")
    assert result.exit_code == 3 and not asked
    assert result.stdout.startswith(
        "blackwell cannot be simulated here: The engine of ptxkit needs a C compiler (no-such-compiler or cc)"
    )


def test_a_backend_that_lacks_its_compiler_keeps_the_exit_code_from_saying_that_all_is_well(made_up, monkeypatch):
    other = dataclasses.replace(BLACKWELL, backend="other", rank=20, stages=("fwd/gate",))
    made_up(BLACKWELL, other)
    right = Proof(True, "o 0.1")
    proofs = {"blackwell": lambda: right, "other": without_its_compiler}
    monkeypatch.setattr(sys.modules[__name__], "prove_simulated", lambda backend, *args: proofs[backend]())
    result = kda_selftest("--arch", "sm100")
    assert result.exit_code == 3 and "blackwell: 10 of 10 stages within budget" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("other cannot be simulated here: building CUDA C++ needs libnvrtc")
    proofs["blackwell"] = lambda: Proof(False, "stuck")
    assert kda_selftest("--arch", "sm100").exit_code == 1


def test_a_package_that_is_not_installed_is_named_and_exits_with_3(made_up):
    rule = Rule("blackwell.installed", lambda p, h: h.has("no-such-dsl"), "needs no-such-dsl", "pip install it")
    made_up(dataclasses.replace(BLACKWELL, rules=(rule,)))
    result = kda_selftest("--arch", "sm100")
    assert result.exit_code == 3 and not asked
    says = "blackwell cannot be judged here: blackwell.installed: needs no-such-dsl -> pip install it\n"
    assert result.stdout == says


# ---------------------------------------------------------------------------------------------- the reference


def test_an_arch_without_kernels_exits_with_3_and_needs_no_torch():
    code = (
        "import sys; sys.argv = ['/bin/kda', 'selftest', '--arch', 'sm120'];"
        "import kda.cli, kda.routing.dispatch, atexit;"
        "kda.routing.dispatch.capabilities = tuple;"
        "atexit.register(lambda: print('torch' in sys.modules)); kda.cli.main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ran.returncode == 3 and ran.stdout.splitlines()[-1] == "False", ran.stderr
    assert ran.stdout.startswith("sm120 (RTX 50, RTX PRO 6000): no backend has kernels for it yet")


@pytest.mark.parametrize(("args", "says"), [
    (["--arch", "sm7"], "no GPU arch or card is called 'sm7'"),
    (["--backend", "refrence"], "Did you mean 'reference'?"),
    (["--stage", "fwd/stat"], "Did you mean 'fwd/state'?"),
    (["--level", "guess"], "guess"),
])
def test_wrong_options_exit_with_2_and_say_what_is_correct(args, says):
    result = kda_selftest(*args)
    assert result.exit_code == 2 and says in result.stderr and not result.stdout


def test_the_reference_passes():
    result = kda_selftest("--backend", "reference", "--quick")
    assert result.exit_code == 0, result.output
    second, *lines = result.stdout.splitlines()[1:]
    assert second.startswith("[✓] reference: 10 of 10 stages and 4 of 4 cases within budget; executed on ")
    assert lines[-1].startswith("-v prints each call") and not any("one exact chunk" in line for line in lines)
    assert "A number is the largest error of a tensor, as a part of what its budget allows" in result.stdout


def test_of_an_arch_one_backend_can_be_picked(made_up):
    made_up(BLACKWELL, BARE)
    assert "[✗] blackwell: 9 of 10" in kda_selftest("--arch", "b200", "--backend", "blackwell").stdout
    result = kda_selftest("--arch", "sm100", "--backend", "reference")
    assert result.exit_code == 2
    assert "reference has no kernels. Leave out --backend, or name blackwell, bare." in result.stderr


@pytest.mark.exhaustive
def test_every_case_of_the_reference_is_within_budget():
    result = kda_selftest("--backend", "reference", "--json")
    (backend,) = json.loads(result.stdout)["backends"]
    assert result.exit_code == 0 and backend["levels"] == ["executed"]
    assert len(backend["cases"]) == len(trials.TRIALS) == 12
    assert {case["status"] for case in backend["cases"]} == {"ok"}
    assert all(0 < case["used"] <= 1 for case in backend["cases"])


def test_a_wrong_stage_and_a_wrong_call_are_findings(monkeypatch):
    from kda.backends.reference import chunked

    right = chunked.output
    monkeypatch.setattr(chunked, "output", lambda *args, **tensors: (1.01 * right(*args, **tensors)[0],))
    result = kda_selftest("--backend", "reference", "--quick")
    assert result.exit_code == 1
    assert "9 of 10 stages and 1 of 4 cases within budget" in result.stdout.splitlines()[1]
    assert "✗ fwd/output: o: " in result.stdout and "got " in result.stdout


def test_a_call_that_breaks_is_a_finding_of_its_own(monkeypatch):
    def breaks(door, trial):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(trials, "attempt", breaks)
    result = kda_selftest("--backend", "reference", "--quick")
    assert result.exit_code == 1 and result.stdout.count("☠ RuntimeError: out of luck") == 4


def test_decoding_that_writes_an_unused_slot_is_noticed(monkeypatch):
    import kda

    right = kda.fused_recurrent_kda

    def spills(**keywords):
        o, pool = right(**keywords)
        pool[0, 0, 0, 0] = 0
        return o, pool

    monkeypatch.setattr(kda, "fused_recurrent_kda", spills)
    result = kda_selftest("--backend", "reference", "--quick")
    assert result.exit_code == 1 and "3 of 4 cases" in result.stdout


def test_a_proof_of_one_stage_names_its_closest_tensors():
    found = parity.prove_executed("reference", "fwd/intra", None)
    assert found.passed and found.says.startswith("A_") and not found.details


def test_every_arch_can_be_requested():
    for name, target in TARGETS.items():
        assert ARCH.convert(name, None, None) == ARCH.convert(target.spelling, None, None) == target


def test_where_auto_picks_nothing_the_backend_that_can_be_named_is_proven_and_said_so(monkeypatch):
    from kda.model.host import Host

    h200 = Host(device="cuda:0", name="NVIDIA H200", cc=(9, 0))
    monkeypatch.setattr("kda.tools.verify.doors.default_device", lambda: "cuda:0")
    monkeypatch.setattr("kda.model.host.detect", lambda device="cpu": h200)
    lines = []
    screen = type("Screen", (), {"line": lambda self, text, err=False: lines.append((text, err))})()
    assert selftest.auto(screen) == "reference"
    says = "auto picks no backend on NVIDIA H200 (9.0); this proves reference, which has to be named there"
    assert lines == [(says, True)]
    monkeypatch.setenv("KDA_BACKEND", "nobody")
    with pytest.raises(click.UsageError, match="KDA_BACKEND=nobody names no backend"):
        selftest.auto(screen)


def test_a_prover_gets_the_backend_whose_stage_it_proves(monkeypatch):
    """A backend must not be proven by the reference's stages."""
    reference = capabilities()[-1]
    twin = dataclasses.replace(reference, backend="twin", rank=1)
    monkeypatch.setattr("kda.routing.dispatch.capabilities", lambda: (twin, reference))
    asked = []
    monkeypatch.setattr(parity, "prove_executed", lambda *args: asked.append(args) or Proof(True, "right"))
    assert selftest.proof(twin, Evidence.EXECUTED, "fwd/intra", None).passed
    assert asked == [("twin", "fwd/intra", None)]
