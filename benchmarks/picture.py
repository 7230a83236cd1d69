"""Draw the picture of the README out of benchmarks/results: `python -m benchmarks write --only picture`.

Two files, for light and for dark pages: docs/pictures/h200-light.svg and h200-dark.svg; and the tables of figures in
README.  Nothing in them is typed by hand: our times are those of times.py, those of others are in
kda/tools/measure/peers.json, or beside ours where `kda bench --against fla` saved them.  Every figure has the gate that
its file says.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import common, times
from .pages import table_row, with_figures, with_rows

README, PICTURES = common.ROOT / "README.md", common.ROOT / "docs" / "pictures"
GATES = "| gate | forward, 64 heads | forward, 32 heads | step, 64 heads | step, 32 heads |"
GAINS = "| training | gate | on | FLA | kda | gain |"
BESIDE_FLA = "| `kimi-8k` | gates | kda, ms | FLA, ms | gain | kda, MiB | FLA, MiB |"
SHOWN = "with a bounded gate forward # ms, training step # to # ms"
EAGER = ("takes # times as long with 16 heads of 8,192 tokens, # with 64 heads of 1,024, and # with 12 heads of 4,096; "
         "with the GPU idle before each step, #, # and #")
EAGER_SHAPES = ("T8192 H16", "T1024 H64", "T4096 H12")
MODELS_TRAINED = ("h200-model", "h200-model-64")               # by benchmarks/training.py
SIDES = {"kda": "`import kda.fla`", "kda.nn": "layers of `kda.nn`"}
MODELS = {"bounded": "Kimi-K3", "softplus": "Kimi-Linear"}     # whose gates they are
CARD, SHAPE = "h200", "h64-8k"
WAYS = {"forward": "forward", "step": "training step"}
KEEPS = {False: "kda", True: "kda, disable_recompute"}
THEMES = {
    "light": dict(text="#1f2328", faint="#8c959f", ours="#0969da", others="#b6bec8"),
    "dark": dict(text="#e6edf3", faint="#7d8590", ours="#58a6ff", others="#3d444d"),
}


class Bar(NamedTuple):
    name: str
    slow: float                              # for gates that remember; the longer number is drawn whole
    fast: float                              # for gates that forget
    ours: bool = False


class Gain(NamedTuple):
    """Training with kda beside training with FLA: the time of a step, or how many tokens a second has."""

    what: str
    gate: str
    card: str
    fla: float
    kda: float
    unit: str                                # "ms" or "tokens/s"

    @property
    def times(self) -> float:
        return self.fla / self.kda if self.unit == "ms" else self.kda / self.fla

    @property
    def row(self) -> str:
        digits = 0 if self.unit != "ms" else 2 if max(self.fla, self.kda) < 10 else 1
        numbers = (f"{x:,.{digits}f} {self.unit}" for x in (self.fla, self.kda))
        return table_row(self.what, self.gate, self.card, *numbers, f"{self.times:.2f} x")


def saved() -> dict[str, Any]:
    peers: dict[str, Any] = json.loads((common.ROOT / "kda" / "tools" / "measure" / "peers.json").read_text())
    return peers


def peers(direction: str, gate: str, key: str | None = None) -> list[Bar]:
    """Return the bars of others: their times with a gate, or another number of their rows."""
    rows = [row for row in saved()["rows"] if (row["shape"], row["direction"]) == (SHAPE, direction)]
    rows = [row for row in rows if row.get("gate", saved()["gate"]) == gate and (key is None or key in row)]
    bars = [Bar(row["peer"], row[key or "slow"], row[key or "fast"]) for row in rows]
    if key is None:
        new = [side for side in times.OTHERS.values() if side not in {bar.name for bar in bars}]
        bars += [bar for side in new for keeps in (False, True) if (bar := ours(direction, gate, keeps, side))]
    return bars


def ours(direction: str, gate: str, keeps: bool, side: str = "kda") -> Bar | None:
    both = [times.found(CARD, SHAPE, gate, regime, direction, keeps, side) for regime in ("slow", "fast")]
    slow, fast = both[0] or both[1], both[1] or both[0]
    if slow is None or fast is None:
        return None
    return Bar(KEEPS[keeps].replace("kda", side), slow.ms, fast.ms, side == "kda")


def bars_of(direction: str, gate: str) -> list[Bar]:
    """Return the bars of a panel; none if nothing of ours was timed with this gate."""
    forms = (False, True)[: 1 + (direction == "step")]
    mine = [bar for keeps in forms if (bar := ours(direction, gate, keeps))]
    return [*peers(direction, gate), *mine] if mine else []


def memory() -> list[Bar]:
    steps = [(KEEPS[keeps], times.found(CARD, SHAPE, "bounded", "slow", "step", keeps)) for keeps in (False, True)]
    mine = [Bar(name, timed.GiB, timed.GiB, True) for name, timed in steps if timed and timed.GiB]
    return [*peers("step", "bounded", "GiB"), *mine]


def gains() -> list[Gain]:
    """Return what training gains: by the kernels alone, by a layer, by a whole model."""
    found = []
    for bar in peers("step", "bounded"):
        mine = ours("step", "bounded", "disable_recompute" in bar.name)
        if bar.name == "FLA, disable_recompute" and mine:
            what = "`chunk_kda`, 64 heads, `disable_recompute`"
            found.append(Gain(what, "bounded", "H200", bar.slow, mine.slow, "ms"))
    layer = times.document("h200-layer")
    steps = {(row["heads"], row["side"]): row["ms"] for row in layer["rows"] if row["what"] == "step" and "ms" in row}
    gate = "softplus" if layer["lower_bound"] is None else "bounded"
    for heads in sorted({heads for heads, side in steps if side == "fla"}, reverse=True):
        found.append(Gain(f"a layer, {heads} heads", gate, "H200", steps[heads, "fla"], steps[heads, "kda"], "ms"))
    return [*found, *(gain for name in MODELS_TRAINED for gain in gains_of_model(times.document(name)))]


def gains_of_model(model: dict[str, Any]) -> list[Gain]:
    """Return what each side of a training run gains over FLA's kernels."""
    rates, size = {row["side"]: row["tokens_per_second"] for row in model["rows"]}, model["settings"]
    what, card = f"FLA's model, {size['layers']} layers, {size['heads']} heads", model["device"].removeprefix("NVIDIA ")
    return [Gain(f"{what}, {words}", model["gate"], card, rates["fla"], rates[side], "tokens/s")
            for side, words in SIDES.items()]


