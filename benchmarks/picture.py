"""Draw the picture of the README out of benchmarks/results: `python -m benchmarks write --only picture`.

Two files, for light and for dark pages: docs/pictures/h200-light.svg and h200-dark.svg.  Nothing in them is typed by
hand: our times are those of h200-sm90.json and h200-sm90-step.json, those of others are in
kda/tools/measure/peers.json, which says which gate was timed.  `gates` are the rows of README's table of gates.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from . import common
from .pages import with_rows

README, PICTURES = common.ROOT / "README.md", common.ROOT / "docs" / "pictures"
GATES = "| gate | forward, 64 heads | forward, 32 heads | step, 64 heads | step, 32 heads |"
SHAPE = "h64-8k"
MIB_PER_GIB = 1024
THEMES = {
    "light": dict(text="#1f2328", faint="#8c959f", ours="#0969da", others="#b6bec8"),
    "dark": dict(text="#e6edf3", faint="#7d8590", ours="#58a6ff", others="#3d444d"),
}


class Bar(NamedTuple):
    name: str
    slow: float                              # time for gates that remember; the longer time is drawn whole
    fast: float                              # time for gates that forget
    ours: bool = False


def read(name: str) -> list[dict]:
    return json.loads((common.RESULTS / f"{name}.json").read_text())["rows"]


def saved() -> dict:
    return json.loads((common.ROOT / "kda" / "tools" / "measure" / "peers.json").read_text())


def peers() -> list[dict]:
    return saved()["rows"]


def of_peers(direction: str, key: str | None = None) -> list[Bar]:
    rows = [row for row in peers() if (row["shape"], row["direction"]) == (SHAPE, direction)]
    if key:
        return [Bar(row["peer"], row[key], row[key]) for row in rows if key in row]
    return [Bar(row["peer"], row["slow"], row["fast"]) for row in rows]


def forward() -> list[Bar]:
    mine = {row["regime"]: 1e3 * row["median"] for row in read("h200-sm90") if row["shape"] == SHAPE}
    return [*of_peers("forward"), Bar("kda", mine["slow"], mine["fast"], True)]


def of_steps(key: str) -> dict[str, float]:
    return {row["regime"]: row[key] for row in read("h200-sm90-step") if row["shape"] == SHAPE}


def step() -> list[Bar]:
    again, saved = (of_steps(f"{mode} graph") for mode in ("again", "kept"))
    return [
        *of_peers("step"), Bar("kda", again["slow"], again["fast"], True),
        Bar("kda, disable_recompute", saved["slow"], saved["fast"], True),
    ]


def memory() -> list[Bar]:
    mine = [(name, of_steps(f"{mode} MiB")["slow"] / MIB_PER_GIB)
            for name, mode in (("kda", "again"), ("kda, disable_recompute", "kept"))]
    return [*of_peers("step", "GiB"), *(Bar(name, x, x, True) for name, x in mine)]


def gates() -> list[str]:
    """Milliseconds on an H100 with each gate: forward and step, at 64 heads and at 32."""
    steps = {row["shape"]: row for row in read("h100-sm90-step") if row["regime"] == "slow"}
    forwards = {(row["shape"], row["gate"]): row["forward"] for row in read("h100-gates")}
    rows = []
    for gate, suffix, model in (("bounded", "", "Kimi-K3"), ("softplus", " softplus", "Kimi-Linear")):
        cells = [f"{forwards[shape, gate]:.3f}" for shape in ("h64-8k", "h32-8k")]
        cells += [f"{steps[shape + suffix]['kept graph']:.2f}" for shape in ("h64-8k", "h32-8k")]
        rows.append(f"| {gate}, as in {model} | {' | '.join(cells)} |")
    return rows


def draw(theme: dict[str, str], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.family": "sans-serif", "font.size": 10, "svg.hashsalt": "kda", "text.color": theme["text"],
        "axes.labelcolor": theme["text"], "xtick.color": theme["faint"], "ytick.color": theme["text"],
    })
    gate = f"{saved()['gate']} gate"
    panels = {f"forward, ms, {gate}": forward(), f"training step, ms, {gate}": step(),
              "peak memory of a step, GiB": memory()}
    heights = [len(bars) + 1.2 for bars in panels.values()]
    figure, axes = plt.subplots(len(panels), figsize=(8.4, 0.3 * sum(heights)), height_ratios=heights)
    for ax, (title, bars) in zip(axes, panels.items()):
        for place, bar in enumerate(reversed(bars)):
            most, least = max(bar.slow, bar.fast), min(bar.slow, bar.fast)
            colour = theme["ours" if bar.ours else "others"]
            ax.barh(place, most, color=colour, height=0.68, linewidth=0)
            differ = most > 1.03 * least
            if differ:
                ax.barh(place, least, color=theme["faint"], height=0.68, linewidth=0)
            said = f"{least:.2f} fast gates, {most:.2f} slow" if differ else f"{most:.2f}"
            ax.text(most, place, f"  {said}", va="center", weight="bold" if bar.ours else "normal")
        ax.set_yticks(range(len(bars)), [bar.name for bar in reversed(bars)])
        ax.set_title(title, loc="left", weight="bold", color=theme["text"], fontsize=10)
        ax.set_xlim(0, 1.45 * max(max(bar.slow, bar.fast) for bar in bars))
        ax.set_xticks([])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, transparent=True, metadata={"Date": None})
    plt.close(figure)


def texts() -> dict[Path, str]:
    """Return the pictures, and README with its table of gates."""
    pictures = {README: with_rows(README.read_text(), GATES, gates())}
    with tempfile.TemporaryDirectory() as folder:
        for name, theme in THEMES.items():
            file = Path(folder, f"h200-{name}.svg")
            draw(theme, file)
            pictures[PICTURES / file.name] = file.read_text()
    return pictures
