"""The ledger of what ran on a GPU, its page and README's table, and the program that fills it."""

import argparse
import dataclasses
import json
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import common, evidence, evidence_cases, evidence_run, ledger_page
from benchmarks.evidence_cases import (
    DECODE,
    GROUPS,
    ON_GPU,
    PATHS,
    RECOMPUTED,
    RECURRENT,
    SLOTS,
    Case,
    GpuTest,
    candidates,
    covering,
    covers,
    gpu_tests,
    matches,
)
from kda.model.host import Host, detect
from kda.model.problem import Problem
from kda.tools.commands import explain
from kda.tools.commands.explain import words_of
from kda.tools.measure.shapes import SHAPES
from kda.tools.verify import ledger
from kda.tools.verify.ledger import FAILED, FILE, RAN, SIMULATED, Ledger

ROOT = Path(__file__).parents[4]
SAID = "python -m benchmarks.evidence --write writes it anew"
PATH, CODE = "sm89: forward, as the plan says", "0123456789abcdef"


def row(case=f"{PATH} | one", path=PATH, outcome="ok", codes=(CODE,), host=None, card="H100", date="2026-11-28"):
    return {"case": case, "path": path, "outcome": outcome, "errors": [], "codes": list(codes), "launches": [],
            "host": host or ledger.host_code(path), "card": card, "date": date, "versions": {}}


def ledger_of(*runs, codes=(CODE,)):
    kernels = {"sm89 sm89": {"float32": {f"chain {n}": code for n, code in enumerate(codes)}}}
    return Ledger({"compilers": {"sm89": "NVRTC 13"}, "kernels": kernels, "paths": {PATH: []}, "runs": runs})


def states(*runs, **words):
    found = ledger_of(*runs, **words)
    return [each.state for each in found.kernels("sm89 sm89")], [each.state for each in found.paths()]


# the committed ones


def test_the_ledger_names_the_kernels_and_paths_of_this_tree():
    assert evidence.written(evidence.document(evidence.rows_of(FILE))) == FILE.read_text(), SAID


def test_readme_says_what_the_ledger_says():
    text = (ROOT / "README.md").read_text()
    assert ledger_page.with_states(text, Ledger.read()) == text, f"README.md is not that of the ledger: {SAID}"


def test_the_page_has_a_row_for_each_group_of_kernels_and_each_path_of_the_ledger():
    known, rows = Ledger.read(), ledger_page.page(Ledger.read()).splitlines()
    for group in known.groups:
        backend, arch = group.split()
        assert any(row.startswith(f"| `{backend}` | {arch} | {len([*known.kernels(group)])} |") for row in rows), group
    assert all(any(row.startswith(f"| {path.name} | {ledger_page.state(path)} |") for row in rows)
               for path in known.paths())


def test_no_run_of_the_ledger_is_of_the_simulator():
    assert not [run["case"] for run in Ledger.read().runs if run["card"] == evidence.SIMULATOR]


# what is evidence


def test_a_run_is_evidence_for_its_path_and_for_the_kernels_that_it_launched():
    assert states(row(), codes=(CODE, "other")) == ([RAN, SIMULATED], [RAN])


def test_a_kernel_whose_code_changed_has_no_evidence():
    assert states(row(codes=["what it was"])) == ([SIMULATED], [RAN])


def test_a_path_whose_host_code_changed_has_no_evidence_and_its_kernels_do():
    assert states(row(host="what it was")) == ([RAN], [SIMULATED])


def test_a_case_that_failed_is_told_until_it_passes_and_is_no_evidence_for_its_kernels():
    failed = row(outcome="wrong", case="another")
    assert states(row(codes=[]), failed) == ([SIMULATED], [FAILED])
    document = evidence.document([failed, row(case="another", date="2026-11-29")])
    assert [run["outcome"] for run in document["runs"]] == ["ok"]


