"""Pictures and pages of `kda bench`."""

from __future__ import annotations

import dataclasses
import importlib.util
from importlib.metadata import version

import pytest
from bench_calls import H200, LINE, ONE, run

from kda.tools.commands import timeline
from kda.tools.commands.bench import drawn, report
from kda.tools.measure.shapes import DIRECTIONS, SHAPES
from ptxkit.commands.render import Screen
from ptxkit.compile.target import TARGETS

H64 = dataclasses.replace(LINE, shape="h64-8k", problem=SHAPES["h64-8k"].label, backend="sm90", floor=0.5)
BASELINE = {"backend": "fla", "median": 2.0, "p20": 1.9, "p80": 2.2}


def test_a_picture_has_every_shape_both_directions_floors_and_the_saved_times_of_others():
    lines = [
        dataclasses.replace(H64, direction=way, regime=regime) for way in DIRECTIONS for regime in ("fast", "slow")
    ]
    given = dataclasses.replace(LINE, baseline=BASELINE)
    h64, other = drawn.groups_of([*lines, given], "NVIDIA H200")
    assert drawn.ways_of([h64, other]) == ["forward", "backward"]
    assert [track.name for track in h64.tracks[:2]] == ["sm90, fast", "sm90, slow"]
    assert [set(track.bars) for track in h64.tracks[:2]] == [{"forward", "backward"}] * 2
    assert h64.floors == {"forward": 500.0, "backward": 500.0} and other.floors == {}
    assert {"FLA", "cuDNN, fast", "cuDNN, slow"} <= {track.name for track in h64.tracks if track.kind == "peer"}
    assert [(track.name, track.bars["forward"][:3]) for track in other.tracks] == [
        ("reference, slow", (1000.0, 980.0, 1020.0)), ("fla, slow", (2000.0, 1900.0, 2200.0))
    ]
    assert "FLA 0.6.0" in drawn.peers_line([h64]) and not drawn.peers_line([other])


def test_others_are_drawn_only_beside_times_of_their_machine_and_call():
    for changed, device in (({}, "NVIDIA H100"), ({"problem": "B=2 T=8192 H=64 K=V=128 bf16"}, "NVIDIA H200")):
        (group,) = drawn.groups_of([dataclasses.replace(H64, **changed)], device)
        assert {track.kind for track in group.tracks} == {"slow"}


@pytest.mark.parametrize("changes", [{}, {"baseline": BASELINE}, {"floor": 0.5}], ids=["alone", "baseline", "floor"])
def test_a_plot_is_drawn(tmp_path, changes):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra `plot`")
    lines = [dataclasses.replace(LINE, **changes), dataclasses.replace(H64, direction="backward")]
    groups = drawn.groups_of(lines, H200.device)
    drawn.draw(str(tmp_path / "x.svg"), "a title", report.header(H200), groups)
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_a_wide_spread_and_its_number_stay_inside_the_plot(monkeypatch, tmp_path):
    figures = pytest.importorskip("matplotlib.figure", reason="needs matplotlib, the extra `plot`")
    saved = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    groups = drawn.groups_of([dataclasses.replace(LINE, median=1.0, p20=0.9, p80=5.0)], H200.device)
    drawn.draw(str(tmp_path / "x.svg"), "a title", report.header(H200), groups)
    (axes,) = saved[0].axes
    assert max(text.get_position()[0] for text in axes.texts) == 5000.0 < axes.get_xlim()[1]


@pytest.mark.parametrize("ways", [("forward",), ("forward", "backward", "step")])
def test_the_legend_of_a_plot_is_inside_it(ways, monkeypatch, tmp_path):
    figures = pytest.importorskip("matplotlib.figure", reason="needs matplotlib, the extra `plot`")
    saved = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    lines = [dataclasses.replace(H64, direction=way, floor=0.5, baseline=BASELINE) for way in ways]
    drawn.draw(str(tmp_path / "x.svg"), "a title", "details", drawn.groups_of(lines, H200.device))
    saved[0].draw_without_rendering()
    (legend,) = saved[0].legends
    assert len(legend.get_texts()) >= 3 and legend.get_window_extent().x1 <= saved[0].bbox.x1


def test_the_command_writes_a_picture_and_a_page(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra `plot`")
    picture, html = tmp_path / "x.png", tmp_path / "x.html"
    out = run(*ONE, "--plot", str(picture), "--html", str(html)).stdout
    assert f"drawn    {picture}" in out and f"drawn    {html}: open it in a browser" in out
    text = html.read_text(encoding="utf-8")
    assert picture.read_bytes().startswith(b"\x89PNG") and text.startswith("<!doctype html>")
    for words in ("B=1 T=70 H=1 K=V=8 fp32", "reference, slow", f"torch {version('torch')}", "parity: 2 of 2"):
        assert words in text
    assert "roles" not in text                           # the reference has no kernels


def test_a_page_shows_what_the_roles_of_kernels_do_when(monkeypatch):
    monkeypatch.setattr("ptxkit.timing.pages.sections", lambda timelines: f"{len(timelines)} kernels")
    text = drawn.page("<a title>", "details", ["a note"], drawn.groups_of([H64], "CPU"), [None] * 2)
    assert "2 kernels" in text and "&lt;a title&gt;" in text and "<a title>" not in text and "a note" in text
    assert 'style="left: 50.00%"' in text                # the floor is half of the only time


def test_there_are_no_roles_to_show_without_kernels_or_a_clock_for_their_gpu():
    assert timeline.of_machine(Screen(), "reference") == timeline.of_machine(Screen(), "sm90") == []
    assert timeline.of_machine(Screen(), "sm90", TARGETS["sm100"]) == []
    assert timeline.of_machine(Screen(), "triton", TARGETS["sm86"]) == []


def test_without_matplotlib_a_plot_is_refused_before_anything_is_timed(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    result = run(*ONE, "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 2 and "pip install matplotlib" in result.stderr
