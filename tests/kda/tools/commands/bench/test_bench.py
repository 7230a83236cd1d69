"""`kda bench` on tiny shapes, with made-up results, a made-up GPU and a backend that is wrong."""

from __future__ import annotations

import dataclasses
import json

import click
import pytest
import torch
from bench_calls import H200, LINE, ONE, QUICK, run

import kda
from kda.backends.reference import launch
from kda.errors import NoBackendError
from kda.model.host import Host
from kda.routing.dispatch import weigh
from kda.tools.commands.bench import CannotJudge, Percent, asked, report, timed
from kda.tools.measure import clocks, decoding, timing
from kda.tools.measure.clocks import CpuClock
from kda.tools.measure.shapes import SHAPES, too_large
from kda.tools.measure.timing import Machine
from kda.tools.verify import cases, doors
from kda.tools.verify.budget import Rounding
from kda.tools.verify.definition import budgets
from kda.tools.verify.steps import run_step
from ptxkit.commands.layout import strip_ansi
from ptxkit.commands.render import Screen

# what it prints


def test_parity_stands_before_the_times():
    out = run(*QUICK, "--against", "reference", "--regime", "slow").output
    assert out.index("18 of 18 tensors within budget") < out.index("median")
    assert "% of its budget, against the recurrence in float64" in " ".join(out.split()) and "9 of 9" not in out
    assert "vs reference" in out and out.count("x\n") == 2
    out = run(*QUICK, "--against", "reference", "--regime", "slow", "-v").output
    assert out.count("9 of 9") == 2 and "TFLOP/s" in out


def test_the_json_is_one_object_without_colour():
    result = run(*ONE, "--json", "--color", "always")
    found = json.loads(result.stdout)
    assert result.stdout == strip_ansi(result.stdout)
    assert (found["command"], found["exit"], found["host"]["kind"]) == ("bench", 0, "cpu")
    row, = found["rows"]
    assert row["p20"] <= row["median"] <= row["p80"] and row["launches"] == 3 and row["x_floor"] is row["ratio"] is None
    assert set(found["parity"][0]["used"]) == {"o", "ht"} and not found["parity"][0]["wrong"]


def test_packed_and_grouped_heads_are_timed():
    result = run("--lengths", "3,0,66", "--heads", "1", "--value-heads", "2", "-K", "8", "-V", "4", "--repeats", "1")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    row = lines.index("[3,0,66] H=1 HV=2 K=8 V=4 bf16, bounded gate")
    assert [line.split()[:2] for line in lines[row + 1 : row + 5]] == [
        ["forward", "fast"], ["backward", "fast"], ["forward", "slow"], ["backward", "slow"]
    ]


def test_a_gpu_has_a_floor_and_a_clock():
    line = dataclasses.replace(LINE, bytes=4_000_000_000, floor=1e-3, median=2e-3, p20=2e-3, p80=2e-3)
    assert report.header(H200).startswith("NVIDIA H200  1980 of 1980 MHz  driver 580.95  copies 4.00 TB/s")
    head, shape, row = (text.split() for text in report.timing_lines(Screen(), [line], True))
    assert shape == f"{LINE.problem}, bounded gate".split()
    assert row[-4:] == ["2.000-2.000", "5e-09", "2e+03", "2.0"] and head[-2:] == ["x", "floor"]
    assert not list(report.remarks(H200, [line]))


def test_what_spoils_a_number_is_said():
    slow_clock = H200._replace(clock=1200)
    waits = dataclasses.replace(LINE, host_inside=True)
    busy = Machine("a CPU", "cpu", 2, cores=8, load=7.0)
    said = [*report.remarks(slow_clock, [waits]), *report.remarks(busy, [LINE])]
    for words in ("1200 of 1980 MHz", "host time is included, because reference waits", "a load of 7.0 on 8"):
        assert any(words in text for text in said)
    assert not busy._replace(load=5.0).crowded
    assert "OMP_NUM_THREADS=1" in said[-1]
    assert not any("OMP_NUM_THREADS" in text for text in report.remarks(busy._replace(threads=1, load=9.0), [LINE]))


@pytest.mark.parametrize(
    "seconds, says", [(3.4e-7, "0.0003"), (1.2e-5, "0.012"), (7.233e-3, "7.233"), (0.2345, "234.5")]
)
def test_milliseconds_keep_a_digit_that_is_not_zero(seconds, says):
    assert asked.ms(seconds) == says


