"""What the clock assumes of a chip: figures give it back, and a GPU that refutes it is told."""

import json

import pytest

from ptxkit import capture
from ptxkit.benchmarks.microbenchmarks import assumptions, tcgen05
from ptxkit.benchmarks.microbenchmarks.assumptions import ASSUMPTIONS, differences
from ptxkit.benchmarks.microbenchmarks.bench import Bench, Built
from ptxkit.benchmarks.microbenchmarks.groups import GROUPS, module_of
from ptxkit.benchmarks.microbenchmarks.page import RESULTS
from ptxkit.compile.errors import MissingCompilerError
from ptxkit.compile.target import parse
from ptxkit.timing.chips import CHIPS

B200, H200 = CHIPS["b200"], CHIPS["h200"]
FIGURES = json.loads(RESULTS.read_text())["figures"]


def test_the_figures_of_an_h200_give_every_constant_of_its_clock():
    found = {one.assumption.constant: one for one in differences(H200, FIGURES)}
    assert [name for name, one in found.items() if one.measured is None] == ["pair_busy"]
    assert max(one.off for one in found.values()) < 0.04


def figures_where(name, **fields):
    """Return the figures of the H200, one of them changed."""
    return [one | fields if one["name"] == name else one for one in FIGURES]


def test_a_figure_that_refutes_a_constant_comes_first():
    slower = figures_where("HBM, 132 SMs", value=40.0)
    first, *_ = differences(H200, slower)
    assert (first.assumption.constant, first.measured) == ("hbm_rate", 40 * 132)
    assert str(first).split()[:4] == ["hbm_rate", "2244", "5280", "57%"]


def test_a_figure_with_a_fault_refutes_nothing():
    faulty = figures_where("HBM, 132 SMs", value=40.0, fault="the sum is wrong")
    (found,) = (one for one in differences(H200, faulty) if one.assumption.constant == "hbm_rate")
    assert found.measured is None and found.off == 0


def test_each_figure_is_one_that_the_microbenchmarks_measure_on_a_b200(monkeypatch):
    monkeypatch.setattr(Bench, "build", lambda *args, **words: Built(None, ""))
    names = set()
    for group in GROUPS.keys() - {"wgmma"}:
        found = []
        module_of(group).measure(Bench(group, parse("sm100"), found.append, "dry", int(B200.sms)))
        names |= {(figure.group, figure.name) for figure in found}
    assert {(one.group, name) for one in ASSUMPTIONS for name in one.names(B200)} <= names


def test_constants_that_no_figure_measures_are_these():
    """They stand for what ptxas does, or for a unit that has no figure of its own."""
    unmeasured = B200.constants.keys() - {one.constant for one in ASSUMPTIONS}
    assert unmeasured == {
        "sms", "parameter_latency", "l1_bytes", "async_latency", "tensor_short",
        "window", "ahead_registers", "queue_fma", "queue_alu", "queue_special", "queue_mio", "queue_registers",
        "queue_shared", "wgmma_rate", "wgmma_latency", "wgmma_alone", "wgmma_registers",
    }


def test_each_published_constant_of_a_b200_names_who_published_it():
    theirs = "SemiAnalysis's microbenchmarks of a B200: "
    known = theirs, "B200 data sheet: ", "B200: cudaDeviceProp", "CUDA programming guide: ", "H100 white paper: "
    published = {name: one.source for name, one in B200.constants.items() if one.how == "published"}
    assert [name for name, source in published.items() if not source.startswith(known)] == []
    measured = {name for name, source in published.items() if source.startswith(theirs)}
    assert measured == {"hbm_rate", "hbm_latency", "operand_rate", "tensor_latency"}


@pytest.mark.simulated
def test_the_figures_of_tcgen05_in_the_clock_of_a_b200_give_its_constants():
    figures = []
    predicting = Bench("tcgen05", parse("sm100"), figures.append, "predicted", sms=1)
    wide, narrow = tcgen05.Umma(128, 256), tcgen05.Umma(128, 64)
    try:
        with capture(arch="sm_100a", clock="b200"):
            for one in (wide, narrow):
                tcgen05.product(predicting, f"{one.name}: a step, no waits", one, 8, False, per=8)
            tcgen05.product(predicting, f"{narrow.name}: 4 steps, commit and wake", narrow, 4, True)
            for width in (32, 128):
                tcgen05.move(predicting, "st", "32x32b", width, 1, 1)
    except MissingCompilerError as error:
        pytest.skip(str(error))
    found = {one.assumption.constant: one for one in differences(B200, [figure._asdict() for figure in figures])}
    for name in ("tensor_rate", "operand_rate", "tensor_latency", "tmem_column", "tmem_latency"):
        assert found[name].off < 0.08, str(found[name])


def test_the_page_has_each_constant_with_its_source():
    lines = assumptions.page().splitlines()
    assert "| operand_rate | 128 | published |" in next(line for line in lines if line.startswith("| operand_rate"))
    assert len(lines) == assumptions.INTRODUCTION.count("\n") + len(ASSUMPTIONS)