def gates() -> list[str]:
    """Milliseconds on an H200 with each gate: forward and saved step, at 64 heads and at 32."""
    rows = []
    for gate in times.gates_of(CARD):
        cells = [
            f"{timed.ms:.{digits}f}" if timed else "-" for direction, digits in (("forward", 3), ("step", 2))
            for timed in (times.found(CARD, shape, gate, "slow", direction, direction == "step")
                          for shape in ("h64-8k", "h32-8k"))
        ]
        rows.append(table_row(f"{gate}, as in {MODELS[gate]}", *cells))
    return rows


def beside_fla() -> list[dict[str, Any]]:
    """Return the rows of a saved `kda bench --against fla`."""
    rows: list[dict[str, Any]] = times.document("h200-against-fla")["rows"]
    return rows


def rows_beside_fla() -> list[str]:
    found = []
    for row in beside_fla():
        sides = row, row["baseline"]
        ms, mib = ([f"{side[key] * unit:,.{digits}f}" for side in sides]
                   for key, unit, digits in (("median", 1e3, 2), ("memory", 2**-20, 0)))
        found.append(table_row(WAYS[row["direction"]], row["regime"], *ms, f"{row['ratio']:.2f} x", *mib))
    return found


def bars_beside_fla(direction: str) -> list[Bar]:
    slow, fast = (next(row for row in beside_fla() if (row["direction"], row["regime"]) == (direction, regime))
                  for regime in ("slow", "fast"))
    fla = Bar("FLA", 1e3 * slow["baseline"]["median"], 1e3 * fast["baseline"]["median"])
    return [fla, Bar("kda", 1e3 * slow["median"], 1e3 * fast["median"], ours=True)]


def steps_with_the_host(how: str = "back to back") -> dict[str, float]:
    """Return how many times as long as from a graph eager saved steps take on an H200, by shape."""
    rows = times.document("h200-host")["eager"]["rows"]
    return {shape: rows[shape][f"step, {how}"] / rows[shape][f"graph, {how}"] for shape in EAGER_SHAPES}


