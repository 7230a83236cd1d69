"""Draws kernels/*.svg, the pictures of docs/stages: `python docs/pictures/kernels.py`.

Each kernel has a picture of its roles, pipelines and memory, drawn from its configuration, and one of its time, drawn
from timelines.json.  `--clock` first measures those times anew in the simulator.  Tests compare the files with what
this script draws, and timelines.json with the clock.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drawing import BLUE, GREEN, INK, ORANGE, PINK, PURPLE, RED, SOFT, box, line, svg, text
from specs import KERNELS, SMEM_LIMIT, TIMED, TMEM_COLUMNS, Kernel, Timed

from kda.backends.common.cute.fields import Struct, StructField

HERE = pathlib.Path(__file__).parent
OUT = HERE / "kernels"
TIMES = HERE / "timelines.json"

WIDTH = 900
FONT = 12
LINE = 16                                    # between lines of text
DTYPES = {"bfloat16": BLUE, "float32": GREEN, "int64": ORANGE}


# ---- roles and pipelines

NODE_GAP = 128                               # between columns: room for an arrow's label
ROW_GAP = 62
EDGE = 32                                    # between arrows


@dataclass
class Placed:
    x: float
    y: float
    w: float
    h: float
    column: int
    row: int


def of_warps(warps: Sequence[int]) -> str:
    """Name warps, those that follow each other by the first and the last: warps 4-7, 16-19."""
    firsts = [warp for warp in warps if warp - 1 not in warps]
    lasts = [warp for warp in warps if warp + 1 not in warps]
    runs = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(firsts, lasts))
    return f"warps {runs}" if len(warps) > 1 else f"warp {runs}"


def about(kernel: Kernel, name: str) -> list[str]:
    """Lines of a node: a role's warps and registers, then what it does."""
    role = name.partition(":")[0]
    lines = list(kernel.nodes[name].says)
    if role in kernel.config.roles:
        many = of_warps(kernel.config.roles[role])
        registers = kernel.registers.get(role.split()[0])
        lines[:0] = [many] + [f"{registers} registers"] * bool(registers)
    return lines