def test_a_percentage_is_a_number_with_or_without_its_sign():
    assert [Percent().convert(text, None, None) for text in ("3%", "2.5")] == [0.03, 0.025]
    with pytest.raises(click.BadParameter):
        Percent().convert("-3%", None, None)


# decoding


def test_decoding_is_right_before_it_is_timed():
    result = run("--direction", "decode", "--heads", "2", "--batch", "3", "-K", "16", "-V", "8", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert result.exit_code == 0 and [row["states"] for row in rows] == ["float32", "bfloat16"]
    assert all(row["used"] <= 1 and row["median"] > 0 and row["bytes"] > 2 * 3 * 2 * 16 * 8 * 2 for row in rows)


@pytest.mark.parametrize("gate", [None, "softplus", "given"])
def test_decoding_has_the_gate_that_was_asked_for_and_names_it(gate, monkeypatch):
    gates, make = [], decoding.make_step
    monkeypatch.setattr(decoding, "make_step", lambda *a, **given: gates.append(given["gate"]) or make(*a, **given))
    words = "--heads", "1", "--batch", "1", "-K", "16", "-V", "8", "--repeats", "3"
    result = run("--direction", "decode", *words, *(["--gate", gate] if gate else []))
    assert result.exit_code == 0 and {*gates} == {gate or "bounded"} and f", {gate or 'bounded'} gate" in result.stdout


def test_decoding_that_is_wrong_is_not_timed(monkeypatch):
    def wrong(x, **options):
        found = run_step(x, **options)
        return found | {"states": found["states"] + 1e-3}

    monkeypatch.setattr("kda.tools.measure.decoding.run_step", wrong)
    result = run("--direction", "decode", "--heads", "2", "--batch", "3", "-K", "16", "-V", "8")
    assert result.exit_code == 1 and "wrong results are not timed" in result.stdout


def test_what_others_publish_of_decoding_stands_behind_what_a_gpu_took(monkeypatch):
    """Only a machine with a GPU has a copy's bandwidth. Nobody published other sizes than K = V = 128."""
    import kda.tools.measure.timing as timing

    machine = timing.this_machine
    monkeypatch.setattr(timing, "this_machine", lambda device: machine(device)._replace(copy=4.2e12))
    words = "--direction", "decode", "--heads", "1", "--batch", "1", "--repeats", "3"
    for sizes, shown in ((("-K", "128", "-V", "128"), True), (("-K", "16", "-V", "8"), False)):
        said = run(*words, *sizes).stdout
        assert ("Published by others, not measured here:" in said) == shown
        assert ("1: 4.1; 128: 28.1   vllm#55364" in said) == shown


@pytest.mark.parametrize("words", [("--tokens", "4"), ("--graph",), ("--direction", "step"), ("--against", "fla")])
def test_decoding_has_no_other_options(words):
    result = run("--direction", "decode", *words)
    assert result.exit_code == 2 and "leave out" in result.output


# wrong results


def test_directions_that_are_requested_together_share_their_comparison():
    words = "--regime slow --direction step --direction both --direction step --json"
    result = run(*QUICK, *words.split())
    found = json.loads(result.stdout)
    assert [row["direction"] for row in found["rows"]] == ["step", "forward", "backward"]
    assert len(found["parity"]) == 1


@pytest.fixture
def wrong_forward(monkeypatch):
    right = launch.forward

    def forward(p, x, save):
        out = right(p, x, save)
        return out._replace(o=out.o * 1.01)

    monkeypatch.setattr(launch, "forward", forward)


@pytest.mark.usefixtures("wrong_forward")
def test_a_wrong_backend_gets_no_ratio():
    result = run(*ONE, "--against", "reference")
    assert result.exit_code == 1
    assert "[✗] parity: 2 of 4 tensors within budget" in result.stdout and "kda verify" in result.stdout
    assert "vs reference" not in result.stdout and "median" not in result.stdout


@pytest.mark.usefixtures("wrong_forward")
def test_wrong_results_are_not_saved(tmp_path):
    result = run(*ONE, "--json", "--save", str(tmp_path / "new.json"))
    found = json.loads(result.stdout)
    assert (result.exit_code, found["exit"], found["rows"], found["parity"][0]["wrong"]) == (1, 1, [], ["o"])
    assert not (tmp_path / "new.json").exists()


def test_a_run_that_is_stopped_leaves_the_file_of_what_it_has_measured(monkeypatch, tmp_path):
    file, measure, regimes = tmp_path / "new.json", timing.measure, []

    def stopped(*args):
        regimes.append(args)
        if len(regimes) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(timing, "measure", stopped)
    assert run(*QUICK, "--direction", "forward", "--save", str(file)).exit_code != 0
    found = json.loads(file.read_text())
    (row,), (missing,) = found["rows"], found["left_out"]
    assert row["median"] > 0 and found["exit"] == 3 and not list(tmp_path.glob("*.json.new"))
    assert missing.endswith("gates: not measured, kda bench was stopped before") and row["regime"] not in missing
    compared = run(*QUICK, "--direction", "forward", "--regime", row["regime"], "--compare", str(file))
    assert "cannot be compared" not in compared.output


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_file_has_the_right_results_around_a_wrong_one_and_says_which_that_is(wrong, monkeypatch, tmp_path):
    file, measure, calls = tmp_path / "new.json", timing.measure, []

    def wrong_once(*args):
        found = measure(*args)
        calls.append(args)
        return dataclasses.replace(found, timed_wrong=found.checks) if len(calls) == wrong + 1 else found

    monkeypatch.setattr(timing, "measure", wrong_once)
    result = run(*QUICK, "--direction", "forward", "--save", str(file))
    found, regimes = json.loads(file.read_text()), list(asked.REGIMES)
    assert result.exit_code == found["exit"] == 1 and len(calls) == 2
    assert [row["regime"] for row in found["rows"]] == [regimes[1 - wrong]]
    assert found["left_out"] == [
        f"custom, {regimes[wrong]} gates: not saved, its results are wrong; `kda verify` finds where"
    ]
    assert "new.json, without the wrong results" in " ".join(result.stdout.split())


def test_a_link_is_followed_by_what_is_saved(tmp_path):
    """/dev/stdout is such a link."""
    file, link = tmp_path / "results.json", tmp_path / "link.json"
    file.touch()
    link.symlink_to(file)
    assert run(*ONE, "--save", str(link)).exit_code == 0
    assert link.is_symlink() and json.loads(file.read_text())["rows"]


def test_a_launch_that_goes_wrong_while_it_is_timed_is_seen(monkeypatch):
    right, calls = launch.forward, []

    def forward(p, x, save):
        calls.append(p)
        out = right(p, x, save)
        return out._replace(o=out.o * 1.01) if len(calls) > 3 else out

    monkeypatch.setattr(launch, "forward", forward)
    result = run(*ONE, "--against", "reference")
    assert result.exit_code == 1
    assert "a timed launch" in result.stdout and "vs reference" not in result.stdout


def test_a_large_case_is_held_against_the_reference(monkeypatch):
    """bfloat16 results against the float32 reference; the budget of a sample fits, and one percent does not."""
    case = cases.make_inputs([150, 80], H=6, K=16, V=16, dtype="bfloat16")
    door = doors.Door("reference", "cpu")
    monkeypatch.setattr(timing, "SAMPLE_TOKENS", 100)
    held = timing.from_the_reference(door, case, backward=True)
    assert held.says == "the reference in float64"
    found = door.call(case, backward=True)
    assert not [row.tensor for row in held.judge(found, case) if row.wrong]
    assert {row.tensor for row in held.judge({n: 1.02 * x for n, x in found.items()}, case) if row.wrong} == set(found)


def test_results_of_timed_launches_are_judged_unless_equal_ones_were():
    judged = {"o": torch.tensor([1.0, 2.0]), "ht": torch.tensor([torch.nan]), "dq": torch.zeros(2)}
    found = {"o": torch.tensor([1.0, 2.0]), "ht": torch.tensor([torch.nan]), "dq": torch.tensor([0.0, 1e-30]),
             "dk": torch.zeros(1)}
    assert list(timing.differing(found, judged)) == ["ht", "dq", "dk"]


@pytest.mark.parametrize(("stored", "wider"), [({}, True), (doors.ROUNDS_EVERY_OPERAND, False)], ids=["fine", "coarse"])
def test_errors_of_the_reference_count_beside_those_of_a_backend_that_is_about_as_exact(monkeypatch, stored, wider):
    spec = cases.Spec(T=90, H=2, K=16, V=16, dtype="bfloat16")
    door, reference = doors.Door("triton", "cpu"), doors.Door("reference", "cpu")
    roundings = {door: Rounding(torch.float32, stored), reference: Rounding(torch.float32)}
    monkeypatch.setattr(doors.Door, "rounding", lambda self, case: roundings[self])
    rooms = timing.rooms_of.__wrapped__(door, spec, torch.float32, True)
    alone = budgets(cases.make(spec), roundings[door])
    assert all((rooms[name].norm > alone[name].norm) is wider for name in alone)


def test_a_sample_is_a_small_case_of_the_same_kind():
    packed = cases.Spec(lengths=(0, 900, 20), H=6, HV=12, gate="softplus", regime="fast", padding=9)
    assert timing.sample(packed) == cases.Spec(T=512, H=4, HV=8, gate="softplus", regime="fast")
    assert timing.sample(cases.Spec(B=3, T=90, H=2)) == cases.Spec(T=90, H=2, HV=2)


# stages


def test_stages_are_timed_alone_on_what_the_stages_before_them_made():
    from kda.model.stages import FORWARD, STAGES

    result = run(*QUICK, "--regime", "slow", "--stages", "--json")
    rows = json.loads(result.stdout)["stages"]
    assert [row["stage"] for row in rows] == list(STAGES)
    assert all(row["backend"] == "reference" and 0 < row["p20"] <= row["median"] <= row["p80"] for row in rows)
    text = run(*ONE, "--stages").stdout
    assert all(stage.name in text for stage in FORWARD) and "bwd/wy" not in text
    assert "fwd/intra" not in run(*ONE).stdout


def test_stages_of_a_wrong_backend_are_not_timed(monkeypatch):
    right = launch.forward
    monkeypatch.setattr(launch, "forward", lambda p, x, save="nothing": right(p, x, save)._replace(o=right(p, x).o + 1))
    result = run(*ONE, "--stages", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["stages"] == []


# comparing with saved results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the results of one call, and the file that holds them."""
    file = tmp_path_factory.mktemp("bench") / "old.json"
    result = run(*QUICK, "--regime", "slow", "--save", str(file))
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text()), file


def rewritten(saved, tmp_path, factor=1.0, **host):
    """Return the saved results as if each time had been so many times as long, on another host."""
    old = json.loads(json.dumps(saved[0]))
    for row in old["rows"]:
        row |= {name: factor * row[name] for name in ("median", "p20", "p80")}
    old["host"] |= host
    file = tmp_path / "old.json"
    file.write_text(json.dumps(old))
    return str(file)


@pytest.mark.parametrize(("median", "p20", "p80", "verdict"), [
    (1.02, 1.019, 1.021, "same"), (1.2, 1.15, 1.3, "slower"), (1.2, 1.01, 1.3, "noise"), (0.8, 0.7, 0.9, "faster"),
    (0.8, 0.7, 0.99, "noise"),
])
def test_a_change_counts_beyond_the_limit_and_the_spread(median, p20, p80, verdict):
    row = {"median": 1.0, "p20": 0.98, "p80": 1.02}
    assert timed.verdict(dataclasses.replace(LINE, median=median, p20=p20, p80=p80), row, 0.03) == verdict


def test_a_regression_exits_with_1(saved, tmp_path):
    result = run(*ONE, "--compare", rewritten(saved, tmp_path, factor=1e-3))
    assert result.exit_code == 1
    assert "slower" in result.stdout and "1 of 1 slower by more than 3% and beyond the spread" in result.stdout


def test_an_improvement_exits_with_0(saved, tmp_path):
    result = run(*ONE, "--compare", rewritten(saved, tmp_path, factor=1e3), "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, [c["verdict"] for c in found["comparison"]]) == (0, ["faster"])


def test_results_of_another_gpu_cannot_be_compared(saved, tmp_path):
    result = run(*ONE, "--compare", rewritten(saved, tmp_path, device="NVIDIA B200", threads=None))
    assert result.exit_code == 3
    assert "the saved results are of NVIDIA B200" in result.stdout
    assert H200.differs({"device": "NVIDIA B200"}) and not H200.differs({"device": "NVIDIA H200", "threads": None})


@pytest.mark.parametrize(("words", "says"), [
    (("--tokens", "5", "--heads", "1", "--direction", "forward", "--repeats", "1"), "none of these timings"),
    ((*ONE, "--disable-recompute"), "made with --disable-recompute, the saved ones without --disable-recompute"),
], ids=["shapes", "settings"])
def test_results_of_other_shapes_and_settings_cannot_be_compared(saved, words, says):
    result = run(*words, "--compare", str(saved[1]))
    assert result.exit_code == 3 and says in result.stdout


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": "doctor", "host": {}, "rows": []}',
                                  '{"command": "bench", "host": {}, "rows": [{}]}',
                                  '{"command": "bench", "host": {}, "rows": [], "settings": []}'])
