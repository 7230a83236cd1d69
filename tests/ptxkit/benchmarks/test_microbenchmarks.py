"""The microbenchmarks without a GPU: their kernels give right results in the simulator, ptxas has removed nothing, and
what would make a figure wrong is noticed."""

import contextlib
import json
import os
import re
import time

import pytest

from ptxkit import capture
from ptxkit.benchmarks.microbenchmarks import frame, issue, tcgen05, wgmma
from ptxkit.benchmarks.microbenchmarks.bench import Bench, Skip, disassembler
from ptxkit.benchmarks.microbenchmarks.figures import EXPECTED, Figure, Results
from ptxkit.benchmarks.microbenchmarks.groups import GROUPS, Message, in_child, module_of
from ptxkit.benchmarks.microbenchmarks.page import NOT_YET, RESULTS, SECTIONS, page, shown, surprises, table
from ptxkit.compile import nvrtc
from ptxkit.compile.errors import MissingCompilerError
from ptxkit.compile.target import parse

pytestmark = pytest.mark.simulated

HOPPER, BLACKWELL = "sm90", "sm100"


@pytest.fixture(autouse=True, scope="module")
def tools():
    try:
        nvrtc.version()
    except MissingCompilerError as error:
        pytest.skip(str(error))
    if disassembler() is None:
        pytest.skip("no nvdisasm here: Triton brings one along")


def bench(group, arch=HOPPER, way="simulated"):
    """Return a Bench, and the list that its figures go to."""
    figures = []
    return Bench(group, parse(arch), figures.append, way, sms=4), figures


def measured(group, arch):
    one, figures = bench(group, arch)
    with capture(arch=parse(arch).spelling) as session:
        module_of(group).measure(one)
    return figures, session.findings


CASES = [
    *((group, HOPPER) for group in ("barriers", "mma", "shared", "bulk", "wgmma", "memory", "issue")),
    *((group, BLACKWELL) for group in ("tcgen05", "mma", "shared", "bulk", "barriers", "fetch", "launches")),
]


@pytest.mark.slow
@pytest.mark.spread(every=24, first=13)    # a cheap one stays in every run; tcgen05 takes 50 s
@pytest.mark.parametrize("group, arch", CASES)
def test_results_are_correct_and_nothing_was_removed(group, arch):
    figures, findings = measured(group, arch)
    assert len(figures) > 5 and not findings
    assert not [str(figure) for figure in figures if figure.fault]


@pytest.mark.parametrize("group, arch", [("wgmma", BLACKWELL), ("tcgen05", HOPPER)])
def test_what_a_chip_has_not_is_left_out_with_a_sentence(group, arch):
    with pytest.raises(Skip, match="alone"):
        module_of(group).measure(bench(group, arch)[0])


@pytest.mark.parametrize("one, steps", [
    *((tcgen05.Umma(m, n), 0) for m in (128, 64) for n in (64, 128)), (tcgen05.Umma(128, 64, "TS"), 0),
    *((tcgen05.Umma(m, 64), steps) for m in (128, 64) for steps in (1, 4)),
], ids=lambda x: getattr(x, "name", x))
def test_products_take_in_the_clock_of_a_b200_what_others_measured_on_one(one, steps):
    predicting, figures = bench("tcgen05", BLACKWELL, "predicted")
    with capture(arch="sm_100a", clock="b200"):
        if steps:
            tcgen05.product(predicting, f"{one.name}: {steps} steps, commit and wake", one, steps, True)
        else:
            tcgen05.product(predicting, f"{one.name}: a step, no waits", one, 8, False, per=8)
    (figure,), expected = figures, EXPECTED["tcgen05", figures[0].name]
    assert expected.source == "published" and not figure.fault
    assert figure.value == pytest.approx(expected.value, rel=0.05)


# --------------------------------------------------------------------------------------------------- what is noticed


def test_a_chain_that_ptxas_shortens_is_noticed():
    twice = issue.Link("rcp.approx.ftz.f32 %0, %0;", "MUFU.RCP")          # 1 / (1 / x) is x
    built = bench("issue", way="dry")[0].build(issue.source_of(twice, 1), issue.sass_of(twice, issue.UNROLLED))
    assert built.fault == "MUFU.RCP stands 0 times in the machine code, not 256"


def test_a_wrong_result_is_noticed():
    op = issue.OPS["fma.f32"]
    one, _ = bench("issue")
    built = one.build(issue.source_of(op, 1))
    with capture(arch="sm_90a"):
        assert issue.run(one, built, op, 32, 1)[1] == ""
        assert "chains end with" in issue.run(one, built, op._replace(ends="bits(N + 1)"), 32, 1)[1]