def place(kernel: Kernel, top: float) -> dict[str, Placed]:
    columns = 1 + max(node.column for node in kernel.nodes.values())
    rows = 1 + max(node.row for node in kernel.nodes.values())
    ends = [(kernel.nodes[e.start].row, kernel.nodes[e.end].row) for e in kernel.edges]
    gaps = [ROW_GAP if (row, row + 1) in ends or (row + 1, row) in ends else ROW_GAP // 3 for row in range(rows)]
    width = (WIDTH - 20 - (columns - 1) * NODE_GAP) / columns
    heights = [0.0] * rows
    for name, node in kernel.nodes.items():
        beside = sum(name == e.end and kernel.nodes[e.start].row == node.row for e in kernel.edges)
        beside += sum(name == e.start and kernel.nodes[e.end].row == node.row for e in kernel.edges)
        left = sum(
            name in (e.start, e.end) and min(kernel.nodes[e.start].column, kernel.nodes[e.end].column) < node.column
            for e in kernel.edges if kernel.nodes[e.start].row == kernel.nodes[e.end].row
        )
        arrows = max(left, beside - left)
        heights[node.row] = max(heights[node.row], 26 + LINE * len(about(kernel, name)), 14 + EDGE * arrows)
    found = {}
    for name, node in kernel.nodes.items():
        y = top + sum(heights[: node.row]) + sum(gaps[: node.row])
        found[name] = Placed(10 + node.column * (width + NODE_GAP), y, width, heights[node.row], node.column, node.row)
    return found


def roles(kernel: Kernel, top: float) -> tuple[list[str], float]:
    """Nodes, and arrows between neighbours; frames round the nodes of a CTA."""
    frame = 22 if kernel.frames else 0
    places = place(kernel, top + 24 + frame)
    parts = [text(10, top + 12, "Roles and pipelines", "start", bold=True)]
    for title, names in kernel.frames.items():
        inside = [places[name] for name in names]
        x, y = min(p.x for p in inside) - 7, min(p.y for p in inside) - 22
        w, h = max(p.x + p.w for p in inside) + 7 - x, max(p.y + p.h for p in inside) + 8 - y
        parts += [
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="none" stroke="{SOFT}" '
            'stroke-dasharray="2 3"/>', text(x + 8, y + 15, title, "start", SOFT),
        ]
    for name, p in places.items():
        role = name.partition(":")[0]
        is_role = role in kernel.config.roles
        colour = BLUE if is_role else SOFT if "memory" in role else PURPLE
        parts.append(box(p.x, p.y, p.w, p.h, colour, 0.2 if is_role else 0.08))
        parts.append(text(p.x + p.w / 2, p.y + 18, role, bold=True))
        for n, words in enumerate(about(kernel, name)):
            parts.append(text(p.x + p.w / 2, p.y + 18 + LINE * (n + 1), words))
    used: dict[frozenset[str], int] = {}
    for edge in kernel.edges:
        a, b, key = places[edge.start], places[edge.end], frozenset((edge.start, edge.end))
        n = used[key] = used.get(key, -1) + 1
        label = kernel.label(edge)
        dashed = label.startswith(("empty", "values_empty", "rows_done", "read"))
        if a.row == b.row:
            assert abs(a.column - b.column) == 1, f"{kernel.name}: {label} is not between neighbours"
            y = max(a.y, b.y) + 26 + EDGE * n
            x1, x2 = (a.x + a.w + 3, b.x - 3) if a.x < b.x else (a.x - 3, b.x + b.w + 3)
            parts += [line(x1, y, x2, y, dashed=dashed), text((x1 + x2) / 2, y - 5, label)]
        else:
            assert a.column == b.column and abs(a.row - b.row) == 1, f"{kernel.name}: {label}, not neighbours"
            x = a.x + 14 + 0.47 * a.w * n
            y1, y2 = (a.y + a.h + 3, b.y - 3) if a.y < b.y else (a.y - 3, b.y + b.h + 3)
            names = re.split(", | (?=[+])", label)    # below each other: a label may not leave its column
            first = (y1 + y2) / 2 + 4 - LINE / 2 * (len(names) - 1)
            parts.append(line(x, y1, x, y2, dashed=dashed))
            parts += [text(x + 6, first + LINE * k, words, "start") for k, words in enumerate(names)]
    return parts, max(p.y + p.h for p in places.values()) + (22 if kernel.frames else 14)


# ---- what the warps of a CTA do, step by step

STEP = 24


def steps(kernel: Kernel, top: float) -> tuple[list[str], float]:
    """Columns are warps, time runs down; a line across is a barrier."""
    if not kernel.steps:
        return [], top
    left, width, y = 70, WIDTH - 80, top + 42
    of_warp = width / kernel.warps
    parts = [text(10, top + 12, f"{kernel.steps_title}, step by step", "start", bold=True)]
    parts.append(text(60, y - 8, "warp", "end", SOFT))
    parts += [text(left + of_warp * (n + 0.5), y - 8, str(n), colour=SOFT) for n in range(kernel.warps)]
    for step in kernel.steps:
        if isinstance(step, str):
            parts += [line(left, y + 12, left + width, y + 12, arrow=False, dashed=True)]
            parts += [text(left + width - 4, y + 8, step, "end", SOFT)]
            y += 18
            continue
        for first, last, words in step:
            x, w = left + first * of_warp, (last - first + 1) * of_warp
            parts += [box(x + 2, y, w - 4, STEP, BLUE, 0.2), text(x + w / 2, y + 16, words)]
        y += STEP + 6
    return parts, y + 14


# ---- memory

NAME, SCALE, ROW = 160, 470, 20              # pixels: names, the bar, and a row


@dataclass
class Row:
    name: str
    says: str
    bytes: int
    offsets: list[int]                            # offsets of each of its places
    colour: str
    deep: int = 0


def shape(f: StructField) -> str:
    return f"{' x '.join(map(str, f.shape))} {f.dtype}"


def rows_of(struct: Struct, inner: dict[str, Struct], bases: list[int], deep: int, least: int) -> Iterator[Row]:
    """A row for each field; small ones that follow each other share one."""
    small: list[tuple[str, StructField]] = []

    def together() -> Iterator[Row]:
        if small:
            names, size = [name for name, _ in small], sum(f.bytes for _, f in small)
            says = ", ".join(names) if len(names) < 5 else f"{', '.join(names[:2])}, ... {names[-1]}"
            first = small[0][1].offset
            colour = DTYPES.get(small[0][1].dtype, ORANGE) if len(small) == 1 else ORANGE
            yield Row("small fields" if len(small) > 1 else names[0], says if len(small) > 1 else shape(small[0][1]),
                      size, [b + first for b in bases], colour, deep)
            small.clear()

    for name, f in struct.fields.items():
        if f.bytes < least and name not in inner:
            small.append((name, f))
            continue
        yield from together()
        offsets = [base + f.offset for base in bases]
        if name not in inner:
            yield Row(name, shape(f), f.bytes, offsets, DTYPES.get(f.dtype, ORANGE), deep)
            continue
        count, each = f.shape
        says = f"{count} x {each:,} bytes" if count > 1 else ""
        yield Row(name, says, f.bytes, offsets, SOFT, deep)
        each_base = [a + n * each for a in offsets for n in range(count)]
        yield from rows_of(inner[name], inner, each_base, deep + 1, least)
    yield from together()


def shared_memory(kernel: Kernel, top: float) -> tuple[list[str], float]:
    struct, total = kernel.config.struct, kernel.config.shared
    end = SMEM_LIMIT if 2 * total > SMEM_LIMIT else -(-total // 8192) * 8192
    title = f"Shared memory: {total:,} bytes per CTA"
    title += f" of {SMEM_LIMIT:,}" if end == SMEM_LIMIT else f", {kernel.ctas} CTAs per SM"
    parts = [text(10, top + 12, title, "start", bold=True)]
    y, per_byte = top + 44, SCALE / end
    rows = list(rows_of(struct, kernel.inner, [0], 0, max(512, end // 400)))
    bottom = y + ROW * len(rows)
    tick = 32768 if end > 100_000 else 8192 if end > 30_000 else 4096
    for address in range(0, end + 1, tick):
        x = NAME + address * per_byte
        parts += [line(x, y - 6, x, bottom, arrow=False), text(x, y - 10, f"{address // 1024}", colour=SOFT)]
        parts[-2] = parts[-2].replace(f'stroke="{INK}"', f'stroke="{SOFT}" stroke-opacity="0.35"')
    parts.append(text(NAME - 8, y - 10, "KiB", "end", SOFT))
    for row in rows:
        parts.append(text(10 + 14 * row.deep, y + 14, row.name, "start"))
        each = row.bytes * per_byte
        for address in row.offsets:
            parts.append(box(NAME + address * per_byte, y + 3, max(each, 1.5), ROW - 6, row.colour, 0.35))
        many = f"{len(row.offsets)} x " if len(row.offsets) > 1 and row.deep else ""
        parts.append(text(NAME + SCALE + 12, y + 14, row.says, "start", SOFT))
        parts.append(text(WIDTH - 4, y + 14, f"{many}{row.bytes:,}", "end"))
        y += ROW
    return parts, y + 16


def tensor_memory(kernel: Kernel, top: float) -> tuple[list[str], float]:
    if not kernel.tmem:
        return [], top
    begin, end = min(c.begin for c in kernel.tmem), max(c.begin + c.columns for c in kernel.tmem)
    assert begin == 0 and end <= TMEM_COLUMNS
    whole = TMEM_COLUMNS if end > 64 else 64
    title = f"Tensor memory: {end} of {TMEM_COLUMNS} columns" + (" per CTA" if kernel.ctas > 1 else "")
    parts = [text(10, top + 12, title, "start", bold=True)]
    y, per = top + 24, (WIDTH - 20) / whole
    colours = [BLUE, GREEN, ORANGE, PURPLE]
    for n, c in enumerate(sorted(kernel.tmem, key=lambda c: c.begin)):
        x, w = 10 + c.begin * per, c.columns * per
        parts += [box(x, y, w, 44, colours[n % 4], 0.3), text(x + w / 2, y + 19, c.name)]
        parts += [text(x + w / 2, y + 36, f"{c.columns}", colour=SOFT)]
    parts.append(box(10 + end * per, y, (whole - end) * per, 44, SOFT, 0.05) if end < whole else "")
    return [part for part in parts if part], y + 62


def structure(kernel: Kernel) -> str:
    parts, y = [], 6.0
    for draw in (roles, steps, shared_memory, tensor_memory):
        if draw is roles and not kernel.nodes:
            continue
        more, y = draw(kernel, y)
        parts += more
    return svg(WIDTH, y, *parts, size=FONT)


# ---- time

LOOKS = {                                    # kind of a slice -> what the legend says, colour
    "work": ("issues instructions", BLUE),
    "mbarrier": ("mbarrier", ORANGE),
    "barrier": ("barrier", PINK),
    "tensor": ("tensor core or memory", PURPLE),
    "long": ("global memory", RED),
    "other": ("other", "#b5c0cc"),
    "unit": ("a unit works", GREEN),
}
BAR = {"warp": 9, "unit": 12}
UNITS = {"tensor core": "tensor cores, mma", "bulk copies": "bulk copies", "shared memory": "shared memory"}
LABELS = 150
PIXELS = 700                                 # slices shorter than this fraction of a window are not shown


def rectangles(slices: list[tuple[float, float, float, float]], colour: str) -> str:
    """One path for all rectangles of a colour."""
    d = "".join(f"M{x:g} {y:g}h{w:g}v{h:g}h-{w:g}z" for x, y, w, h in slices)
    return f'<path d="{d}" fill="{colour}" fill-opacity="0.9"/>'


def time(kernel: Kernel | Timed, found: dict[str, Any]) -> str:
    ends = found["ends"]
    per, y, parts, heading = (WIDTH - LABELS - 10) / ends, 62.0, [], None
    shapes: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in found["rows"]:
        if row["group"] != heading:
            heading = row["group"]
            y += 8
            parts.append(text(10, y + BAR[row["kind"]] - 1, heading, "start", bold=row["kind"] == "warp"))
        for a, b, kind in row["slices"]:
            x, w = LABELS + a * per, max((b - a) * per - 0.3, 0.5)
            shape_ = (round(x, 1), y + 1, round(w, 1), BAR[row["kind"]] - 2)
            shapes.setdefault(kind, []).append(shape_)
        y += BAR[row["kind"]]
    step = next(n for e in range(9) for n in (10**e, 2 * 10**e, 5 * 10**e) if ends / n <= 10)
    for clocks in range(0, ends + 1, step):
        x = LABELS + clocks * per
        mark = line(x, 58, x, y + 2, arrow=False).replace(f'stroke="{INK}"', f'stroke="{SOFT}" stroke-opacity="0.4"')
        anchor = "middle" if x < WIDTH - 20 else "end"
        parts += [mark, text(x if anchor == "middle" else WIDTH - 2, 54, f"{clocks:,}", anchor, SOFT)]
    head = f"{kernel.title}: {found['says']}, {ends:,} clocks on {found['chip'].upper()}, predicted"
    parts.insert(0, text(10, 18, head, "start", bold=True))
    x, waits = 10.0, False
    for kind, (says, colour) in LOOKS.items():
        if kind in shapes:
            if not waits and kind not in ("work", "unit"):
                parts.append(text(x, 36, "waits for:", "start"))
                x, waits = x + 60, True
            parts += [rectangles([(x, 27, 10, 10)], colour), text(x + 14, 36, says, "start")]
            x += 32 + 5.9 * len(says)
    parts += [rectangles(some, LOOKS[kind][1]) for kind, some in shapes.items()]
    return svg(WIDTH, y + 12, *parts, size=11)


# ---- the clock


def measured(kernels: list[Kernel | Timed]) -> dict[str, Any]:
    """Timelines of the kernels, from calls in the simulator that launch them."""
    import torch

    import kda
    from kda.tools.verify.cases import make_inputs
    from kda.tools.verify.definition import leaves_of
    from ptxkit import capture

    found: dict[str, Any] = {}
    for call in dict.fromkeys(kernel.call for kernel in kernels if kernel.call):
        case = make_inputs(T=call.T, H=call.H, K=128, V=128, initial_state=False, dtype=call.dtype)
        inputs = case.keywords | (leaves_of(case.keywords) if call.step else {})
        with capture(arch=call.arch, checks=False, clock=True, timeline=True) as session:
            o, ht = kda.chunk_kda(**inputs, backend=call.backend, disable_recompute=call.step and call.keep)
            if call.step:
                torch.autograd.backward([o, ht], [case.do, case.dht])
        for kernel in kernels:
            if kernel.call == call:
                run = next(run for run in session.runs if run.recorded and is_launch_of(kernel, run))
                found[kernel.name] = window(kernel, run.timeline(sms=1))
    return found


def is_launch_of(kernel: Kernel | Timed, run: Any) -> bool:
    if isinstance(kernel, Timed):
        return run.kernel == kernel.title
    config = run.recorded.config
    assert type(config) is not type(kernel.config) or config == kernel.config, f"{kernel.name}: {config} was launched"
    return config == kernel.config


def group_of(kernel: Kernel | Timed, row: Any) -> str:
    """The heading of a warp's row."""
    if isinstance(kernel, Kernel):
        return row.role
    warp = int(row.name.rpartition(" ")[2])
    return next(name for name, warps in kernel.roles if warp in warps)


def window(kernel: Kernel | Timed, timeline: Any) -> dict[str, Any]:
    """Warps and units of the first CTA between two ends of a phase of an mbarrier, or in the life of a CTA."""
    rows = [row for row in timeline.rows if row.sm == min(row.sm for row in timeline.rows)]
    ctas = [row.name.partition(":")[0] for row in rows if row.kind == "warp"]
    cta = ctas[0]
    if kernel.ring:
        phases = next(row.slices for row in rows if row.name == f"{cta}: {kernel.ring}")
        middle = len(phases) // 2
        begins, ends = phases[middle - 1].ends, phases[middle - 1 + kernel.turns].ends
    else:
        slices = [s for row in rows if row.kind == "warp" and row.name.startswith(f"{cta}:") for s in row.slices]
        begins, ends = min(s.begins for s in slices), max(s.ends for s in slices)
    kept: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row.kind not in BAR or not (row.kind == "unit" or row.name.startswith(f"{cta}:")):
            continue
        if row.kind == "warp":
            group = group_of(kernel, row)
        else:
            group = "UMMA" if row.name == "tensor core" else UNITS[row.name.rstrip(" 0123")]
        slices = clipped(row.slices, begins, ends)
        if slices:
            drawn = kept.setdefault((row.kind, group), [])
            if row.kind == "unit" and drawn:
                drawn[0]["slices"] = merged(drawn[0]["slices"] + slices)
            else:
                drawn.append({"group": group, "kind": row.kind, "slices": slices})
    length, found = round(ends - begins), [row for some in kept.values() for row in some]
    for row in found:
        row["slices"] = coarse(row["slices"], length / PIXELS)
    return {"ends": length, "says": kernel.window, "chip": timeline.clock.chip.name, "rows": found}


def clipped(slices: list[Any], begins: float, ends: float) -> list[list[Any]]:
    """[begins, ends, a key of LOOKS], from the window's begin; neighbours that look alike are one."""
    found: list[list[Any]] = []
    for s in slices:
        if s.ends > begins and s.begins < ends:
            why = s.why if s.why in LOOKS else "other"
            kind = why if s.kind == "stall" else s.kind
            a, b = round(max(s.begins, begins) - begins), round(min(s.ends, ends) - begins)
            if found and found[-1][2] == kind and a - found[-1][1] <= 2:
                found[-1][1] = b
            elif b > a:
                found.append([a, b, kind])
    return found


def coarse(slices: list[list[Any]], least: float) -> list[list[Any]]:
    """Without slices too short to be seen: the one before lasts until they end, if it touches them."""
    found: list[list[Any]] = []
    for a, b, kind in slices:
        if found and a - found[-1][1] <= least and (b - a < least or kind == found[-1][2]):
            found[-1][1] = b
        elif b - a >= least:
            found.append([a, b, kind])
    return found


def merged(slices: list[list[Any]]) -> list[list[Any]]:
    """When any of several units works."""
    found: list[list[Any]] = []
    for a, b, kind in sorted(slices):
        if found and a <= found[-1][1]:
            found[-1][1] = max(found[-1][1], b)
        else:
            found.append([a, b, kind])
    return found


def pictures() -> dict[str, str]:
    times = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    drawn = {f"{kernel.name}.svg": structure(kernel) for kernel in KERNELS}
    drawn |= {f"{k.name}_time.svg": time(k, times[k.name]) for k in (*KERNELS, *TIMED) if k.name in times}
    return drawn


def dumps(times: dict[str, Any]) -> str:
    """A row of a timeline per line."""
    parts = []
    for name, found in times.items():
        rows = ",\n".join(f"   {json.dumps(row, separators=(',', ':'))}" for row in found["rows"])
        head = json.dumps({key: value for key, value in found.items() if key != "rows"})
        parts.append(f' "{name}": {head[:-1]}, "rows": [\n{rows}]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    if "--clock" in sys.argv:
        TIMES.write_text(dumps(measured([*KERNELS, *TIMED])))
    OUT.mkdir(exist_ok=True)
    for file, drawn in pictures().items():
        (OUT / file).write_text(drawn)
