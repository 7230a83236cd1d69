"""Draws losses.svg, the losses of FLA's model with FLA's kernels and with kda, out of benchmarks/results:
`python docs/pictures/losses.py`.  A test compares the file with it."""

from __future__ import annotations

import json
import math
import pathlib

from drawing import BLUE, ORANGE, SOFT, line, svg, text

HERE = pathlib.Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
RUNS = ("h200-model", "h200-model-64")
SIDES = {"fla": (SOFT, 6, ""), "kda": (BLUE, 2.5, ""), "kda.nn": (ORANGE, 1.5, "5 4")}      # colour, width, dashes
LEFT, TOP, WIDTH, HEIGHT, APART = 50, 40, 340, 190, 70
LEAST, MOST, TICKS = 1.0, 20.0, (1, 2, 5, 10, 20)


def height_of(loss: float) -> float:
    """Return where a loss lies, on a logarithmic scale."""
    return TOP + HEIGHT * (1 - math.log(loss / LEAST) / math.log(MOST / LEAST))


def stroke_of(side: str) -> str:
    """Return the attributes of a side's lines."""
    colour, width, dashes = SIDES[side]
    return f'stroke="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def curve(losses: dict[str, float], x: float, steps: int, side: str) -> str:
    points = " ".join(f"{x + WIDTH * int(step) / steps:.1f},{height_of(loss):.1f}" for step, loss in losses.items())
    return f'<polyline points="{points}" fill="none" {stroke_of(side)}/>'


def panel(run: str, x: float) -> list[str]:
    """Return the parts of one training run: axes, a curve for each side, and its tokens per second."""
    saved = json.loads((RESULTS / f"{run}.json").read_text())
    settings = saved["settings"]
    steps, bottom = settings["steps"], TOP + HEIGHT
    title = f"{settings['layers']} layers of {settings['heads']} heads, {saved['gate']} gate"
    parts = [text(x, TOP - 18, title, "start", bold=True), line(x, bottom, x + WIDTH, bottom, arrow=False)]
    parts += [text(x - 6, height_of(tick) + 4, str(tick), "end", SOFT) for tick in TICKS]
    parts += [text(x + WIDTH * step / steps, bottom + 18, str(step), colour=SOFT) for step in range(0, steps + 1, 10)]
    for number, row in enumerate(saved["rows"]):
        y = TOP + 6 + 20 * number
        words = f"{row['side']}, {row['tokens_per_second']:,.0f} tokens/s"
        parts += [curve(row["losses"], x, steps, row["side"]), text(x + WIDTH - 40, y + 4, words, "end")]
        parts.append(f'<path d="M{x + WIDTH - 32:g} {y:g}h30" {stroke_of(row["side"])}/>')
    return parts


def losses() -> str:
    parts = [part for n, run in enumerate(RUNS) for part in panel(run, LEFT + n * (WIDTH + APART))]
    width = LEFT + len(RUNS) * (WIDTH + APART)
    parts.append(text(width / 2 - APART / 4, TOP + HEIGHT + 38, "loss over steps"))
    return svg(width - APART / 2, TOP + HEIGHT + 50, *parts)


PICTURES = {"losses.svg": losses}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
