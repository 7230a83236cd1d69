"""The picture of the README shows what was measured, with the gate of each figure."""

import json
import pathlib

import pytest

from benchmarks import picture, times
from kda.tools.verify.ledger import Ledger

ROOT = pathlib.Path(__file__).parents[2]


def test_the_readme_says_what_the_picture_shows():
    readme, drawn = (ROOT / "README.md").read_text(), (picture.PICTURES / "h200-light.svg").read_text()
    said = picture.SHOWN
    for figure in picture.shown():
        said = said.replace("#", figure, 1)
        assert f"<!--   {figure} -->" in drawn or f"<!--   {figure} fast" in drawn
    assert said in readme


def test_every_panel_of_times_names_its_gate_and_the_readme_that_of_the_others():
    titles = [title for title, _ in picture.panels()]
    readme = (ROOT / "README.md").read_text()
    assert titles[0] == "forward, ms, bounded gate" and "training step, ms, softplus gate" in titles
    for theme in picture.THEMES:
        drawn = (picture.PICTURES / f"h200-{theme}.svg").read_text()
        assert all(f"<!-- {title} -->" in drawn for title in titles)
    assert "with the **bounded** gate of Kimi-K3" in " ".join(readme.split()) and picture.saved()["gate"] == "bounded"
    assert "a bounded gate" in picture.saved()["what"]


def test_the_tables_and_the_sentence_of_the_readme_are_those_of_the_files():
    readme = (ROOT / "README.md").read_text()
    assert picture.readme(readme) == readme
    assert [row.split(",")[0] for row in picture.gates()] == ["| bounded", "| softplus"]
    kernel, *layers = picture.gains()
    models = [layers.pop() for _ in range(4)]
    assert kernel.gate == "bounded" and kernel.times == kernel.fla / kernel.kda and len(layers) == 2
    assert all(gain.times == gain.kda / gain.fla > 1.2 for gain in models)
    assert {(gain.gate, gain.unit) for gain in models} == {("softplus", "tokens/s")}
    assert [bar.name for bar in picture.bars_beside_fla("step")] == ["FLA", "kda"]
    assert all(row["ratio"] == row["baseline"]["median"] / row["median"] > 3 for row in picture.beside_fla())
    other = picture.with_figures(readme, picture.EAGER, ["9.99"] * 6)
    assert other != readme == picture.readme(other)


def test_every_time_of_ours_is_shorter_than_every_other_one():
    """Otherwise the picture would have to say so in words."""
    panels = [bars for title, bars in picture.panels() if "gain" not in title and any(not bar.ours for bar in bars)]
    assert len(panels) >= 3
    for bars in panels:
        ours, others = ([bar for bar in bars if bar.ours == is_ours] for is_ours in (True, False))
        assert max(bar.slow for bar in ours) < min(bar.fast for bar in others)


def test_it_is_drawn_for_light_and_for_dark_pages():
    pytest.importorskip("matplotlib")
    drawings = picture.texts()
    for name, theme in picture.THEMES.items():
        drawn = drawings[picture.PICTURES / f"h200-{name}.svg"]
        assert drawn.count(f"fill: {theme['ours']}") == sum(bar.ours for _, bars in picture.panels() for bar in bars)


def test_the_front_page_names_the_cards_of_the_ledger():
    front = (ROOT / "docs" / "index.md").read_text()
    assert all(run["card"] in front for run in Ledger.read().runs)
    assert "bounded gate of Kimi-K3" in front and "softplus gate of Kimi-Linear" in front


# ---- files as they may come


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Return a function that writes a file as `kda bench --save` does; `times` reads these alone."""
    monkeypatch.setattr(times.common, "RESULTS", tmp_path)

    def write(name, rows, graph=True, keeps=False):
        rows = [
            {"problem": f"B=1 T=8192 H=64 K=V=128 bf16{gate}", "regime": regime, "direction": way, "backend": "sm90",
             "median": ms / 1e3, "memory_with_inputs": 2**31,
             "baseline": fla and {"backend": "fla", "median": fla / 1e3}} for gate, regime, way, ms, fla in rows
        ]
        document = {"command": "bench", "settings": {"graph": graph, "disable_recompute": keeps}, "rows": rows}
        (tmp_path / f"h200-sm90-{name}.json").write_text(json.dumps(document))
        forget()

    def forget():
        for cached in (times.document, times.on_record):
            cached.cache_clear()

    forget()
    yield write
    forget()


def test_a_file_with_another_gate_gets_a_panel_of_its_own(results):
    results("forward", [("", "slow", "forward", 0.3, None)])
    assert times.gates_of("h200") == ["bounded"] and picture.bars_of("forward", "softplus") == []
    results("forward-softplus", [(", softplus gate", "slow", "forward", 0.46, None)])
    assert times.gates_of("h200") == ["bounded", "softplus"]
    assert picture.bars_of("forward", "softplus") == [picture.Bar("kda", 0.46, 0.46, True)]


def test_both_regimes_are_drawn_and_a_file_of_a_later_kind_changes_nothing(results):
    results("kept", [("", "slow", "step", 1.2, None), ("", "fast", "step", 1.1, None)], keeps=True)
    results("step", [("", "slow", "step", 1.6, None), ("", "fast", "step", 1.6, None)])
    again, kept = picture.bars_of("step", "bounded")[-2:]
    assert (again.slow, kept.slow, kept.fast) == (1.6, 1.2, 1.1)
    assert picture.words_of(kept) == "1.10 fast gates, 1.20 slow" and picture.words_of(again) == "1.60"


def test_only_times_from_graphs_are_drawn_as_kdas(results):
    results("forward", [("", "slow", "forward", 0.4, None)], graph=False)
    assert times.on_record("h200") == () and picture.bars_of("forward", "bounded") == []


def test_fla_beside_kda_in_one_run_is_drawn_with_the_gate_of_that_run(results):
    results("step-softplus", [(", softplus gate", "slow", "step", 2.0, 9.0)])
    assert [(bar.name, bar.slow, bar.ours) for bar in picture.bars_of("step", "softplus")] == [
        ("FLA", 9.0, False), ("kda", 2.0, True)
    ]


def test_a_forward_that_saves_is_not_drawn_as_one_without_gradients(results):
    results("kept", [("", "slow", "forward", 0.5, None), ("", "slow", "step", 1.2, None)], keeps=True)
    assert times.found("h200", "h64-8k", "bounded", "slow", "forward") is None
    assert times.found("h200", "h64-8k", "bounded", "slow", "step", keeps=True)[-2:] == (1.2, 2.0)