def test_a_file_that_holds_no_results_is_refused(tmp_path, text):
    file = tmp_path / "old.json"
    file.write_text(text)
    result = run(*ONE, "--compare", str(file))
    assert result.exit_code == 2 and "kda bench --save" in result.stderr


def test_what_keeps_the_states_alone_is_not_compared_with_what_keeps_all(saved, tmp_path):
    file = tmp_path / "kept.json"
    assert run(*ONE, "--disable-recompute", "--save", str(file)).exit_code == 0
    assert json.loads(file.read_text())["settings"]["disable_recompute"] is True
    result = run(*ONE, "--disable-recompute", "states", "--compare", str(file))
    assert result.exit_code == 3
    assert "made with --disable-recompute states, the saved ones with --disable-recompute" in result.stdout


def test_results_saved_before_there_were_settings_had_none_on(saved, tmp_path):
    old = {name: x for name, x in saved[0].items() if name != "settings"}
    file = tmp_path / "old.json"
    file.write_text(json.dumps(old))
    assert len(json.loads(run(*ONE, "--compare", str(file), "--json").stdout)["comparison"]) == 1
    assert run(*ONE, "--disable-recompute", "--compare", str(file)).exit_code == 3


# what is refused


@pytest.mark.parametrize(("args", "words"), [
    (("--backend", "refrence"), "Did you mean 'reference'?"),
    (("--against", "flaa"), "Did you mean 'fla'?"),
    (("--shape", "tinny"), "Did you mean 'tiny'?"),
    (("--shape", "tiny", "-K", "8"), "leave out -K"),
    (("--value-heads", "8"), "--value-heads needs --tokens or --lengths"),
    (("--lengths", "3,4", "--tokens", "8"), "leave out --batch and --tokens"),
    (("--lengths", "3,4", "--batch", "1"), "leave out --batch and --tokens"),
    (("--lengths", "0,0"), "a token to time"),
    (("--lengths", "3,x"), "not a list of lengths"),
    (("--tokens", "8", "--heads", "2", "--value-heads", "3"), "a multiple of --heads 2"),
    (("--graph", "--stages"), "leave out --stages"),
    (("--shape", "tiny", "--direction", "decode"), "leave out --shape"),
    (("--fail-above", "3%"), "--fail-above needs --compare"),
    (("--fail-above", "3 percent"), "is not a percentage"),
    (("--regime", "medium"), "'medium' is not one of"),
    (("--compare", "nowhere.json"), "does not exist"),
])
def test_usage_errors_say_what_to_do(args, words):
    result = run(*args)
    assert result.exit_code == 2 and words in result.stderr


