"""The results of `kda bench` as a picture (`--plot`) and as a page (`--html`): bars by shape and direction.

`Machine` and times in, a file out.  Only the picture needs matplotlib.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kda.tools.measure.peers import peers_of, saved
from kda.tools.measure.shapes import CUSTOM, GATES, SHAPES, gate_in, with_gate
from ptxkit.commands.layout import fold
from ptxkit.commands.render import Screen, program_version, write_file

from .. import timeline
from .asked import ms

if TYPE_CHECKING:
    from kda.tools.measure.timing import TimedLine
    from ptxkit.compile.target import Target

WAYS = ("forward", "backward", "step")       # the order of panels
# kind of bar -> its colour, its words in a legend
KINDS = {
    "fast": ("#54aeff", "gates that forget (fast)"),
    "slow": ("#0969da", "gates that remember (slow)"),
    "predicted": ("#0969da", "predicted, not timed"),
    "baseline": ("#8250df", "the baseline, timed here"),
    "peer": ("#b6bec8", "others, saved"),
}
FLOOR, FAINT, TEXT = "#cf222e", "#656d76", "#1f2328"


class Bar(NamedTuple):
    """Milliseconds; a spread where one was measured, of a prediction the error to expect."""

    median: float
    low: float | None = None
    high: float | None = None
    error: str = ""

    @property
    def reach(self) -> float:
        """Return the time at which its drawing ends."""
        return max(self.median, self.high or 0)


@dataclass
class Track:
    """One line of the picture: a time for each direction."""

    name: str
    kind: str                                # a key of KINDS
    bars: dict[str, Bar] = field(default_factory=dict)


@dataclass
class ShapeBars:
    """One shape of the picture, and its tracks."""

    name: str
    problem: str
    tracks: list[Track] = field(default_factory=list)
    floors: dict[str, float] = field(default_factory=dict)       # direction -> milliseconds

    def track(self, name: str, kind: str) -> Track:
        for track in self.tracks:
            if (track.name, track.kind) == (name, kind):
                return track
        self.tracks.append(Track(name, kind))
        return self.tracks[-1]

    @property
    def title(self) -> str:
        problem = with_gate(self.problem)
        return problem if self.name == CUSTOM else f"{self.name}: {problem}"


def groups_of(lines: Sequence[TimedLine], device: str) -> list[ShapeBars]:
    """Return the timings by shape, with baselines, floors, and the saved times of others on such a device."""
    groups: dict[str, ShapeBars] = {}
    for line in lines:
        group = groups.setdefault(line.problem, ShapeBars(line.shape, line.problem))
        row = group.track(f"{line.backend}, {line.regime}", line.regime)
        row.bars[line.direction] = _bar(vars(line))
        if line.baseline:
            other = group.track(f"{line.baseline['backend']}, {line.regime}", "baseline")
            other.bars[line.direction] = _bar(line.baseline)
        if line.floor:
            group.floors[line.direction] = 1e3 * line.floor
    for group in groups.values():
        regimes = [kind for kind in ("fast", "slow") if any(track.kind == kind for track in group.tracks)]
        if group.problem != getattr(SHAPES.get(group.name), "label", None):
            continue                         # a named shape that was changed is another one
        for way in {way for track in group.tracks for way in track.bars}:
            for peer in peers_of(device, group.name, way):
                for kind in regimes if peer.fast != peer.slow else regimes[:1]:
                    says = f", {kind}" if peer.fast != peer.slow else ""
                    group.track(f"{peer.name}{says}", "peer").bars[way] = Bar(getattr(peer, kind))
    for group in groups.values():
        group.tracks.sort(key=lambda track: list(KINDS).index(track.kind))
    return list(groups.values())


def groups_of_predicted(rows: Sequence[Any]) -> list[ShapeBars]:
    groups: dict[str, ShapeBars] = {}
    for row in rows:
        group = groups.setdefault(row.problem, ShapeBars(row.shape, row.problem))
        group.track(row.backend, "predicted").bars[row.direction] = Bar(1e3 * row.predicted, error=row.error_words)
        group.floors[row.direction] = 1e3 * row.floor
    return list(groups.values())


def _bar(times: dict[str, Any]) -> Bar:
    return Bar(*(1e3 * times[name] for name in ("median", "p20", "p80")))


def ways_of(groups: Sequence[ShapeBars]) -> list[str]:
    return [way for way in WAYS if any(way in track.bars for group in groups for track in group.tracks)]


def kinds_of(groups: Sequence[ShapeBars]) -> list[str]:
    return [kind for kind in KINDS if any(track.kind == kind for group in groups for track in group.tracks)]


def peers_line(groups: Sequence[ShapeBars]) -> str:
    """Say when and with what the saved times of others were made; "" where there are none."""
    if "peer" not in kinds_of(groups):
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in saved()["versions"].items())
    return f"Others: saved on {saved()['date']} with a {saved()['gate']} gate, {versions}"


# ---------------------------------------------------------------------------------------------- a picture


def draw(file: str, title: str, details: str, groups: Sequence[ShapeBars]) -> None:
    """Draw a panel for each direction, a heading for each shape, bars for backends, gates and others, ticks for
    floors."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    ways = ways_of(groups)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)                   # inches round everything
    height = sum(len(group.tracks) + 1.6 for group in groups)
    figure = Figure(figsize=(3.0 + 4.2 * len(ways), 2.7 + 0.24 * height), layout=layout)
    panels = figure.subplots(1, len(ways), sharey=True, squeeze=False)[0]
    for way, axes in zip(ways, panels):
        y, most = 0.0, max(track.bars[way].reach for g in groups for track in g.tracks if way in track.bars)
        ticks = []
        for group in groups:
            if axes is panels[0]:
                axes.text(0, y, group.title, va="center", weight="bold", color=TEXT, fontsize=9)
            top = last = y + 0.5
            for track in group.tracks:
                y += 1
                ticks.append((y, track.name))
                if bar := track.bars.get(way):
                    spread = None
                    if bar.low is not None and bar.high is not None:
                        spread = [[bar.median - bar.low], [bar.high - bar.median]]
                    axes.barh(y, bar.median, 0.78, color=KINDS[track.kind][0], xerr=spread,
                              error_kw={"elinewidth": 0.8, "ecolor": FAINT})
                    axes.text(bar.reach, y, f"  {ms(bar.median / 1e3)}", va="center", color=TEXT, fontsize=8)
                    last = y + 0.5
            if way in group.floors:
                axes.plot([group.floors[way]] * 2, [top, last], color=FLOOR, linewidth=1.6)
            y += 1.6
        axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8, color=FAINT)
        axes.set_ylim(y - 0.6, -0.8)
        axes.set_xlim(0, 1.2 * most)
        axes.set_title(f"{way}, ms", loc="left", fontsize=10, weight="bold", color=TEXT)
        axes.tick_params(length=0, labelcolor=FAINT, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", color=TEXT, fontsize=13)
    keys: list[Any] = [Patch(color=colour, label=words) for colour, words in (KINDS[kind] for kind in kinds_of(groups))]
    if any(group.floors for group in groups):
        keys.append(Patch(color=FLOOR, label="floor: bytes over the bandwidth of memory"))
    each = 0.5 + 0.067 * max(len(key.get_label()) for key in keys)             # inches
    columns = max(1, min(len(keys), int(figure.get_figwidth() / each)))
    figure.legend(handles=keys, loc="outside lower left", ncols=columns, frameon=False, fontsize=8)
    date = f"Made on {datetime.date.today()}"
    says = [line for text in (details, date, peers_line(groups)) if text for line in fold(text, 90, 0)]
    panels[0].set_xlabel("\n".join(says), loc="left", fontsize=7, color=FAINT)
    figure.savefig(file, dpi=150)


# ---------------------------------------------------------------------------------------------- a page

STYLE = """
table { border-collapse: collapse; margin: 0 0 20px; width: 100%; max-width: 1100px; }
th, td { text-align: left; padding: 2px 14px 2px 0; white-space: nowrap; font-variant-numeric: tabular-nums; }
th { font-weight: 600; color: var(--faint); } .number { text-align: right; } td.bar { width: 60%; }
h1 ~ h1 { margin-top: 48px; }
.track { position: relative; height: 14px; } .track i { position: absolute; inset: 1px auto 1px 0; }
.track b { position: absolute; top: -3px; bottom: -3px; width: 2px; background: #cf222e; }
tr.shape td { padding-top: 12px; font-weight: 600; }
"""


def page(title: str, details: str, notes: Sequence[str], groups: Sequence[ShapeBars], timelines: Sequence[Any],
         gate: str = GATES[0]) -> str:
    """Return a table with bars for each direction; below, what the roles of kernels do over time, in the simulator."""
    from ptxkit.timing.pages import document, sections

    about = escape(" · ".join(details.split("  ")))
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{about}<br>Made on {datetime.date.today()}.</p>"]
    keys = [KINDS[kind] for kind in kinds_of(groups)]
    if any(group.floors for group in groups):
        keys.append((FLOOR, "floor: bytes over the bandwidth of memory"))
    parts.append("<ul>" + "".join(f'<li><i style="background: {c}"></i>{escape(w)}</li>' for c, w in keys) + "</ul>")
    parts += [_table(way, groups) for way in ways_of(groups)]
    parts += [f"<p>{escape(note)}</p>" for note in filter(None, [peers_line(groups), *notes])]
    if timelines:
        parts.append("<h1>What the roles of a forward do over time</h1>")
        parts.append(f"<p>Predicted by the simulator's clock, of a short call with a {gate} gate; nothing here was "
                     "timed.</p>")
        parts.append(sections(timelines))
    return document(title, "\n".join(parts), STYLE)


def _table(way: str, groups: Sequence[ShapeBars]) -> str:
    most = max(bar.median for g in groups for track in g.tracks if (bar := track.bars.get(way)))
    rows = []
    for group in groups:
        tracks = [(track, track.bars[way]) for track in group.tracks if way in track.bars]
        if tracks:
            rows.append(f'<tr class="shape"><td colspan="4">{escape(group.title)}</td></tr>')
        floor = group.floors.get(way)
        tick = f'<b style="left: {100 * floor / most:.2f}%"></b>' if floor else ""
        for track, bar in tracks:
            spread = bar.error if bar.low is None or bar.high is None else f"{ms(bar.low / 1e3)}-{ms(bar.high / 1e3)}"
            filled = f'<i style="width: {100 * bar.median / most:.2f}%; background: {KINDS[track.kind][0]}"></i>'
            rows.append(
                f'<tr><td>{escape(track.name)}</td><td class="number">{ms(bar.median / 1e3)} ms</td>'
                f'<td>{spread}</td><td class="bar"><div class="track">{filled}{tick}</div></td></tr>'
            )
    names = ("predicted", "error (worst)") if kinds_of(groups) == ["predicted"] else ("median", "p20-p80")
    head = '<tr><th></th><th class="number">{}</th><th>{}</th><th></th></tr>'.format(*names)
    return f"<h2>{way}</h2><table>{head}{''.join(rows)}</table>"


def write(
    screen: Screen, options: dict[str, Any], device: str, details: str, notes: Sequence[str],
    groups: Sequence[ShapeBars], backend: str, target: Target | None = None,
) -> list[str]:
    """Write the picture and the page that were asked for; return what is said of them.  The page has timelines of the
    backend on the target, or on this machine's GPU."""
    title, says = f"Kimi Delta Attention on {device}, kda {program_version()}", []
    if options["plot"]:
        draw(options["plot"], title, details, groups)
        says.append(f"drawn    {options['plot']}")
    if options["html"]:
        gate = gate_in(groups[0].problem)
        timelines = timeline.of_machine(screen, backend, target, gate)
        write_file(Path(options["html"]), page(title, details, notes, groups, timelines, gate))
        says.append(f"drawn    {options['html']}: open it in a browser")
    return says
