"""The matrix of several GPUs, on processes of a CPU: that it runs, and that it notices what is wrong."""

import itertools
import json
import sys

import processes
import pytest
import torch

from benchmarks import parallel_matrix as matrix


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["parallel_matrix.py", *map(str, words)])
    return matrix.main()


def test_any_three_options_meet_in_some_case():
    cases = matrix.covering()
    assert len(cases) < 80 and all(map(matrix.possible, cases))
    for names in itertools.combinations(matrix.OPTIONS, 3):
        met = {tuple(case[name] for name in names) for case in cases}
        everything = itertools.product(*(matrix.OPTIONS[name] for name in names))
        assert met == {values for values in everything if matrix.possible(dict(zip(names, values)))}


def test_cases_run_on_processes_of_a_cpu_and_leave_a_row_each(tmp_path, monkeypatch):
    case = next(case for case in matrix.covering() if case["exchange"] == "tree" and case["layout"] == "lengths")
    file = tmp_path / "rows.json"
    assert run(monkeypatch, "--device", "cpu", "--json", file, "--only", matrix.name_of(case)) == 0
    rows = json.loads(file.read_text())
    assert [(row["case"], row["outcome"], row["card"]) for row in rows] == [(matrix.name_of(case), "ok", "CPU")]


def test_cases_that_the_file_says_are_ok_do_not_run_again(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.json"
    rows = [{"case": matrix.name_of(case), "outcome": "ok", "errors": {}} for case in matrix.cases()]
    file.write_text(json.dumps(rows))
    assert run(monkeypatch, "--device", "cpu", "--json", file) == 0 and json.loads(file.read_text()) == rows
    assert capsys.readouterr().out == f"{len(rows)} of {len(rows)} cases ran, 0 are not ok\n"


@pytest.mark.parametrize("wrong", [torch.full((4,), torch.nan), torch.ones(4) + 0.01, torch.ones(3)],
                         ids=["nan", "far off", "of another shape"])
def test_a_wrong_result_is_outside_the_budget(wrong):
    exact = torch.ones(4, dtype=torch.float64)
    assert not matrix.far(wrong, exact) <= 2 * matrix.far(exact.float(), exact) + matrix.FLOOR


def test_without_two_gpus_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert run(monkeypatch) == 3 and "needs 2 GPUs; found 1" in capsys.readouterr().out


def layers(rank):
    """Return what is wrong with a layer in parts, and with one whose exchanges bring nothing from the other rank."""
    from kda.parallel import exchange

    rank_alone = matrix.Rank(rank, torch.device("cpu"))
    right = {layout: matrix.in_parts(rank_alone, layout) for layout in matrix.OPTIONS["layout"]}
    exchange.gather = lambda context, mine, op: mine.new_zeros(matrix.WORLD * len(mine), *mine.shape[1:])
    return right, matrix.in_parts(rank_alone, "contiguous")


def test_a_layer_in_parts_is_that_of_one_process_and_one_without_its_halo_is_noticed():
    results = processes.run(matrix.WORLD, layers)
    assert not any(isinstance(x, str) for x in results), results
    assert [right for right, _ in results] == [{layout: {} for layout in matrix.OPTIONS["layout"]}] * matrix.WORLD
    assert "y, turn 0" in results[1][1] and "dx, turn 0" in results[0][1]


def test_every_case_of_one_call_has_a_name_of_its_own_that_the_program_lists():
    assert (*matrix.SINGLE, "a rank that skips a backward") == matrix.OTHERS