def test_the_page_says_what_a_path_was_before_its_code_changed():
    found = ledger_of(row(host="what it was"))
    assert [*map(ledger_page.state, found.paths())] == ["simulated since its code changed (before: H100, 2026-11-28)"]


def test_readme_counts_what_ran():
    text = ledger_page.of_backend("| `sm89`: float32 |", ledger_of(row(), codes=(CODE, "other")))
    assert text == "1 of 2 kernels, 1 of 1 host paths ran on H100, last on 2026-11-28"
    assert ledger_page.of_backend("| `sm89`: float32 |", ledger_of()) == "simulated"


def test_each_file_that_backends_share_is_the_host_code_of_a_path():
    package, patterns = ledger.PACKAGES["kda"], {pattern for code in ledger.HOST_CODE.values() for pattern in code}
    read = {file for pattern in patterns if ":" not in pattern for file in package.glob(pattern)}
    assert {*package.glob("backends/common/[!_]*.py")} <= read
    assert all([*package.glob(pattern)] for pattern in patterns if ":" not in pattern)


def test_words_are_not_host_code():
    code = 'def f(x):\n    return f"#{x}", "#", x\n'
    words = '"""Says."""\n# one\ndef f(x):  # another\n    """Says."""\n\n    return f"#{x}", "#", x  # a third\n'
    assert ledger.without_words(words) == ledger.without_words(code)
    assert ledger.without_words(code) != ledger.without_words(code.replace('"#"', '"# "'))


# what is run


def test_cases_cover_every_kernel_and_path_of_float32():
    codes = {recipe: str(n) for n, recipe in enumerate(evidence.digests.labelled("sm89", "sm89").values())}
    paths = {case.path for case in candidates("sm89", "sm89")}
    chosen = covering("sm89", "sm89", set(codes.values()), paths, codes, ())
    assert {case.path for case in chosen} == paths
    launched = {codes.get(recipe) for case in chosen for recipe in case.recipes()}
    assert launched >= set(codes.values()) == covers("sm89", "sm89", codes)
    without = covering("sm89", "sm89", set(), {chosen[0].path}, codes, {chosen[0].name})
    assert [case.path for case in without] == [chosen[0].path] and without[0].name != chosen[0].name


@pytest.mark.parametrize("backend, arch", GROUPS)
def test_some_case_launches_each_kernel_of_the_digests(backend, arch):
    labels = evidence.digests.labelled(backend, arch)
    without = {*labels} - covers(backend, arch, {recipe: label for label, recipe in labels.items()})
    assert not without, "\n".join(without)


OF_HOPPER = [name for name, shape in SHAPES.items() if shape.dtype == "bfloat16"]


@pytest.mark.parametrize("name", OF_HOPPER)
def test_some_case_launches_each_kernel_of_a_named_shape_on_hopper(name):
    labels = {recipe: label for label, recipe in evidence.digests.labelled("sm90", "sm90").items()}
    launched, problem = covers("sm90", "sm90", labels), Problem.parse(words_of(SHAPES[name]))
    for training, keeps in ((False, False), (True, False), (True, True)):
        p = dataclasses.replace(problem, disable_recompute=keeps)
        explained = explain.explained(p, training, "auto", evidence.parse("sm90"))
        recipes = [recipe for each in explained.planned for recipe in each.recipes]
        assert explained.backend == "sm90" and recipes
        assert {labels.get(recipe) for recipe in recipes} <= launched


def test_a_case_is_known_by_its_name_and_the_tests_exist():
    case = next(iter(candidates("sm89", "sm89")))
    assert matches(case.name, "sm89 forward K=64") and not matches(case.name, "K=64 sm89: forward")
    assert all((ON_GPU / file).exists() for file in evidence.ALL_TESTS.values())
    assert {path.partition(":")[0] for path in [*evidence.ALL_TESTS, evidence.TWO_GPUS]} <= set(ledger.HOST_CODE)