def test_a_shape_too_large_for_a_cpu_is_refused_with_an_estimate():
    result = run("--shape", "h64-8k")
    assert result.exit_code == 3
    assert "h64-8k (B=1 T=8192 H=64 K=V=128 bf16) would " in result.stdout and "--force" in result.stdout
    assert json.loads(run("--shape", "h64-8k", "--json").stdout)["refused"]


@pytest.mark.parametrize(("memory", "words"), [
    ({"threads": 2}, "would take about 9 minutes on this CPU: 283 GFLOP"),
    ({"threads": None, "device_memory": 8 << 30}, "the GPU has 8 GiB"),
    ({"threads": None, "device_memory": 80 << 30}, None),
])
def test_what_a_machine_is_not_asked(monkeypatch, memory, words):
    monkeypatch.setattr("kda.tools.measure.shapes.host_memory", lambda: 64 << 30)
    says = too_large(SHAPES["h64-8k"], ("forward", "backward"), **memory)
    assert says is None if words is None else words in says


def test_a_default_shape_that_is_too_large_is_left_out_with_a_sentence(monkeypatch):
    def small(device):
        return Host(device, "a small GPU", memory=12 << 30)

    monkeypatch.setattr("kda.tools.commands.bench.timed.detect", small)
    monkeypatch.setattr("kda.tools.measure.shapes.host_memory", lambda: None)
    options = {"names": (), "tokens": None, "lengths": None, "gate": "bounded", "force": False, "directions": ("both",)}
    shapes = asked.shapes_asked(options, "gpu")
    kept, left_out = timed.refuse_large(shapes, options, "cuda:0", None)
    assert "h64-1k" in kept and "h96-8k" not in kept and len(kept) + len(left_out) == len(shapes)
    assert timed.refuse_large(shapes, {**options, "force": True}, "cuda:0", None) == (shapes, [])
    with pytest.raises(CannotJudge, match="h96-8k"):
        timed.refuse_large({"h96-8k": SHAPES["h96-8k"]}, {**options, "names": ("h96-8k",)}, "cuda:0", None)


