"""Draws kernels/sm89.svg, the shared memory of the float32 kernels from their configurations, and kernels/triton.svg,
the bytes in the table of docs/triton.md: `python docs/pictures/budgets.py`.  A test compares the files with it."""

from __future__ import annotations

import pathlib
import re

from drawing import BLUE, GREEN, INK, ORANGE, PURPLE, RED, SOFT, box, line, svg, text

from kda.backends.sm89.configs import (
    SLICE,
    SMALLEST,
    ChainBwdConfig,
    ChainConfig,
    IntraConfig,
    PrepareConfig,
    WyConfig,
)
from kda.model.bundles import Save

HERE = pathlib.Path(__file__).parent
WIDTH, NAME, BAR = 900, 110, 640
COLOURS = (BLUE, GREEN, ORANGE, PURPLE)
K = V = 128
C, COLUMNS = 64, 16


def launches():
    """(configuration, its parts in bytes): `Shared` of each source."""
    prepare = PrepareConfig(K, V, C, "softplus", True, True, True, "sigmoid", None, Save.PRODUCTS, False)
    kE, totals, rows = 4 * C * (K + 4), 4 * C // 8 * SLICE, 4 * 3 * C
    both = prepare.shared - kE - totals - rows
    name = "decayed rows of a slice; then inverse, A_kk, A_qk; then v"
    yield prepare, {"kE": kE, name: both, "sums, b": totals + rows}
    chain = ChainConfig(K, V, C, COLUMNS, None, False)
    state, tokens = 8 * K * (COLUMNS + 1), 8 * C * (COLUMNS + 1)
    yield chain, {"rings of 8 KiB per warp": chain.rings, "state": state, "v_new": tokens, "qg h": 4 * C * COLUMNS}
    back = ChainBwdConfig(K, V, C, COLUMNS, None, False)
    inside = 4 * (COLUMNS + 1) * (C + 1)
    fields = {"dh": state, "do, twice": 2 * tokens, "dv_new": tokens, "A_qk^T do": inside}
    yield back, {"rings of 6 KiB per warp": back.rings, **fields}
    wy, pitch = WyConfig(V, C, None), SLICE + 8
    A_inv, P, db = 4 * C * (C + 4), 4 * C * pitch, 8 * C
    yield wy, {"A_inv": A_inv, "P": P, "two slices of V": wy.shared - A_inv - P - db, "db": db}
    intra = IntraConfig(K, V, C, "softplus", True, True, None)
    sums = 4 * SLICE * (C // 8 * (C.bit_length() - 4 + 5) + 1)
    yield intra, {"dA_qk, dA_kk, rows of a slice; or two slices of states": intra.shared - sums, "sums": sums}


def sm89() -> str:
    """A bar per launch, its parts from left to right."""
    per, y = BAR / (SMALLEST + 1024), 60
    limit = NAME + SMALLEST * per
    parts = [text(10, 18, f"Shared memory of a CTA, K = V = {K}, chunks of {C}, {COLUMNS} columns of the state",
                  "start", bold=True), text(limit, 44, f"{SMALLEST:,} bytes", colour=SOFT)]
    for config, fields in launches():
        assert sum(fields.values()) == config.shared, f"{config.kernel}: {fields}, not {config.shared}"
        parts.append(text(10, y + 19, config.kernel, "start"))
        x = float(NAME)
        for n, (name, size) in enumerate(fields.items()):
            w = size * per
            parts.append(box(x, y, w, 28, COLOURS[n % 4], 0.3))
            words = f"{name} {size:,}" if w > 6.6 * len(f"{name} {size:,}") else name
            if w > 6.3 * len(words):
                parts.append(text(x + w / 2, y + 18, words))
            x += w
        parts.append(text(WIDTH - 4, y + 19, f"{config.shared:,}", "end"))
        y += 38
    parts.append(line(limit, 50, limit, y, arrow=False, dashed=True))
    return svg(WIDTH, y + 8, *parts, size=12)


ROW = re.compile(r"^\| (?P<name>[^|]+) \| (?P<reads>[\d,]+)(?: \[(?P<in_l2>[\d,]+)\])? \| (?P<writes>[\d,]+)"
                 r"(?: \[(?P<out_l2>[\d,]+)\])? \|$", re.MULTILINE)
TOTAL = re.compile(r"^\| \*\*(?P<way>forward|backward).*\| floor (?P<floor>[\d,]+) \| FLA about (?P<fla>[\d,]+) \|$",
                   re.MULTILINE)


def triton() -> str:
    """Stacked bars of what the launches of each direction read and write, beside the floor and FLA."""
    page = (HERE.parent / "triton.md").read_text()

    def number(found: str | None) -> int:
        return int(found.replace(",", "")) if found else 0

    rows, way = {"forward": [], "backward": []}, "forward"
    for match in sorted([*ROW.finditer(page), *TOTAL.finditer(page)], key=lambda m: m.start()):
        if match.re is ROW:
            name = match["name"].replace("`", "").partition(",")[0].removeprefix("forward ").removeprefix("backward ")
            read, written = number(match["in_l2"]), number(match["out_l2"])
            rows[way].append((name, number(match["reads"]) + number(match["writes"]), read + written))
        else:
            rows[way].append((match["way"], number(match["floor"]), number(match["fla"])))
            way = "backward"
    parts = [text(10, 18, "Bytes per token and value head, read and written (shaded: scratch that stays in L1 or L2)",
                  "start", bold=True)]
    largest = max(fla for found in rows.values() for *_, fla in found[-1:])
    per, y = (WIDTH - NAME - 20) / largest, 40
    for way, found in rows.items():
        *launches_, (_, floor, fla) = found
        x = float(NAME)
        parts.append(text(10, y + 22, way, "start", bold=True))
        for n, (name, size, scratch) in enumerate(launches_):
            w = size * per
            parts.append(box(x, y, w, 32, COLOURS[n % 4], 0.3))
            if scratch:
                parts.append(box(x + w - scratch * per, y, scratch * per, 32, INK, 0.2))
            if w > 6.6 * len(name):
                parts.append(text(x + w / 2, y + 20, name))
            x += w
        parts.append(text(x + 6, y + 20, f"{sum(size for _, size, _ in launches_):,}", "start"))
        y += 40
        for name, size, colour in (("floor", floor, GREEN), ("FLA", fla, RED)):
            parts += [text(NAME - 8, y + 11, name, "end", SOFT), box(NAME, y, size * per, 14, colour, 0.15)]
            words, inside = f"{size:,}", size * per > 0.9 * (WIDTH - NAME - 20)
            text_x = NAME + size * per + (-6 if inside else 6)
            parts.append(text(text_x, y + 11, words, "end" if inside else "start", SOFT))
            y += 19
        y += 16
    return svg(WIDTH, y, *parts, size=12)


def pictures() -> dict[str, str]:
    return {"sm89.svg": sm89(), "triton.svg": triton()}


if __name__ == "__main__":
    for file, drawn in pictures().items():
        (HERE / "kernels" / file).write_text(drawn)