def eager() -> list[str]:
    """Return the figures of EAGER."""
    return [f"{x:.2f}" for how in ("back to back", "waited for") for x in steps_with_the_host(how).values()]


def shown() -> list[str]:
    """Return the figures of SHOWN, what the picture says of kda."""
    again, kept = bars_of("step", "bounded")[-2:]
    return [f"{max(bar.slow, bar.fast):.2f}" for bar in (bars_of("forward", "bounded")[-1], kept, again)]


def panels() -> Iterator[tuple[str, list[Bar]]]:
    """Yield the titles of panels and their bars; only those of gates that are on record."""
    for direction, words in WAYS.items():
        for gate in times.gates_of(CARD):
            if bars := bars_of(direction, gate):
                yield f"{words}, ms, {gate} gate", bars
    yield "peak memory of a step, GiB, bounded gate", memory()
    for direction, words in WAYS.items():
        yield f"{words}, ms, softplus gate, kimi-8k (32 heads), eager calls", bars_beside_fla(direction)
    yield "eager saved step in a loop, bounded gate, times as long as from a graph", [
        Bar(shape, ratio, ratio, True) for shape, ratio in steps_with_the_host().items()
    ]
    yield "gain of training over FLA, times as fast", [
        Bar(f"{gain.what.replace('`', '')}, {gain.gate}, {gain.card}", gain.times, gain.times, True) for gain in gains()
    ]


def words_of(bar: Bar) -> str:
    """Return what stands beside a bar."""
    most, least = max(bar.slow, bar.fast), min(bar.slow, bar.fast)
    return f"{least:.2f} fast gates, {most:.2f} slow" if most > 1.03 * least else f"{most:.2f}"


def draw(theme: dict[str, str], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.transforms import blended_transform_factory

    plt.rcParams.update({
        "font.family": "sans-serif", "font.size": 10, "svg.hashsalt": "kda", "text.color": theme["text"],
        "axes.labelcolor": theme["text"], "xtick.color": theme["faint"], "ytick.color": theme["text"],
    })
    drawn = dict(panels())
    heights = [len(bars) + 1.2 for bars in drawn.values()]
    figure, axes = plt.subplots(len(drawn), figsize=(8.4, 0.3 * sum(heights)), height_ratios=heights)
    for ax, (title, bars) in zip(axes, drawn.items()):
        for place, bar in enumerate(reversed(bars)):
            most, least = max(bar.slow, bar.fast), min(bar.slow, bar.fast)
            colour = theme["ours" if bar.ours else "others"]
            ax.barh(place, most, color=colour, height=0.68, linewidth=0)
            if most > 1.03 * least:
                ax.barh(place, least, color=theme["faint"], height=0.68, linewidth=0)
            ax.text(most, place, f"  {words_of(bar)}", va="center", weight="bold" if bar.ours else "normal")
        ax.set_yticks(range(len(bars)), [bar.name for bar in reversed(bars)])
        ax.set_title(" ", fontsize=10)                     # room for the title, which begins where the picture does
        beside = blended_transform_factory(figure.transFigure, ax.transAxes)
        ax.text(0.01, 1, title, transform=beside, va="bottom", weight="bold", fontsize=10).set_in_layout(False)
        alike = [each for other, each in drawn.items() if title.partition(",")[0] == other.partition(",")[0]]
        ax.set_xlim(0, 2.05 * max(max(bar.slow, bar.fast) for each in alike for bar in each))
        ax.set_xticks([])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, transparent=True, metadata={"Date": None})
    plt.close(figure)


def readme(text: str) -> str:
    """Return README with its tables of figures, and what is said of the picture and of eager steps."""
    rows = {GATES: gates(), GAINS: [gain.row for gain in gains()], BESIDE_FLA: rows_beside_fla()}
    for head, found in rows.items():
        text = with_rows(text, head, found)
    return with_figures(with_figures(text, EAGER, eager()), SHOWN, shown())


def texts() -> dict[Path, str]:
    """Return the pictures, and README with its figures."""
    pictures = {README: readme(README.read_text())}
    with tempfile.TemporaryDirectory() as folder:
        for name, theme in THEMES.items():
            file = Path(folder, f"h200-{name}.svg")
            draw(theme, file)
            pictures[PICTURES / file.name] = file.read_text()
    return pictures