def test_if_no_backend_accepts_the_call_the_reasons_are_printed(monkeypatch):
    def nobody(problem, asked):
        raise NoBackendError(weigh(problem, Host("cuda:0", "NVIDIA B200", (10, 0)), asked))

    monkeypatch.setattr("kda.routing.dispatch.choose", nobody)
    monkeypatch.setattr(asked, "problem_of", lambda spec, way, device: kda.Problem(direction=way))
    result = run(*ONE)
    assert result.exit_code == 3
    assert "no backend accepts" in result.stdout
    assert "reference.auto: auto never moves a call on cuda:0" in result.stdout


@pytest.mark.parametrize(("asked", "device", "hint"), [
    ("sm90", "cpu", "--backend sm90 --predicted --arch sm90 predicts its times without such a GPU"),
    ("sm100", "cpu", "--backend sm100 --predicted --arch sm100 predicts its times without such a GPU"),
    ("triton", "cpu", "--backend triton --predicted --arch sm90 predicts its times without such a GPU"),
    ("reference", "cpu", None),                                             # runs anywhere
    (None, "cpu", None),
])
def test_a_backend_whose_gpus_are_not_here_can_be_predicted(asked, device, hint):
    assert timed.predictable(asked, device) == [hint] * bool(hint)


def test_the_prediction_is_mentioned_where_timing_is_refused():
    result = run(*ONE, "--backend", "sm90")
    assert result.exit_code == 3 and "--predicted --arch sm90" in result.stdout.splitlines()[-1]
    assert "no shape was named" not in result.stdout
    assert "no shape was named, so this is one for a CPU" in run("--backend", "sm90").stdout.splitlines()[-2]


