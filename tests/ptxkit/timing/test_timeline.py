"""Timelines: every clock of a warp is told once, nothing overlaps, roles have their names, and recording is free."""

import copy
import json
from html.parser import HTMLParser
from types import SimpleNamespace

import planted
import pytest
import torch
from click.testing import CliRunner
from test_clock import FRAME, INIT, ONE, WAIT, X, timed

from kda.backends.sm89 import configs as sm89
from kda.backends.sm90 import configs as sm90
from kda.backends.sm100 import configs as sm100
from kda.cli import cli
from ptxkit.launches import LaunchError, launch
from ptxkit.timing.timeline import KINDS, PAUSE, name_of

pytestmark = pytest.mark.simulated

NEAR = 1e-6


def problems(timeline):
    """Return what is wrong with the rows of a timeline of all SMs in detail."""
    return [*misplaced(timeline), *miscounted(timeline)]


def misplaced(timeline):
    for row in timeline.rows:
        end = 0
        for s in row.slices:
            if s.begins < end - NEAR:
                yield f"{row.name}: {s.name} begins before the one ahead has ended"
            if not s.begins < s.ends <= timeline.clock.clocks + NEAR:
                yield f"{row.name}: {s.name} is not within the launch"
            end = s.ends
            inside = s.begins
            for inner in s.inner:
                if inner.begins < inside - NEAR or inner.ends > s.ends + NEAR:
                    yield f"{row.name}: {inner.name} does not nest in {s.name}"
                inside = inner.ends


def miscounted(timeline):
    """Against the counters of the clock, which the engine keeps without a timeline, too."""
    clock = timeline.clock
    slices = [s for row in timeline.rows if row.kind == "warp" for s in row.slices]
    if abs(sum(s.issued for s in slices) - sum(w["issued"] for w in clock.warps)) > NEAR:
        yield "the slots of slices are not those of the warps"
    for why, clocks in clock.stalls.items():
        if abs(sum(s.stalls.get(why, 0) for s in slices) - clocks) > 1e-3:
            yield f"the waits of slices for {why} are not those of the warps"
    for s in slices:
        if s.inner and abs(s.issued - sum(inner.issued for inner in s.inner)) > NEAR:
            yield f"{s.name} issues more or less than what lies in it"
        if abs(s.clocks - s.issued - sum(s.stalls.values())) > 1e-3:
            yield f"{s.name} has clocks of which nothing is told"


def recorded(name):
    path, call = planted.KERNELS[name]
    return call(path.read_text(), strict=True, clock=True, timeline=True)


@pytest.mark.parametrize("name", planted.KERNELS)
def test_a_timeline_tells_every_clock_once_and_recording_it_changes_nothing(name, monkeypatch):
    path, call = planted.KERNELS[name]
    outputs = []
    monkeypatch.setattr(planted, "nan", lambda *shape: outputs.append(torch.full(shape, float("nan"))) or outputs[-1])
    (run, right), (plain, _) = recorded(name), call(path.read_text(), strict=True, clock=True)
    assert right and not run.findings and all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert run.clock.clocks == plain.clock.clocks and run.clock.stalls_of == plain.clock.stalls_of
    assert run.counters == plain.counters and plain.recorded is None
    timeline = run.timeline()
    assert not problems(timeline)
    assert {row.kind for row in timeline.rows} >= {"warp", "unit"}
    assert [KINDS.index(row.kind) for row in timeline.rows if not row.sm] == sorted(
        KINDS.index(row.kind) for row in timeline.rows if not row.sm
    )


def longest(timeline):
    return max((s for row in timeline.rows for s in row.slices if s.inner), key=lambda s: s.clocks)


def stretch(timeline):
    longest(timeline).ends += 1000


def lose(timeline):
    next(row for row in timeline.rows if row.kind == "warp").slices.pop()


def spill(timeline):
    longest(timeline).inner[-1].ends += 1


def outlive(timeline):
    timeline.rows[-1].slices[-1].ends = timeline.clock.clocks + 1


def blame(timeline):
    stall = next(s for row in timeline.rows for s in row.slices if s.kind == "stall")
    stall.stalls = {"grid": stall.clocks}