def test_a_path_of_tests_ran_when_each_of_them_did():
    first, *others = gpu_tests("pool: prefill from and to slots")
    document = evidence.document([row(case=first.name, path=first.path, codes=[])])
    known = next(each for each in Ledger(document).paths() if each.name == first.path)
    assert known.state == SIMULATED and ledger_page.state(known) == "in part: H100, 2026-11-28"
    left = evidence.lacking(Ledger(document), evidence.parse("sm89"))
    assert first not in left and all(test in left for test in others)
    document = evidence.document([row(case=test.name, path=test.path, codes=[]) for test in (first, *others)])
    assert [each.state for each in Ledger(document).paths() if each.name == first.path] == [RAN]


def test_a_case_is_run_again_when_its_kernels_are_not_known_or_were_built_by_another_compiler():
    known = {case.name for case in candidates("sm89", "sm89")}
    compiler, _, version = Ledger(evidence.document([])).compilers["sm89"].rpartition(" ")

    def left(codes=("a kernel of before",), built_by=version):
        runs = [row(case=case.name, path=case.path, codes=codes) | {"versions": {compiler: built_by}}
                for case in candidates("sm89", "sm89")]
        found = evidence.lacking(Ledger(evidence.document(runs)), evidence.parse("sm89"))
        return {case.name for case in found if isinstance(case, Case) and case.backend == "sm89"}

    assert left() == set()
    for again in (left(codes=()), left(built_by="12.0")):
        assert again and again <= known


def test_a_case_that_no_test_has_any_more_is_left_out():
    test = gpu_tests("pool: prefill from and to slots")[0]
    document = evidence.document([row(case=name, path=test.path) for name in (test.name, "file.py::test_of_before")])
    assert [run["case"] for run in document["runs"]] == [test.name]


def test_a_long_test_runs_in_parts_that_have_each_of_its_cases_once(pytestconfig):
    (part_of,) = (each.Part for each in pytestconfig.pluginmanager.get_plugins() if hasattr(each, "Part"))
    parts = [test for test in gpu_tests("sm90: tests of the forward") if test.test in evidence_cases.PARTS]
    assert [test.name[-11:] for test in parts] == [f"part {n} of 4" for n in (1, 2, 3, 4)]
    assert {test.test for path in evidence.ALL_TESTS for test in gpu_tests(path)} >= evidence_cases.PARTS.keys()
    found = []
    for test in parts:
        found += [*range(10)][part_of(f"{test.part}/{test.parts}").chosen]
    assert sorted(found) == [*range(10)]
    with pytest.raises(pytest.UsageError, match="K < N, such as 0/3; found '3/3'"):
        part_of("3/3")


@pytest.fixture
def of_the_reference(monkeypatch):
    """Return a case whose kernels are torch's, its inputs, and the right results for them."""
    monkeypatch.setitem(PATHS, "reference", PATHS["sm89"])
    words = "float32 K=8 V=16 C=32 bounded dt_bias=true l2norm beta=sigmoid state_dtype=float32 final_state=true packed"
    case = Case("reference", "sm89", f"{words} state_v_first=true", "as the plan says", RECOMPUTED, tokens=80)
    return case, *evidence_run.right(evidence_run.reused(case), "slow", "cpu", None)


def test_a_right_case_is_within_every_budget(of_the_reference):
    used = []
    assert [*evidence_run.checked(*of_the_reference, "cpu", used)] == []
    assert {name for *_, name in used} == {"o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"}


def test_one_wrong_element_and_other_bits_of_a_second_call_are_told(of_the_reference, monkeypatch):
    right, calls = evidence_run.called, []

    def wrong(*arguments):
        found = right(*arguments)
        calls.append(found["dk"][0, 3, 0, 5].mul_(1.5 if not calls else 1.0))
        return found

    monkeypatch.setattr(evidence_run, "called", wrong)
    first, second = evidence_run.checked(*of_the_reference, "cpu", [])
    assert first.startswith("dk is ") and "times its budget" in first
    assert second == "a second call, with nan in fresh memory, gives other bits: dk"