def test_a_backend_that_is_not_for_this_machine_is_refused_whatever_is_kept():
    for keeps in ((), ("--disable-recompute", "all"), ("--disable-recompute", "states")):
        result = run(*ONE, "--backend", "sm90", "--direction", "step", *keeps)
        assert result.exit_code == 3 and "sm90.gpu" in result.stdout, keeps


def test_a_baseline_that_cannot_run_here_is_refused():
    for shape in (ONE, ("--shape", "kimi-8k")):          # the second is too large for a CPU, which is not what is amiss
        result = run(*shape, "--against", "fla")
        assert result.exit_code == 3 and result.stdout.startswith("the baseline fla cannot run here: fla.gpu: "), shape


# on a made-up GPU


class MadeUpClock(CpuClock):
    """The clock of a device on which a call takes 3 MiB; `refuses` counts down the captures to the one that fails."""

    def __init__(self, refuses=0):
        self.refuses, self.asked = refuses, []

    def copy_bandwidth(self):
        return 1e12

    def peak_memory(self, call):
        self.asked.append(set(call()))
        return 3 << 20

    def captured(self, make):
        self.refuses -= 1
        if self.refuses == 0:
            raise clocks.CannotCapture("it waits for the GPU")
        return make()


@pytest.fixture
def made_up(monkeypatch):
    """Return a function that sets the clock of the next command, which takes its machine for an H200."""

    def take(clock):
        monkeypatch.setattr(clocks, "clock_of", lambda device: clock)
        monkeypatch.setattr(timing, "this_machine", lambda device: H200._replace(copy=None))
        monkeypatch.setattr(timing, "ask_clocks", lambda machine, clock, device: machine)
        return clock

    return take


