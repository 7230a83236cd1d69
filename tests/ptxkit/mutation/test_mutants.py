"""Every synchronising instruction weakened, one at a time: what is noticed, what survives, and who accepts that."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

import ptxkit
from ptxkit import launches
from ptxkit.compile.kernel import Kernel
from ptxkit.compile.target import parse as target
from ptxkit.mutation import RULES, MutantsError, Outcome, Weakening, mutants_of, sources
from ptxkit.ptx import parse

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("one_thread"), pytest.mark.simulated_only]

HEAD = ".version 8.6\n.target {arch}\n.address_size 64\n"
# y[i] = x[63 - i], through shared memory; line 5 of its source orders the two, line 7 orders nothing
REVERSED = HEAD.format(arch="sm_90") + """
.visible .entry reversed(.param .u64 x, .param .u64 y)
{
    .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<3>;
    .shared .align 4 .b8 row[256];
    .loc 1 2 0
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y];
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    mov.u32 %r2, row; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3; sub.u32 %r5, %r2, %r3;
    ld.global.f32 %f1, [%rd4];
    .loc 1 4 0
    st.shared.f32 [%r4], %f1;
    .loc 1 5 0
    bar.sync 0; bar.warp.sync 0xffffffff;
    ld.shared.f32 %f2, [%r5+252];
    .loc 1 7 0
    bar.sync 0;
    .loc 1 8 0
    st.global.f32 [%rd5], %f2;
    ret;
}
.file 1 "SOURCE"
"""
SOURCE = "\n".join(f"line {n}" for n in range(1, 10))
REMOVED = Weakening("removed", "bar", lambda site: "")
ONE = Weakening("one", "ld.shared", lambda site: "mov.f32 %f2, 0f3F800000;")


@pytest.fixture
def source(tmp_path):
    """Write a source file and return the PTX that names it."""

    def write(text=SOURCE, ptx=REVERSED):
        for kept in (sources.located, sources.shown, sources.text_of):
            kept.cache_clear()
        (tmp_path / "reversed.py").write_text(text)
        return ptx.replace("SOURCE", str(tmp_path / "reversed.py"))

    return write


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_of_a_package_is_called_from_the_package_on_wherever_its_kernel_was_built(exists, source, tmp_path):
    source()
    name = "ptxkit/mutation/sources.py"
    if exists:
        (tmp_path / "ptxkit" / "mutation").mkdir(parents=True)
        (tmp_path / name).touch()
    assert sources.shown(str(tmp_path / name)) == sources.shown(sources.__file__) == name
    assert sources.text_of(str(tmp_path / name)) == Path(sources.__file__).read_text()
    assert sources.shown(str(tmp_path / "reversed.py")) == str(tmp_path / "reversed.py")


def kernel_of(ptx, name="reversed"):
    return Kernel.of(name, ptx, None, target("sm90"))


def calls(ptx, block=64, name="reversed"):
    """Return a call of the kernel, as a program makes it."""
    kernel, x = kernel_of(ptx, name), torch.arange(64.0)

    def run_it():
        y = torch.empty(64)
        kernel.launch(1, x, y, block=block)
        return {"y": y}

    return run_it


def judged(ptx, **options):
    return ptxkit.mutants(calls(ptx), arch="sm_90a", **options)


def test_a_barrier_that_is_needed_is_noticed_and_one_that_is_not_survives(source):
    found = judged(source())
    by_line = {row.source[-2:]: row for row in found.rows if row.instruction == "bar.sync"}
    assert set(by_line[":5"].noticed) == {"uninitialised"}                       # the first that is found
    assert [o.mutant.mutation for o in by_line[":7"].survivors] == ["removed"]
    assert {o.mutant.instruction for o in found.survivors} == {"bar.sync 0;", "bar.warp.sync 0xffffffff;"}
    counts = dict(mutants=3, noticed=1, redundant=0, survived=2, race=0, deadlock=0, rule=1, result=0)
    assert found.counts == {"reversed": counts}
    assert found.share == 1 / 3


@pytest.mark.parametrize("comment", ["line 7  # redundant: nothing follows", "line 7  // redundant: nothing follows"])
@pytest.mark.parametrize("above", [False, True])
def test_a_comment_on_the_source_line_or_right_above_accepts_a_survivor(comment, above, source):
    old, new = ("line 6", f"    {comment[8:]}") if above else ("line 7", comment)
    text = SOURCE.replace(old, new)
    found = judged(source(text), rules=(REMOVED,))
    (row,) = [row for row in found.rows if row.with_status("redundant")]
    assert row.source.endswith("reversed.py:7") and row.says.endswith("nothing follows")
    assert "line 7" not in str(found.survivors) and len(found.survivors) == 1


def test_a_comment_beside_other_code_says_nothing_of_the_line_below(source):
    found = judged(source(SOURCE.replace("line 6", "line 6  # redundant: nothing follows")))
    assert not any(outcome.reason for outcome in found.outcomes)


@pytest.mark.parametrize(("rule", "noticed"), [
    (ONE, "wrong result"),
    (Weakening("removed", "st.global", lambda site: ""), "wrong result"),      # memory that is never written is no luck
    (Weakening("spins", r"st\.shared", lambda site: "bra L;"), "too-many-instructions"),
], ids=["a wrong result", "memory that is never written", "no end"])
def test_what_a_mutant_does_wrong_is_noticed(source, rule, noticed):
    found = judged(source().replace("ld.global.f32 %f1, [%rd4];", "L: ld.global.f32 %f1, [%rd4];"), rules=(rule,))
    assert [outcome.noticed for outcome in found.outcomes] == [(noticed,)]
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_assertion_of_the_caller_is_a_wrong_result(source):
    run_it = calls(source())

    def checked():
        assert run_it()["y"][0] == 63

    found = ptxkit.mutants(checked, arch="sm_90a", rules=(ONE,))
    assert [outcome.noticed for outcome in found.outcomes] == [("wrong result",)]


def test_a_lost_arrival_is_a_deadlock(source):
    barrier = "mbarrier.arrive.shared.b64 _, [bar]; W: mbarrier.try_wait.parity.shared.b64 p, [bar], 0; @!p bra W;"
    ptx = source().replace("bar.sync 0; bar.warp.sync 0xffffffff;", barrier)
    ptx = ptx.replace(".shared .align 4", ".shared .align 8 .b64 bar; .reg .pred p, q; .shared .align 4")
    start = "setp.ne.u32 q, %r1, 0; @!q mbarrier.init.shared.b64 [bar], 64; bar.sync 1; st.shared.f32 [%r4], %f1;"
    found = judged(ptx.replace("st.shared.f32 [%r4], %f1;", start))
    noticed = {(row.instruction.split(".")[1], row.mutation): set(row.noticed) for row in found.rows}
    assert noticed["arrive", "removed"] == {"deadlock"}
    assert noticed["arrive", "relaxed"] == noticed["try_wait", "relaxed"] == {"race-write-read"}
    assert noticed["try_wait", "does not wait"] == {"uninitialised"}
    assert noticed["init", "one arrival less"]


def test_identical_instructions_of_one_line_are_mutants_of_one_row(source):
    found = judged(source().replace(".loc 1 7 0", ""), rules=(Weakening("removed", "bar.sync", lambda site: ""),))
    (row,) = found.rows
    assert [outcome.status for outcome in row.outcomes] == ["noticed", "survived"] and row.source.endswith(":5")
    assert "SURVIVED (PTX line 21)" in str(found)


def test_a_helper_is_shown_with_its_callers_and_accepted_where_one_of_them_says_so(source):
    ptx = source(SOURCE.replace("line 9", "line 9  # redundant: nothing follows"))
    numbered = ptx.replace(".loc 1 7 0", ".loc 1 7 1003") + "// call site 1003: SOURCE:8 < SOURCE:9\n"
    found = judged(numbered.replace("SOURCE", ptx.split('"')[1]), rules=(REMOVED,))
    (row,) = [row for row in found.rows if ":7" in row.source]
    assert row.source.endswith("reversed.py:7 < reversed.py:8 < reversed.py:9")
    assert row.says == "redundant (PTX line 21): nothing follows"


def test_an_instruction_that_the_calls_do_not_execute_survives_and_says_so(source):
    found = judged(source().replace("ret;", "ret;\nbar.sync 0;"), rules=(REMOVED,))
    (row,) = [row for row in found.rows if row.source.endswith(":8")]
    assert not row.outcomes[0].reached and "never execute" in row.says


def test_kernels_of_one_name_are_distinguished(source):
    one, two = source(), source().replace("4 0\n", "4 1\n")

    def run_it():
        return [calls(ptx)()["y"] for ptx in (one, two)]

    found = ptxkit.mutants(run_it, arch="sm_90a", rules=(REMOVED,))
    assert list(found.counts) == ["reversed", "reversed 2"] and len(found.outcomes) == 6


def test_a_mutant_runs_in_the_calls_that_execute_it_alone(source):
    times, one, other = [0, 0], source(), source().replace("reversed", "mirrored")
    first, second = calls(one), calls(other, name="mirrored")

    def counted(number, call):
        def run_it():
            times[number] += 1
            return call()

        return run_it

    both = counted(0, first), counted(1, lambda: (first(), second()))
    found = ptxkit.mutants(*both, arch="sm_90a", rules=(REMOVED,), schedules=({},))
    assert list(found.counts) == ["reversed", "mirrored"] and len(found.outcomes) == 6
    assert times == [2 + 3, 2 + 2 + 3]  # a survivor of the first call runs in the second, too


@pytest.fixture
def simulated(monkeypatch):
    """Return the names of the kernels whose launches are simulated, in order."""
    names, launch = [], launches.launch
    monkeypatch.setattr(launches, "launch", lambda ptx, name, **how: names.append(name) or launch(ptx, name, **how))
    return names


def three_in_turn(source):
    """Return a call of three kernels, each of which reads what the one before wrote."""
    kernels = [kernel_of(source().replace("reversed", name), name) for name in ("first", "second", "third")]

    def run_it():
        rows = [torch.arange(64.0)]
        for kernel in kernels:
            rows.append(torch.empty(64))
            kernel.launch(1, *rows[-2:], block=64)
        return rows[-1]

    return run_it


def test_launches_of_other_kernels_are_not_simulated_again(source, simulated):
    found = ptxkit.mutants(three_in_turn(source), arch="sm_90a", rules=(REMOVED,), schedules=({},))
    assert simulated[:6] == ["first", "second", "third"] * 2               # as they are, and once more
    assert simulated[6:] == ["first"] * 3 + ["second"] * 3 + ["third"] * 3  # three barriers in each
    assert [outcome.status for outcome in found.outcomes] == ["noticed", "survived", "survived"] * 3


def test_what_follows_a_wrong_launch_is_simulated(source, simulated):
    found = ptxkit.mutants(three_in_turn(source), arch="sm_90a", rules=(ONE,), schedules=({},))
    assert simulated[6:] == ["first", "second", "third", "second", "third", "third"]
    assert {outcome.noticed for outcome in found.outcomes} == {("wrong result",)}


def test_every_nth_mutant_is_a_sample_and_processes_give_the_same_table(source):
    every = judged(source())
    assert [o.mutant for o in judged(source(), sample=2).outcomes] == [o.mutant for o in every.outcomes][::2]
    assert str(judged(source(), workers=2)) == str(every)


@pytest.mark.parametrize("noticed, way", [
    (("deadlock", "race-lanes"), "race"), (("deadlock", "proxy"), "deadlock"), (("too-many-instructions",), "deadlock"),
    (("proxy", "uninitialised"), "rule"), (("wrong result",), "result"), (("IndexError",), "result"), ((), None),
], ids=str)
def test_a_mutant_is_counted_once_by_what_says_most(noticed, way):
    (mutant,) = mutants_of(module("bar.warp.sync 1;"), "k")
    assert Outcome(mutant, noticed).way == way


def test_the_table_is_json(source):
    found = json.loads(json.dumps(judged(source()).as_json()))
    assert found["kernels"]["reversed"]["mutants"] == 3 and found["rows"][0]["symbol"] == "reversed"
    assert found["rows"][0]["mutants"][0] == dict(
        line=18, status="noticed", noticed=["uninitialised"], schedule=0, reached=True, reason=None
    )


def test_kernels_that_are_wrong_as_they_are_cannot_be_judged(source):
    with pytest.raises(ptxkit.SimulationError, match="race-write-read"):
        judged(source().replace("bar.sync 0; bar", "bar"))


TURNS = itertools.count()


@pytest.mark.parametrize(("calls_of", "says"), [
    (lambda run_it: [lambda: (run_it(), torch.tensor(next(TURNS)))], "other results when it runs again"),
    (lambda run_it: [], "needs functions that launch kernels, found nothing"),
    (lambda run_it: [3], "needs functions that launch kernels, found int"),
    (lambda run_it: [lambda: None], "launched no kernel"),
    (lambda run_it: [lambda: [run_it(), object()]], "Return tensors"),
], ids=["calls that do not repeat", "no calls", "no functions", "calls that launch nothing", "results of no tensors"])
def test_what_cannot_be_judged_is_refused(source, calls_of, says):
    with pytest.raises(MutantsError, match=says):
        ptxkit.mutants(*calls_of(calls(source())), arch="sm_90a")


# ---- what the rules write

CHANGES = {
    "@%p mbarrier.try_wait.parity.shared.b64 %q, [%r1], %r2, 1000;": {
        "does not wait": "@%p setp.eq.u32 %q, 0, 0;",
        "relaxed": "@%p mbarrier.try_wait.parity.relaxed.cta.shared.b64 %q, [%r1], %r2, 1000;",
    },
    "mbarrier.test_wait.shared.b64 %q, [%r1], %rd1;": {
        "does not wait": "setp.eq.u32 %q, 0, 0;",
        "relaxed": "mbarrier.test_wait.relaxed.cta.shared.b64 %q, [%r1], %rd1;",
    },
    "mbarrier.try_wait.parity.acquire.cluster.shared.b64 %q, [%r1], %r2;": {
        "does not wait": "setp.eq.u32 %q, 0, 0;",
        "relaxed": "mbarrier.try_wait.parity.relaxed.cluster.shared.b64 %q, [%r1], %r2;",
        "for the CTA alone": "mbarrier.try_wait.parity.acquire.cta.shared.b64 %q, [%r1], %r2;",
    },
    "mbarrier.init.shared.b64 [%r1], %r2;": {
        "one arrival less": "{ .reg .b32 ptxkit_fewer; sub.u32 ptxkit_fewer, %r2, 1; "
        "mbarrier.init.shared.b64 [%r1], ptxkit_fewer; }"
    },
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2;": {
        "relaxed": "mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%r1], %r2;",
        "expects no bytes": "mbarrier.arrive.shared::cta.b64 _, [%r1];",
        "removed": "",
    },
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1], 3;": {
        "relaxed": "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r1], 3;",
        "for the CTA alone": "mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r1], 3;",
        "one arrival less": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1], 2;",
        "removed": "",
    },
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], %r2;": {"removed": ""},
    "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];": {"removed": ""},
    "bar.sync 1, 128;": {"does not wait": "bar.arrive 1, 128;", "removed": ""},
    "barrier.sync.aligned 0;": {"removed": ""},
    "bar.arrive 1, 128;": {"removed": ""},
    "bar.warp.sync 0xffffffff;": {"removed": ""},
    "barrier.cluster.arrive.aligned;": {"relaxed": "barrier.cluster.arrive.aligned.relaxed ;", "removed": ""},
    "barrier.cluster.arrive.release.aligned;": {"relaxed": "barrier.cluster.arrive.relaxed.aligned ;", "removed": ""},
    "barrier.cluster.wait.acquire.aligned;": {"removed": ""},
    "fence.acq_rel.gpu;": {
        "acquires nothing": "fence.release.gpu ;",
        "releases nothing": "fence.acquire.gpu ;",
        "for the CTA alone": "fence.acq_rel.cta ;",
        "removed": "",
    },
    "fence.mbarrier_init.release.cluster;": {"removed": ""},
    "fence.proxy.async.shared::cta;": {"removed": ""},
    "membar.gl;": {"removed": ""},
    "ld.acquire.gpu.global.u32 %r1, [%rd1];": {
        "relaxed": "ld.relaxed.gpu.global.u32 %r1, [%rd1];",
        "for the CTA alone": "ld.acquire.cta.global.u32 %r1, [%rd1];",
    },
    "st.release.sys.global.u32 [%rd1], %r1;": {
        "relaxed": "st.relaxed.sys.global.u32 [%rd1], %r1;",
        "for the CTA alone": "st.release.cta.global.u32 [%rd1], %r1;",
    },
    "atom.global.acq_rel.gpu.add.u32 %r1, [%rd1], %r2;": {
        "acquires nothing": "atom.global.release.gpu.add.u32 %r1, [%rd1], %r2;",
        "releases nothing": "atom.global.acquire.gpu.add.u32 %r1, [%rd1], %r2;",
        "for the CTA alone": "atom.global.acq_rel.cta.add.u32 %r1, [%rd1], %r2;",
    },
    "red.release.gpu.global.add.u32 [%rd1], %r1;": {
        "relaxed": "red.relaxed.gpu.global.add.u32 [%rd1], %r1;",
        "for the CTA alone": "red.release.cta.global.add.u32 [%rd1], %r1;",
    },
    "atom.acquire.cluster.global.exch.b32 %r1, [%rd1], %r2;": {
        "relaxed": "atom.relaxed.cluster.global.exch.b32 %r1, [%rd1], %r2;",
        "for the CTA alone": "atom.acquire.cta.global.exch.b32 %r1, [%rd1], %r2;",
    },
    "cp.async.wait_group 2;": {"one group more in flight": "cp.async.wait_group 3;"},
    "cp.async.wait_all;": {"removed": ""},
    "cp.async.commit_group;": {"removed": ""},
    "cp.async.bulk.commit_group;": {"removed": ""},
    "cp.async.bulk.wait_group.read 0;": {"one group more in flight": "cp.async.bulk.wait_group.read 1;"},
    "cp.async.bulk.wait_group 1;": {
        "one group more in flight": "cp.async.bulk.wait_group 2;",
        "waits for reads alone": "cp.async.bulk.wait_group.read 1;",
    },
    "wgmma.fence.sync.aligned;": {"removed": ""},
    "wgmma.commit_group.sync.aligned;": {"removed": ""},
    "wgmma.wait_group.sync.aligned 7;": {"one group more in flight": ""},
    "tcgen05.wait::ld.sync.aligned;": {"removed": ""},
    "tcgen05.fence::before_thread_sync;": {"removed": ""},
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];": {"removed": ""},
    "griddepcontrol.wait;": {"removed": ""},
    "griddepcontrol.launch_dependents;": {},
    "ld.relaxed.gpu.global.u32 %r1, [%rd1];": {},
    "setmaxnreg.inc.sync.aligned.u32 240;": {},
}


def module(*body):
    registers = ".reg .pred %p, %q; .reg .b32 %r<9>; .reg .b64 %rd<9>;"
    return "\n".join((HEAD.format(arch="sm_100a"), ".visible .entry k()\n{", registers, *body, "ret;\n}\n"))


@pytest.mark.parametrize("instruction", CHANGES)
def test_an_instruction_is_changed_by_the_rules_for_it(instruction):
    ptx = module("bar.sync 7; // a comment", instruction)
    rest = [line.strip() for line in ptx.replace(" // a comment", "").split("\n")]
    index, found = rest.index(instruction), {}
    for mutant in mutants_of(ptx, "k"):
        lines = [line.strip() for line in mutant.changed.split("\n")]
        if mutant.line == index + 1:
            found[mutant.mutation] = " ".join(lines[index].split())
            assert lines[:index] + lines[index + 1 :] == rest[:index] + rest[index + 1 :]
            parse(mutant.changed)
    assert found == {name: " ".join(text.split()) for name, text in CHANGES[instruction].items()}


def test_every_rule_changes_something():
    texts = [re.sub(r"^@\S+ ", "", instruction).split(" ")[0].rstrip(";") for instruction in CHANGES]
    unused = [rule for rule in RULES if not any(re.match(rule.pattern, text) for text in texts)]
    assert not unused


COPY, MULTIPLY = "cp.async.ca.shared.global [%r1], [%rd1], 4;", "tcgen05.cp.cta_group::1.128x256b [%r3], %rd2;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];"


@pytest.mark.parametrize("body, expected", [
    ((COPY, COPY, "cp.async.commit_group;"), (COPY, "cp.async.commit_group; " + COPY, "")),
    ((f"{{ {MULTIPLY} }}", COMMIT), (f"{{ {COMMIT} {MULTIPLY} }}", "")),
    ((MULTIPLY, "add.u32 %r1, %r2, %r3;", COMMIT), None),
    ((COPY, "L:", "cp.async.commit_group;"), None),
    ((COPY, "@%p bra L;", "cp.async.commit_group;", "L:"), None),
    (("@%p " + COPY, "cp.async.commit_group;"), None),
    ((COPY, "{", ".reg .b32 %r1;", "cp.async.commit_group;", "}"), None),
    (("cp.async.commit_group;",), None),
], ids=["the last of two", "out of a scope", "its address comes later", "a label", "a branch", "a guard", "a scope",
        "nothing to commit"])
def test_a_commit_is_too_early_where_whoever_copies_also_commits(body, expected):
    found = [m.changed.split("\n") for m in mutants_of(module(*body), "k") if m.mutation == "too early"]
    lines = [[line.strip() for line in lines[7:-3]] for lines in found]
    assert lines == ([list(expected)] if expected else [])