def test_products_that_ptxas_waits_for_one_by_one_are_noticed():
    one, (bench_, _) = wgmma.Wgmma(64), bench("wgmma", way="dry")
    read_early = wgmma.group(one, 4) + "\nseen += d[0];"
    for body, said in ((wgmma.group(one, 4), False), (read_early, True)):
        setup = wgmma.setup(one) + " float seen = 0.f;"
        ends = wgmma.finish(one) + " out[512] = __float_as_uint(seen);"
        text = frame.loop(body, setup, ends, threads=128, drain=wgmma.waiting(0))
        assert ("waits in the machine code, not 1" in wgmma.build(bench_, text, {"HGMMA": 4}).fault) == said


def test_a_clock_that_runs_wrong_is_noticed():
    one, _ = bench("issue")
    assert one.unlikely("a chain of FMA takes four clocks", False) == ""       # clocks of the simulator mean nothing
    one.gpu = True
    assert one.unlikely("a chain of FMA takes four clocks", False) != ""


# ------------------------------------------------------------------------------------------------ a group's own process


def messages(work, limit):
    began = time.monotonic()
    found = list(in_child(work, limit))
    return [(each.kind, each.content) for each in found], time.monotonic() - began


def test_a_group_that_hangs_costs_its_limit_and_keeps_what_it_had():
    def work(send):
        send(Message("figure", 1))
        time.sleep(600)

    found, took = messages(work, 2)
    assert found == [("figure", 1), ("failed", "no end after 2 seconds")] and took < 500


def test_a_group_that_dies_or_raises_is_reported():
    def raising(send):
        raise ValueError("an illegal instruction")

    def dying(send):
        send(Message("figure", 1))
        os._exit(3)

    ((kind, said),), _ = messages(raising, 600)
    assert kind == "failed" and said.startswith("ValueError: an illegal instruction")
    assert messages(dying, 600)[0] == [("figure", 1), ("failed", "the process ended with 3")]


# --------------------------------------------------------------------------------------------------------- the results


@pytest.fixture
def results():
    return json.loads(RESULTS.read_text())


def test_the_results_on_record_have_no_faults(results):
    assert not results["failed"] and set(results["skipped"]) == {"tcgen05"}
    assert not [figure for figure in results["figures"] if figure["fault"]]
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in results["figures"])
    one = results["figures"][0]
    assert shown(one) != NOT_YET == shown(one | {"fault": "a chain ends with 3"}) == shown(None)


def test_everything_expected_was_measured(results):
    names = {(figure["group"], figure["name"]) for figure in results["figures"]}
    assert {name for name in EXPECTED if name[0] != "tcgen05" and "f32x2" not in name[1]} <= names


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL])
def test_every_kernel_builds_and_everything_expected_is_measured(arch):
    found, missing = {}, {HOPPER: "tcgen05", BLACKWELL: "wgmma"}[arch]
    for group in GROUPS:
        one, figures = bench(group, arch, way="dry")
        one.sms = 132
        with contextlib.suppress(Skip):
            module_of(group).measure(one)
        found |= {(group, figure.name): figure.fault for figure in figures}
    assert not list(filter(None, found.values()))
    on_page = {(section.group, name) for section in SECTIONS for row in section.rows for name in row.figures}
    asked = {(group, name) for group, name in {*EXPECTED, *on_page} if group not in (missing, "clock")}
    on_gpus_alone = re.compile("prefetch|graph|by the host|cluster of (8|16)|SMs reading|power|L2 hits, 16 SMs")
    assert {name for name in asked if not on_gpus_alone.search(name[1])} <= found.keys()


def test_the_page_shows_the_results_on_record(results):
    text = page(results)
    assert table(results["figures"]) in text and surprises(results["figures"]) in text
    other = [figure | {"value": figure["value"] * 1.5} for figure in results["figures"]]
    assert table(other) not in text and surprises(other) not in text
    assert f"\n| {SECTIONS[0].rows[0].constant} | 4.04; 1.02 | 4 L; 1 L |" in text


def test_results_are_written_again_after_each_figure(tmp_path):
    kept = Results(tmp_path / "r.json", {"device": "none"})
    for n in range(2):
        kept.figures.append(Figure.from_values("issue", "fma.f32: latency", [4.0 + n, 5.0, 3.0], "clocks").record())
        kept.write()
        assert len(json.loads((tmp_path / "r.json").read_text())["figures"]) == n + 1
    assert kept.figures[0] | {"value": 4.0, "low": 3.0, "high": 5.0, "expected": 4.0} == kept.figures[0]