def test_memory_is_that_of_a_forward_and_of_a_forward_with_its_backward(made_up):
    clock = made_up(MadeUpClock())
    rows = json.loads(run(*QUICK, "--regime", "slow", "--json").stdout)["rows"]
    assert clock.asked == [{"o", "ht"}, {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}]
    row, state = 70 * 8 * 4, 8 * 8 * 4
    inputs = 4 * row + 70 * 4 + 4 + 8 * 4                       # q, k, v, g; beta; A_log; dt_bias
    assert [r["memory"] for r in rows] == [3 << 20] * 2
    assert [r["memory_with_inputs"] - r["memory"] for r in rows] == [inputs, inputs + row + state]


def test_memory_is_printed_beside_the_times(made_up):
    made_up(MadeUpClock())
    out = run(*QUICK, "--regime", "slow", "--against", "reference", "-v").stdout
    assert "x floor  memory  with inputs  reference  vs reference" in out
    assert out.count("3 MiB") == 4 and "memory of a backward is that of a forward and its backward" in out
    assert [report.size(n) for n in (37 << 20, 3 << 29, None)] == ["37 MiB", "1.50 GiB", ""]


def test_a_cpu_counts_no_memory(saved):
    assert all(row["memory"] is row["memory_with_inputs"] is None for row in saved[0]["rows"])
    assert "MiB" not in run(*ONE, "-v").stdout


def test_a_cpu_has_no_graphs():
    result = run(*ONE, "--graph")
    assert result.exit_code == 3 and "--graph needs a GPU" in result.stdout
    assert json.loads(run(*ONE, "--graph", "--json").stdout)["rows"] == []


def test_replays_are_timed_and_said_to_be(made_up):
    clock = made_up(MadeUpClock())
    found = json.loads(run(*QUICK, "--regime", "slow", "--graph", "--json").stdout)
    assert (found["exit"], len(found["rows"]), clock.refuses) == (0, 2, -2)
    assert found["settings"] == {"graph": True, "disable_recompute": False} and found["not_captured"] == []
    assert run(*ONE, "--graph").stdout.splitlines()[0].endswith("  --graph")


def test_a_replay_that_returns_something_else_is_seen(made_up):
    class Stale(MadeUpClock):
        def captured(self, make):
            results = {name: torch.zeros_like(x) for name, x in make()().items()}
            return lambda: results

    made_up(Stale())
    result = run(*ONE, "--graph")
    assert result.exit_code == 1 and "a timed launch" in result.stdout and "median" not in result.stdout


def test_what_cannot_be_captured_is_not_timed_and_the_rest_is(made_up):
    made_up(MadeUpClock(refuses=2))
    result = run(*QUICK, "--regime", "slow", "--graph")
    assert result.exit_code == 3
    assert ("backward, B=1 T=70 H=1 K=V=8 fp32, slow gates: not timed, because a call of reference cannot be captured "
            "in a CUDA graph: it waits for the GPU") in result.stdout
    made_up(MadeUpClock(refuses=2))
    found = json.loads(run(*QUICK, "--regime", "slow", "--graph", "--json").stdout)
    assert ([row["direction"] for row in found["rows"]], found["exit"]) == (["forward"], 3)
    assert [(x["direction"], x["reason"]) for x in found["not_captured"]] == [("backward", "it waits for the GPU")]


def test_replays_are_not_compared_with_calls(made_up, saved, tmp_path):
    made_up(MadeUpClock())
    old = rewritten(saved, tmp_path, device=H200.device, threads=None)
    result = run(*ONE, "--graph", "--compare", old)
    assert result.exit_code == 3
    assert "these timings are made with --graph, the saved ones without --graph" in result.stdout


@pytest.mark.parametrize(("kept", "words"), [
    (False, []), (True, ["--disable-recompute"]), ("states", ["--disable-recompute", "states"]),
])
def test_every_call_is_asked_to_keep_what_the_backward_needs(monkeypatch, made_up, kept, words):
    calls, right = [], doors.Door.chunk_kda

    def chunk_kda(self, **keywords):
        recorded = torch.is_grad_enabled() and keywords["q"].requires_grad
        calls.append((keywords.get("disable_recompute", False), recorded))
        return right(self, **keywords)

    made_up(MadeUpClock())
    monkeypatch.setattr(doors.Door, "chunk_kda", chunk_kda)
    assert run(*ONE, *words).exit_code == 0
    compared, *timed = calls
    assert compared == (kept, False) and len(timed) > 3 and set(timed) == {(kept, bool(kept))}
