"""Timelines as a self-contained page: an SVG of what the roles of an SM do from clock to clock."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

WIDTH, LABEL = 1400, 190  # pixels: of the picture, and of the names at its left
HEIGHTS = {"warp": 13, "unit": 15, "copy": 9, "mbarrier": 13, "barrier": 13}
HEADINGS = {"unit": "engines", "copy": "copies in flight", "mbarrier": "mbarriers: phases",
            "barrier": "named barriers: first arrival to last"}
# why a warp waits -> what the legend says
WAITS = {
    "mbarrier": "an mbarrier", "barrier": "a barrier", "cluster": "a barrier", "copies": "its copies",
    "grid": "the previous kernel", "tensor": "a matrix product", "long": "global memory", "short": "shared memory",
    "mio": "shared memory", "math": "a unit, a result or its turn", "wait": "a unit, a result or its turn",
    "not selected": "a unit, a result or its turn",
}
# light, dark
COLOURS = {
    "work": ("#2a78d6", "#3987e5"), "unit": ("#008300", "#33a533"), "copy": ("#52514e", "#c3c2b7"),
    "phase": ("#c9c7bd", "#55544f"), "odd-phase": ("#e3e1d9", "#3d3c39"),
    "mbarrier": ("#eda100", "#c98500"), "barrier": ("#e87ba4", "#d55181"), "cluster": ("#e87ba4", "#d55181"),
    "copies": ("#1baf7a", "#199e70"), "grid": ("#52514e", "#c3c2b7"), "tensor": ("#4a3aa7", "#9085e9"),
    "long": ("#e34948", "#e66767"), "short": ("#eb6834", "#d95926"), "mio": ("#eb6834", "#d95926"),
    "math": ("#b9c8d8", "#4d6076"), "wait": ("#b9c8d8", "#4d6076"), "not selected": ("#b9c8d8", "#4d6076"),
}
STYLE = Path(__file__).with_name("pages.css").read_text()


def page(timelines, begins=None, ends=None, sm=0):
    """Return a page of one or several launches; a launch's window is chosen unless it is given."""
    return document("A timeline", sections(timelines, begins, ends, sm))


def sections(timelines, begins=None, ends=None, sm=0):
    """Return the parts of such a page, one for each launch."""
    return "\n".join(_launch(timeline, *_window(timeline, sm, begins, ends), sm) for timeline in timelines)


def document(title, body, style=""):
    """Return a page in the colours of timelines, with more rules for its style."""
    light, dark = (" ".join(f"--{_name(k)}: {c[n]};" for k, c in COLOURS.items()) for n in (0, 1))
    classes = " ".join(f".{_name(k)} {{ fill: var(--{_name(k)}); background: var(--{_name(k)}); }}" for k in COLOURS)
    colours = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{classes}\n"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width"><style>'
        f"\n{STYLE}{colours}{style}</style></head><body>\n{body}\n</body></html>\n"
    )


def _name(kind):
    return "is-" + kind.replace(" ", "-")


# ---- which part of a launch


