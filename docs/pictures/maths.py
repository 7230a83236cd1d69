"""Draws the pictures of docs/math.md: `python docs/pictures/maths.py`.  A test compares the files with it."""

from __future__ import annotations

import pathlib

from drawing import BLUE, GREEN, ORANGE, PURPLE, SOFT, box, line, svg, text

HERE = pathlib.Path(__file__).parent
LEVELS = (BLUE, GREEN, ORANGE, PURPLE)  # colours of the levels of halving, the widest first; the last one: rows alone


def chunks(count: int = 4) -> str:
    """What is parallel over chunks, and what is serial."""
    w, step, left = 120, 150, 185
    parts = [
        text(10, 45, "chunks of C tokens", "start"), text(10, 107, "gate, intra, wy", "start"),
        text(10, 124, "all chunks at once", "start", SOFT), text(10, 187, "state", "start"),
        text(10, 204, "one after the other", "start", SOFT), text(10, 267, "output", "start"),
        text(10, 284, "all chunks at once", "start", SOFT),
    ]
    for i in range(count):
        x = left + i * step
        middle = x + w / 2
        parts += [
            box(x, 25, w, 30, LEVELS[0]), text(middle, 45, "q, k, v, g, b"), line(middle, 55, middle, 88),
            box(x, 90, w, 42, LEVELS[1]), text(middle, 107, "A_qk, qg, kg"), text(middle, 124, "w, u"),
            line(middle, 132, middle, 168), box(x, 170, w, 42, LEVELS[2]), text(middle, 187, "v_new = u - w h"),
            text(middle, 204, "next h"), line(middle, 212, middle, 248), box(x, 250, w, 42, LEVELS[3]),
            text(middle, 267, "o = scale qg h"), text(middle, 284, "+ A_qk v_new"),
            line(x - (step - w) + (0 if i else 5), 191, x - 2, 191),
        ]
        parts.append(text(x - (step - w) / 2, 183, f"h{i}"))
    end = left + (count - 1) * step + w
    parts += [line(end, 191, end + 28, 191), text(end + 15, 183, f"h{count}")]
    return svg(end + 40, 305, *parts)


def halving(rows: int = 16, size: int = 20) -> str:
    """Which product makes which quarter of A; lines are the widest cuts."""
    left, top = 90, 30
    parts = [text(left + rows * size / 2, 18, "j: keys")]
    parts.append(text(left - 10, top + rows * size / 2, "i: queries", "end"))
    width, level = rows, 0
    while width > 1:
        half, colour = width // 2, LEVELS[level]
        for begin in range(0, rows, width):
            x, y = left + begin * size, top + (begin + half) * size
            parts.append(box(x, y, half * size, half * size, colour, 0.35))
            if level < 2:
                parts.append(line(x, y, x + width * size, y, arrow=False))
        name = f"{rows // width} product{'s' * (width < rows)} of {half} x {half}"
        level_y = top + 30 + 60 * level
        parts += [box(left + (rows + 2) * size, level_y - 12, 16, 16, colour, 0.35)]
        parts += [text(left + (rows + 3) * size + 5, level_y, name, "start")]
        width, level = half, level + 1
    for row in range(rows):
        parts.append(box(left + row * size, top + row * size, size, size, SOFT, 0.5))
    level_y = top + 30 + 60 * level
    parts += [box(left + (rows + 2) * size, level_y - 12, 16, 16, SOFT, 0.5)]
    parts += [text(left + (rows + 3) * size + 5, level_y, "the diagonal: decay 1", "start")]
    return svg(left + (rows + 13) * size, top + rows * size + 15, *parts)


PICTURES = {"chunks.svg": chunks, "halving.svg": halving}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