SMALL = "K=8 V=16 C=32 state_dtype=float32 state_v_first=true"
WITHOUT_CHUNKS = {                             # what is called -> words, and what the call gives
    DECODE: (f"float32 decode T=2 softplus accepted_tokens=true slots=4 {SMALL}",
             {"o", "states", "written", "conv_states", "records"}),
    RECURRENT: (f"float32 recurrent softplus packed slots=4 {SMALL} final_state=true",
                {"o", "initial_state", "written"}),
    SLOTS: (f"float32 bounded packed start_slots=true checkpoints=float32 batch_invariant=true slots=4 {SMALL}",
            {"o", "initial_state", "written"}),
}


@pytest.fixture(params=WITHOUT_CHUNKS)
def of_slots(request, monkeypatch):
    monkeypatch.setitem(PATHS, "reference", PATHS["triton"])
    words, results = WITHOUT_CHUNKS[request.param]
    case = Case("reference", "sm90", words, "as the plan says", request.param, tokens=150)
    return case, *evidence_run.right(evidence_run.reused(case), "slow", "cpu", None), results


def test_a_right_call_of_slots_is_within_every_budget(of_slots):
    *arguments, results = of_slots
    used = []
    assert [*evidence_run.checked(*arguments, "cpu", used)] == []
    assert {name for *_, name in used} == results


def test_one_wrong_element_of_each_result_of_slots_is_told(of_slots, monkeypatch):
    *arguments, results = of_slots
    right, (_, given, limits) = evidence_run.called, arguments
    for wrong in results:
        def spoilt(*arguments, wrong=wrong):
            found = right(*arguments)
            moved = found[wrong] != given.keywords.get(wrong, 0)               # what the call has written
            found[wrong][tuple(moved.nonzero()[-1])] += 4 * limits[wrong].exact.std()
            return found

        monkeypatch.setattr(evidence_run, "called", spoilt)
        (line,) = evidence_run.checked(*arguments, "cpu", [])
        assert line.startswith(f"{wrong} is ") and "times its budget" in line


def test_each_state_that_a_call_with_slots_writes_is_one_that_the_budget_has_moved(of_slots):
    """A case would prove nothing of a slot whose right contents are those from before."""
    case, given, limits, _ = of_slots
    name = "states" if case.call == DECODE else "initial_state"
    before = given.keywords[name].double()
    moved = (limits[name].exact != before).flatten(1).any(1).nonzero().flatten().tolist()
    listed = [given.keywords[each].flatten() for each in ("ssm_state_indices", "checkpoint_indices")
              if each in given.keywords]
    written = {int(slot) for slots in listed for slot in slots} - {-1}
    kept = int(given.keywords["ssm_state_indices"][1]) if case.call == RECURRENT else None
    assert set(moved) == written - {kept} and len(moved) < len(before)         # a sequence of no tokens keeps its own


def test_a_gpu_looks_as_it_is_stated_in_every_thread():
    stated, found = Host("cuda:0", "A100", (8, 0), 3), []
    with evidence_run.on(stated):
        thread = threading.Thread(target=lambda: found.append(detect("cuda:0")))
        thread.start()
        thread.join()
    assert found == [stated] and detect("cpu").device == "cpu"


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    name = json.loads(line)
    if name.endswith("crash"):
        os._exit(9)
    if name.endswith("hang"):
        time.sleep(600)
    outcome = "wrong" if name.endswith("wrong") else "ok"
    print(json.dumps(dict(json.loads(sys.argv[1]), case=name, outcome=outcome)))
    print("null", flush=True)
    if outcome == "wrong":
        time.sleep(0.5)                      # what was written to it meanwhile is lost
        os._exit(0)