@pytest.mark.parametrize("fault", [stretch, lose, spill, outlive, blame])
def test_a_planted_fault_in_a_timeline_is_noticed(fault):
    timeline = recorded("pipeline_sm90")[0].timeline()
    assert not problems(timeline)
    broken = copy.deepcopy(timeline.rows)
    timeline.rows = broken
    fault(timeline)
    assert problems(timeline)


@pytest.mark.parametrize("kind", ["issue", "stall"])
def test_a_record_that_the_engine_loses_is_noticed(kind):
    run, _ = recorded("pipeline_sm80")
    records = list(run.recorded.records)
    lost = next(r for r in records if r.kind == ("issue", "stall").index(kind))
    run.recorded = run.recorded._replace(records=[r for r in records if r is not lost])
    assert problems(run.timeline())


# ---- what it says


def row_of(timeline, name):
    return next(row for row in timeline.rows if row.name == name)


def test_a_warp_that_waits_at_a_barrier_has_a_slice_for_it_and_so_has_the_barrier():
    """Warp 1 arrives first, warp 0 behind a chain."""
    chain = "ex2.approx.ftz.f32 %f1, %f1;" * 20
    body = f"{ONE} setp.ne.u32 %p1, %r3, 0; @%p1 bra MEET; {chain}\nMEET: bar.sync 0;\n"
    timeline = timed(body, block=64, timeline=True).timeline()
    (wait,) = [s for s in row_of(timeline, "CTA 0: warp 1").slices if s.kind == "stall"]
    assert wait.why == "barrier" and wait.name.startswith("barrier: PTX line")
    (phase,) = row_of(timeline, "CTA 0: barrier 0").slices
    assert phase.clocks == pytest.approx(20 * timeline.clock.chip.special_latency, abs=30)
    assert 0 < wait.ends - phase.ends < PAUSE
    assert not any(s.why == "barrier" for s in row_of(timeline, "CTA 0: warp 0").slices if s.kind == "stall")


def test_phases_of_an_mbarrier_follow_each_other_and_a_copy_is_on_its_way_between():
    copied = (
        "@!%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 1024;\n"
        "@!%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd1], 1024, [smem];\n"
    )
    loop = "".join(copied + WAIT.format(name=f"W{k}", offset=0, parity=k % 2) for k in range(4))
    body = INIT + "setp.ne.u32 %p1, %r2, 0; fence.proxy.async; add.u32 %r8, %r4, 1024;" + loop
    barriers = SimpleNamespace(fields={"full": SimpleNamespace(dtype="int64", bytes=16, offset=-(1 << 15))})
    timeline = timed(body, timeline=True, config=SimpleNamespace(struct=barriers)).timeline()
    phases, copies = row_of(timeline, "CTA 0: full[0]").slices, row_of(timeline, "copies in flight 0").slices
    assert len(phases) == len(copies) == 4
    assert all(a.ends == b.begins for a, b in zip(phases, phases[1:]))
    assert [s.ends for s in copies] == pytest.approx([s.ends for s in phases])
    busy = sum(s.says["busy"] for s in row_of(timeline, "bulk copies").slices)
    assert busy == pytest.approx(4 * 1024 / timeline.clock.chip.tma_rate)


def test_rows_are_named_by_role_where_the_kernel_has_roles():
    run = timed(ONE + "bar.sync 0;", block=96, timeline=True, config=SimpleNamespace(roles={"LOAD": range(2, 3)}))
    warps = [(row.name, row.role) for row in run.timeline().rows if row.kind == "warp"]
    assert warps == [("CTA 0: warp 0", "warp 0"), ("CTA 0: warp 1", "warp 1"), ("CTA 0: LOAD, warp 2", "LOAD")]