def _window(timeline, sm, begins, ends):
    """Return (begins, ends): between two ends of a phase of the mbarrier that has most, in the middle of the launch: a
    turn of a ring. Without such, the life of a CTA, or all."""
    longest = max((row.slices for row in timeline.rows if (row.kind, row.sm) == ("mbarrier", sm)), key=len, default=[])
    slices = [longest[len(longest) // 2]] if len(longest) >= 3 else _life(timeline, sm)
    first = min((s.begins for s in slices), default=0.0)
    last = max((s.ends for s in slices), default=max(timeline.clock.clocks, 1.0))
    return first if begins is None else begins, last if ends is None else ends


def _life(timeline, sm):
    """Return the slices of the CTA in the middle."""
    warps = [row for row in timeline.rows if row.kind == "warp" and row.sm == sm and row.slices]
    ctas = list(dict.fromkeys(row.name.partition(":")[0] for row in warps))
    chosen = ctas[len(ctas) // 2 : len(ctas) // 2 + 1]
    return [s for row in warps if row.name.partition(":")[0] in chosen for s in row.slices]


# ---- one launch


def _launch(timeline, begins, ends, sm):
    clock = timeline.clock
    rows = [row for row in timeline.rows if row.sm == sm]
    seen = [(row, [s for s in row.slices if s.begins < ends and s.ends > begins]) for row in rows]
    seen = [(row, slices) for row, slices in seen if slices]
    picture, waits = _picture(seen, begins, ends)
    legend = {"issues instructions": "work"} | {f"waits for {WAITS[why]}": why for why in WAITS if why in waits}
    legend |= {"a unit works": "unit", "a copy is in flight": "copy", "phases, one after the other": "phase"}
    items = "".join(f'<li><i class="{_name(kind)}"></i>{says}</li>' for says, kind in legend.items())
    return (
        f"<h2>{escape(timeline.kernel)}</h2>\n<p>SM {sm}, clocks {begins:,.0f} to {ends:,.0f} of "
        f"{clock.clocks:,.0f} ({1e3 * clock.milliseconds:,.1f} us on {clock.chip}, predicted): {ends - begins:,.0f} "
        f"clocks. Each line is a warp; hover over a slice for details. Waits below 48 clocks count as work.</p>\n"
        f'<ul>{items}</ul>\n<div class="picture">{picture}</div>'
    )


def _picture(rows, begins, ends):
    """Return (SVG, reasons that its warps wait for)"""
    scale, y, parts, waits, heading = (WIDTH - LABEL) / (ends - begins), 22, [], set(), None
    for row, slices in rows:
        said = f"{row.name.partition(':')[0]}: {row.role}" if row.kind == "warp" else HEADINGS[row.kind]
        if said != heading:
            y += 10
            heading, is_warp = said, row.kind == "warp"
            cta, _, role = said.partition(": ")
            label = escape(f"{role} ({cta})" if is_warp else said)
            parts.append(f'<text class="role" x="0" y="{y + 10}">{label}</text>')
            y += 0 if is_warp else 16
        height = HEIGHTS[row.kind]
        if row.kind in ("unit", "mbarrier", "barrier"):
            parts.append(f'<text x="0" y="{y + height - 4}">{escape(row.name)}</text>')
        for s in slices:
            parts.append(_rect(row, s, begins, ends, scale, y, height, _kind(row, s)))
            waits |= {s.why} if s.kind == "stall" else set()
        y += height
    axis = _axis(begins, ends, scale, y)
    return f'<svg viewBox="0 0 {WIDTH} {y + 6}" role="img">{axis}{"".join(parts)}</svg>', waits


def _kind(row, s):
    """Return the key of its colour."""
    if row.kind == "mbarrier":
        return "odd-phase" if row.slices.index(s) % 2 else "phase"
    return s.why if s.kind == "stall" else "phase" if s.kind == "barrier" else s.kind


def _rect(row, s, begins, ends, scale, y, height, kind):
    left, right = max(s.begins, begins), min(s.ends, ends)
    width = max((right - left) * scale - 0.4, 0.6)
    shape = f'class="slice {_name(kind)}" x="{LABEL + (left - begins) * scale:.1f}" y="{y + 1}"'
    return f'<rect {shape} width="{width:.1f}" height="{height - 2}"><title>{escape(_says(row, s))}</title></rect>'


def _says(row, s):
    lines = [row.name, s.name, f"clocks {s.begins:,.0f} to {s.ends:,.0f}: {s.clocks:,.0f}"]
    if s.issued:
        lines.append(f"issued {s.issued:,.0f}")
    lines += [f"stalled, {why}: {n:,.0f}" for why, n in sorted(s.stalls.items(), key=lambda item: -item[1])]
    return "\n".join(lines + [f"{name}: {what}" for name, what in s.says.items()])


def _axis(begins, ends, scale, bottom):
    step = next(n for e in range(9) for n in (10**e, 2 * 10**e, 5 * 10**e) if (ends - begins) / n <= 12)
    parts = []
    for n in range(math.ceil(begins / step), math.floor(ends / step) + 1):
        x = LABEL + (n * step - begins) * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="12" text-anchor="middle">{n * step:,.0f}</text>')
    return "".join(parts)