"""


class Runner(evidence.Runner):
    started = 0

    def limit(self, job):
        return 0.5 if job.name.endswith("hang") else 300.0

    def start(self, device):
        self.started += 1
        argv = [sys.executable, "-c", WORKER, json.dumps(row())]
        pipe = evidence.subprocess.PIPE
        return evidence.subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)


def test_a_case_that_crashes_or_hangs_does_not_lose_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evidence, "failure", lambda job, why, device: row(case=job.name, outcome=why))
    words = ("first", "crash", "second", "hang", "third", "wrong", "fourth")
    jobs = [GpuTest(PATH, f"{PATH} {word}") for word in words]
    asked = argparse.Namespace(minutes=5, workers=1, builders=1, tokens=0)
    runner = Runner(asked, jobs, tmp_path)
    runner.run(["cpu"])
    outcomes = {run["case"].rpartition(" ")[2]: run["outcome"] for run in evidence.rows_of(tmp_path / "evidence.json")}
    assert outcomes == {"first": "ok", "second": "ok", "third": "ok", "crash": "the process ended with 9",
                        "hang": "took longer than 0 s", "wrong": "wrong", "fourth": "ok"}
    assert runner.started == 4


PROGRAM = """
import json, sys
file = sys.argv[sys.argv.index("--json") + 1]
rows = json.load(open(file))
rows += [{"case": "a call, 64 channels", "outcome": "ok", "errors": {}, "seconds": 1.0},
         {"case": "a graph", "outcome": "failed", "errors": {"rank 1 dq": "0.3"}, "seconds": 2.0}]
json.dump(rows, open(file, "w"))
"""


def test_rows_of_two_gpus_go_into_the_ledger_and_do_not_run_again(tmp_path, monkeypatch):
    (tmp_path / "matrix_of_a_test.py").write_text(PROGRAM)
    monkeypatch.setattr(evidence, "MATRIX", [sys.executable, str(tmp_path / "matrix_of_a_test.py")])
    monkeypatch.setattr(evidence, "pairs_of_gpus", lambda: ["a layer", "a call, 64 channels", "a graph"])
    monkeypatch.setattr(evidence, "card", lambda: "H100")
    before = row(case="parallel: a layer", path=evidence.TWO_GPUS, codes=[])
    known = Ledger(evidence.document([before]))
    asked = argparse.Namespace(minutes=1, workers=1, no_matrix=False, again=False)
    runner = evidence.Runner(asked, [], tmp_path)
    evidence.matrix(asked, runner, known, 1)
    assert runner.rows == {}
    evidence.matrix(asked, runner, known, 2)
    assert {name: (run["outcome"], run["errors"]) for name, run in runner.rows.items()} == {
        "parallel: a call, 64 channels": ("ok", []), "parallel: a graph": ("failed", ["rank 1 dq: 0.3"]),
    }
    (path,) = (each for each in known.paths() if each.name == evidence.TWO_GPUS)
    assert path.state == SIMULATED and len(known.needed[path.name]) == 3
    failed = next(each for each in Ledger(evidence.document([before, *runner.rows.values()])).paths("parallel"))
    assert failed.state == FAILED


def test_what_ran_or_failed_with_this_code_is_not_run_again():
    jobs = evidence.lacking(Ledger(evidence.document([])), evidence.parse("sm89"))
    case = next(job for job in jobs if isinstance(job, Case))
    codes = evidence.codes_of(Ledger(evidence.document([])), case.backend, case.arch)
    for outcome in ("ok", "wrong"):
        run = row(case=case.name, path=case.path, outcome=outcome, codes=[codes[recipe] for recipe in case.recipes()])
        known = Ledger(evidence.document([run]))
        later = evidence.lacking(known, evidence.parse("sm89"))
        assert later and case not in later
    assert case in evidence.lacking(known, evidence.parse("sm89"), again=True)


def test_rows_of_the_simulator_cannot_be_merged(tmp_path):
    common.write(tmp_path / "evidence.json", {"runs": [row(card=evidence.SIMULATOR)]})
    with pytest.raises(SystemExit, match="not of a GPU"):
        evidence.merge([tmp_path / "evidence.json"])