@pytest.mark.parametrize("home", [sm90, sm100])
def test_roles_of_configurations_are_those_of_all_warps(home):
    def threads(config):
        found = getattr(config, "threads", None)  # what is no configuration may have roles as well
        return found if isinstance(found, int) else None

    found = [c for c in vars(home).values() if isinstance(c, type) and getattr(c, "roles", None) and threads(c)]
    assert len(found) >= 1
    for config in found:
        assert sorted(warp for warps in config.roles.values() for warp in warps) == [*range(config.threads // 32)]


def test_a_timeline_needs_a_clock_and_must_be_requested():
    with pytest.raises(LaunchError, match="without a clock"):
        timed("", clock=None, timeline=True)
    with pytest.raises(ValueError, match="timeline=True"):
        timed("").timeline()


def test_the_first_sms_can_be_requested_alone():
    run = launch(FRAME.format(body=ONE, target="sm_90a"), grid=4, block=32, args=[X, 0], clock="h200", timeline=True)
    assert {row.sm for row in run.timeline().rows} == {0, 1, 2, 3} and {row.sm for row in run.timeline(1).rows} == {0}


# ---- files


def check_trace(trace):
    """Whole nanoseconds, complete events in named rows, each inside of the ones that it lies in."""
    events = json.loads(json.dumps(trace))["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {e["ph"] for e in events} == {"M", "X"}
    rows = {}
    for e in events:
        if e["ph"] == "X":
            begins, clocks = round(1000 * e["ts"] - 0.25, 6), round(1000 * e["dur"], 6)
            assert begins == int(begins) >= 0 and clocks == int(clocks) > 0 and e["name"] and e["cat"]
            assert (e["pid"], e["tid"]) in named
            rows.setdefault((e["pid"], e["tid"]), []).append((int(begins), int(begins + clocks)))
    assert rows
    for slices in rows.values():
        around = []
        for begins, ends in slices:
            while around and around[-1] <= begins:
                around.pop()
            assert not around or ends <= around[-1]
            around.append(ends)
    return events


def test_a_trace_is_valid_and_its_slices_nest_when_they_are_cut_to_nanoseconds(tmp_path):
    timeline = recorded("pipeline_sm90")[0].timeline()
    timeline.save(tmp_path / "trace.json")
    events = check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {row.name for row in timeline.rows}
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last <= 1e3 * timeline.clock.milliseconds + 0.002


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_a_page_needs_nothing_beside_it_and_stays_within_its_picture():
    text = recorded("pipeline_sm90")[0].timeline().html()
    page = Page(text)
    assert not any(name in ("src", "href") for _, attributes in page.tags for name in attributes)
    assert "http" not in text and "@import" not in text and "prefers-color-scheme: dark" in text
    rects = [a for tag, a in page.tags if tag == "rect"]
    assert len(rects) > 20 and text.count("<title>") == 1 + len(rects)
    width = float(next(a["viewbox"].split()[2] for tag, a in page.tags if tag == "svg"))
    assert all(float(r["x"]) + float(r["width"]) <= width + 1 for r in rects)
    for says in ("tensor core 0", "mbarrier", "waits for an mbarrier", "issued"):
        assert says in text


@pytest.mark.parametrize("arch, chip, which", [
    ("sm90", "h200", "h200, which stands for sm90 (H100, H200, H20)"), ("h100", "h100", "h100 (sm90)"),
])
def test_one_command_writes_both_for_a_forward(tmp_path, arch, chip, which):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    asked = ["timeline", "--arch", arch, "--tokens", "64", "--heads", "1", "--out", str(trace), "--html", str(page)]
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.output
    names = {e["args"]["name"] for e in check_trace(json.loads(trace.read_text())) if e["name"] == "thread_name"}
    assert {"CTA 0: CHAIN, warp 0", "CTA 0: PREPARE 1, warp 12", "CTA 1: CHAIN, warp 0", "CTA 0: full[0]"} <= names
    assert "CHAIN (CTA 0)" in page.read_text() and "ui.perfetto.dev" in result.output
    said = [line for line in result.output.splitlines() if line.startswith("fused: ")]     # progress may come first
    assert len(said) == 1 and f"us on {chip}, predicted" in said[0]
    assert f"predicted for {which}\n" in result.output


def test_a_kernel_is_called_as_its_configuration_and_otherwise_as_in_its_ptx():
    configs = [sm90.FusedConfig, sm89.ChainBwdConfig, sm100.OperandsConfig]
    assert [name_of(object.__new__(config)) for config in configs] == ["fused", "chain_bwd", "operands"]
    assert name_of(None) == name_of(SimpleNamespace(roles={})) == ""
