"""The picture of the README shows what was measured, with the gate of each figure."""

import json
import pathlib

import pytest

from benchmarks import picture, times
from kda.tools.verify.ledger import Ledger

ROOT = pathlib.Path(__file__).parents[2]


def test_the_readme_says_what_the_picture_shows():
    forward = picture.bars_of("forward", "bounded")[-1]
    again, kept = picture.bars_of("step", "bounded")[-2:]
    longest = [max(bar.slow, bar.fast) for bar in (forward, kept, again)]
    said = "with a bounded gate forward {:.2f} ms, training step {:.2f} to {:.2f} ms".format(*longest)
    assert said in (ROOT / "README.md").read_text()


def test_every_panel_of_times_names_its_gate_and_the_readme_that_of_the_others():
    titles = [title for title, _ in picture.panels()]
    readme = (ROOT / "README.md").read_text()
    assert titles[0] == "forward, ms, bounded gate" and "training step, ms, softplus gate" in titles
    for theme in picture.THEMES:
        drawn = (picture.PICTURES / f"h200-{theme}.svg").read_text()
        assert all(f"<!-- {title} -->" in drawn for title in titles)
    assert "with the **bounded** gate of Kimi-K3" in readme and picture.saved()["gate"] == "bounded"
    assert "a bounded gate" in picture.saved()["what"]


def test_the_tables_and_the_sentence_of_the_readme_are_those_of_the_files():
    readme = (ROOT / "README.md").read_text()
    assert picture.readme(readme) == readme
    assert [row.split(",")[0] for row in picture.gates()] == ["| bounded", "| softplus"]
    kernel, *layers, model = picture.gains()
    assert (kernel.gate, model.gate, model.unit) == ("bounded", "softplus", "tokens/s") and len(layers) == 2
    assert model.times == model.kda / model.fla and kernel.times == kernel.fla / kernel.kda
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
    for cached in (times.document, times.on_record):
        cached.cache_clear()

    def write(name, rows, graph, keeps=False, commit="c0ffee"):
        rows = [
            {"problem": f"B=1 T=8192 H=64 K=V=128 bf16{gate}", "regime": regime, "direction": way, "backend": "sm90",
             "median": ms / 1e3, "memory_with_inputs": 2**31,
             "baseline": fla and {"backend": "fla", "median": fla / 1e3}} for gate, regime, way, ms, fla in rows
        ]
        settings = {"graph": graph, "disable_recompute": keeps}
        document = {"command": "bench", "settings": settings, "host": {"commit": commit}, "rows": rows}
        (tmp_path / f"h200-sm90-{name}.json").write_text(json.dumps(document))

    yield write
    for cached in (times.document, times.on_record):
        cached.cache_clear()


def test_a_file_with_another_gate_gets_a_panel_of_its_own(results):
    results("forward", [("", "slow", "forward", 0.3, None)], True)
    assert times.gates_of("h200") == ["bounded"] and picture.bars_of("forward", "softplus") == []
    times.on_record.cache_clear(), times.document.cache_clear()
    results("forward-softplus", [(", softplus gate", "slow", "forward", 0.46, None)], True)
    assert times.gates_of("h200") == ["bounded", "softplus"]
    assert picture.bars_of("forward", "softplus") == [picture.Bar("kda", 0.46, 0.46, True, 0.46)]


def test_an_eager_time_stands_beside_that_of_a_graph_if_both_are_of_the_same_code(results):
    results("forward", [("", "slow", "forward", 0.3, None)], True)
    results("eager", [("", "slow", "forward", 0.4, None)], False)
    assert times.pair("h200", "h64-8k", "bounded", "slow", "forward") == times.Pair(0.3, 0.4, 2.0)
    assert picture.words_of(picture.bars_of("forward", "bounded")[-1]) == "0.40, 0.30 from a graph"
    results("eager", [("", "slow", "forward", 0.4, None)], False, commit="older")
    times.on_record.cache_clear(), times.document.cache_clear()
    assert times.pair("h200", "h64-8k", "bounded", "slow", "forward") == times.Pair(0.3, None, 2.0)
    assert picture.words_of(picture.bars_of("forward", "bounded")[-1]) == "0.30 from a graph"


def test_fla_beside_kda_in_one_run_is_drawn_with_the_gate_of_that_run(results):
    results("step-softplus", [(", softplus gate", "slow", "step", 2.0, 9.0)], True)
    assert [(bar.name, bar.slow, bar.ours) for bar in picture.bars_of("step", "softplus")] == [
        ("FLA", 9.0, False), ("kda", 2.0, True)
    ]


def test_a_forward_that_saves_is_not_drawn_as_one_without_gradients(results):
    results("kept", [("", "slow", "forward", 0.5, None), ("", "slow", "step", 1.2, None)], True, keeps=True)
    assert times.pair("h200", "h64-8k", "bounded", "slow", "forward") is None
    assert times.pair("h200", "h64-8k", "bounded", "slow", "step", keeps=True) == times.Pair(1.2, None, 2.0)
