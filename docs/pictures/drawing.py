"""What the scripts of this folder draw with.  One file reads on a light and on a dark page: colours have a middle
lightness, and text and lines become lighter where the page is dark."""

from __future__ import annotations

from html import escape

INK, SOFT = "#57606a", "#6e7781"
ON_DARK = {INK: "#c3c9d0", SOFT: "#98a1ab"}
BLUE, GREEN, ORANGE, PURPLE, RED, PINK = "#4c8dd6", "#3fa77a", "#d08a3c", "#b06ac2", "#d9605f", "#d9709a"


def svg(width: float, height: float, *parts: str, size: int = 13) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="{size}">'
    )
    arrow = (
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    rules = "".join(f'[fill="{a}"]{{fill:{b}}}[stroke="{a}"]{{stroke:{b}}}' for a, b in ON_DARK.items())
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    return "\n".join([head, style, arrow, *parts, "</svg>", ""])


def box(x: float, y: float, w: float, h: float, colour: str, fill: float = 0.25) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{colour}" fill-opacity="{fill}" '
        f'stroke="{colour}"/>'
    )


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = INK, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, arrow: bool = True, dashed: bool = False) -> str:
    end = ' marker-end="url(#to)"' if arrow else ""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}"{dashes}{end}/>'
