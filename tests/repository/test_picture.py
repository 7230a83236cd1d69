"""The picture of the README shows what was measured."""

import pathlib

import pytest

from benchmarks import picture

ROOT = pathlib.Path(__file__).parents[2]


def test_the_readme_says_what_the_picture_shows():
    forward, (again, kept) = picture.forward()[-1], picture.step()[-2:]
    longest = [max(bar.slow, bar.fast) for bar in (forward, kept, again)]
    said = "forward {:.2f} ms, training step {:.2f} to {:.2f} ms".format(*longest)
    assert said in (ROOT / "README.md").read_text()


def test_the_readme_the_picture_and_the_peers_say_which_gate_was_timed():
    readme, gate = (ROOT / "README.md").read_text(), picture.saved()["gate"]
    caption = readme.partition("</picture>")[2].partition("## ")[0]
    assert f"on an H200 with a {gate} gate: forward" in readme and f"with the **{gate}** gate" in caption
    assert f"a {gate} gate" in picture.saved()["what"]
    for theme in picture.THEMES:
        drawn = (picture.PICTURES / f"h200-{theme}.svg").read_text()
        assert all(f"<!-- {what}, ms, {gate} gate -->" in drawn for what in ("forward", "training step"))


def test_the_softplus_gate_stands_beside_the_bounded_one_with_what_was_measured():
    readme = (ROOT / "README.md").read_text()
    bounded, softplus = picture.gates()
    assert f"{bounded}\n{softplus}\n" in readme and "0.322" in bounded and "0.492" in softplus


def test_every_time_of_ours_is_shorter_than_every_other_one():
    """Otherwise the picture would have to say so in words."""
    for bars in (picture.forward(), picture.step(), picture.memory()):
        ours, others = ([bar for bar in bars if bar.ours == is_ours] for is_ours in (True, False))
        assert max(bar.slow for bar in ours) < min(bar.fast for bar in others)


def test_it_is_drawn_for_light_and_for_dark_pages():
    pytest.importorskip("matplotlib")
    drawings = picture.texts()
    for name, theme in picture.THEMES.items():
        drawn = drawings[picture.PICTURES / f"h200-{name}.svg"]
        assert drawn.count(f"fill: {theme['ours']}") == len([bar for bars in (picture.forward(), picture.step(),
                                                            picture.memory()) for bar in bars if bar.ours])
