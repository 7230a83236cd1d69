"""Draws the pictures of docs/math.md: `python docs/pictures/maths.py`.  A test holds the files to it.

Colours are of a middle lightness, so that one file reads on a light and on a dark page.
"""

from __future__ import annotations

import pathlib

HERE = pathlib.Path(__file__).parent
INK, SOFT = "#808080", "#a0a0a0"
LEVELS = ("#4c8dd6", "#3fa77a", "#d08a3c", "#b06ac2")           # of halving, the widest first; the last one: rows alone


def svg(width: int, height: int, *parts: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">'
    )
    arrow = (
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    return "\n".join([head, arrow, *parts, "</svg>", ""])


def box(x: float, y: float, w: float, h: float, colour: str, fill: float = 0.25) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{colour}" fill-opacity="{fill}" '
        f'stroke="{colour}"/>'
    )


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, arrow: bool = True) -> str:
    end = ' marker-end="url(#to)"' if arrow else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}"{end}/>'


def chunks(count: int = 4) -> str:
    """What is parallel over chunks, and what is serial."""
    w, step, left = 120, 150, 185
    parts = [
        text(10, 45, "chunks of C tokens", "start"), text(10, 107, "gate, intra, wy", "start"),
        text(10, 124, "all chunks at once", "start", SOFT), text(10, 187, "state", "start"),
        text(10, 204, "one after the other", "start", SOFT), text(10, 267, "output", "start"),
        text(10, 284, "all chunks at once", "start", SOFT),
    ]  # fmt: skip
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
        ]  # fmt: skip
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
        at = top + 30 + 60 * level
        parts += [box(left + (rows + 2) * size, at - 12, 16, 16, colour, 0.35)]
        parts += [text(left + (rows + 3) * size + 5, at, name, "start")]
        width, level = half, level + 1
    for row in range(rows):
        parts.append(box(left + row * size, top + row * size, size, size, SOFT, 0.5))
    at = top + 30 + 60 * level
    parts += [box(left + (rows + 2) * size, at - 12, 16, 16, SOFT, 0.5)]
    parts += [text(left + (rows + 3) * size + 5, at, "the diagonal: decay 1", "start")]
    return svg(left + (rows + 13) * size, top + rows * size + 15, *parts)


PICTURES = {"chunks.svg": chunks, "halving.svg": halving}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
